"""Deploy, start, follow and stop over a real sshd, with the operators' own hook and trigger."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from integration.sshd import Sshd, private_sshd
from unit.host import NOISY, QUIET, STUBBORN, until
from unit.test_deploy import recipe

from drafter import jobs
from drafter.code import code_hash
from drafter.errors import RecipeError
from drafter.layout import JobDir, Workspace
from gpu_host import triggers
from gpu_host.deploy import PACKAGE, deploy
from gpu_host.hooks import GpuHostHook, Unreachable
from gpu_host.triggers import JobTrigger

CONNECTION = "AIRFLOW_CONN_GPU_HOST"
CODE = code_hash(PACKAGE)


START = """
import json, sys
from drafter import jobs
print(json.dumps(jobs.start(*json.load(sys.stdin))))
"""
"""`drafter start` without its look at the plan: the jobs here are not phases."""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with private_sshd(tmp_path_factory.mktemp("sshd") / "with space") as server:
        yield server


@pytest.fixture
def workspace(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.setenv(CONNECTION, sshd.connection())
    monkeypatch.setattr(triggers, "FIRST_EVENT_S", 0.0)
    root = tmp_path / 'it\'s a $(touch x) `id` "dir"'
    with GpuHostHook.of(recipe(root).host) as hook:
        deploy(hook, recipe(root))
    yield Workspace(root)
    jobs.stop_all(root)


def start(workspace: Workspace, argv: list[str], **changes: Any) -> JobTrigger:
    """Start ``argv`` as generate B1 over SSH; the trigger to follow it."""
    tiny = recipe(workspace.root)
    job = workspace.job("generate", "B1")
    spec = {
        "phase": "generate",
        "dataset": "B1",
        "argv": argv,
        "what": "same",
        "code": CODE,
        "run_id": "run",
        "mode": "resume",
        "token_budget": None,
        "in_flight": 1,
        "recipe": tiny.as_json(),
        "timeout_s": 60,
        "lease_s": 60,
        "grace_s": 0.5,
        "lock": str(workspace.lock("generate", "B1")),
        "request": None,
        **changes,
    }
    package = workspace.code(CODE)
    line = shlex.join(["env", f"PYTHONPATH={package}", sys.executable, "-c", START])
    with GpuHostHook.of(tiny.host, CODE) as hook:
        code, output, errors = hook.run_line(line, json.dumps([str(workspace.root), spec]))
    assert code == 0, errors
    answer = json.loads(output)
    return JobTrigger(
        conn_id="gpu_host",
        workspace=str(workspace.root),
        python=sys.executable,
        code=CODE,
        job_dir=str(job.root),
        start_id=answer["start_id"],
        offset=answer["offset"],
        poll_s=0.1,
        patience_s=20,
        request="try 1",
    )


def follow(trigger: JobTrigger, beside: Any = None) -> tuple[dict[str, Any], list[str]]:
    """Event and shown lines; ``beside`` is awaited while the job is followed."""
    shown: list[str] = []
    trigger._log = SimpleNamespace(  # type: ignore[assignment]
        info=lambda text, *args: shown.append(text % args),
        warning=lambda *_: None,
        error=lambda *_: None,
    )

    async def both() -> dict[str, Any]:
        side = asyncio.create_task(beside()) if beside else None
        events = [event.payload async for event in trigger.run()]
        if side:
            await side
        (event,) = events
        return dict(event)

    return asyncio.run(both()), shown


def survivors(workspace: Workspace) -> list[bytes]:
    token = str(workspace.root / "jobs").encode()
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                command = (proc / "cmdline").read_bytes()
                if token in (proc / "cwd").readlink().as_posix().encode() + command:
                    found.append(command)
            except OSError:
                continue
    return found


def test_a_job_is_followed_to_its_end_with_its_whole_log(workspace: Workspace) -> None:
    trigger = start(
        workspace, ["bash", "-c", "for i in 1 2 3; do echo $i; sleep 0.2; done; exit 65"]
    )
    event, shown = follow(trigger)
    assert (event["outcome"], event["exit"]["code"]) == ("ended", 65)
    assert shown == ["1", "2", "3"]
    assert not (workspace.root / "x").exists()


def test_a_job_survives_dropped_connections_and_a_restarted_sshd(
    workspace: Workspace, sshd: Sshd
) -> None:
    async def trouble() -> None:
        for _ in range(20):
            await asyncio.sleep(0.15)
            sshd.drop()
        sshd.stop()
        await asyncio.sleep(0.5)
        sshd.start()

    trigger = start(workspace, ["bash", "-c", "for i in $(seq 60); do echo $i; sleep 0.1; done"])
    event, shown = follow(trigger, trouble)
    assert (event["outcome"], event["exit"]["code"]) == ("ended", 0)
    assert shown == [str(n) for n in range(1, 61)]


def test_a_flood_in_the_last_second_is_on_the_host_and_its_end_here(workspace: Workspace) -> None:
    trigger = start(workspace, ["bash", "-c", "seq 1000000 1200000"])
    event, shown = follow(trigger)
    log = JobDir(Path(trigger.job_dir)).log
    assert log.read_text().count("\n") == 200_001
    assert shown[0] == "1000000"
    assert any(f"read {log} on the host" in line for line in shown)
    assert shown[-1] == event["last_line"] == "1200000"


@pytest.mark.parametrize("argv", [QUIET, NOISY, STUBBORN], ids=["quiet", "noisy", "stubborn"])
def test_a_killed_task_leaves_no_process(workspace: Workspace, argv: list[str]) -> None:
    trigger = start(workspace, argv)
    until(lambda: len(survivors(workspace)) > 2)
    began = time.monotonic()
    asyncio.run(trigger.on_kill())
    assert survivors(workspace) == []
    assert time.monotonic() - began < 10
    asyncio.run(trigger.on_kill())


def test_code_that_is_not_there_is_one_sentence_and_never_retried(workspace: Workspace) -> None:
    hook = GpuHostHook("gpu_host", str(workspace.root), sys.executable, "0" * 64)
    sentence = f"drafter: there is no {workspace.code('0' * 64)} on the host: run the deploy task\n"
    with hook:
        assert hook.run(["status"]) == (RecipeError.exit_code, "", sentence)


def test_the_lease_ends_a_job_that_nobody_follows(workspace: Workspace) -> None:
    trigger = start(workspace, STUBBORN, lease_s=1)
    until(lambda: survivors(workspace) == [], 8)
    event, _ = follow(trigger)
    assert event["exit"]["code"] == 142


def test_stop_on_the_host_works_without_airflow(workspace: Workspace) -> None:
    trigger = start(workspace, QUIET)
    status = os.spawnl(os.P_WAIT, workspace.launcher, "drafter", "stop", "B1")
    assert status == 0
    assert survivors(workspace) == []
    event, _ = follow(trigger)
    assert event["exit"]["code"] == 143


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"host_key": "other"}, RecipeError, "another key|not the connection's host_key"),
        ({"host_key": None}, RecipeError, "not the connection's host_key, or there is none"),
        ({"key_file": "other"}, RecipeError, "refuses our key: check login and key_file"),
        ({"key_file": "/no/key"}, RecipeError, "not usable: .*/no/key"),
        (None, RecipeError, "there is no Airflow connection 'gpu_host': add it"),
        ("down", Unreachable, "cannot be reached .*: is sshd up"),
    ],
    ids=["host key changed", "host key unknown", "wrong key", "no key", "no connection", "down"],
)
def test_what_keeps_us_from_the_host_is_one_sentence(
    workspace: Workspace,
    sshd: Sshd,
    monkeypatch: pytest.MonkeyPatch,
    changes: Any,
    kind: type[Exception],
    message: str,
) -> None:
    if changes is None:
        monkeypatch.delenv(CONNECTION)
    elif changes == "down":
        monkeypatch.setenv(CONNECTION, Sshd(sshd.root, 1).connection())
        monkeypatch.setattr("gpu_host.hooks.CONNECT_ATTEMPTS", 1)
    else:
        if changes.get("host_key"):
            changes = {"host_key": sshd.strangers_key.with_suffix(".pub").read_text()}
        if changes.get("key_file") == "other":
            changes = {"key_file": str(sshd.strangers_key)}
        monkeypatch.setenv(CONNECTION, sshd.connection(**changes))
    hook = GpuHostHook.of(recipe(workspace.root).host)
    with pytest.raises(kind, match=message) as sync:
        hook.run(["status"])
    with pytest.raises(kind, match=message) as other:
        asyncio.run(hook.arun(["status"]))
    for error in (sync, other):
        assert "\n" not in str(error.value)
