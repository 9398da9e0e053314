"""JSON lines that survive kills: read in constant memory, appended with one write per row.

A file only grows. A killed writer leaves at most one torn last line (no newline), which is not a
row: readers pass over it and the next :class:`Appender` sets it aside. A bad line *with* a newline
is damage that no kill of ours produces, so nobody carries on over it silently.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import orjson

from drafter import layout
from drafter.errors import DataError, DrafterError

MAX_LINE_BYTES = 64 << 20
"""A longer line is damage, and is never held in memory. An answer of a million tokens has 7 MiB."""

MAX_LEVELS = 200
"""Lists and objects in each other. A deeper line is damage: Python gives up at about a thousand."""

_BLOCK_BYTES = 1 << 20


class Line(NamedTuple):
    """One line as it stands in the file."""

    number: int
    """From 1."""

    offset: int
    """Of its first byte."""

    num_bytes: int
    """Of it, the newline included."""

    value: Any
    """The parsed JSON; None when ``fault`` is set."""

    fault: str | None
    """Why it is no row."""

    torn: bool
    """The last line, no object and without a newline: never completely written."""

    raw: bytes
    """Of a line longer than MAX_LINE_BYTES only the end."""


def scan(path: Path) -> Iterator[Line]:
    """Every line of ``path``, good or bad; nothing when there is no such file."""
    if not path.exists():
        return
    offset = 0
    with open(path, "rb", buffering=_BLOCK_BYTES) as file:
        read = functools.partial(file.readline, MAX_LINE_BYTES + 1)
        for number, raw in enumerate(iter(read, b""), start=1):
            num_bytes = len(raw)
            if num_bytes > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(_BLOCK_BYTES)
                    num_bytes += len(raw)
                value = None
                wrong: str | None = f"longer than {MAX_LINE_BYTES >> 20} MiB"
            else:
                value, wrong = parse(raw)
            torn = not isinstance(value, dict) and not raw.endswith(b"\n")
            yield Line(number, offset, num_bytes, value, wrong, torn, raw)
            offset += num_bytes


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


def tail(path: Path, num_lines: int) -> int:
    """Offset of the first of the last ``num_lines`` lines; 0 when there are no more."""
    if not num_lines:
        return path.stat().st_size
    with open(path, "rb") as file:
        begin = file.seek(0, os.SEEK_END)
        # The last line's own end is not the beginning of another.
        left, end = num_lines, begin - 1
        while begin:
            begin -= (step := min(_BLOCK_BYTES, begin))
            file.seek(begin)
            block = file.read(step)
            found = min(end - begin, step)
            while (found := block.rfind(b"\n", 0, found)) >= 0:
                left -= 1
                if not left:
                    return begin + found + 1
    return 0


def fault(line: Line) -> str | None:
    """Why ``line`` is no row: not JSON, or not an object."""
    if line.fault or isinstance(line.value, dict):
        return line.fault
    return f"{type(line.value).__name__} instead of an object"


def damage(path: Path, line: Line) -> DataError:
    dataset = layout.repaired_as(path)
    remedy = (
        f"see what `drafter repair {dataset}` would set aside, then run again"
        if dataset
        else "move the file away, then run the phase that writes it"
    )
    return DataError(f"{path}:{line.number} is damaged ({fault(line)}): {remedy}")


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
        begin = self._last_line()
        num_bytes = self.end - begin
        if not num_bytes:
            return 0
        if num_bytes <= MAX_LINE_BYTES and isinstance(
            parse(os.pread(self._fd, num_bytes, begin))[0], dict
        ):
            self._write(b"\n")
            return 0
        # Aside first, cut second: killed between the two, the line is set aside twice, never lost.
        set_aside(self.path, [(begin, num_bytes)], self.path.with_name(f"{self.path.name}.torn"))
        self.end = begin
        os.ftruncate(self._fd, begin)
        return num_bytes

    def _last_line(self) -> int:
        """Where the line begins that has no newline yet; the end when there is none."""
        begin = self.end
        while begin:
            step = min(_BLOCK_BYTES, begin)
            begin -= step
            if (found := os.pread(self._fd, step, begin).rfind(b"\n")) >= 0:
                return begin + found + 1
        return 0


def set_aside(path: Path, spans: Iterable[tuple[int, int]], aside: Path) -> None:
    """Append ``spans`` (offset, bytes) of ``path`` to ``aside``, each as a line, and sync it."""
    with open(path, "rb") as source, open(aside, "ab") as file:
        for offset, num_bytes in spans:
            source.seek(offset)
            copy_bytes(source, file, num_bytes)
            source.seek(offset + num_bytes - 1)
            if source.read(1) != b"\n":
                file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def copy_bytes(source: IO[bytes], target: IO[bytes], num_bytes: int) -> None:
    """Copy up to ``num_bytes`` bytes, in blocks."""
    while num_bytes and (block := source.read(min(num_bytes, _BLOCK_BYTES))):
        target.write(block)
        num_bytes -= len(block)


def parse(raw: bytes) -> tuple[Any, str | None]:
    """(the JSON of a line, why there is none)"""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return None, str(error)
    if raw.count(b"[") + raw.count(b"{") > MAX_LEVELS and _is_deep(value):
        return None, f"more than {MAX_LEVELS} lists and objects in each other"
    return value, None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_LEVELS):
        inner = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [x for each in inner for x in each if isinstance(x, (dict, list))]
        if not level:
            return False
    return True
