"""The canary stops what is tainted within a window and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import BLANK, CLOSE, FAMILY, STOP, TEXT, TOOL, TOOL_END, VOCAB, Site

from drafter.generation.canary import LONG_WINDOWS, Alarm, Canary, archive_tail

Answer = tuple[list[int], str]

WINDOW, SHARE = 32, 0.5
LONG = LONG_WINDOWS * WINDOW
SOUND: Answer = ([TEXT, CLOSE, TEXT, STOP], "stop")
BARE: Answer = ([TEXT, STOP], "stop")
TOOL_CALL: Answer = ([TEXT, TOOL, TEXT, TOOL_END, STOP], "stop")
CUT: Answer = ([TEXT, TEXT], "length")
EMPTY: Answer = ([CLOSE, TEXT, STOP], "stop")
TAINTS: dict[str, Answer] = {
    "unclosed": ([TEXT, TEXT, STOP], "stop"),
    "empty thinking": EMPTY,
    "blank thinking": ([BLANK, CLOSE, TEXT, STOP], "stop"),
    "silent": ([TEXT, CLOSE, STOP], "stop"),
    "cut": CUT,
    "open tool call": ([TEXT, CLOSE, TOOL, TEXT, STOP], "stop"),
    "open tool call in thinking": ([TEXT, TOOL, TEXT, STOP], "stop"),
    "id outside": ([TEXT, VOCAB, CLOSE, TEXT, STOP], "stop"),
}
BARE_TAINTS: dict[str, Answer] = {
    "silent": ([BLANK, STOP], "stop"),
    "thinks": SOUND,
    "open tool call": ([TOOL, TEXT, STOP], "stop"),
}


def row(number: int, answer: Answer) -> dict[str, Any]:
    output_ids, finish = answer
    return {
        "sample_id": f"s{number}",
        "output_ids": output_ids,
        "prompt_tokens": 1,
        "completion_tokens": len(output_ids),
        "finish_reason": finish,
    }


def watch(
    answers: list[Answer], thinking: bool = True, canary: Canary | None = None
) -> tuple[int, Alarm] | None:
    """(index of the row at which it alarmed, alarm); each row is 10 bytes."""
    canary = canary or Canary(FAMILY, thinking, WINDOW, SHARE)
    for i, answer in enumerate(answers):
        if alarm := canary.see(row(i, answer), 10 * i):
            return i, alarm
    return None


def drawn(
    seed: int, num_rows: int, bad_share: float | Callable[[int], float], bad: Answer = EMPTY
) -> list[Answer]:
    """Sound rows, each of them ``bad`` with a probability that may depend on its number."""
    dice = random.Random(seed)
    share = bad_share if callable(bad_share) else lambda _: bad_share
    return [bad if dice.random() < share(i) else SOUND for i in range(num_rows)]


@pytest.mark.parametrize("first", [0, 5, 500, 5000])
@pytest.mark.parametrize(
    ("thinking", "sound", "taint"),
    [(True, SOUND, taint) for taint in TAINTS.values()]
    + [(False, BARE, taint) for taint in BARE_TAINTS.values()],
    ids=[*TAINTS, *(f"{name}, thinking off" for name in BARE_TAINTS)],
)
def test_lost_reasoning_alarms_within_one_window(
    thinking: bool, sound: Answer, taint: Answer, first: int
) -> None:
    found = watch([sound] * first + [taint] * 100, thinking)
    assert found is not None
    at, alarm = found
    assert at - first < WINDOW
    assert alarm.offset == 10 * max(first - WINDOW, 0)
    assert f"first s{first} (" in alarm.reason


def test_counts_that_are_not_equal_to_the_ids_alarm() -> None:
    canary = Canary(FAMILY, True, WINDOW, SHARE)
    alarms = [canary.see({**row(i, SOUND), "completion_tokens": 5}, 10 * i) for i in range(16)]
    assert alarms[-1] and "s0 (wrong completion_tokens)" in alarms[-1].reason
    assert not any(alarms[:-1])


@pytest.mark.parametrize("seed", range(20))
def test_a_third_of_sound_rows_does_not_hide_the_taint(seed: int) -> None:
    found = watch(drawn(seed, 300, lambda i: 0.67 if i >= 100 else 0))
    assert found is not None and found[0] < 100 + 2 * WINDOW


LEGITIMATE = [
    ("cut by length", CUT, 0.2),
    ("tool in thinking", TOOL_CALL, 0.3),
    ("broken", EMPTY, 0.05),
]


@pytest.mark.parametrize(
    ("answer", "share"), [case[1:] for case in LEGITIMATE], ids=[case[0] for case in LEGITIMATE]
)
def test_no_alarm_where_rows_are_merely_long_or_call_tools_or_one_in_twenty_is_broken(
    answer: Answer, share: float
) -> None:
    for seed in range(100):
        assert not watch(drawn(seed, 2000, share, answer))


def test_no_alarm_where_all_of_that_comes_together() -> None:
    for seed in range(100):
        dice = random.Random(seed)
        kinds = dice.choices([SOUND, CUT, TOOL_CALL, EMPTY], [50, 20, 28, 2], k=2000)
        assert not watch(kinds)


@pytest.mark.parametrize(("share", "within"), [(0.12, 3000), (0.15, 1000), (0.25, 500)])
def test_a_taint_of_some_rows_in_a_hundred_alarms_over_the_long_window(
    share: float, within: int
) -> None:
    for seed in range(20):
        found = watch(drawn(seed, 1000 + within, lambda i: share if i >= 1000 else 0.01))
        assert found is not None
        assert found[0] > 1000
        assert 10 * (1000 - LONG - WINDOW) <= found[1].offset < 10 * found[0]


def drifting(i: int) -> float:
    """From 1 % broken rows to 20 % in 2,000 rows."""
    return 0.01 + 0.19 * i / 2000


@pytest.mark.parametrize(
    "share",
    [
        lambda i: 0.01 if i < 1000 else 1.0,
        lambda i: 0.01 if i < 1000 else 0.5,
        lambda i: 0.01 if i < 1000 else 0.15,
        lambda i: 0.01 if i < 1000 else 0.1,
        drifting,
    ],
    ids=["all broken", "half", "15 %", "10 %", "drifting"],
)
def test_what_an_alarm_leaves_does_not_make_the_mended_run_alarm(
    share: Callable[[int], float],
) -> None:
    for seed in range(20):
        answers = drawn(seed, 20_000, share)
        found = watch(answers)
        assert found is not None
        kept = answers[: found[1].offset // 10]
        again = Canary(FAMILY, True, WINDOW, SHARE)
        assert not watch([*kept[-again.lookback :], *drawn(seed + 1000, 600, 0.02)], canary=again)


def test_a_resumed_job_sees_what_the_killed_one_had_seen() -> None:
    for seed in range(5):
        answers = drawn(seed, 2500, drifting)
        found = watch(answers)
        assert found is not None
        killed_at = random.Random(seed).randrange(found[0])
        again = Canary(FAMILY, True, WINDOW, SHARE)
        begin = max(killed_at - again.lookback, 0)
        resumed = watch(answers[begin:], canary=again)
        assert resumed is not None and begin + resumed[0] == found[0]
        assert begin + resumed[1].offset // 10 >= found[1].offset // 10


def test_archiving_moves_whole_rows_and_never_overwrites(tmp_path: Path) -> None:
    responses, archive = tmp_path / "raw_responses.jsonl", tmp_path / "archive" / "run"
    for round_ in range(2):
        Site.write(responses, [{"i": i, "round": round_} for i in range(9)])
        size = len('{"i": 0, "round": 0}\n')
        moved = archive_tail(responses, 4 * size, archive)
        assert [row["i"] for row in Site.read(responses)] == [0, 1, 2, 3]
        assert Site.read(moved) == [{"i": i, "round": round_} for i in range(4, 9)]
    assert len(list(archive.iterdir())) == 2
