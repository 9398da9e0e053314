"""served: an exported drafter measured in the recipe's [evaluate.served] servers."""

from __future__ import annotations

import argparse

from drafter.commands import Add, recipe_of, workspace_of
from drafter.files import locked
from drafter.layout import ALL


def add_to(add: Add) -> None:
    served = add(
        "served",
        _served,
        "acceptance length and speed of the exported drafter in the servers of [evaluate.served]",
    )
    served.add_argument("--again", action="store_true", help="measure anew what is measured")


def _served(arguments: argparse.Namespace) -> int:
    """In the foreground; the lock keeps it and the scheduler's job of the same apart."""
    from drafter import served
    from drafter.job import Job

    workspace = workspace_of(arguments)
    recipe = recipe_of(workspace)
    job = Job(
        phase=served.PHASE,
        dataset=ALL,
        recipe=recipe,
        dir=workspace.job(served.PHASE, ALL),
        start_id="by hand",
        code="",
        run_id="",
        mode="restart" if arguments.again else "resume",
        token_budget=None,
        in_flight=recipe.engine.in_flight,
    )
    with locked(workspace.lock(served.PHASE, ALL)):
        served.run(job)
    return 0
