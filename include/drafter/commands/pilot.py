"""pilot: what a person looks at before a dataset is generated, and their answer."""

from __future__ import annotations

import argparse
import contextlib
import getpass
from typing import TYPE_CHECKING, Any

from drafter.commands import ADD_YES, Add, count, prepared_of, print_json, recipe_of, workspace_of
from drafter.errors import DataError, RecipeError
from drafter.files import count_lines, locked
from drafter.layout import Prepared, Workspace
from drafter.terminal import one_line

if TYPE_CHECKING:
    from drafter.recipe import Recipe


def add_to(add: Add) -> None:
    pilot = add(
        "pilot",
        _pilot,
        "a dataset's pilot: show it, approve it so that the rest is generated, or reject it, which"
        " moves its rows to archive/",
    )
    pilot.add_argument("act", choices=("show", "approve", "reject"))
    pilot.add_argument("dataset")
    pilot.add_argument("--run-id", default="", help="the run that asks")
    pilot.add_argument("--json", action="store_true", help="with show: one line of JSON")
    pilot.add_argument("--samples", type=count, metavar="N", help="default: the recipe's")
    pilot.add_argument("--mode", choices=("resume", "restart", "adopt"), default="resume")
    pilot.add_argument("--token-budget", type=int)
    pilot.add_argument("--by", help="whose answer; default: yours")
    pilot.add_argument("--seen", metavar="SHA256", help="answer only for responses with this hash")
    pilot.add_argument("--yes", action="store_true", help="do it, not only show it")


def _pilot(arguments: argparse.Namespace) -> int:
    workspace = workspace_of(arguments)
    recipe, prepared = recipe_of(workspace), prepared_of(workspace, arguments.dataset)
    if recipe.pilot is None:
        raise RecipeError(f"recipe {recipe.name} asks for no pilot: add a section [pilot] to it")
    if arguments.act == "show":
        _show(arguments, workspace, recipe, prepared)
        return 0
    with locked(prepared.lock) if arguments.yes else contextlib.nullcontext():
        _answer(arguments, workspace, recipe, prepared)
    return 0


def _show(
    arguments: argparse.Namespace, workspace: Workspace, recipe: Recipe, prepared: Prepared
) -> None:
    """As JSON {action, reason} of the plan; where a person is asked, {rejected} too: null, or where
    the pilot is that they rejected in this run; and what ``pilot.report`` gives."""
    from drafter import plan
    from drafter.generation import approval, pilot
    from drafter.generation.sessions import refuse_other_identity
    from drafter.identity import generation_identity

    decision = plan.decide(
        "generate",
        arguments.dataset,
        workspace,
        recipe,
        token_budget=arguments.token_budget,
        mode=arguments.mode,
        run_id=arguments.run_id,
    )
    answer: dict[str, Any] = {"action": decision.action, "reason": decision.reason}
    identity = generation_identity(recipe)
    pending = approval.pending_of(arguments.dataset, workspace, recipe, identity)
    if pending and recipe.pilot and decision.action in ("pilot", "approve"):
        refuse_other_identity(prepared, identity)
        archive = pilot.rejected(prepared, arguments.run_id)
        answer["rejected"] = str(archive) if archive and not pending.num_rows else None
        limits, samples = recipe.dataset(arguments.dataset), arguments.samples
        limit = limits.token_budget if arguments.token_budget is None else arguments.token_budget
        answer |= pilot.report(prepared, recipe, pending, samples or recipe.pilot.samples, limit)
    if arguments.json:
        print_json(answer)
        return
    print(f"{arguments.dataset}: {decision.action}, {decision.reason}")
    for line in (*answer.get("story", ()), *answer.get("samples", ())):
        print(line)


def _answer(
    arguments: argparse.Namespace, workspace: Workspace, recipe: Recipe, prepared: Prepared
) -> None:
    """Both answers can be given twice. With ``--yes`` the caller holds the dataset's lock."""
    from drafter import rewrite
    from drafter.generation import approval, pilot
    from drafter.generation.sessions import refuse_other_identity
    from drafter.identity import generation_identity

    name, by = arguments.dataset, one_line(arguments.by or getpass.getuser())
    if arguments.yes:
        rewrite.finish(prepared)
    identity = generation_identity(recipe)
    refuse_other_identity(prepared, identity)
    pending = approval.pending_of(name, workspace, recipe, identity)
    if pending is None:
        given = approval.given(prepared, identity)
        said = f"its pilot was approved by {given['by']}" if given else "it has no prompts"
        if arguments.act == "reject":
            raise RecipeError(
                f"{name}: nothing to reject, {said}: `drafter discard {name}` or `drafter restart"
                f" {name}` moves answers away"
            )
        print(f"{name}: nothing to approve, {said}")
        return
    archive = pilot.rejected(prepared, arguments.run_id)
    if arguments.act == "reject" and archive and not pending.num_rows:
        print(f"{name}: rejected already, the pilot is in {archive}")
        return
    if not pending.num_rows:
        raise DataError(f"{name} has no pilot: {approval.REMEDY}")
    if arguments.seen not in (None, pilot.seen(prepared)):
        raise DataError(
            f"{name}: its answers are not those that were shown any more: clear the task approve"
            " to be asked about these"
        )
    if not arguments.yes:
        print(f"{name}: {pending.reason}")
        print(ADD_YES)
    elif arguments.act == "approve":
        approval.give(prepared, pending, identity, by, arguments.run_id)
        print(f"{name}: {by} approved the pilot of {pending.num_rows:,} rows")
    else:
        num_failed = count_lines(prepared.failed)
        where, gone = pilot.reject(prepared, pending, arguments.run_id)
        print(
            f"{name}: {by} rejected the pilot: {gone.num_rows:,} answers with {gone.num_tokens:,}"
            f" tokens and {num_failed:,} failures are now in {where}"
        )
