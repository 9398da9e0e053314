"""Whatever the demo's processes leave behind, stopping the stack ends it, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from demo import stack
from demo.stack import Stack
from drafter.errors import Busy, RecipeError
from drafter.files import read_json, write_json

WORKER = """
import os, time
if os.fork() == 0:
    os.setpgid(0, 0)
    os.execve("/bin/sleep", ["sleep", "60"], {})
time.sleep(60)
"""
"""A process whose child has a group of its own and no environment, as Airflow's workers."""


@pytest.fixture
def here(tmp_path: Path) -> Stack:
    ports = dict(zip(stack.PORTS, stack.free_ports(4), strict=True))
    made = Stack(tmp_path, tmp_path / "r.toml", Path(sys.executable), 1, ports)
    stack.begin(made, tmp_path / "workspace")
    return made


def launch(here: Stack) -> int:
    """The process of WORKER, noted in the record."""
    leader = subprocess.Popen([sys.executable, "-c", WORKER], start_new_session=True)
    record = read_json(here.record)
    record["processes"]["scheduler"] = [leader.pid, stack.start_time(leader.pid)]
    write_json(here.record, record)
    deadline = time.monotonic() + 10
    while len(stack.stragglers(here)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return leader.pid


def test_a_worker_of_a_killed_scheduler_is_found_by_its_session(here: Stack) -> None:
    leader = launch(here)
    (worker,) = set(stack.stragglers(here)) - {leader}
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    assert stack.alive(here) == []
    assert stack.stragglers(here) == [worker]
    stack.stop(here)
    assert stack.start_time(worker) == 0


def test_a_process_that_took_over_a_recorded_number_is_left_alone(here: Stack) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    processes = {"scheduler": [stranger.pid, stack.start_time(stranger.pid) - 1]}
    write_json(here.record, {"workspace": "/nowhere", "processes": processes})
    stack.stop(here)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_stopping_twice_is_stopping(here: Stack) -> None:
    launch(here)
    stack.stop(here)
    stack.stop(here)
    assert not here.record.exists()


def test_a_process_of_the_stack_that_died_is_named_with_its_last_word(here: Stack) -> None:
    leader = launch(here)
    (here.home / "logs").mkdir()
    (here.home / "logs" / "scheduler.log").write_text("first\nlast word\n")
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    with pytest.raises(Busy, match="scheduler has ended: last word"):
        stack.require_alive(here)
    stack.stop(here)


def test_the_engine_is_the_embedded_one_or_a_real_sglang_on_the_same_target_and_port(
    here: Stack,
) -> None:
    embedded = stack.engine_command(here)
    assert embedded[:4] == [sys.executable, "-m", "drafter", "serve"]
    script, verb, *real = stack.engine_command(replace(here, engine="sglang"))
    assert Path(script).is_file() and os.access(script, os.X_OK) and verb == "serve"
    for word in (str(stack.ROOT / "include/demo/target"), str(here.ports["engine"])):
        assert word in embedded and word in real


def test_a_real_engine_that_is_not_installed_says_how_to_install_it(
    here: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = stack.ROOT / "tests" / "engines" / "sglang_cpu.sh"
    monkeypatch.setattr(stack, "SGLANG", here.home / "none")
    command = stack.engine_command(replace(here, engine="sglang"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"run: {script.name} setup {here.home / 'none'}" in done.stderr


def test_a_taken_port_is_refused_and_a_free_one_is_not() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RecipeError, match="is taken"):
            stack.require_free(taken.getsockname()[1])
    stack.require_free(stack.free_ports(1)[0])
