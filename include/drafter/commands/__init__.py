"""The commands, by what they are about. Each is a thin skin over a module of the same noun, which
is imported when the command is called: ``status`` must not wait for torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.errors import RecipeError
from drafter.files import read_json
from drafter.layout import Prepared, Workspace

if TYPE_CHECKING:
    from drafter.recipe import Recipe

Add = Callable[[str, Callable[[argparse.Namespace], int], str], Any]
"""(name, command, text) to the command's own parser."""

ADD_YES = "nothing is changed yet: add --yes to do it"


def workspace_of(arguments: argparse.Namespace) -> Workspace:
    if not arguments.workspace:
        raise RecipeError("which workspace? pass --workspace DIR or set DRAFTER_WORKSPACE")
    return Workspace(Path(arguments.workspace))


def recipe_of(workspace: Workspace) -> Recipe:
    from drafter.recipe import parse_recipe

    return parse_recipe(read_json(workspace.recipe), str(workspace.recipe))


def prepared_of(workspace: Workspace, dataset: str) -> Prepared:
    """The directory of a dataset that is there, in the recipe or no longer."""
    there = sorted(p.name for p in workspace.prepared("-").root.parent.glob("*") if p.is_dir())
    if dataset not in there:
        known = ", ".join(there) or "none"
        raise RecipeError(f"no dataset {dataset!r} in {workspace.root}: there are {known}")
    return workspace.prepared(dataset)


def count(text: str) -> int:
    """A number from 1 on, as an argument's type."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return number


def print_json(value: Any) -> None:
    print(json.dumps(value, separators=(",", ":")), flush=True)
