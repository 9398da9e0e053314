"""JSON lines that survive kills: read in constant memory, appended with one write per row.

A file only grows. A killed writer leaves at most one torn last line (no newline), which is not a
row: readers pass over it and the next :class:`Appender` sets it aside. A bad line *with* a newline
is damage that no kill of ours produces, so nobody carries on over it silently.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import orjson

from drafter.errors import DataError, DrafterError

_BLOCK_BYTES = 1 << 20


class Line(NamedTuple):
    """One line as it stands in the file."""

    number: int
    """From 1."""

    offset: int
    """Of its first byte."""

    value: Any
    """The parsed JSON; None when ``fault`` is set."""

    fault: str | None
    """Why it is not JSON."""

    torn: bool
    """The last line, no object and without a newline: never completely written."""


def scan(path: Path) -> Iterator[Line]:
    """Every line of ``path``, good or bad; nothing when there is no such file."""
    if not path.exists():
        return
    offset = 0
    with open(path, "rb", buffering=_BLOCK_BYTES) as file:
        for number, raw in enumerate(file, start=1):
            value, fault = _parse(raw)
            torn = not isinstance(value, dict) and not raw.endswith(b"\n")
            yield Line(number, offset, value, fault, torn)
            offset += len(raw)


def rows(path: Path) -> Iterator[Line]:
    """Lines whose ``value`` is an object; a torn last line is passed over.

    Raises DataError naming file and line for any other line.
    """
    for line in scan(path):
        if line.torn:
            return
        if not isinstance(line.value, dict):
            raise damage(path, line)
        yield line


def row_at(path: Path, offset: int) -> Any:
    """The row that begins at ``offset``, as given by an earlier :class:`Line`."""
    with open(path, "rb") as file:
        file.seek(offset)
        return orjson.loads(file.readline())


def damage(path: Path, line: Line) -> DataError:
    what = line.fault or f"{type(line.value).__name__} instead of an object"
    return DataError(
        f"{path}:{line.number} is damaged ({what}): move that line to another file, then run again"
    )


class Appender:
    """The one writer of a JSONL file.

    Opening mends the end: a torn last line that parses gets its newline, any other is moved to
    ``<name>.torn`` (``torn_bytes`` says how much). Each row is one write including its newline; one
    that the disk cuts short is taken back before DrafterError is raised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.end = os.fstat(self._fd).st_size
        try:
            self.torn_bytes = self._mend()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def append(self, row: dict[str, Any]) -> int:
        """Write one row; gives the offset it begins at."""
        begin = self.end
        self._write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        return begin

    def sync(self) -> None:
        """Make everything appended so far survive a reboot."""
        os.fsync(self._fd)

    def close(self) -> None:
        self.sync()
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        begin = self.end
        try:
            written = os.write(self._fd, data)
            fault = f"wrote {written} of {len(data)} bytes"
        except OSError as error:
            written, fault = 0, os.strerror(error.errno or 0)
        if written != len(data):
            os.ftruncate(self._fd, begin)
            raise DrafterError(
                f"cannot append to {self.path} ({fault}): free some space and run again, "
                "every row before this one is kept"
            )
        self.end = begin + written

    def _mend(self) -> int:
        tail = self._tail()
        if not tail:
            return 0
        if isinstance(_parse(tail)[0], dict):
            self._write(b"\n")
            return 0
        # Aside first, cut second: killed between the two, the line is set aside twice, never lost.
        with open(self.path.with_name(f"{self.path.name}.torn"), "ab") as aside:
            aside.write(tail + b"\n")
            aside.flush()
            os.fsync(aside.fileno())
        self.end -= len(tail)
        os.ftruncate(self._fd, self.end)
        return len(tail)

    def _tail(self) -> bytes:
        """What stands after the last newline."""
        tail = b""
        begin = self.end
        while begin and b"\n" not in tail:
            step = min(_BLOCK_BYTES, begin)
            begin -= step
            tail = os.pread(self._fd, step, begin) + tail
        return tail[tail.rfind(b"\n") + 1 :]


def _parse(raw: bytes) -> tuple[Any, str | None]:
    try:
        return orjson.loads(raw), None
    except orjson.JSONDecodeError as error:
        return None, str(error)
