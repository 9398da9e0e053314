"""plan, join, doctor: what a run would find and do."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from drafter.commands import Add, print_json, recipe_of, workspace_of
from drafter.files import digest
from drafter.layout import ALL, Workspace

if TYPE_CHECKING:
    from drafter.recipe import Recipe


def add_to(add: Add) -> None:
    plan = add("plan", _plan, "what a start would do, per dataset, and why")
    plan.add_argument("phase")
    plan.add_argument("datasets", nargs="*", help="default: all of the recipe")
    plan.add_argument("--json", action="store_true", help="end with one line of JSON")
    plan.add_argument("--mode", choices=("resume", "restart", "adopt"), default="resume")
    plan.add_argument("--run-id", default="")
    plan.add_argument("--token-budget", type=int)

    join = add("join", _join, "is a phase done on every dataset? one line of JSON")
    join.add_argument("phase")

    doctor = add("doctor", _doctor, "is this host ready for a phase of the recipe?")
    doctor.add_argument("phase")
    doctor.add_argument("--now", type=float, help="Unix time where Airflow runs")


def left(phase: str, dataset: str, workspace: Workspace, recipe: Recipe) -> str | None:
    """One hash over what a phase left and made it of; None when it has not finished."""
    from drafter.plan import read_phase

    section = read_phase(phase, dataset, workspace, recipe)
    if section is None:
        return None
    return digest({key: section.get(key) for key in ("inputs", "files")})


def _plan(arguments: argparse.Namespace) -> int:
    from drafter.foresee import foresee, foresee_extraction
    from drafter.plan import OVER_ALL, decide

    workspace = workspace_of(arguments)
    recipe = recipe_of(workspace)
    over_all = arguments.phase in OVER_ALL
    names = [ALL] if over_all else arguments.datasets or recipe.dataset_names
    if arguments.phase == "generate":
        prepare = decide("prepare", ALL, workspace, recipe)
        print(f"{'prepare':22} {prepare.action:8} {prepare.reason}")
    plans = [
        foresee(
            arguments.phase,
            name if over_all else recipe.dataset(name).name,
            workspace,
            recipe,
            token_budget=arguments.token_budget,
            mode=arguments.mode,
            run_id=arguments.run_id,
        )
        for name in names
    ]
    if arguments.phase == "extract":
        plans = foresee_extraction(plans, workspace, recipe)
    for line in plans:
        print(f"{line.dataset:22} {line.action:8} {line.reason}")
    if arguments.json:
        print_json(
            [
                {**line.as_json(), "digest": left(line.phase, line.dataset, workspace, recipe)}
                for line in plans
            ]
        )
    return 0


def _join(arguments: argparse.Namespace) -> int:
    from drafter.plan import joined

    workspace = workspace_of(arguments)
    print_json(joined(arguments.phase, workspace, recipe_of(workspace)))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from drafter.doctor import examine, table

    findings = list(examine(recipe_of(workspace_of(arguments)), arguments.phase, arguments.now))
    print(table(findings), flush=True)
    for finding in findings:
        if finding.error:
            raise finding.error
    return 0
