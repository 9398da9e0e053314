"""Files of states: taken, deleted, and swept when nobody will ask for them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.random_targets import (
    one_thread,
    save_target,
)
from unit.test_vllm_states import ROWS, backend, fake

from drafter.backends import handover, servers
from drafter.backends.handover import Handover
from drafter.errors import Busy, RecipeError
from drafter.processes import look


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "BACKOFF_S", 0.01)
    monkeypatch.setattr(servers, "PATIENCE_S", 0.1)
    monkeypatch.setattr(handover, "APPEAR_S", 0.05)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        save_target(directory)
        yield directory


def test_what_a_killed_run_left_goes_and_what_is_foreign_or_live_stays(
    tmp_path: Path, target: Path
) -> None:
    mine = Handover(1).request_id()
    _, home, boot, pid, starttime, _ = mine.split("-")
    left = {
        "of a lost attempt": mine,
        "of a dead process": f"drafter-{home}-{boot}-{pid}-1-3",
        "of another boot": f"drafter-{home}-00000000-{pid}-{starttime}-3",
    }
    kept = {
        "of another host": f"drafter-00000000-{boot}-{pid}-1-3",
        "of a live process": f"drafter-{home}-{boot}-{os.getppid()}-{_starttime(os.getppid())}-3",
        "of somebody else": "chat-1",
        "of a name that is like ours": f"drafter-{home}-1",
    }
    for name in [*left.values(), *kept.values()]:
        for suffix in ("", ".lock"):
            (tmp_path / f"cmpl-{name}-0-5ca1ab1e.safetensors{suffix}").write_text("x")
    (tmp_path / f"cmpl-{left['of a dead process']}-notes.txt").write_text("x")
    held = tmp_path / f"cmpl-drafter-{home}-{boot}-{pid}-1-4-0-5ca1ab1e.safetensors"
    lock = os.open(f"{held}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with fake(target, tmp_path) as server:
        ours = backend(target, server.url)
        ours.features(ROWS)
        stays = {f"cmpl-{name}-0-5ca1ab1e.safetensors" for name in kept.values()}
        stays |= {f"{name}.lock" for name in stays}
        stays |= {f"cmpl-{left['of a dead process']}-notes.txt"}
        assert set(os.listdir(tmp_path)) == stays | {f"{held.name}.lock"}
        os.close(lock)
        ours.features(ROWS)
        assert set(os.listdir(tmp_path)) == stays


def test_a_file_that_is_not_named_after_the_request_is_neither_read_nor_deleted(
    tmp_path: Path, target: Path
) -> None:
    refused = pytest.raises(RecipeError, match="needed is a file named after the request")
    with fake(target, tmp_path, fault="own name") as server, refused:
        backend(target, server.url).features(ROWS[:1])
    assert sorted(os.listdir(tmp_path)) == ["states.safetensors", "states.safetensors.lock"]


def test_the_file_of_another_request_of_this_process_is_neither_read_nor_deleted(
    tmp_path: Path,
) -> None:
    files = Handover(1)
    first, second = files.request_id(), files.request_id()
    path = tmp_path / f"cmpl-{first}.safetensors"
    path.write_text("x")
    with pytest.raises(RecipeError, match="needed is a file named after the request"):
        asyncio.run(files.take(path, second))
    assert path.exists()


def test_a_host_of_the_same_name_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Handover(1).request_id().split("-")[1]
    monkeypatch.setattr(handover, "MACHINE_ID", Path("/nonesuch"))
    assert Handover(1).request_id().split("-")[1] != here
    monkeypatch.setattr(handover, "boot_id", lambda: "another")
    assert len({here, *(Handover(1).request_id().split("-")[1] for _ in range(2))}) == 2


def test_a_file_that_stays_locked_is_busy_and_is_deleted(tmp_path: Path) -> None:
    files = Handover(0.05)
    request_id = files.request_id()
    path = tmp_path / f"cmpl-{request_id}.safetensors"
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(Busy, match=re.escape(f"{path} is locked by vLLM for more than 0.05 s")):
        asyncio.run(files.take(path, request_id))
    os.close(lock)
    assert os.listdir(tmp_path) == []


def _starttime(pid: int) -> int:
    process = look(pid)
    assert process is not None
    return process.starttime
