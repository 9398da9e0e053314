"""What status tells of jobs and files, and the digest by which a phase's result is known."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from unit.host import QUIET, Host, until
from unit.plan_site import generate, make_recipe, prepare, validate

from drafter import cli, jobs
from drafter.files import file_record, read_section, write_json, write_section
from drafter.layout import Workspace
from drafter.recipe import Recipe
from drafter.status import as_table, read_status


@pytest.fixture
def host(tmp_path: Path) -> Any:
    host = Host(tmp_path / "host")
    yield host
    jobs.stop_all(host.workspace.root)
    until(lambda: host.processes() == [], 2)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.fixture
def workspace(recipe: Recipe) -> Workspace:
    """B1 is generated and validated."""
    workspace = Workspace(Path(recipe.host.workspace))
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")
    validate(workspace, recipe, "B1")
    write_json(workspace.recipe, recipe.as_json())
    return workspace


def test_status_tells_jobs_and_verifies_files(host: Host) -> None:
    prepared = host.workspace.prepared("B1")
    host.start(QUIET)
    prepared.responses.write_text("{}\n")
    record = {
        "bytes": 3,
        "sha256": "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356",
    }
    files = {"raw_responses.jsonl": record, "failed.jsonl": record}
    section = {"inputs": {}, "counts": {"responses": 1}, "files": files, "stop_reason": "budget"}
    write_json(prepared.manifest, {"generate": section})
    write_json(host.workspace.hidden_states("B1").manifest, {"extract": {"counts": {"rows": 1}}})
    status = read_status(host.workspace.root, verify=True)
    job = status["jobs"]["generate"]["B1"]
    assert job["alive"] and job["state"]["state"] == "running" and job["exit"] is None
    assert job["job"]["run_id"] == "run"
    dataset = status["datasets"]["B1"]
    assert dataset["generate"] == {
        "counts": {"responses": 1},
        "files": files,
        "stop_reason": "budget",
    }
    assert dataset["extract"] == {"counts": {"rows": 1}}
    assert dataset["sizes"] == {"raw_responses.jsonl": 3}
    assert dataset["verified"] == {"raw_responses.jsonl": "ok", "failed.jsonl": "missing"}
    prepared.responses.write_text("[]\n")
    changed = read_status(host.workspace.root, verify=True, dataset="B1")["datasets"]["B1"]
    assert changed["verified"]["raw_responses.jsonl"] == (
        "changed: generate left sha256 ca3d163bab05, now 37517e5f3dc6"
    )
    assert read_status(host.workspace.root, dataset="B2") == {"jobs": {}, "datasets": {}}


def verified(workspace: Workspace) -> dict[str, str]:
    found: dict[str, str] = read_status(workspace.root, verify=True)["datasets"]["B1"]["verified"]
    return found


def test_verify_looks_at_what_validation_read(workspace: Workspace) -> None:
    assert set(verified(workspace).values()) == {"ok"}
    workspace.prepared("B1").prompt_ids.write_text("[]\n")
    assert re.fullmatch(
        "changed: validate read (sha256 [0-9a-f]{12}, now [0-9a-f]{12}|[0-9]+ bytes, now [0-9]+)",
        verified(workspace)["prompt_ids.jsonl"],
    )


def test_one_byte_with_its_date_restored_is_a_change(workspace: Workspace) -> None:
    path = workspace.prepared("B1").responses
    before, data = path.stat(), bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert verified(workspace)[path.name].startswith("changed: generate left sha256 ")


def test_rows_generated_after_validation_are_a_change(workspace: Workspace) -> None:
    prepared = workspace.prepared("B1")
    with open(prepared.responses, "a") as file:
        file.write('{"row":3}\n')
    section = read_section(prepared.manifest, "generate") or {}
    files = {prepared.responses.name: file_record(prepared.responses)}
    write_section(prepared.manifest, "generate", {**section, "files": files})
    said = verified(workspace)["raw_responses.jsonl"]
    assert re.fullmatch("changed: validate read [0-9]+ bytes, now [0-9]+", said)


def start(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> dict[str, Any]:
    spec = {"phase": "generate", "dataset": "B1", "recipe": recipe.as_json()}
    spec |= {"token_budget": None, "mode": "resume", "run_id": "run"}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(spec)))
    assert cli.main(["start"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_start_and_plan_give_the_same_digest_of_what_is_done(
    workspace: Workspace, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def plan(dataset: str) -> Any:
        arguments = ["plan", "generate", dataset, "--json", "--workspace", str(workspace.root)]
        assert cli.main(arguments) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])[0]["digest"]

    answer = start(recipe, monkeypatch, capsys)
    assert answer["outcome"] == "done"
    assert answer["digest"] == plan("B1")
    assert plan("B2") is None
    prepared = workspace.prepared("B1")
    section = read_section(prepared.manifest, "generate") or {}
    other = {"raw_responses.jsonl": {**section["files"]["raw_responses.jsonl"], "sha256": "0"}}
    write_section(prepared.manifest, "generate", {**section, "files": other})
    assert plan("B1") not in (None, answer["digest"])


def test_states_of_another_system_are_told_as_such(workspace: Workspace, capsys: Any) -> None:
    section = {"inputs": {"imported": "specforge", "source": "0"}, "counts": {"rows": 7}}
    write_json(workspace.hidden_states("B3").manifest, {"extract": section})
    states = read_status(workspace.root)["datasets"]["B3"]["extract"]
    assert states == {"imported": "specforge", "counts": {"rows": 7}}
    assert cli.main(["status", "--workspace", str(workspace.root)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("B3"))
    assert line.split(maxsplit=1)[1].startswith("imported from specforge")


def test_both_sides_of_a_spool_are_told() -> None:
    running = {"alive": True, "state": {"state": "running"}, "exit": None, "job": None}
    jobs = {"spool": {"all": running}, "train": {"all": {**running, "state": None}}}
    line = as_table({"jobs": jobs, "datasets": {}}).splitlines()[1]
    assert " ".join(line.split()) == "all spool running, train starting"
