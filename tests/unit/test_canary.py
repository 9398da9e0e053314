"""The canary stops what is tainted within a window and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import CLOSE, FAMILY, STOP, TEXT, TOOL, Site

from drafter.canary import Alarm, Canary, archive_tail

WINDOW, SHARE = 32, 0.5
SOUND = ([TEXT, CLOSE, TEXT, STOP], "stop")
TOOL_CALL = ([TEXT, TOOL, TEXT, STOP], "stop")
CUT = ([TEXT, TEXT], "length")
UNCLOSED = ([TEXT, TEXT, STOP], "stop")
EMPTY = ([CLOSE, TEXT, STOP], "stop")
SILENT = ([TEXT, CLOSE, STOP], "stop")


def watch(kinds: list[tuple[list[int], str]]) -> tuple[int, Alarm] | None:
    """(index of the row at which it alarmed, alarm); each row is 10 bytes."""
    canary = Canary(FAMILY, WINDOW, SHARE)
    for i, (output_ids, finish) in enumerate(kinds):
        row: dict[str, Any] = {"sample_id": f"s{i}", "output_ids": output_ids}
        alarm = canary.see({**row, "finish_reason": finish}, 10 * i)
        if alarm:
            return i, alarm
    return None


@pytest.mark.parametrize("taint", [UNCLOSED, EMPTY, SILENT, CUT], ids=str)
@pytest.mark.parametrize("first", [0, 5, 500])
def test_lost_reasoning_alarms_within_one_window(taint: tuple[list[int], str], first: int) -> None:
    found = watch([SOUND] * first + [taint] * 100)
    assert found is not None
    at, alarm = found
    assert at - first < WINDOW
    assert alarm.offset == 10 * max(first - WINDOW, 0)
    assert f"first s{first} (" in alarm.reason


def test_a_third_of_sound_rows_does_not_hide_the_taint() -> None:
    dice = random.Random(0)
    found = watch([SOUND] * 100 + [dice.choice([SOUND, EMPTY, EMPTY]) for _ in range(200)])
    assert found is not None and found[0] < 100 + 2 * WINDOW


@pytest.mark.parametrize("legitimate", [CUT, TOOL_CALL], ids=["cut by length", "tool in thinking"])
def test_no_alarm_where_rows_are_merely_long_or_call_tools(
    legitimate: tuple[list[int], str],
) -> None:
    share = 0.2 if legitimate is CUT else 0.3
    for seed in range(100):
        dice = random.Random(seed)
        assert not watch([legitimate if dice.random() < share else SOUND for _ in range(1000)])


def test_no_alarm_over_a_few_broken_rows() -> None:
    dice = random.Random(0)
    assert not watch([EMPTY if dice.random() < 0.1 else SOUND for _ in range(10_000)])


def test_archiving_moves_whole_rows_and_never_overwrites(tmp_path: Path) -> None:
    responses, archive = tmp_path / "raw_responses.jsonl", tmp_path / "archive" / "run"
    for round_ in range(2):
        Site.write(responses, [{"i": i, "round": round_} for i in range(9)])
        size = len('{"i": 0, "round": 0}\n')
        moved = archive_tail(responses, 4 * size, archive)
        assert [row["i"] for row in Site.read(responses)] == [0, 1, 2, 3]
        assert Site.read(moved) == [{"i": i, "round": round_} for i in range(4, 9)]
    assert len(list(archive.iterdir())) == 2
