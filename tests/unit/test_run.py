"""A polite stop of a phase: it unwinds within the grace and leaves no half files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unit.fake_engine import FakeEngine, Reply, Site

from drafter.files import locked
from drafter.processes import MARKER

TESTS = Path(__file__).parents[1]
GRACE_S = 3

WRITES = """
import sys, time, types
from drafter import cli
from drafter.files import whole_file

def run(job):
    with whole_file(job.workspace.prepared("B1").tokenized) as partial:
        partial.write_text("half")
        print("begun", flush=True)
        time.sleep(60)

sys.modules["drafter.validate"] = types.ModuleType("drafter.validate")
sys.modules["drafter.validate"].run = run
cli.main(["run", sys.argv[1]])
"""

ASKS = """
import sys
import drafter.generate
from drafter import cli
from unit.fake_engine import FAMILY
drafter.generate.run = lambda job: drafter.generate.generate(job, FAMILY)
cli.main(["run", sys.argv[1]])
"""


def start(code: str, job: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "include")])
    return subprocess.Popen(
        [sys.executable, "-c", code, str(job)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop(child: subprocess.Popen[str]) -> tuple[int, str]:
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=GRACE_S)
    return child.returncode, errors


def test_a_stop_takes_half_written_files_along(tmp_path: Path) -> None:
    site = Site(tmp_path)
    child = start(WRITES, site.job("validate").dir.root)
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    assert [path.suffix for path in site.prepared.root.glob(".tokenized*")] == [".partial"]
    assert stop(child) == (143, "")
    assert not list(site.prepared.root.glob("*.partial"))


def test_a_stop_does_not_wait_for_requests_in_flight(tmp_path: Path) -> None:
    with FakeEngine(lambda *_: Reply(delay_s=60)) as engine:
        site = Site(tmp_path, urls=(engine.url,), engine={"queue_timeout_s": 99})
        child = start(ASKS, site.job().dir.root)
        give_up = time.monotonic() + 30
        while len(engine.requests) < 8 and time.monotonic() < give_up:
            time.sleep(0.02)
        assert stop(child) == (143, "")


def test_what_the_supervisor_runs_works_under_its_lock(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with locked(site.prepared.lock):
        alone = start(WRITES, site.job("validate").dir.root)
        assert alone.stdout is not None and alone.stdout.readline() == ""
        assert "is held by another job" in alone.communicate(timeout=GRACE_S)[1]
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(MARKER, "start")
            child = start(WRITES, site.job("validate").dir.root)
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        assert stop(child) == (143, "")
