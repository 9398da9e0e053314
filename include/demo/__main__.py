"""``python -m demo run | up | down``: the whole pipeline on this machine, for real and in small.

``run`` starts the stack, drives the four DAGs to a drafter, writes ``<home>/summary.json`` and
leaves no process behind, however it ends. ``up`` leaves the stack running for clicking; ``down``
stops it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import httpx

from demo import stack
from demo.airflow_api import AirflowApi
from demo.stack import ENGINE_KINDS, PORTS, ROOT, Stack, free_ports
from demo.summary import summarise, table
from demo.watch import Drive
from drafter.doctor import examine
from drafter.errors import Busy, DrafterError, Stopped
from drafter.files import write_json
from drafter.recipe import Recipe, load_recipe

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("command", choices=("run", "up", "down"))
    parser.add_argument("--home", type=Path, default=ROOT / ".demo")
    parser.add_argument("--recipe", type=Path, default=ROOT / "include/recipes/demo.toml")
    parser.add_argument("--host-python", type=Path, default=ROOT / ".demo/host-venv/bin/python")
    parser.add_argument("--port", type=int, default=8080, help="of the Airflow UI")
    parser.add_argument("--engine", choices=ENGINE_KINDS, default="embedded")
    arguments = parser.parse_args(argv)
    here = Stack(
        home=arguments.home.absolute(),
        recipe=arguments.recipe.absolute(),
        host_python=arguments.host_python.absolute(),
        web_port=arguments.port,
        ports=dict(zip(PORTS, free_ports(len(PORTS)), strict=True)),
        engine=arguments.engine,
    )
    for sig in SIGNALS:
        signal.signal(sig, _interrupted)
    if arguments.command == "down":
        stack.stop(here)
        return 0
    if stack.alive(here):
        raise Busy("the demo's stack is running already: `make down` stops it")
    os.environ |= {**here.variables, "NO_PROXY": "127.0.0.1,localhost"}
    recipe = load_recipe(here.recipe)
    if arguments.command == "up":
        _up(here, recipe)
    else:
        _run(here, recipe)
    return 0


def _run(here: Stack, recipe: Recipe) -> None:
    began = time.monotonic()
    try:
        print("starting sshd, engine and Airflow (about 40 s)", flush=True)
        _start(here, recipe)
        print(f"Airflow is at {here.url}", flush=True)
        with AirflowApi(here.url) as api:
            Drive(api, recipe, lambda: stack.require_alive(here)).run()
    finally:
        _end(here)
    summary = summarise(recipe, time.monotonic() - began)
    write_json(here.home / "summary.json", summary)
    print(f"\n{table(summary)}\nsummary: {here.home / 'summary.json'}")


def _up(here: Stack, recipe: Recipe) -> None:
    try:
        _start(here, recipe)
        with AirflowApi(here.url) as api:
            Drive(api, recipe, lambda: stack.require_alive(here)).get_ready()
    except BaseException:
        _end(here)
        raise
    print(f"Airflow is at {here.url} (no login, DAGs unpaused); `make down` stops it")


def _end(here: Stack) -> None:
    """Whatever else is signalled now, first everything is stopped."""
    for sig in SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    stack.stop(here)


def _start(here: Stack, recipe: Recipe) -> None:
    stack.begin(here, Path(recipe.host.workspace))
    stack.start_host(here)
    for finding in examine(recipe, "generate"):
        if finding.error:
            raise finding.error
    stack.start_airflow(here)


def _interrupted(_signal: int, _frame: FrameType | None) -> None:
    raise Stopped("interrupted")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DrafterError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"demo: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except httpx.HTTPError as error:
        print(f"demo: Airflow does not answer ({error}): see .demo/logs", file=sys.stderr)
        sys.exit(1)
