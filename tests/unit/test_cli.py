"""The command line as processes: no traceback for a person's mistake, colours on terminals only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.pty_child import PYTHONPATH, PtyChild
from unit.test_repair import workspace
from unit.test_show import answer, prepared, put

from drafter import cli
from drafter.errors import RecipeError
from drafter.files import write_json
from drafter.layout import Prepared, Workspace
from drafter.status import COLUMNS, as_table, read_status

__all__ = ["prepared", "workspace"]

DRAFTER = [sys.executable, "-m", "drafter"]


def drafter(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DRAFTER, *arguments],
        input=stdin,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **env},
        capture_output=True,
        text=True,
    )


MISTAKES = {
    "no command": ([], "the following arguments are required: COMMAND"),
    "unknown command": (["fly"], "invalid choice: 'fly'"),
    "no workspace": (["status"], "which workspace?"),
    "unknown option": (["status", "--far"], "unrecognized arguments: --far"),
    "not a number": (["show", "B1", "--last", "x"], "'x' is no number from 1 on"),
    "none asked for": (["show", "B1", "--last", "0"], "'0' is no number from 1 on"),
    "no dataset": (["repair", "B1", "--workspace", "/none"], "no dataset 'B1' in /none"),
    "no time": (["discard", "B1", "--since", "soon"], "'soon' is neither an ISO nor a Unix"),
    "no number": (["discard", "B1", "--since", "nan"], "'nan' is neither an ISO nor a Unix"),
    "no end": (["discard", "B1", "--since", "inf"], "'inf' is neither an ISO nor a Unix"),
    "no calendar": (["discard", "B1", "--since", "1e300"], "'1e300' is neither an ISO nor a"),
    "no job": (["start"], "no job on stdin"),
    "watching a pipe": (
        ["status", "--workspace", "/none", "--watch"],
        "--watch redraws a terminal",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_never_retried(arguments: list[str], message: str) -> None:
    done = drafter(*arguments)
    assert done.returncode == RecipeError.exit_code and done.stdout == ""
    assert done.stderr.startswith("drafter: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_names_every_command() -> None:
    told = drafter("--help").stdout
    for command in ("status", "plan", "show", "repair", "discard", "restart", "stop"):
        assert f"\n    {command} " in told


def test_a_reader_that_leaves_early_is_no_error(workspace: Workspace) -> None:
    path = workspace.prepared("B1").responses
    path.write_bytes(b"[]\n" * 20)
    line = f"{sys.executable} -m drafter repair B1 --workspace {workspace.root} | true"
    done = subprocess.run(
        ["bash", "-c", f"{line}; echo ${{PIPESTATUS[0]}}"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_samples_are_coloured_on_a_terminal_that_wants_it(prepared: Prepared) -> None:
    text = "oak</think>elm<|im_end|>"
    put(prepared.responses, answer("B1-0", text))
    show = ["show", "B1", "--workspace", str(prepared.root.parents[1])]
    with PtyChild([*DRAFTER, *show]) as child:
        assert child.end() == 0, child.shown
    assert "\x1b[36m--- thinking\x1b[0m" in child.shown
    assert "\x1b[35m</think>\x1b[0m" in child.shown
    with PtyChild([*DRAFTER, *show], NO_COLOR="1") as child:
        assert child.end() == 0
    assert "</think>" in child.shown and "\x1b" not in child.shown


def test_watching_redraws_until_interrupted(workspace: Workspace) -> None:
    with PtyChild([*DRAFTER, "status", "--watch", "--workspace", str(workspace.root)]) as child:
        assert child.read_until("dataset") and child.read_until("\x1b[H") and child.read_until("B1")
        child.interrupt()
        assert child.end() == 130
    assert "Traceback" not in child.shown


def state(workspace: Workspace, phase: str, dataset: str, **records: Any) -> None:
    directory = workspace.job(phase, dataset)
    directory.root.mkdir(parents=True, exist_ok=True)
    write_json(directory.job, {"start_id": "s", "run_id": "r", "what": "w"})
    for name, record in records.items():
        write_json(getattr(directory, name), {"start_id": "s", **record})


def cells(workspace: Workspace, dataset: str) -> dict[str, str]:
    table = as_table(read_status(workspace.root)).splitlines()
    line = next(line for line in table if line.split()[0] == dataset)
    ends = [*(table[0].index(name) for name in COLUMNS), len(line) + 1]
    return {
        name: line[begin : end - 1].strip()
        for name, begin, end in zip(COLUMNS, ends, ends[1:], strict=False)
    }


def test_status_is_a_table_for_people(workspace: Workspace) -> None:
    counts = {"prompts": 1000, "responses": 250, "completion_tokens": 3600, "failed": {"abort": 2}}
    section = {"counts": counts, "stop_reason": "budget", "token_budget": 3500, "files": {}}
    sections = {"prepare": {"counts": {"prompts": 1000}}, "generate": section}
    write_json(workspace.prepared("B1").manifest, sections)
    assert cells(workspace, "B1") == {
        "dataset": "B1", "state": "generate done", "prompts": "1,000", "responses": "250",
        "tokens": "3,600 of 3,500", "tokens/s": "", "in flight": "", "ETA": "", "failed": "2",
        "stop reason": "budget",
    }  # fmt: skip
    workspace.prepared("B2").root.mkdir()
    write_json(workspace.prepared("B2").manifest, {"prepare": {"counts": {"prompts": 7}}})
    assert cells(workspace, "B2")["prompts"] == "7" and cells(workspace, "B2")["tokens"] == ""
    state(workspace, "generate", "B2", exit={"code": 65, "ended": 5})
    assert cells(workspace, "B2")["state"] == "generate data wrong (65)"
    state(workspace, "train", "all", exit={"code": 0, "ended": 5})
    assert cells(workspace, "all")["state"] == "train done"


PROGRESS = {
    "prompts": 9, "responses": 5, "completion_tokens": 105, "token_budget": 100,
    "tokens_per_s": 7.0, "in_flight": 0, "eta_s": 0, "stop_reason": "quota", "failed": {"abort": 1},
}  # fmt: skip

AFTER = {
    # name: (what a person does, stored responses then)
    "restart": (["restart", "B1", "--yes"], ""),
    "discard": (["discard", "B1", "--session", "2", "--yes"], "2"),
}


@pytest.mark.parametrize(("command", "stored"), AFTER.values(), ids=AFTER)
def test_numbers_of_a_job_go_with_what_it_made(
    command: list[str], stored: str, workspace: Workspace
) -> None:
    state(workspace, "generate", "B1", exit={"code": 0, "ended": 5}, progress=PROGRESS)
    before = cells(workspace, "B1")
    assert before["responses"] == "5" and before["stop reason"] == "quota"
    assert cli.main([*command, "--workspace", str(workspace.root)]) == 0
    after = cells(workspace, "B1")
    assert (after["state"], after["responses"]) == ("prepare done", stored)
    assert after["tokens"] == after["stop reason"] == after["failed"] == ""


def test_a_pilot_is_told_apart_from_what_follows_it(workspace: Workspace) -> None:
    write_json(workspace.prepared("B1").manifest, {"prepare": {"counts": {"prompts": 4}}})
    state(workspace, "generate", "B1", exit={"code": 0, "ended": 5}, progress=PROGRESS)
    write_json(workspace.job("generate", "B1").job, {"start_id": "s", "pilot_rows": 3})
    assert (cells(workspace, "B1")["state"], cells(workspace, "B1")["responses"]) == (
        "pilot done",
        "3",
    )
    workspace.prepared("B1").responses.write_bytes(b"")
    assert cells(workspace, "B1")["state"] == "prepare done"
    state(workspace, "generate", "B1", exit={"code": 65, "ended": 5})
    write_json(workspace.job("generate", "B1").job, {"start_id": "s", "pilot_rows": 3})
    assert cells(workspace, "B1")["state"] == "pilot data wrong (65)"


def test_a_job_that_ended_without_a_result_shows_what_is_stored(workspace: Workspace) -> None:
    write_json(workspace.prepared("B1").manifest, {"prepare": {"counts": {"prompts": 4}}})
    state(workspace, "generate", "B1", exit={"code": 65, "ended": 5}, progress=PROGRESS)
    shown = cells(workspace, "B1")
    assert (shown["state"], shown["responses"]) == ("generate data wrong (65)", "3")
    assert shown["tokens"] == shown["stop reason"] == ""


def test_a_running_job_tells_its_own_numbers() -> None:
    progress = {
        "prompts": 9, "responses": 3, "completion_tokens": 1200, "token_budget": 10_000,
        "tokens_per_s": 512.3, "in_flight": 150, "eta_s": 3700,
    }  # fmt: skip
    job = {"alive": True, "state": {"state": "running"}, "exit": None, "progress": progress}
    shown = as_table({"jobs": {"generate": {"B1": {**job, "job": None}}}, "datasets": {}})
    assert shown.splitlines()[1].split() == [
        "B1", "generate", "running", "9", "3", "1,200", "of", "10,000", "512", "150", "1:01:40",
    ]  # fmt: skip


def test_verified_files_are_told_in_the_table(workspace: Workspace) -> None:
    record = {"bytes": 1, "sha256": ""}
    section = {"counts": {}, "files": {"raw_responses.jsonl": record, "gone.jsonl": record}}
    write_json(workspace.prepared("B1").manifest, {"generate": section})
    told = as_table(read_status(workspace.root, verify=True)).splitlines()[2:]
    missing, changed = sorted(told)
    assert missing == "B1/gone.jsonl: missing"
    assert changed.startswith("B1/raw_responses.jsonl: changed: generate left 1 bytes, now ")


def test_status_needs_no_installed_package(workspace: Workspace) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "drafter", "status", "--workspace", str(workspace.root)],
        env={"PYTHONPATH": str(Path(PYTHONPATH.split(os.pathsep)[1]))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dataset")
