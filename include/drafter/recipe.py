"""One file says everything about a deployment's run; drafter.sections explains every knob of it.

``include/recipes/<name>.toml`` is read where DAGs are parsed; the resolved recipe travels to the
GPU host in each job.json and as ``<workspace>/recipe.json``. Paths in it are paths on the GPU host.
``${NAME}`` in a string stands for an environment variable of the reading process; secrets are
never written here, only the *name* of the variable that holds them on the host. Pydantic and the
standard library only.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from drafter.errors import RecipeError
from drafter.sections import (
    Alerts,
    Dataset,
    Engine,
    Evaluate,
    Extract,
    Generate,
    Host,
    Name,
    Pilot,
    Schedule,
    Section,
    Target,
    Train,
    Validate,
)


class Recipe(Section):
    """A whole deployment."""

    name: Name
    """Used in asset names; the file's stem unless given."""

    target: Target
    engine: Engine
    datasets: tuple[Dataset, ...] = Field(min_length=1)
    generate: Generate = Generate()
    pilot: Pilot | None = None
    """No pilot without it."""

    validate_: Validate = Field(default=Validate(), alias="validate")
    extract: Extract = Extract()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    host: Host
    schedule: Schedule = Schedule()
    alerts: Alerts = Alerts()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = self.dataset_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"datasets share the name {', '.join(twice)}: give each its own")
        if "all" in names:
            raise ValueError('"all" names jobs over every dataset: call the dataset something else')
        return self

    @model_validator(mode="after")
    def _spool_has_two_sides(self) -> Self:
        if self.train.spool_shards is None:
            return self
        if self.host.slots < 2:
            raise ValueError(
                "train.spool_shards needs host.slots of 2 at least, got 1: two jobs run at once,"
                " one extracts and one trains"
            )
        if self.train.no_states_baseline:
            raise ValueError(
                "train.no_states_baseline trains on every batch twice, but a spool (train."
                "spool_shards) keeps none: switch one of the two off"
            )
        return self

    @property
    def spools(self) -> bool:
        """Are states made beside training instead of being stored?"""
        return self.train.spool_shards is not None

    @property
    def dataset_names(self) -> list[str]:
        return [dataset.name for dataset in self.datasets]

    def dataset(self, name: str) -> Dataset:
        for dataset in self.datasets:
            if dataset.name == name:
                return dataset
        raise RecipeError(
            f"no dataset {name!r} in recipe {self.name}: it has {', '.join(self.dataset_names)}"
        )

    def as_json(self) -> dict[str, Any]:
        """The resolved recipe as plain JSON; ``parse_recipe`` of it gives an equal recipe."""
        return self.model_dump(mode="json", by_alias=True)


def load_recipe(path: Path) -> Recipe:
    """Read and resolve one TOML recipe. Raises RecipeError naming file, field and remedy."""
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise RecipeError(
            f"no recipe at {path}: set DRAFTER_RECIPE to a file that exists"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None
    return parse_recipe({"name": path.stem, **_resolved(tree, path)}, str(path))


def deployed_recipe() -> Recipe:
    """The recipe of this deployment: the file that the variable DRAFTER_RECIPE names."""
    path = os.environ.get("DRAFTER_RECIPE")
    if not path:
        raise RecipeError("DRAFTER_RECIPE is not set: let it name a file such as kimi-k2.5.toml")
    return load_recipe(Path(path))


def parse_recipe(tree: dict[str, Any], origin: str) -> Recipe:
    """Check a resolved recipe; ``origin`` is what errors name."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(f"{origin}: " + "; ".join(map(_sentence, error.errors()))) from None


def _sentence(error: Any) -> str:
    field = ".".join(map(str, error["loc"])) or "recipe"
    if error["type"] == "extra_forbidden":
        return f"unknown field {field}: remove it or correct its spelling"
    if error["type"] == "missing":
        return f"{field} is missing: add it"
    return f"{field} = {error['input']!r}: {error['msg'].removeprefix('Value error, ')}"


def _resolved(value: Any, path: Path) -> Any:
    """``value`` with ``${NAME}`` in its strings replaced from the environment."""

    def variable(match: re.Match[str]) -> str:
        try:
            return os.environ[match[1]]
        except KeyError:
            raise RecipeError(f"{path} uses ${{{match[1]}}}: set that variable") from None

    if isinstance(value, str):
        return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", variable, value)
    if isinstance(value, list):
        return [_resolved(item, path) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(item, path) for key, item in value.items()}
    return value
