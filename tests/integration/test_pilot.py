"""A generate run that asks about each dataset's pilot, against a real Airflow, sshd and engine.

One Airflow for the whole file: the tests tell one story, in order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.test_dag_semantics import DAGS, HOST_PYTHON, NAMES, Airflow, wait

from demo import stack as demo_stack
from demo.airflow_api import ACTIVE, AirflowApi
from demo.stack import ROOT, Stack, free_ports
from drafter.files import read_section
from drafter.layout import Prepared, Workspace

pytestmark = pytest.mark.long

B1, B6, B7 = NAMES
ROWS = 8
TIMEOUT_S = 90
"""Long enough to answer two questions, and then waited for."""

SEEN_S = 6.0
"""A person needs longer than the scheduler to see that the asking process has ended."""


def question(airflow: Airflow, run_id: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """(path, detail) of what is asked about a dataset, once it is."""
    task = ("generate", run_id, "dataset.approve")
    wait(lambda: airflow.state(*task, dataset) == "awaiting_input", f"the question of {dataset}")
    index = airflow.tasks(*task)[dataset]["map_index"]
    page = f"/dags/generate/dagRuns/{run_id}/taskInstances/dataset.approve/{index}/hitlDetails"
    return page, airflow.api.get(page)


def respond(airflow: Airflow, run_id: str, dataset: str, choice: str) -> None:
    page, _ = question(airflow, run_id, dataset)
    time.sleep(SEEN_S)
    airflow.api._send("PATCH", page, {"chosen_options": [choice], "params_input": {}})


def states(airflow: Airflow, run_id: str, task_id: str) -> dict[str, str]:
    """By dataset; Airflow names only the instances that have begun."""
    tasks = airflow.tasks("generate", run_id, f"dataset.{task_id}").values()
    return {NAMES[task["map_index"]]: task["state"] for task in tasks}


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def prepared(airflow: Airflow, dataset: str) -> Prepared:
    return airflow.workspace.prepared(dataset)


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("pilot")
    recipe = home / "small.toml"
    text = (ROOT / "tests" / "integration" / "small.toml").read_text()
    # The engine serves already and is nobody's job: it is used and left alone.
    text = text.replace("[engine]\n", '[engine]\nstart = "false"\n')
    recipe.write_text(f"{text}\n[pilot]\nrows = {ROWS}\nresponse_timeout_s = {TIMEOUT_S}\n")
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
            for dag_id in ("generate", "validate"):
                api.unpause(dag_id)
            api.set_pool("gpu", 2)
            yield Airflow(stack, api, workspace)
    finally:
        demo_stack.stop(stack)
    assert demo_stack.stragglers(stack) == []


def test_plan_only_asks_nobody(airflow: Airflow) -> None:
    run_id = airflow.api.trigger("generate", plan_only=True)
    assert airflow.end("generate", run_id) == "success"
    assert states(airflow, run_id, "approve") == {}
    assert not airflow.workspace.jobs.exists()


@pytest.fixture(scope="module")
def first(airflow: Airflow) -> str:
    return airflow.api.trigger("generate")


def test_each_dataset_stops_at_its_pilot_and_asks_with_figures_and_samples(
    airflow: Airflow, first: str
) -> None:
    for dataset in NAMES:
        _, detail = question(airflow, first, dataset)
        assert (detail["options"], detail["response_received"]) == (["Approve", "Reject"], False)
        assert dataset in detail["subject"]
        assert f"* {ROWS} rows, " in detail["body"] and "* sound: " in detail["body"]
        assert detail["body"].count("--- thinking") == 3 and f"{dataset}-" in detail["body"]
        assert len(lines(prepared(airflow, dataset).responses)) == ROWS
        assert read_section(prepared(airflow, dataset).manifest, "generate") is None
    assert airflow.alive() == set()
    assert airflow.runs("validate") == []


def test_an_approval_a_rejection_and_silence_each_do_their_own(
    airflow: Airflow, first: str
) -> None:
    pilots = {name: prepared(airflow, name).responses.read_bytes() for name in NAMES}
    respond(airflow, first, B1, "Approve")
    respond(airflow, first, B6, "Reject")
    assert airflow.end("generate", first) == "failed"
    assert states(airflow, first, "approve") == {B1: "success", B6: "skipped", B7: "failed"}
    assert states(airflow, first, "generate") == {
        B1: "success",
        B6: "skipped",
        B7: "upstream_failed",
    }
    whole = {t["task_id"]: t["state"] for t in airflow.api.tasks("generate", first)}
    assert (whole["start_engine"], whole["stop_engine"]) == ("success", "success")

    stored = {name: prepared(airflow, name).responses.read_bytes() for name in NAMES}
    assert stored[B1].startswith(pilots[B1]) and len(stored[B1]) > len(pilots[B1])
    section = read_section(prepared(airflow, B1).manifest, "generate") or {}
    assert section["stop_reason"] == "budget"
    approval = (read_section(prepared(airflow, B1).manifest, "pilot") or {})["approval"]
    assert approval["run_id"] == first and approval["by"]

    archive = prepared(airflow, B6).archive(f"rejected-{first}")
    assert (archive / "raw_responses.jsonl").read_bytes() == pilots[B6] and stored[B6] == b""
    log = "\n".join(airflow.api.log(airflow.tasks("generate", first, "dataset.approve")[B6]))
    assert f"rejected the pilot: {ROWS} answers" in log

    assert stored[B7] == pilots[B7]
    silent = airflow.tasks("generate", first, "dataset.approve")[B7]
    assert silent["try_number"] == 1
    (said,) = (line for line in airflow.api.log(silent) if line.startswith("drafter: "))
    assert f"nobody answered for the pilot of {B7} within 0:01:30: its rows are kept" in said


def test_only_what_was_approved_is_announced_and_validation_refuses_a_pilot(
    airflow: Airflow,
) -> None:
    wait(lambda: airflow.runs("validate"), "a validate run")
    airflow.idle("validate")
    mapped = [
        set(airflow.tasks("validate", run["dag_run_id"], "dataset.validate"))
        for run in airflow.runs("validate")
    ]
    assert mapped == [{B1}]
    run_id = airflow.api.trigger("validate", datasets=[B7])
    assert airflow.end("validate", run_id) == "failed"
    sensor = airflow.tasks("validate", run_id, "dataset.token_budget")[B7]
    assert (sensor["state"], sensor["try_number"]) == ("failed", 1)
    (said,) = (line for line in airflow.api.log(sensor) if line.startswith("drafter: "))
    assert f"only a pilot of {B7} is generated ({ROWS} rows)" in said


def test_a_rerun_asks_only_where_nobody_has_approved(airflow: Airflow) -> None:
    kept = prepared(airflow, B7).responses.read_bytes()
    airflow.edit_recipe(
        lambda text: text.replace(f"response_timeout_s = {TIMEOUT_S}", "response_timeout_s = 86400")
    )
    run_id = airflow.api.trigger("generate")
    for dataset in (B6, B7):
        question(airflow, run_id, dataset)
    tasks = {
        name: airflow.tasks("generate", run_id, f"dataset.{name}")
        for name in ("pilot", "approve", "generate")
    }
    assert {name: airflow.left(task)["outcome"] for name, task in tasks["pilot"].items()} == {
        B1: "done",
        B6: "ran",
        B7: "done",
    }
    wait(lambda: states(airflow, run_id, "generate")[B1] == "success", "B1 to be done")
    assert (
        airflow.left(airflow.tasks("generate", run_id, "dataset.approve")[B1])["outcome"]
        == "nothing to ask"
    )
    assert prepared(airflow, B7).responses.read_bytes() == kept
    for dataset in (B6, B7):
        respond(airflow, run_id, dataset, "Approve")
    assert airflow.end("generate", run_id) == "success"
    assert set(states(airflow, run_id, "generate").values()) == {"success"}
    assert prepared(airflow, B7).responses.read_bytes().startswith(kept)
    for dataset in NAMES:
        assert read_section(prepared(airflow, dataset).manifest, "generate")


def test_a_clear_does_not_ask_again(airflow: Airflow) -> None:
    run = airflow.runs("generate")[-1]
    run_id = run["dag_run_id"]
    index = airflow.tasks("generate", run_id, "dataset.approve")[B6]["map_index"]
    airflow.api.clear("generate", run_id, [["dataset.approve", index]])
    wait(lambda: airflow.runs("generate")[-1]["state"] in ACTIVE, "the run to go on")
    assert airflow.end("generate", run_id) == "success"
    task = airflow.tasks("generate", run_id, "dataset.approve")[B6]
    assert airflow.left(task)["outcome"] == "nothing to ask"
    assert json.dumps(airflow.left(task)).count("stop reason")
