"""What people do with the four DAGs, against a real Airflow, sshd and engine, over three datasets.

One Airflow for the whole file: the tests tell one story, in order. SIGSTOP of the engine is what
makes generation last as long as a test needs it to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from demo import stack as demo_stack
from demo.airflow_api import ACTIVE, AirflowApi, ApiError
from demo.stack import ROOT, Stack, environment, free_ports
from drafter.files import read_json
from drafter.layout import Workspace
from drafter.status import read_status

HOST_PYTHON = ROOT / ".demo" / "host-venv" / "bin" / "python"
DAGS = {"generate", "validate", "extract", "train"}
PROMPTS = ROOT / "include" / "demo" / "prompts"
FEWER_ROWS = 30
"""Of B7 at first, fewer than its max_samples: the rows that come later are asked."""

NAMES = ["B1_glaive", "B6_ultrachat", "B7_sharegpt"]
B1, B6, B7 = NAMES
GPU_PHASES = ("generate", "extract", "train", "evaluate")
WITHIN_S = 600.0
"""Of one step, on a busy machine."""

Task = dict[str, Any]


@dataclass
class Airflow:
    """The stack, its API, and what stands on the "GPU host"."""

    stack: Stack
    api: AirflowApi
    workspace: Workspace

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """Oldest first."""
        return self.api.runs(dag_id)[::-1]

    def end(self, dag_id: str, run_id: str) -> str:
        """Waits for the end of a run; its state."""

        def state() -> str:
            return next(r["state"] for r in self.runs(dag_id) if r["dag_run_id"] == run_id)

        wait(lambda: state() not in ACTIVE, f"the end of {dag_id} {run_id}")
        return state()

    def idle(self, *dag_ids: str) -> None:
        """Waits until none of the DAGs has an unfinished run."""

        def busy() -> bool:
            return any(run["state"] in ACTIVE for dag in dag_ids for run in self.runs(dag))

        wait(lambda: not busy(), f"{dag_ids} to be idle")

    def tasks(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Task]:
        """Mapped instances of a task by dataset."""
        found = [t for t in self.api.tasks(dag_id, run_id) if t["task_id"] == task_id]
        return {task["rendered_map_index"]: task for task in found if task["map_index"] >= 0}

    def state(self, dag_id: str, run_id: str, task_id: str, dataset: str) -> str | None:
        task = self.tasks(dag_id, run_id, task_id).get(dataset)
        return task and task["state"]

    def left(self, task: Task, key: str = "return_value") -> Any:
        """An XCom of a task instance."""
        page = f"/dags/{task['dag_id']}/dagRuns/{task['dag_run_id']}/taskInstances"
        path = f"{page}/{task['task_id']}/xcomEntries/{key}"
        return self.api.get(path, map_index=task["map_index"], deserialize=True)["value"]

    def links(self, task: Task) -> dict[str, str | None]:
        """The buttons of a task instance."""
        page = f"/dags/{task['dag_id']}/dagRuns/{task['dag_run_id']}/taskInstances"
        path = f"{page}/{task['task_id']}/links"
        found: dict[str, str | None] = self.api.get(path, map_index=task["map_index"])[
            "extra_links"
        ]
        return found

    def last_line(self, task: Task) -> str:
        """Of ours in a task's log: what follows is Airflow's own."""
        name = task["rendered_map_index"]
        return [line for line in self.api.log(task) if name in line][-1]

    def alive(self) -> set[tuple[str, str]]:
        """(phase, dataset) of the GPU jobs that run."""
        if not self.workspace.root.exists():
            return set()
        jobs = read_status(self.workspace.root)["jobs"]
        return {(p, d) for p in GPU_PHASES for d, job in jobs.get(p, {}).items() if job["alive"]}

    @contextmanager
    def engine_stopped(self, run_id: str) -> Iterator[None]:
        """From when the doctor of a generate run has seen it well."""

        def is_checked() -> bool:
            tasks = self.api.tasks("generate", run_id)
            return any(t["task_id"] == "doctor" and t["state"] == "success" for t in tasks)

        wait(is_checked, f"the doctor of {run_id}")
        (pid,) = (pid for pid, name in demo_stack.alive(self.stack) if name == "engine")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def sampled(self) -> Iterator[list[int]]:
        """How many GPU jobs were alive, every tenth of a second."""
        counts: list[int] = []
        over = threading.Event()

        def sample() -> None:
            while not over.wait(0.1):
                counts.append(len(self.alive()))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield counts
        finally:
            over.set()
            thread.join()

    def edit_recipe(self, change: Callable[[str], str]) -> None:
        """Tasks read it when they begin; schedules once it is parsed again."""
        self.stack.recipe.write_text(change(self.stack.recipe.read_text()))


def wait(condition: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        time.sleep(0.5)


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("dags")
    sources = home / "sources"
    shutil.copytree(PROMPTS, sources)
    grows = sources / "B7_sharegpt.json"
    grows.write_text(json.dumps(json.loads(grows.read_text())[:FEWER_ROWS]))
    recipe = home / "small.toml"
    text = (ROOT / "tests" / "integration" / "small.toml").read_text()
    recipe.write_text(text.replace("${DEMO_ROOT}/include/demo/prompts", str(sources)))
    web, *others = free_ports(1 + len(demo_stack.PORTS))
    ports = dict(zip(demo_stack.PORTS, others, strict=True))
    stack = Stack(home, recipe, HOST_PYTHON, web, ports)
    workspace = Workspace(home / "host" / "a workspace")
    (home / "logs").mkdir()
    try:
        demo_stack.begin(stack, workspace.root)
        demo_stack.start_host(stack)
        demo_stack.start_airflow(stack)
        with AirflowApi(stack.url) as api:
            wait(lambda: api.dag_ids() >= DAGS, f"the DAGs ({api.import_errors()})")
            for dag_id in DAGS:
                api.unpause(dag_id)
            api.set_pool("gpu", 1)
            yield Airflow(stack, api, workspace)
    finally:
        demo_stack.stop(stack)
    assert environment(stack)["DEMO_STACK"] == str(home)
    assert demo_stack.stragglers(stack) == []


@pytest.mark.parametrize(
    "conf",
    [
        {"datasets": ["B9_nothing"]},
        {"datasets": []},
        {"datasets": [B1, B1]},
        {"mode": "again"},
        {"token_budget": 0},
        {"token_budget": "many"},
        {"plan_only": "perhaps"},
    ],
    ids=str,
)
def test_what_the_form_refuses_the_api_refuses_too(airflow: Airflow, conf: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=": 400 "):
        airflow.api.trigger("generate", **conf)
    assert airflow.runs("generate") == []


def test_plan_only_shows_the_plan_and_starts_nothing(airflow: Airflow) -> None:
    run_id = airflow.api.trigger("generate", plan_only=True)
    assert airflow.end("generate", run_id) == "success"
    states = {task["task_id"]: task["state"] for task in airflow.api.tasks("generate", run_id)}
    assert states["plan"] == "success"
    assert {states[name] for name in ("doctor", "prepare", "generate")} == {"skipped"}
    assert not airflow.workspace.jobs.exists()


def test_validation_waits_for_generation_and_then_passes(airflow: Airflow) -> None:
    with airflow.sampled() as num_alive:
        generating = airflow.api.trigger("generate", datasets=[B1, B6])
        with airflow.engine_stopped(generating):
            wait(lambda: airflow.alive(), "the first job")
            ((_, first),) = airflow.alive()
            validating = airflow.api.trigger("validate", datasets=[first])
            sensor = ("validate", validating, "dataset.token_budget", first)
            wait(lambda: airflow.state(*sensor) == "deferred", "the sensor to wait")
            time.sleep(5)
            assert airflow.state(*sensor) == "deferred"
        assert airflow.end("generate", generating) == "success"
    assert airflow.end("validate", validating) == "success"
    assert max(num_alive) == 1
    assert set(airflow.tasks("generate", generating, "generate")) == {B1, B6}


def test_a_task_ends_with_its_numbers_and_a_link_to_samples(airflow: Airflow) -> None:
    run_id = airflow.runs("generate")[-1]["dag_run_id"]
    for name, task in airflow.tasks("generate", run_id, "generate").items():
        said = rf"generate {name}: [\d,]+ responses, [\d,]+ of 1,500 tokens, .* tokens/s, stop"
        assert re.match(f"{said} reason: budget", airflow.last_line(task))
        samples = "\n".join(airflow.left(task, "samples"))
        assert samples.count(name) >= 3
        assert "\x1b" not in samples
        links = airflow.links(task)
        assert links.pop("Report or curves") is None
        (url,) = links.values()
        assert url.startswith(f"{airflow.stack.url}/dags/generate/runs/")
        assert url.endswith(f"/tasks/generate/mapped/{task['map_index']}/xcom")
        assert httpx.get(url).status_code == 200


def test_extraction_waits_for_the_last_dataset_and_training_starts_once(airflow: Airflow) -> None:
    airflow.idle("validate")
    assert airflow.runs("extract") == []
    earlier = {run["dag_run_id"] for run in airflow.runs("validate")}
    airflow.api.set_pool("gpu", 2)
    with airflow.sampled() as num_alive:
        airflow.api.trigger("generate", datasets=[B7])
        wait(lambda: airflow.runs("train"), "a train run")
        airflow.idle("train", *DAGS)
    assert max(num_alive) == 2
    later = [run for run in airflow.runs("validate") if run["dag_run_id"] not in earlier]
    assert {run["run_type"] for run in later} == {"asset_triggered"}
    mapped = [set(airflow.tasks("validate", r["dag_run_id"], "dataset.validate")) for r in later]
    # An event of before may have come late; B7 flows alone, and once.
    assert [names for names in mapped if B7 in names] == [{B7}]
    for dag_id in ("extract", "train"):
        (run,) = airflow.runs(dag_id)
        assert (run["state"], run["run_type"]) == ("success", "asset_triggered")


def test_a_button_leads_to_the_report_and_to_the_curves(airflow: Airflow) -> None:
    token = httpx.get(f"{airflow.stack.url}/auth/token").json()["access_token"]
    validated = next(
        tasks[B7]
        for run in airflow.runs("validate")
        if B7 in (tasks := airflow.tasks("validate", run["dag_run_id"], "dataset.validate"))
    )
    (training,) = airflow.runs("train")
    found = airflow.api.tasks("train", training["dag_run_id"])
    (trained,) = (task for task in found if task["task_id"] == "train")
    shown = {}
    for task, page in ((validated, f"prepared/{B7}/report.html"), (trained, "curves.html")):
        url = airflow.links(task)["Report or curves"]
        assert url == f"{airflow.stack.url}/drafter/{page}"
        answer = httpx.get(url, headers={"Cookie": f"_token={token}"}, timeout=60)
        assert answer.status_code == 200, answer.text
        shown[task["dag_id"]] = answer.text
    assert B7 in shown["validate"] and "<svg" in shown["validate"]
    assert "held-out" in shown["train"] and "<svg" in shown["train"]
    assert any(url in line for line in airflow.api.log(trained))


def failed_sensor(airflow: Airflow, dag_id: str, task_id: str, dataset: str) -> str:
    """What the sensor of a run over ``dataset`` says when it has failed at once, for good."""
    run_id = airflow.api.trigger(dag_id, datasets=[dataset])
    assert airflow.end(dag_id, run_id) == "failed"
    task = airflow.tasks(dag_id, run_id, task_id)[dataset]
    assert (task["state"], task["try_number"]) == ("failed", 1)
    (line,) = (line for line in airflow.api.log(task) if "drafter: " in line)
    return line


def test_generation_that_ended_short_fails_at_once_with_the_numbers(airflow: Airflow) -> None:
    before = airflow.stack.recipe.read_text()
    airflow.edit_recipe(
        lambda text: text.replace("max_samples = 40", "max_samples = 40\nmin_tokens = 9999999")
    )
    said = failed_sensor(airflow, "validate", "dataset.token_budget", B7)
    airflow.edit_recipe(lambda _: before)
    assert re.search(
        rf"generation of {B7} ended \([\w ]+\) too early: \d+ tokens stored, budget none, minimum"
        " 9999999",
        said,
    )


def test_one_byte_changed_after_validation_is_refused_by_its_hash(airflow: Airflow) -> None:
    path = airflow.workspace.prepared(B1).responses
    stat, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    said = failed_sensor(airflow, "extract", "dataset.schema", B1)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    seen = r"generate left sha256 [0-9a-f]{12}, now [0-9a-f]{12}"
    assert re.search(
        rf"raw_responses.jsonl of {B1} is not what was validated \(changed: {seen}", said
    )


def test_a_restart_with_a_clear_and_a_retry_archives_the_old_rows_once(airflow: Airflow) -> None:
    prepared = airflow.workspace.prepared(B1)
    old = prepared.responses.read_bytes()
    run_id = airflow.api.trigger("generate", datasets=[B1], mode="restart")
    with airflow.engine_stopped(run_id):
        task = ("generate", run_id, "generate", B1)
        wait(lambda: airflow.state(*task) == "deferred" and airflow.alive(), "the job")
        start_id = read_json(airflow.workspace.job("generate", B1).job)["start_id"]

        def restarted(before: str) -> bool:
            now = read_json(airflow.workspace.job("generate", B1).job)["start_id"]
            return bool(now != before and airflow.alive() and airflow.state(*task) == "deferred")

        airflow.api.clear("generate", run_id, [["generate", 0]])
        wait(lambda: restarted(start_id), "the cleared task's job")
        start_id = read_json(airflow.workspace.job("generate", B1).job)["start_id"]
        state = read_json(airflow.workspace.job("generate", B1).state)
        os.kill(state["supervisor"][0], signal.SIGKILL)
        wait(lambda: restarted(start_id), "the retry's job")
    assert airflow.end("generate", run_id) == "success"
    archived = list((prepared.root / "archive").glob("*/raw_responses.jsonl"))
    assert [path.read_bytes() for path in archived] == [old]
    assert prepared.responses.read_bytes() != old
    wait(lambda: len(airflow.runs("train")) == 2, "a train run for the new set")
    airflow.idle(*DAGS)
    assert len(airflow.runs("train")) == 2


def test_a_short_cron_redoes_exactly_what_changed(airflow: Airflow) -> None:
    def scheduled() -> list[dict[str, Any]]:
        """Finished ones, oldest first."""
        runs = [r for r in airflow.runs("generate") if r["run_type"] == "scheduled"]
        return [run for run in runs if run["state"] not in ACTIVE]

    def outcomes(run: dict[str, Any]) -> dict[str, str]:
        tasks = airflow.tasks("generate", run["dag_run_id"], "generate")
        return {name: airflow.left(task)["outcome"] for name, task in tasks.items()}

    airflow.edit_recipe(lambda text: text + '\n[schedule]\ngenerate = "* * * * *"\n')
    wait(lambda: scheduled(), "a scheduled run")
    first = scheduled()[0]
    assert first["state"] == "success"
    assert first["duration"] < 60
    assert outcomes(first) == dict.fromkeys(NAMES, "done")

    source = airflow.stack.home / "sources" / "B7_sharegpt.json"
    shutil.copyfile(PROMPTS / source.name, source)
    num_train = len(airflow.runs("train"))
    wait(
        lambda: "ran" in [o for r in scheduled()[1:] for o in outcomes(r).values()], "a changed run"
    )
    (changed,) = (r for r in scheduled() if "ran" in outcomes(r).values())
    assert outcomes(changed) == {B1: "done", B6: "done", B7: "ran"}
    wait(lambda: len(airflow.runs("train")) == num_train + 1, "a train run for the new set")
