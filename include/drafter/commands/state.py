"""status: what runs and what is stored; page: what a phase found, to be looked at."""

from __future__ import annotations

import argparse
import sys
import time

from drafter.commands import Add, prepared_of, print_json, recipe_of, workspace_of
from drafter.errors import RecipeError
from drafter.layout import ALL

WATCH_S = 1.0
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def add_to(add: Add) -> None:
    status = add("status", _status, "what runs and what is stored, per dataset")
    how = status.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="everything, as one line of JSON")
    how.add_argument("--watch", action="store_true", help="again each second, on a terminal")
    status.add_argument("--verify", action="store_true", help="hash files against the manifests")
    status.add_argument("--dataset", help="only this one")
    page = add("page", _page, "the report of validate, or the curves of train, as HTML")
    page.add_argument("phase", choices=("validate", "train"))
    page.add_argument("dataset", nargs="?", default=ALL, help="of validate; default: over all")


def _page(arguments: argparse.Namespace) -> int:
    from drafter import plan

    workspace = workspace_of(arguments)
    recipe = recipe_of(workspace)
    if arguments.phase == "train":
        if arguments.dataset != ALL:
            raise RecipeError("train is over all datasets: leave the dataset out")
        path = workspace.drafter(plan.run_name(workspace, recipe)).curves
        since = "it appears with training's first checkpoint"
    else:
        one = arguments.dataset != ALL
        path = (prepared_of(workspace, arguments.dataset) if one else workspace).report
        since = "it appears when validate is done"
    if not path.exists():
        raise RecipeError(f"there is no {path} yet: {since}")
    sys.stdout.write(path.read_text(encoding="utf-8"))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from drafter.status import as_table, read_status

    root = workspace_of(arguments).root
    if arguments.watch and not sys.stdout.isatty():
        raise RecipeError("--watch redraws a terminal, and this is none: leave it out")
    while True:
        status = read_status(root, arguments.verify, arguments.dataset)
        if arguments.json:
            print_json(status)
        elif arguments.watch:
            _redraw(f"{time.strftime('%H:%M:%S')}  {root}\n{as_table(status)}")
            time.sleep(WATCH_S)
            continue
        else:
            print(as_table(status))
        return 0


def _redraw(text: str) -> None:
    """Over what stands there, so that nothing flickers."""
    lines = "".join(f"{line}{_CLEAR_LINE}\n" for line in text.splitlines())
    print(f"{_HOME}{lines}{_CLEAR_BELOW}", end="", flush=True)
