"""The short form of ``make torture``: generation killed with -9 loses and repeats nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.kill_generate import IN_FLIGHT, run

KILLS = 10


def test_killed_at_any_moment_and_resumed_nothing_is_missing_or_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, report = run(tmp_path, KILLS, seed=4)
    with capsys.disabled():
        print("\n" + report)
    assert not found
    assert f"{KILLS} kills at {IN_FLIGHT} in flight" in report
