"""Moves answers that a person no longer trusts to the archive: a session's, or all since a time.

Whether an answer belongs to them says sessions.jsonl. Entries of failed.jsonl carry no time, so all
of them go along: their prompts are asked again, which costs little, while a prompt given up because
of the engine that is not trusted would be lost. Sessions keep their numbers.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from drafter import jsonl, plan, rewrite
from drafter.errors import DataError, RecipeError
from drafter.files import count_lines, fsync_dir
from drafter.generation.sessions import archive_previous
from drafter.layout import Prepared
from drafter.rewrite import Event, Span
from drafter.terminal import utc

SLACK_S = 120.0
"""A session's last answer comes at most one mark (a minute) after its last mark, and some more."""

COPIES = ("discard", "rejected")
"""Archives that hold nothing but copies while they are being filled."""


class Selection(NamedTuple):
    """Answers to discard: bytes of raw_responses.jsonl, and what they amount to."""

    begin: int
    end: int
    earliest: float
    latest: float
    """Unix times between which they were stored; of adopted ones, when they were adopted."""

    num_rows: int
    num_tokens: int


def by_session(prepared: Prepared, which: str) -> Selection:
    """The answers of one session: its start_id, or its number from 1. RecipeError if unknown."""
    events, offsets = _history(prepared)
    starts = [i for i, event in enumerate(events) if event.is_start]
    named = [i for i in starts if events[i].row["start_id"] == which]
    if not named and which.isdecimal() and 1 <= int(which) <= len(starts):
        named = [starts[int(which) - 1]]
    if not named:
        raise RecipeError(f"no session {which}: give a number {sessions(prepared)} or a start_id")
    begin, end = named[0], next((i for i in starts if i > named[0]), None)
    if end is None:
        size = _size(prepared.responses)
        return _select(prepared, offsets[begin], size, events[begin].time)
    selection = _select(prepared, offsets[begin], offsets[end], events[begin].time)
    return selection._replace(latest=min(events[end].time, events[end - 1].time + SLACK_S))


def since(prepared: Prepared, moment: float) -> Selection:
    """Every answer stored at ``moment`` (Unix time) or later, and of those before, which carry no
    time of their own, less than a minute's; none that was adopted."""
    timed = [both for both in zip(*_history(prepared), strict=True) if "adopted" not in both[0].row]
    events, offsets = [event for event, _ in timed], [offset for _, offset in timed]
    if not events:
        raise RecipeError(f"{prepared.sessions} says nothing of when answers came: name a session")
    size = _size(prepared.responses)
    after = next((i for i, event in enumerate(events) if event.time > moment), len(events))
    if after == 0:
        return _select(prepared, offsets[0], size, events[0].time)
    before = events[after - 1]
    if moment - before.time > SLACK_S:
        if after == len(events) and not _still_written(prepared, moment):
            return _select(prepared, size, size, moment)
        if after < len(events) and events[after].is_start:
            return _select(prepared, offsets[after], size, events[after].time)
    return _select(prepared, offsets[after - 1], size, before.time)


def from_row(prepared: Prepared, first: int) -> Selection:
    """The answers from row ``first`` on, of which the file holds so many at least."""
    starts = (line.offset for line in jsonl.scan(prepared.responses))
    begin = next(islice(starts, first, None), _size(prepared.responses))
    return _select(prepared, begin, _size(prepared.responses), 0)


def sessions(prepared: Prepared) -> str:
    """The numbers there are, in words."""
    number = sum(event.is_start for event in rewrite.events(prepared))
    return f"from 1 to {number}" if number else "(there is none)"


def apply(prepared: Prepared, selection: Selection, name: str | None = None) -> Path:
    """Move the selected answers and every failure to the archive, to ``name`` there, or a name that
    tells the time. The caller holds the lock.

    Killed at any moment, they are in the archive, in their files or in both.
    """
    archive = _fill_archive(prepared, selection, name or f"discard-{utc(time.time())}")
    spans: dict[Path, Sequence[Span]] = {
        prepared.responses: [(selection.begin, selection.end - selection.begin)],
        prepared.failed: [(0, size)] if (size := _size(prepared.failed)) else [],
    }
    rewrite.take_out(prepared, spans)
    return archive


def restart(prepared: Prepared) -> Path | None:
    """Move all answers to the archive, as a run in mode restart does. The caller holds the lock.

    Finishes what a killed call began; None when there was nothing to move.
    """
    begun = sorted(prepared.archive("x").parent.glob("restart-*.partial"))
    name = begun[0].stem if begun else _unused(prepared, f"restart-{utc(time.time())}")
    if not begun and not plan.is_begun(prepared):
        return None
    archive_previous(prepared, name)
    return prepared.archive(name)


def count(prepared: Prepared) -> tuple[int, int, int]:
    """(answers, their tokens, failures) of a dataset."""
    everything = _select(prepared, 0, _size(prepared.responses), 0)
    return everything.num_rows, everything.num_tokens, count_lines(prepared.failed)


def _history(prepared: Prepared) -> tuple[list[Event], list[int]]:
    events = list(rewrite.events(prepared))
    offsets = [event.offset for event in events]
    return events, rewrite.true_offsets(offsets, _size(prepared.responses))


def _select(prepared: Prepared, begin: int, end: int, earliest: float) -> Selection:
    num_rows = num_tokens = 0
    boundaries = {0, _size(prepared.responses)}
    for line in jsonl.scan(prepared.responses):
        boundaries |= {line.offset} & {begin, end}
        if begin <= line.offset < end and isinstance(line.value, dict):
            num_rows += 1
            tokens = line.value.get("completion_tokens")
            num_tokens += tokens if type(tokens) is int else 0
    if not {begin, end} <= boundaries:
        raise DataError(
            f"{prepared.sessions} does not fit {prepared.responses} (no line begins at byte"
            f" {begin} or {end}): it was changed by hand, restore it"
        )
    latest = prepared.responses.stat().st_mtime if prepared.responses.exists() else earliest
    return Selection(begin, end, earliest, latest, num_rows, num_tokens)


def _fill_archive(prepared: Prepared, selection: Selection, name: str) -> Path:
    archive = prepared.archive(_unused(prepared, name))
    root = archive.parent
    for kind in COPIES:
        for partial in root.glob(f"{kind}-*.partial"):
            shutil.rmtree(partial)
    partial = archive.with_name(f"{archive.name}.partial")
    partial.mkdir(parents=True)
    span = (selection.begin, selection.end - selection.begin)
    jsonl.set_aside(prepared.responses, [span], partial / prepared.responses.name)
    for path in (prepared.failed, prepared.sessions, prepared.manifest):
        if size := _size(path):
            jsonl.set_aside(path, [(0, size)], partial / path.name)
    fsync_dir(partial)
    partial.rename(archive)
    fsync_dir(root)
    return archive


def _unused(prepared: Prepared, stem: str) -> str:
    name, number = stem, 1
    while prepared.archive(name).exists():
        number += 1
        name = f"{stem}-{number}"
    return name


def _still_written(prepared: Prepared, moment: float) -> bool:
    return prepared.responses.exists() and prepared.responses.stat().st_mtime >= moment


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
