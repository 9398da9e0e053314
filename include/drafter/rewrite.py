"""Takes lines out of a dataset's files, out of all at once or out of none.

The new files are made whole beside the old ones, and one rename of their directory to ``.rewrite``
decides: from then on :func:`finish` puts them in place, however often it is killed. Whoever appends
to these files calls it first. The caller holds the dataset's lock and keeps a copy of what goes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from drafter import jsonl
from drafter.files import clear_partial, drop_sections, fsync_dir, read_section
from drafter.layout import Prepared

Span = tuple[int, int]
"""(offset, bytes) of a file; those of one file in order, and apart."""


class Event(NamedTuple):
    """A line of sessions.jsonl: a job's start, or a mark."""

    time: float
    offset: int
    """Of raw_responses.jsonl at that time, as the line says."""

    row: dict[str, Any]

    @property
    def is_start(self) -> bool:
        return "start_id" in self.row


def session_fault(row: dict[str, Any]) -> str | None:
    """Why ``row`` is no line of sessions.jsonl."""
    time, offset = row.get("time"), row.get("offset")
    if type(time) not in (int, float) or type(offset) is not int or offset < 0:
        return f"time is {time!r} and offset {offset!r}, needs a number and an offset"
    if not isinstance(row.get("identity", {}), dict):
        return "identity is no object"
    return None


def events(prepared: Prepared) -> Iterator[Event]:
    """Raises DataError naming file and line."""
    for line in jsonl.rows(prepared.sessions):
        if fault := session_fault(line.value):
            raise jsonl.damage(prepared.sessions, line._replace(fault=fault))
        yield Event(line.value["time"], line.value["offset"], line.value)


def true_offsets(offsets: Sequence[int], size: int) -> list[int]:
    """Where in the file of today the rows begin that came after each of ``offsets``.

    The canary cuts the file's end off, and the next session begins where that left it: no offset
    can be behind a later one, nor behind the end.
    """
    found = []
    for offset in reversed(offsets):
        size = min(size, offset)
        found.append(size)
    return found[::-1]


def take_out(prepared: Prepared, spans: Mapping[Path, Sequence[Span]]) -> None:
    """Remove ``spans`` from files of ``prepared``, and the sections that describe them.

    Offsets in sessions.jsonl follow; a line of it without a row left stays, so that sessions keep
    their numbers.
    """
    finish(prepared)
    partial = _partial(prepared)
    partial.mkdir()
    for path, cut in spans.items():
        if path != prepared.sessions and cut:
            copy_without(path, cut, partial / path.name)
    if any(spans.get(path) for path in (prepared.responses, prepared.sessions)):
        _write_sessions(prepared, spans, partial / prepared.sessions.name)
    fsync_dir(partial)
    os.rename(partial, prepared.rewrite)
    fsync_dir(prepared.root)
    finish(prepared)


def finish(prepared: Prepared) -> bool:
    """Put the files of a rewrite that was decided in their places; True when there was one."""
    shutil.rmtree(_partial(prepared), ignore_errors=True)
    clear_partial(prepared.root)
    if not prepared.rewrite.is_dir():
        return False
    new = sorted(prepared.rewrite.iterdir())
    names = {path.name for path in new}
    # First the sections, so that none ever describes files that have left.
    if prepared.responses.name in names:
        drop_sections(prepared.manifest, ("generate", "validate"))
    elif prepared.failed.name in names:
        drop_sections(prepared.manifest, ("generate",))
    for path in new:
        os.replace(path, prepared.root / path.name)
    fsync_dir(prepared.root)
    prepared.rewrite.rmdir()
    fsync_dir(prepared.root)
    return True


def _partial(prepared: Prepared) -> Path:
    return prepared.rewrite.with_name(f"{prepared.rewrite.name}.partial")


def copy_without(path: Path, cut: Sequence[Span], target: Path) -> None:
    with open(path, "rb") as source, open(target, "wb") as file:
        for offset, num_bytes in cut:
            jsonl.copy_bytes(source, file, offset - source.tell())
            source.seek(offset + num_bytes)
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())


def _write_sessions(prepared: Prepared, spans: Mapping[Path, Sequence[Span]], target: Path) -> None:
    """sessions.jsonl without its spans, its offsets those that the responses will have."""
    gone = {offset for offset, _ in spans.get(prepared.sessions, ())}
    kept = [
        line.value
        for line in jsonl.scan(prepared.sessions)
        if line.offset not in gone and not line.torn
    ]
    size = prepared.responses.stat().st_size if prepared.responses.exists() else 0
    offsets = true_offsets([row["offset"] for row in kept], size)
    cut = spans.get(prepared.responses, ())
    with open(target, "wb") as file:
        for row, offset in zip(kept, offsets, strict=True):
            moved = offset - sum(min(n, offset - begin) for begin, n in cut if begin < offset)
            file.write(orjson.dumps({**row, "offset": moved}, option=orjson.OPT_APPEND_NEWLINE))
        if (known := _unwritten_identity(prepared, kept)) is not None:
            file.write(orjson.dumps(known, option=orjson.OPT_APPEND_NEWLINE))
        file.flush()
        os.fsync(file.fileno())


def _unwritten_identity(
    prepared: Prepared, kept: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """A line with what the responses were made with, when only a section says so that goes now."""
    section = read_section(prepared.manifest, "generate")
    if section is None or any("identity" in row for row in kept):
        return None
    return {"time": 0, "offset": 0, "identity": section["identity"]}
