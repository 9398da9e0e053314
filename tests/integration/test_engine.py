"""The engine's life in the production DAG on a real Airflow: started, followed, dead, stopped.

The recipe's start command runs a script that each test writes: what it is to the recipe, a file on
the host, may change without another recipe.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.kill_stack import HERE, Clicks, launch, launched, wait
from unit.test_engine_job import SERVER

from demo import sshd
from demo import stack as demo_stack
from demo.stack import ROOT, Stack, free_ports
from drafter import engine_job, jobs
from drafter.files import read_json
from drafter.layout import JobDir, Workspace
from drafter.processes import MARKER

pytestmark = pytest.mark.long

TARGET = ROOT / "include" / "demo" / "target"
PATIENCE_S = 240.0
"""A try, its retry after half a minute, and two engines that load, on a busy machine."""


@dataclass
class Site:
    stack: Stack
    workspace: Workspace
    api: Clicks

    @property
    def engine(self) -> JobDir:
        return self.workspace.job(engine_job.PHASE, "all")

    def script(self, command: str) -> None:
        (self.stack.home / "start.sh").write_text(f"{command}\n")

    def real_engine(self) -> None:
        port = self.stack.ports["engine"]
        self.script(f"exec {sys.executable} -m drafter serve --model {TARGET} --port {port}")

    def states(self, run: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for task in self.api.tasks("generate", run):
            found.setdefault(task["task_id"], set()).add(str(task["state"]))
        return found

    def ended(self, run: str) -> str:
        wait(lambda: self.run_state(run) in ("success", "failed"), "the run's end", PATIENCE_S)
        return self.run_state(run)

    def run_state(self, run: str) -> str:
        return str(self.api.get(f"/dags/generate/dagRuns/{run}")["state"])

    def log(self, run: str, task_id: str) -> str:
        tasks = self.api.tasks("generate", run)
        return "\n".join(
            line for task in tasks if task["task_id"] == task_id for line in self.api.log(task)
        )

    def answers(self) -> dict[str, list[str]]:
        """Sample ids that are stored, by dataset."""
        found = {}
        for path in sorted(self.workspace.root.glob("prepared/*/raw_responses.jsonl")):
            rows = path.read_text().splitlines(keepends=True)
            found[path.parent.name] = [
                json.loads(row)["sample_id"] for row in rows if row.endswith("\n")
            ]
        return found

    def await_new_answers(self) -> None:
        before = sum(map(len, self.answers().values()))

        def more() -> bool:
            return sum(map(len, self.answers().values())) > before

        wait(more, "answers of a running job", PATIENCE_S)

    def marked(self) -> list[str]:
        """Command lines of all live processes of jobs of this workspace."""
        found = []
        for proc in Path("/proc").iterdir():
            try:
                if not proc.name.isdigit():
                    continue
                environ = (proc / "environ").read_bytes()
                command = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            mine = f"DEMO_STACK={self.stack.home}".encode() in environ
            if command and f"{MARKER}=".encode() in environ and (mine or str(self.home) in command):
                found.append(command)
        return found

    @property
    def home(self) -> Path:
        return self.stack.home


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("engine") / "stack"
    (home / "logs").mkdir(parents=True)
    recipe = home / "engine.toml"
    text = (HERE / "small.toml").read_text()
    settings = 'start = "sh ${DEMO_HOME}/start.sh"\npatience_s = 3\nready_timeout_s = 120\n'
    text = text.replace("[engine]\n", f"[engine]\n{settings}", 1)
    recipe.write_text(text.replace("in_flight = 60", "in_flight = 4"))
    web, *others = free_ports(1 + len(demo_stack.PORTS))
    ports = dict(zip(demo_stack.PORTS, others, strict=True))
    stack = Stack(home, recipe, Path(sys.executable), web, ports)
    workspace = Workspace(home / "host" / "a workspace")
    try:
        sshd.make_keys(home / "ssh")
        launch(stack, "sshd", sshd.command(home / "ssh", ports["sshd"]))
        demo_stack.begin(stack, workspace.root)
        demo_stack.start_airflow(stack)
        with Clicks(stack.url) as api:
            wait(lambda: "generate" in api.dag_ids(), "the DAGs")
            api.set_pool("gpu", 2)
            api.unpause("generate")
            yield Site(stack, workspace, api)
    finally:
        jobs.stop_all(workspace.root)
        demo_stack.stop(stack)
        for pid in launched(stack).values():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def test_an_engine_that_serves_another_model_is_one_red_task_and_nothing_stays(site: Site) -> None:
    (site.home / "server.py").write_text(SERVER)
    port = site.stack.ports["engine"]
    server = site.home / "server.py"
    site.script(f"exec {sys.executable} {server} {port} /models/other 0 300")
    run = site.api.trigger("generate")
    assert site.ended(run) == "failed"
    states = site.states(run)
    assert states["start_engine"] == {"failed"}
    assert states["generate"] == states["stop_engine"] == {"upstream_failed"}
    assert f"serves /models/other, the recipe's target is {TARGET}" in site.log(run, "start_engine")
    assert site.marked() == []


def test_one_that_never_becomes_ready_is_tried_twice_and_nothing_stays(site: Site) -> None:
    recipe = site.stack.recipe.read_text()
    site.stack.recipe.write_text(recipe.replace("ready_timeout_s = 120", "ready_timeout_s = 5"))
    site.script("echo still loading; sleep 600")
    run = site.api.trigger("generate")
    assert site.ended(run) == "failed"
    site.stack.recipe.write_text(recipe)
    (start,) = (t for t in site.api.tasks("generate", run) if t["task_id"] == "start_engine")
    assert (start["state"], start["try_number"]) == ("failed", 2)
    said = site.log(run, "start_engine")
    assert "the engine is not ready after 5 s" in said
    assert "its log ends: still loading" in said
    assert site.marked() == []


def test_one_that_dies_in_mid_run_is_started_again_by_the_retry_and_stopped_at_the_end(
    site: Site,
) -> None:
    site.real_engine()
    run = site.api.trigger("generate")
    site.await_new_answers()
    first = read_json(site.engine.job)["start_id"]
    child = read_json(site.engine.state)["child"][0]
    wrapped = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    os.kill(int(wrapped[0]), signal.SIGKILL)
    wait(lambda: "up_for_retry" in site.states(run)["generate"], "a retry", PATIENCE_S)
    assert site.ended(run) == "success"
    assert read_json(site.engine.job)["start_id"] != first
    assert site.states(run)["stop_engine"] == {"success"}
    assert site.marked() == []
    for dataset, ids in site.answers().items():
        assert len(ids) == len(set(ids)) > 0, dataset


def test_a_run_in_which_all_is_done_starts_no_engine(site: Site) -> None:
    before = read_json(site.engine.job)["start_id"]
    run = site.api.trigger("generate")
    assert site.ended(run) == "success"
    assert "no engine is needed" in site.log(run, "start_engine")
    assert read_json(site.engine.job)["start_id"] == before


def begin_again(site: Site) -> str:
    site.real_engine()
    run = site.api.trigger("generate", mode="restart")
    wait(lambda: site.states(run).get("start_engine") == {"success"}, "the engine", PATIENCE_S)
    wait(lambda: "deferred" in site.states(run)["generate"], "a job that is followed", PATIENCE_S)
    return run


def test_a_run_marked_failed_still_stops_it(site: Site) -> None:
    run = begin_again(site)
    site.api.fail_run("generate", run)
    assert site.ended(run) == "failed"
    assert site.states(run)["stop_engine"] == {"success"}
    assert site.marked() == []


def test_a_paused_dag_has_no_teardown_and_the_engine_ends_itself(site: Site) -> None:
    run = begin_again(site)
    site.api.pause("generate")
    paused = site.api.get(f"/dags/generate/dagRuns/{run}")
    assert paused["state"] == "failed"
    assert "Stopped because the DAG was paused" in paused["note"]
    wait(lambda: not engine_job.used_by(site.workspace), "the jobs' death")
    wait(lambda: not site.marked(), "the engine's death", engine_job.LINGER_S + 30)
    record: dict[str, Any] = read_json(site.engine.exit)
    assert record["code"] == 0
    site.api.unpause("generate")
    site.api.clear("generate", run, ["generate"])
    assert site.ended(run) == "success"
    assert site.marked() == []
