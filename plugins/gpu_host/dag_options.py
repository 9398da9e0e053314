"""What the four DAGs share: defaults, trigger forms and asset names, all from the recipe."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import Asset, Param

from drafter.plan import MODES
from drafter.recipe import Recipe

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
            minimum=1,
            description="Completion tokens per dataset, instead of the recipe's budget.",
        ),
    }


def generated_asset(recipe: Recipe) -> str:
    """Prefix of the URIs that each dataset's generation emits."""
    return f"drafter://{recipe.name}/generated"


def generated_assets(recipe: Recipe) -> list[Asset]:
    return [Asset(f"{generated_asset(recipe)}/{name}") for name in recipe.dataset_names]


def joined_asset(recipe: Recipe, name: str) -> Asset:
    """``validated``, ``extracted`` or ``drafter``: one event per new set over all datasets."""
    return Asset(f"drafter://{recipe.name}/{name}")
