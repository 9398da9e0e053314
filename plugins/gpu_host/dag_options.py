"""What the four DAGs share: defaults, trigger forms and asset names, all from the recipe."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.exceptions import AirflowTimetableInvalid
from airflow.sdk import Asset, AssetOrTimeSchedule, Param
from airflow.sdk.definitions.asset import BaseAsset

from drafter.errors import RecipeError
from drafter.plan import MODES
from drafter.recipe import Recipe
from drafter.sections import Dataset
from gpu_host.timetables import CronAhead

START = datetime(2026, 1, 1, tzinfo=UTC)

DEFAULTS: dict[str, Any] = {
    "owner": "drafter",
    "retries": 5,
    "retry_delay": timedelta(seconds=30),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=15),
}
"""Five retries span a quarter of an hour at least, up to twice that: engines load for so long."""


def plan_params() -> dict[str, Param]:
    """The trigger form of the train DAG, which is always over all datasets."""
    return {
        "plan_only": Param(
            False, type="boolean", description="Show what would be done, and why, and stop."
        ),
    }


def dataset_params(recipe: Recipe) -> dict[str, Param]:
    """The trigger form of the DAGs that work per dataset."""
    names = recipe.dataset_names
    return {
        "datasets": Param(
            names,
            type="array",
            items={"type": "string", "enum": names},
            examples=names,
            uniqueItems=True,
            minItems=1,
            description="Datasets to run; the others are left alone.",
        ),
        **plan_params(),
    }


def generate_params(recipe: Recipe) -> dict[str, Param]:
    """The trigger form of the generate DAG."""
    return {
        **dataset_params(recipe),
        "mode": Param(
            "resume",
            type="string",
            enum=list(MODES),
            description="resume keeps every stored row; restart moves them to archive/ first;"
            " adopt checks and keeps what an older run left without a manifest.",
        ),
        "token_budget": Param(
            None,
            type=["null", "integer"],
            minimum=_at_least("token_budget"),
            description="Completion tokens per dataset, instead of the recipe's budget.",
        ),
    }


def _at_least(field: str) -> int:
    """The bound that the recipe itself sets for this number of a dataset."""
    options = Dataset.model_json_schema()["properties"][field]["anyOf"]
    return next(int(option["minimum"]) for option in options if "minimum" in option)


def schedule(recipe: Recipe, cron: str | None, assets: BaseAsset | None = None) -> Any:
    """When a DAG starts by itself: at events of ``assets``, at ``cron`` (UTC), both or never."""
    if cron is None:
        return assets
    try:
        timetable = CronAhead(cron)
        timetable.validate()
    except (AirflowTimetableInvalid, ValueError) as error:
        raise RecipeError(
            f"recipe {recipe.name}: {cron!r} in [schedule] is no cron expression ({error}): write"
            " five fields, such as '0 3 * * *'"
        ) from None
    return timetable if assets is None else AssetOrTimeSchedule(timetable=timetable, assets=assets)


def generated_asset(recipe: Recipe) -> str:
    """Prefix of the URIs that each dataset's generation emits."""
    return f"drafter://{recipe.name}/generated"


def generated_assets(recipe: Recipe) -> list[Asset]:
    return [Asset(f"{generated_asset(recipe)}/{name}") for name in recipe.dataset_names]


def joined_asset(recipe: Recipe, name: str) -> Asset:
    """``validated``, ``extracted`` or ``drafter``: one event per new set over all datasets."""
    return Asset(f"drafter://{recipe.name}/{name}")


def states_asset(recipe: Recipe) -> Asset:
    """What training waits for: with a spool it makes its states itself, from validated rows."""
    return joined_asset(recipe, "validated" if recipe.spools else "extracted")
