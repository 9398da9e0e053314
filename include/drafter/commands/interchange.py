"""states: hidden states to and from other EAGLE-3 training systems."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafter.commands import Add, recipe_of, workspace_of
from drafter.errors import DataError, RecipeError
from drafter.files import locked

_AUX_LAYERS = (
    "of what is imported, as indices of HF hidden_states, where the recipe does not say them. "
    "SpecForge counts outputs of layers, one less: its [1, n//2 - 1, n - 4] are 2, n//2, n - 3"
)

_JUDGED = (
    "An import compares its first row with a plain forward of the target, as far as its layers fit "
    "in memory. Where none fits, or the weights are quantised, states are judged by their form and "
    "by the tokens that they predict alone, and the import says so."
)


def add_to(add: Add) -> None:
    states = add("states", _states, "hidden states to and from other EAGLE-3 training systems")
    states.epilog = _JUDGED
    states.add_argument("direction", choices=["export", "import"])
    states.add_argument("system", choices=["specforge", "speculators"])
    states.add_argument("dataset")
    states.add_argument("directory", type=Path, help="of the other system's files")
    states.add_argument("--aux-layers", type=_layers, metavar="A,B,C", help=_AUX_LAYERS)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 2,30,58") from None


def _states(arguments: argparse.Namespace) -> int:
    from drafter.interchange import Source, exporting, importing
    from drafter.interchange.specforge import SpecForgeSource
    from drafter.interchange.speculators import SpeculatorsSource

    workspace = workspace_of(arguments)
    recipe = recipe_of(workspace)
    dataset, directory = arguments.dataset, arguments.directory
    if dataset not in recipe.dataset_names:
        known = ", ".join(recipe.dataset_names)
        raise RecipeError(f"no dataset {dataset!r} in the recipe: there are {known}")
    lock = workspace.lock("extract", dataset)
    if arguments.direction == "export":
        if arguments.aux_layers:
            raise RecipeError("--aux-layers is of what is imported: leave it out of an export")
        with locked(lock):
            exporting.run(workspace, recipe, arguments.system, dataset, directory)
        return 0
    if not directory.is_dir():
        raise DataError(f"{directory} is no directory: name the one that holds the files")
    source: Source = (
        SpecForgeSource(directory, dataset)
        if arguments.system == "specforge"
        else SpeculatorsSource(directory, dataset)
    )
    with locked(lock):
        importing.run(
            workspace,
            recipe,
            arguments.system,
            dataset,
            source,
            arguments.aux_layers,
        )
    return 0
