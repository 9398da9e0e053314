"""start, run, poll, stop: jobs, as Airflow and people handle them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.commands import Add, print_json, workspace_of
from drafter.commands.planning import left
from drafter.errors import DataError, DrafterError, RecipeError, Stopped
from drafter.files import locked
from drafter.layout import Workspace

if TYPE_CHECKING:
    from drafter.plan import Plan
    from drafter.recipe import Recipe


def add_to(add: Add) -> None:
    add("start", _start, "start or follow the job described by JSON on stdin")

    run = add("run", _run, "run a phase in the foreground, as the supervisor does")
    run.add_argument("job", type=Path, metavar="JOB_DIR")

    poll = add("poll", _poll, "one look at a job, as JSON; renews its lease")
    poll.add_argument("--job", type=Path, required=True)
    poll.add_argument("--offset", type=int, default=0, help="byte of the log to read from")
    poll.add_argument("--no-renew", action="store_true", help="leave the lease alone")

    stop = add("stop", _stop, "stop jobs and wait until their process trees are dead")
    which = stop.add_mutually_exclusive_group(required=True)
    which.add_argument("dataset", nargs="?", help="jobs on this dataset")
    which.add_argument("--all", action="store_true", help="every job of the workspace")
    which.add_argument("--job", type=Path, help="the job in this directory")
    stop.add_argument("--phase", help="only jobs of this phase")
    stop.add_argument("--start-id", help="with --job: only this start of it")
    stop.add_argument("--request", help="with --job: who asks; a later start by them is refused")


def _start(_arguments: argparse.Namespace) -> int:
    from drafter import jobs, plan
    from drafter.recipe import parse_recipe

    try:
        spec = json.load(sys.stdin)
    except ValueError as error:
        raise RecipeError(f"no job on stdin ({error}): trigger the DAG, which writes it") from None
    recipe = parse_recipe(spec["recipe"], "job")
    workspace = Workspace(Path(recipe.host.workspace))
    decision = plan.decide(
        spec["phase"],
        spec["dataset"],
        workspace,
        recipe,
        token_budget=spec["token_budget"],
        mode=spec["mode"],
        run_id=spec["run_id"],
    )
    if decision.action == "wait":
        if spec["phase"] == "generate":
            _refuse_foreign(decision, workspace, recipe, spec)
        raise DataError(decision.reason)
    if spec["phase"] == "generate" and recipe.pilot:
        decision = _with_pilot(decision, workspace, recipe, spec)
    if decision.action == "done":
        answer = {"outcome": "done", "reason": decision.reason, "counts": decision.counts}
        digest = left(spec["phase"], spec["dataset"], workspace, recipe)
        print_json({**answer, "digest": digest})
    else:
        print_json(jobs.start(workspace.root, spec))
    return 0


def _with_pilot(decision: Plan, workspace: Workspace, recipe: Recipe, spec: dict[str, Any]) -> Plan:
    """What ``decision`` means to a pilot, which may be there already, or to what follows one."""
    from drafter.generation import approval
    from drafter.generation.adoption import has_unknown_responses
    from drafter.generation.sessions import refuse_other_identity
    from drafter.identity import generation_identity

    if not spec.get("pilot_rows"):
        if decision.action in ("pilot", "approve", "restart"):
            raise DataError(f"{spec['dataset']}: {decision.reason}: {approval.REMEDY}")
        return decision
    prepared = workspace.prepared(spec["dataset"])
    adopts = spec["mode"] == "adopt" and has_unknown_responses(prepared)
    if decision.action in ("pilot", "restart") or (decision.action == "approve" and adopts):
        return decision
    identity = generation_identity(recipe)
    if decision.action == "approve":
        refuse_other_identity(prepared, identity)
    given = approval.given(prepared, identity)
    reason = f"pilot approved by {given['by']}" if given else decision.reason
    return replace(decision, action="done", reason=reason)


def _refuse_foreign(
    decision: Plan, workspace: Workspace, recipe: Recipe, spec: dict[str, Any]
) -> None:
    """Rows that nobody may touch keep prepare from finishing: say which, and why."""
    from drafter.foresee import look
    from drafter.generation.adoption import has_unknown_prompts

    prepared = workspace.prepared(spec["dataset"])
    if has_unknown_prompts(prepared):
        look(decision, prepared, recipe, spec["token_budget"], spec["mode"])


def _run(arguments: argparse.Namespace) -> int:
    from drafter.engine_job import used
    from drafter.job import load_job
    from drafter.plan import PHASES
    from drafter.processes import MARKER

    job = load_job(arguments.job)
    if job.phase not in PHASES:
        raise RecipeError(f"no phase {job.phase!r}: there are {', '.join(PHASES)}")
    signal.signal(signal.SIGTERM, _leave)
    # The supervisor holds the lock of what it runs.
    supervised = os.environ.get(MARKER) == job.start_id
    lock = job.workspace.lock(job.phase, job.dataset)
    with contextlib.nullcontext() if supervised else locked(lock), used(job):
        importlib.import_module(f"drafter.{job.phase}").run(job)
    return 0


def _leave(*_: object) -> None:
    """Unwind on a polite stop: temporary files go, and a second one does not disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(Stopped.exit_code)


def _poll(arguments: argparse.Namespace) -> int:
    from drafter import jobs

    print_json(jobs.poll(arguments.job, arguments.offset, renew=not arguments.no_renew))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from drafter import jobs

    if arguments.job:
        answer = jobs.stop(arguments.job, arguments.start_id, request=arguments.request)
        print_json({str(arguments.job): answer})
    else:
        root = workspace_of(arguments).root
        outcomes = jobs.stop_all(root, arguments.dataset, arguments.phase)
        print_json(outcomes)
        failed = [o["reason"] for o in outcomes.values() if o["outcome"] == "failed"]
        if failed:
            raise DrafterError("; ".join(failed))
    return 0
