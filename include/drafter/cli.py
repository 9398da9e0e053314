"""The commands. Each is a thin skin over a module of the same noun, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.errors import DataError, DrafterError, RecipeError, Stopped
from drafter.layout import ALL, Workspace, digest, read_json

if TYPE_CHECKING:
    from drafter.recipe import Recipe


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drafter", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        sub.add_argument("--workspace", default=os.environ.get("DRAFTER_WORKSPACE"))
        return sub

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

    status = add("status", _status, "every job and manifest of the workspace")
    status.add_argument("--json", action="store_true", help="one line of JSON")
    status.add_argument("--verify", action="store_true", help="hash files against the manifests")
    status.add_argument("--dataset", help="only this one")

    plan = add("plan", _plan, "what a start would do, per dataset, and why")
    plan.add_argument("phase")
    plan.add_argument("datasets", nargs="*", help="default: all of the recipe")
    plan.add_argument("--json", action="store_true", help="end with one line of JSON")
    plan.add_argument("--mode", choices=("resume", "restart"), default="resume")
    plan.add_argument("--run-id", default="")
    plan.add_argument("--token-budget", type=int)

    join = add("join", _join, "is a phase done on every dataset? one line of JSON")
    join.add_argument("phase")

    doctor = add("doctor", _doctor, "is this host ready for a phase of the recipe?")
    doctor.add_argument("phase")
    doctor.add_argument("--now", type=float, help="Unix time where Airflow runs")

    serve = add("serve", _serve, "embedded engine: SGLang's /generate over a tiny model")
    serve.add_argument("--model", type=Path, required=True)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, required=True)
    return parser


def _workspace(arguments: argparse.Namespace) -> Workspace:
    if not arguments.workspace:
        raise RecipeError("which workspace? pass --workspace DIR or set DRAFTER_WORKSPACE")
    return Workspace(Path(arguments.workspace))


def _recipe(workspace: Workspace) -> Recipe:
    from drafter.recipe import parse_recipe

    return parse_recipe(read_json(workspace.recipe), str(workspace.recipe))


def _print_json(value: Any) -> None:
    print(json.dumps(value, separators=(",", ":")), flush=True)


def _start(_arguments: argparse.Namespace) -> int:
    from drafter import jobs, plan
    from drafter.recipe import parse_recipe

    spec = json.load(sys.stdin)
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
        raise DataError(decision.reason)
    if decision.action == "done":
        answer = {"outcome": "done", "reason": decision.reason, "counts": decision.counts}
        left = _left(spec["phase"], spec["dataset"], workspace, recipe)
        _print_json({**answer, "digest": left})
    else:
        _print_json(jobs.start(workspace.root, spec))
    return 0


def _left(phase: str, dataset: str, workspace: Workspace, recipe: Recipe) -> str | None:
    """One hash over what a phase left and made it of; None when it has not finished."""
    from drafter.plan import read_phase

    section = read_phase(phase, dataset, workspace, recipe)
    if section is None:
        return None
    return digest({key: section.get(key) for key in ("inputs", "files")})


def _run(arguments: argparse.Namespace) -> int:
    from drafter.job import load_job
    from drafter.plan import PHASES

    job = load_job(arguments.job)
    if job.phase not in PHASES:
        raise RecipeError(f"no phase {job.phase!r}: there are {', '.join(PHASES)}")
    signal.signal(signal.SIGTERM, _leave)
    importlib.import_module(f"drafter.{job.phase}").run(job)
    return 0


def _leave(*_: object) -> None:
    """Unwind on a polite stop: temporary files go, and a second one does not disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(Stopped.exit_code)


def _poll(arguments: argparse.Namespace) -> int:
    from drafter import jobs

    _print_json(jobs.poll(arguments.job, arguments.offset, renew=not arguments.no_renew))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from drafter import jobs

    if arguments.job:
        answer = jobs.stop(arguments.job, arguments.start_id, request=arguments.request)
        _print_json({str(arguments.job): answer})
    else:
        root = _workspace(arguments).root
        outcomes = jobs.stop_all(root, arguments.dataset, arguments.phase)
        _print_json(outcomes)
        failed = [o["reason"] for o in outcomes.values() if o["outcome"] == "failed"]
        if failed:
            raise DrafterError("; ".join(failed))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from drafter.status import read_status

    status = read_status(_workspace(arguments).root, arguments.verify, arguments.dataset)
    if arguments.json:
        _print_json(status)
    else:
        print(json.dumps(status, indent=2))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from drafter.plan import OVER_ALL, decide

    workspace = _workspace(arguments)
    recipe = _recipe(workspace)
    over_all = arguments.phase in OVER_ALL
    names = [ALL] if over_all else arguments.datasets or recipe.dataset_names
    plans = [
        decide(
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
    for line in plans:
        print(f"{line.dataset:22} {line.action:8} {line.reason}")
    if arguments.json:
        _print_json(
            [
                {**line.as_json(), "digest": _left(line.phase, line.dataset, workspace, recipe)}
                for line in plans
            ]
        )
    return 0


def _join(arguments: argparse.Namespace) -> int:
    from drafter.plan import joined

    workspace = _workspace(arguments)
    _print_json(joined(arguments.phase, workspace, _recipe(workspace)))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from drafter.doctor import examine, table

    findings = list(examine(_recipe(_workspace(arguments)), arguments.phase, arguments.now))
    print(table(findings), flush=True)
    for finding in findings:
        if finding.error:
            raise finding.error
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from drafter.engines.embedded import serve

    serve(arguments.model, arguments.host, arguments.port)
    return 0
