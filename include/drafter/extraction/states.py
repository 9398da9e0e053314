"""What decides the target's stored states besides the rows: target, layers, precision, rules.

For states that are kept (extract.py) and states that are made beside training (spool.py) alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafter.errors import RecipeError
from drafter.extraction import layer_ids
from drafter.extraction.shard_maker import Task
from drafter.extraction.shard_plan import Footprint
from drafter.extraction.shards import DTYPES
from drafter.files import digest
from drafter.recipe import Recipe
from drafter.target_head import text_config


def identity(recipe: Recipe) -> dict[str, Any]:
    """What all states that train one drafter have in common. RecipeError as of ``task``."""
    config, aux_layers = _target(recipe)
    return {
        "target": recipe.target.path,
        "revision": recipe.target.revision,
        "aux_layers": list(aux_layers),
        "dtype": recipe.extract.dtype,
        "norm": "before",
        "hidden_size": config["hidden_size"],
    }


def task(recipe: Recipe, inputs: dict[str, Any], tokenized_sha256: str) -> Task:
    """``inputs`` are what plan.inputs says that the states depend on.

    Raises RecipeError when the target's config lacks a size, the layers are not three of its, or
    what is trained from these states could not be served.
    """
    config, aux_layers = _target(recipe)
    layer_ids.for_sglang(aux_layers, config)
    # What leaves the shards as they are is left out: changing it costs no second extraction.
    rules = recipe.extract.rules()
    del rules["min_argmax_share"]
    return Task(
        target=Path(recipe.target.path),
        tokenized_sha256=tokenized_sha256,
        shards_sha256=digest({**inputs, "extract": {**rules, "aux_layers": aux_layers}}),
        settings=recipe.extract,
        aux_layers=aux_layers,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
    )


def footprint(recipe: Recipe) -> Footprint:
    """What these states take on disk. RecipeError as of ``task``."""
    config, aux_layers = _target(recipe)
    return Footprint(len(aux_layers), config["hidden_size"], DTYPES[recipe.extract.dtype].itemsize)


def choose_aux_layers(num_layers: int, chosen: Sequence[int] | None) -> tuple[int, ...]:
    """The recipe's layers, or [2, n//2, n-3]. RecipeError unless they are three of the target's."""
    layers = tuple(chosen or (2, num_layers // 2, num_layers - 3))
    if len(set(layers)) == 3 and all(0 <= layer < num_layers for layer in layers):
        return layers
    origin = "extract.aux_layers" if chosen else "the default [2, n//2, n-3]"
    raise RecipeError(
        f"{origin} gives {list(layers)} for a target of {num_layers} layers: set "
        f"extract.aux_layers to three different ids in 0..{num_layers - 1}"
    )


def _target(recipe: Recipe) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Its configuration, and the layers that are kept."""
    target = Path(recipe.target.path)
    config = text_config(target)
    absent = {"num_hidden_layers", "hidden_size", "vocab_size"} - config.keys()
    if absent:
        raise RecipeError(f"{target}/config.json does not give {', '.join(sorted(absent))}: add it")
    return config, choose_aux_layers(config["num_hidden_layers"], recipe.extract.aux_layers)
