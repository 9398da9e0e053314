"""A job whose engine loses its reasoning stops itself, keeps what is good, and can be cleared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
    CLOSE,
    OPEN,
    STOP,
    TEXT,
    TOOL,
    FakeEngine,
    Reply,
    Site,
    answer,
    assert_complete,
    generated,
    sound,
    thoughtful,
)

from drafter.errors import NEVER_RETRY, DataError
from drafter.layout import Workspace

WINDOW, IN_FLIGHT, NUM_PROMPTS = 32, 8, 700

JOB = """
import runpy, sys
import drafter.generate
from unit.fake_engine import FAMILY
drafter.generate.run = lambda job: drafter.generate.generate(job, FAMILY)
sys.argv[:] = ["drafter", "run", sys.argv[1]]
runpy.run_module("drafter", run_name="__main__")
"""

TAINTS: dict[str, tuple[list[int], str]] = {
    "thinking dropped": ([TEXT, TEXT, STOP], "stop"),
    "thinking empty": ([CLOSE, TEXT, STOP], "stop"),
    "thinking opened again and empty": ([OPEN, CLOSE, TEXT, STOP], "stop"),
    "never closed": ([TEXT] * 64, "length"),
    "tool call never closed": ([TEXT, CLOSE, TOOL, TEXT, STOP], "stop"),
}


def run(site: Site) -> tuple[int, str]:
    """(exit code, last line) of the phase in a process of its own."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent / "include")])
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(site.job().dir.root)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr.strip()


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("first", [0, 500])
@pytest.mark.parametrize("taint", TAINTS)
def test_a_tainted_dataset_stops_alone_and_a_clear_starts_clean(
    taint: str, first: int, tmp_path: Path
) -> None:
    output_ids, ended = TAINTS[taint]

    def loses_it(request: dict[str, Any], number: int, _again: int) -> Reply:
        ids = (thoughtful(request), "stop") if number <= first else (output_ids, ended)
        return Reply(body=answer(request, *ids))

    with FakeEngine(loses_it) as engine:
        site = Site(tmp_path, NUM_PROMPTS, urls=(engine.url,), in_flight=IN_FLIGHT)
        if first:
            generated(site, token_budget=2000)
        earlier = site.prepared.responses.read_bytes() if first else b""
        other = Workspace(tmp_path / "workspace").prepared("B2").root
        other.mkdir(parents=True)
        (other / "raw_responses.jsonl").write_bytes(b'{"sample_id": "B2-0"}\n')
        untouched = files(other)

        code, said = run(site)
        assert code == 65 and code in NEVER_RETRY, said
        assert "\n" not in said and "rows are now in" in said
        (moved,) = site.prepared.archive("run:1").iterdir()
        kept, archived = site.responses(), site.read(moved)
        bad = [row["output_ids"] == output_ids for row in [*kept, *archived]]
        assert len(kept) == max(bad.index(True) - WINDOW, 0)
        assert len(bad) - bad.index(True) <= WINDOW + IN_FLIGHT
        assert site.prepared.responses.read_bytes().startswith(earlier)
        assert files(other) == untouched

        engine.behave = sound
        generated(site)
    assert_complete(site, NUM_PROMPTS)
    assert site.read(moved) == archived


def test_where_thinking_is_off_an_engine_that_thinks_stops_the_dataset(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, NUM_PROMPTS, urls=(engine.url,), thinking=False)
        with pytest.raises(DataError, match="thinking although off"):
            generated(site)
    assert len(engine.requests) <= WINDOW + IN_FLIGHT
    assert not site.responses()
