"""Watch the rows of a dataset while they arrive, so that tainted generation stops within minutes.

The incident behind it: an endpoint that silently dropped the model's reasoning, hours of GPU time
and three thousand useless rows before a person looked at one. So from the first row to the last a
window over the finished rows must show what ``structure.verdict`` calls sound: thinking
that is closed and not empty (or none, where the target was told not to think), then an answer or a
tool call that is closed. A second, longer window finds what taints one row in ten.
"""

from __future__ import annotations

import os
from collections import deque
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from drafter.files import clear_partial, whole_file
from drafter.kinds import reason_class
from drafter.rows import Family, check_row
from drafter.validation.structure import Verdict, verdict

LONG_WINDOWS = 16
"""Windows in the long window, 512 rows with the recipe's default."""

LONG_SHARE = 0.2
"""Of the recipe's share, for the long window: 0.1 with the default. A target that does this in one
row of twenty by itself is 5 standard deviations away from it."""

_COPY_BYTES = 1 << 20


class Bad(NamedTuple):
    """A row that is not sound, as the canary remembers it."""

    number: int
    """In the order in which rows were shown."""

    sample_id: str
    kind: str


class Alarm(NamedTuple):
    offset: int
    """Rows from here on are not to be trusted: one window before the first bad one."""

    reason: str


class Canary:
    """Sliding windows over finished rows, in the order in which they were stored.

    Broken rows (reasoning missing, empty or never closed although ended; no answer; a tool call
    begun and not closed; not a valid row at all) alarm when they make up ``share`` of the last
    ``window`` rows, or a fifth of that share of the long window. Rows cut by length while thinking
    say as much about max_new_tokens as about the engine, so they are judged apart: only a whole
    window without a single sound row alarms.

    generate stores valid rows only; the others stand in a file that something else has written.
    """

    def __init__(self, family: Family, thinking: bool, window: int, share: float) -> None:
        self._family = family
        self._thinking = thinking
        self._window = window
        long = LONG_WINDOWS * window
        self._rules = (ceil(share * window), window), (ceil(LONG_SHARE * share * long), long)
        """(broken rows that alarm, among so many rows)"""
        self.lookback = long + window
        """A job that resumes shows so many of its last rows again."""
        self._memory = 2 * long
        self._offsets: deque[int] = deque(maxlen=self._memory)
        self._num_seen = 0
        self._last_sound = -1
        self._broken: deque[Bad] = deque()
        self._bad: deque[Bad] = deque()

    def see(self, row: dict[str, Any], offset: int) -> Alarm | None:
        """Judge the row stored at ``offset``; an Alarm when a window has gone bad."""
        number = self._num_seen
        self._num_seen += 1
        self._offsets.append(offset)
        judged, kind = self._judge(row)
        if judged == "sound":
            self._last_sound = number
            return None
        bad = Bad(number, row["sample_id"], kind)
        for kept in (self._bad, self._broken) if judged == "broken" else (self._bad,):
            kept.append(bad)
            while kept[0].number <= number - self._memory:
                kept.popleft()
        for limit, window in self._rules:
            if len(self._broken) >= limit and self._broken[-limit].number > number - window:
                return self._alarm(self._broken, window)
        if number - self._last_sound >= self._window:
            return self._alarm(self._bad, self._window)
        return None

    def _judge(self, row: dict[str, Any]) -> tuple[Verdict, str]:
        fault = check_row(row, self._family, None)
        if fault:
            return "broken", reason_class(fault)
        return verdict(row, self._family, self._thinking)

    def _alarm(self, bad: deque[Bad], window: int) -> Alarm:
        offenders = [row for row in bad if row.number >= self._num_seen - window]
        begin = self._clean_before(offenders[0].number)
        named = ", ".join(f"{row.sample_id} ({row.kind})" for row in offenders[:3])
        return Alarm(
            offset=self._offsets[max(begin - self._num_seen + len(self._offsets), 0)],
            reason=f"{len(offenders)} of the last {min(self._num_seen, window)} rows are not"
            f" sound, first {named}",
        )

    def _clean_before(self, first: int) -> int:
        """Number of the first row not to be trusted, when ``first`` is the first bad one.

        The rows before it are those a resumed job starts from. Where they alone come near to an
        alarm, the trouble began earlier.
        """
        end = first - self._window
        for limit, window in self._rules:
            before = [row.number for row in self._broken if end - window <= row.number < end]
            if len(before) > 0.75 * limit:
                return self._clean_before(before[0])
        return end


def archive_tail(responses: Path, offset: int, archive: Path) -> Path:
    """Move the rows of ``responses`` from byte ``offset`` on into a new file under ``archive``.

    Killed between copy and cut, both files hold the rows, and the next start alarms again.
    """
    archive.mkdir(parents=True, exist_ok=True)
    clear_partial(archive)
    index = 0
    while (target := archive / f"canary-{index}.jsonl").exists():
        index += 1
    with (
        whole_file(target) as partial,
        open(responses, "rb") as source,
        open(partial, "wb") as copy,
    ):
        source.seek(offset)
        while block := source.read(_COPY_BYTES):
            copy.write(block)
    fd = os.open(responses, os.O_WRONLY)
    try:
        os.ftruncate(fd, offset)
        os.fsync(fd)
    finally:
        os.close(fd)
    return target
