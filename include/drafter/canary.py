"""Watch the rows of a dataset while they arrive, so that tainted generation stops within minutes.

The incident behind it: an endpoint that silently dropped the model's reasoning, hours of GPU time
and three thousand useless rows before a person looked at one. So from the first row to the last a
window over the finished rows must show thinking that is closed and not empty, and then an answer.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from drafter.layout import whole_file
from drafter.rows import Family, Verdict, verdict

_COPY_BYTES = 1 << 20


class Seen(NamedTuple):
    """One finished row as the canary remembers it."""

    sample_id: str
    offset: int
    verdict: Verdict
    kind: str


class Alarm(NamedTuple):
    offset: int
    """Rows from here on are not to be trusted: one window before the first bad one."""

    reason: str


class Canary:
    """A sliding window over finished rows, in the order in which they were stored.

    Broken rows (reasoning missing, empty, never closed although ended; no answer) alarm when they
    make up ``share`` of a full window. Rows cut by length while thinking say as much about
    max_new_tokens as about the engine, so they are judged apart: only a whole window without a
    single sound row alarms.
    """

    def __init__(self, family: Family, window: int, share: float) -> None:
        self._family = family
        self.window = window
        self._share = share
        self._seen: deque[Seen] = deque(maxlen=2 * window)

    def see(self, row: dict[str, Any], offset: int) -> Alarm | None:
        """Judge the row stored at ``offset``; an Alarm when the window has gone bad."""
        self._seen.append(Seen(row["sample_id"], offset, *verdict(row, self._family)))
        window = list(self._seen)[-self.window :]
        bad = [seen for seen in window if seen.verdict != "sound"]
        broken = [seen for seen in bad if seen.verdict == "broken"]
        if len(broken) >= self._share * self.window:
            return self._alarm(broken)
        if len(bad) == self.window:
            return self._alarm(bad)
        return None

    def _alarm(self, offenders: list[Seen]) -> Alarm:
        seen = list(self._seen)
        first = seen.index(offenders[0])
        named = ", ".join(f"{row.sample_id} ({row.kind})" for row in offenders[:3])
        return Alarm(
            offset=seen[max(first - self.window, 0)].offset,
            reason=f"{len(offenders)} of the last {min(len(seen), self.window)} rows have no"
            f" proper reasoning, first {named}",
        )


def archive_tail(responses: Path, offset: int, archive: Path) -> Path:
    """Move the rows of ``responses`` from byte ``offset`` on into a new file under ``archive``.

    Killed between copy and cut, both files hold the rows, and the next start alarms again.
    """
    archive.mkdir(parents=True, exist_ok=True)
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
