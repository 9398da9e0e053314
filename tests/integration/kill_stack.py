"""A whole Airflow over a private sshd, for jobs that are small programs instead of phases.

One DAG per dataset of the recipe, each with the tasks deploy and job. The kill matrix, the test of
long waits and the benchmarks share it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from demo import sshd
from demo import stack as demo_stack
from demo.airflow_api import AirflowApi
from demo.stack import Stack, environment, free_ports
from drafter.files import read_json, write_json
from drafter.layout import Workspace

HERE = Path(__file__).parent
LOOK_S = 0.2
SETTLE_S = 90.0
"""From a click to a task's new state, on a busy machine."""


class Clicks(AirflowApi):
    def start(
        self,
        dataset: str,
        program: list[str],
        wait_s: float = 0,
        environ: dict[str, str] | None = None,
    ) -> str:
        """A run whose job is ``program``; its task stays running for ``wait_s`` after the start."""
        conf = {"program": json.dumps(program), "environ": json.dumps(environ or {})}
        return self.trigger(dataset, wait_s=wait_s, **conf)

    def job(self, dataset: str, run: str) -> dict[str, Any]:
        return next(task for task in self.tasks(dataset, run) if task["task_id"] == "job")

    def pause(self, *dag_ids: str) -> None:
        """One DAG as the UI's switch does it, several as a script does."""
        if len(dag_ids) == 1:
            self._send("PATCH", f"/dags/{dag_ids[0]}", {"is_paused": True})
            return
        query = {"dag_id_pattern": "|".join(dag_ids)}
        response = self._http.patch("/dags", params=query, json={"is_paused": True})
        response.raise_for_status()

    def mark(self, dataset: str, run: str, state: str) -> None:
        path = f"/dags/{dataset}/dagRuns/{run}/taskInstances/job"
        self._http.patch(path, json={"new_state": state}).raise_for_status()


@contextmanager
def airflow(
    home: Path, recipe: Path = HERE / "kill.toml"
) -> Iterator[tuple[Stack, Workspace, Clicks]]:
    """Up, with every DAG unpaused; at the end no process of it is left."""
    datasets = {dataset["name"] for dataset in tomllib.loads(recipe.read_text())["datasets"]}
    web, *others = free_ports(1 + len(demo_stack.PORTS))
    ports = dict(zip(demo_stack.PORTS, others, strict=True))
    stack = Stack(home, recipe, Path(sys.executable), web, ports, HERE / "kill_dags")
    workspace = Workspace(home / "host" / "it's a $(touch x) workspace")
    try:
        (home / "logs").mkdir(parents=True)
        sshd.make_keys(home / "ssh")
        launch(stack, "sshd", sshd.command(home / "ssh", ports["sshd"]))
        demo_stack.begin(stack, workspace.root)
        demo_stack.start_airflow(stack)
        with Clicks(stack.url) as api:
            wait(lambda: datasets <= api.dag_ids(), "the DAGs")
            api.set_pool("gpu", 8)
            for dataset in datasets:
                api.unpause(dataset)
            yield stack, workspace, api
    finally:
        demo_stack.stop(stack)
        for pid in launched(stack).values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def wait(
    condition: Callable[[], object], what: str, within_s: float = SETTLE_S, look_s: float = LOOK_S
) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        time.sleep(look_s)


def settled(api: Clicks, dataset: str, run: str, within_s: float = SETTLE_S) -> str:
    """State of the job's task once it has ended."""
    ends = ("success", "failed")
    wait(lambda: api.job(dataset, run)["state"] in ends, f"the end of {dataset}", within_s)
    return str(api.job(dataset, run)["state"])


def launch(stack: Stack, name: str, command: list[str]) -> None:
    """One more process of the stack, noted in pids.json."""
    with open(stack.home / "logs" / f"{name}.log", "a") as log:
        process = subprocess.Popen(
            command,
            env=environment(stack),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    write_json(stack.home / "pids.json", {**launched(stack), name: process.pid})


def launched(stack: Stack) -> dict[str, int]:
    path = stack.home / "pids.json"
    pids: dict[str, int] = read_json(path) if path.exists() else {}
    return pids


def kill_part(stack: Stack, name: str) -> None:
    """KILL a part of Airflow and its children."""
    pids = {name: pid for pid, name in demo_stack.alive(stack)} | launched(stack)
    os.killpg(pids[name], signal.SIGKILL)
