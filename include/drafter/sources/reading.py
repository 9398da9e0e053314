"""Rows of a source file in bounded memory: JSON lines, one JSON array, or Parquet.

What a file is shows in its bytes, not in its name; JSON may be packed with gzip, bzip2, xz or
Zstandard. A row that is no JSON object becomes a str, the reason, and reading goes on; a file that
cannot be read on (a torn stream, an array with a row beyond ``MAX_ROW_BYTES``) raises DataError,
and so does one that ends in the middle of a row or an array: half a download would else be a small
dataset.

JSON lines and Parquet can be read in parts, so that several processes share one file.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from drafter.errors import DataError
from drafter.sources import compression
from drafter.sources.compression import SourceFile

MAX_ROW_BYTES = 64 << 20
"""The longest known rows (agent trajectories with tool output) are below 10 MB."""

_NOT_JSON = "not JSON"
_TOO_LONG = "row too long"
_BLOCK_BYTES = 256 << 10
"""Read at once: small enough that its rows are still in the cache when they are parsed."""

_PARQUET = b"PAR1"

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+[{}\[\]]", re.DOTALL)
_TO_BRACKET_OR_COMMA = re.compile(rb'(?:[^",{}\[\]]++|' + _STRING + rb")*+[,{}\[\]]", re.DOTALL)


class Bytes(NamedTuple):
    """A part of plain JSON lines: whole lines, each of which can be found again by its offset."""

    begin: int
    end: int


class RowGroups(NamedTuple):
    """A part of Parquet."""

    begin: int
    end: int


Part = Bytes | RowGroups | None
"""None: all of a file, of any kind."""

Row = dict[str, Any] | str
"""An object, or why it is none."""


def rows(
    file: SourceFile,
    part: Part = None,
    columns: Collection[str] | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Row]:
    """Each row of ``file`` in order, or of one of its :func:`parts`: an object, or why it is none.

    Of Parquet only ``columns`` are read, where they are given.
    """
    return (row for _, row in placed_rows(file, part, columns, max_row_bytes))


def placed_rows(
    file: SourceFile,
    part: Part = None,
    columns: Collection[str] | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[tuple[int, Row]]:
    """As :func:`rows`, each with its place: for :class:`Bytes` what :func:`row_at` finds it by."""
    begin = compression.head(file)
    if begin.startswith(_PARQUET):
        from drafter.sources import parquet

        yield from enumerate(parquet.rows(file, part, columns))
        return
    try:
        with file.open("rb") as packed, closing(compression.unpacked(packed, begin)) as stream:
            blocks = _Stream(stream, part)
            if part is None and blocks.first_byte() == b"[":
                yield from enumerate(map(_parsed, _elements(blocks, file, max_row_bytes)))
            else:
                yield from _lines(blocks, file, max_row_bytes)
    except compression.DAMAGED as error:
        raise compression.damaged(file, error) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise compression.damaged(file, error) from None


def row_at(file: Path, part: Bytes, offset: int) -> Row:
    with open(file, "rb") as lines:
        lines.seek(part.begin + offset)
        return _parsed(lines.readline(MAX_ROW_BYTES + 1))


def parts(file: Path, num_bytes: int) -> list[Part]:
    """``file`` in parts of about ``num_bytes``; ``[None]`` where it can be read as a whole only."""
    begin = compression.head(file)
    if begin.startswith(_PARQUET):
        from drafter.sources import parquet

        return [RowGroups(*span) for span in parquet.spans(file, num_bytes)]
    if compression.is_packed(begin):
        return [None]
    size = file.stat().st_size
    with open(file, "rb") as lines:
        if _Stream(lines).first_byte() == b"[":
            return [None]
        ends = [0]
        while ends[-1] < size:
            begin_at = lines.seek(min(ends[-1] + num_bytes, size))
            ends.append(begin_at + _to_next_line(lines))
    return [Bytes(*span) for span in itertools.pairwise(ends)] or [None]


def _to_next_line(file: IO[bytes]) -> int:
    """How far it is to the line after the one that ``file`` stands in."""
    num_bytes = 0
    while line := file.readline(_BLOCK_BYTES):
        num_bytes += len(line)
        if line.endswith(b"\n"):
            break
    return num_bytes


class _Stream:
    """Blocks of a stream without its byte order mark, or of a part of it."""

    def __init__(self, stream: IO[bytes], part: Part = None) -> None:
        self._stream = stream
        self._left = part.end - part.begin if part else None
        self._ahead = b""
        self.skipped = 0
        """Bytes of the mark."""
        if part and part.begin:
            stream.seek(part.begin)
            return
        mark = codecs.BOM_UTF8
        while len(self._ahead) < len(mark) and (more := self._next(_BLOCK_BYTES)):
            self._ahead += more
        if self._ahead.startswith(mark):
            self._ahead = self._ahead.removeprefix(mark)
            self.skipped = len(mark)

    def first_byte(self) -> bytes:
        """The first byte that means something; it is still to be read."""
        while not (begin := self._ahead.lstrip()) and (more := self._next(_BLOCK_BYTES)):
            self._ahead = more
        return begin[:1]

    def read(self, num_bytes: int) -> bytes:
        """Some bytes, about ``num_bytes`` at most; none at the end."""
        block, self._ahead = self._ahead, b""
        return block or self._next(num_bytes)

    def _next(self, num_bytes: int) -> bytes:
        if self._left is None:
            return self._stream.read(num_bytes)
        block = self._stream.read(min(num_bytes, self._left))
        self._left -= len(block)
        return block


def _lines(stream: _Stream, file: SourceFile, max_row_bytes: int) -> Iterator[tuple[int, Row]]:
    """(offset, row) of each line that is not blank."""
    following = stream.skipped
    kept = b""
    in_long_row = False
    # Reading more at once the more is kept makes the copies of a long row add up linearly.
    while block := stream.read(max(_BLOCK_BYTES, len(kept) // 4)):
        *lines, kept = (kept + block).split(b"\n")
        for line in lines:
            offset = following
            following += len(line) + 1
            if in_long_row or len(line) > max_row_bytes:
                in_long_row = False
                yield offset, _TOO_LONG
            elif line and not line.isspace():
                # Nearly every row is an object: one call less for each of millions.
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError:
                    row = _parsed(line)
                yield offset, row if type(row) is dict else _parsed(line)
        if in_long_row or len(kept) > max_row_bytes:
            following += len(kept)
            kept, in_long_row = b"", True
    if in_long_row:
        yield following, _TOO_LONG
    elif kept and not kept.isspace():
        row = _parsed(kept)
        if row == _NOT_JSON:
            raise DataError(f"{file} ends in the middle of a row: fetch it again")
        yield following, row


def _elements(stream: _Stream, file: SourceFile, max_row_bytes: int) -> Iterator[bytes]:
    """The bytes of each element of the array that the stream begins with.

    One step goes to the next bracket (or comma between elements) and skips over strings in C.
    """
    buffer = stream.read(_BLOCK_BYTES)
    begin = position = buffer.index(b"[") + 1
    depth = 0
    while True:
        match = (_TO_BRACKET if depth else _TO_BRACKET_OR_COMMA).match(buffer, position)
        if match is None:
            kept = buffer[begin:]
            if len(kept) > max_row_bytes:
                raise DataError(
                    f"{file} holds a row of more than {max_row_bytes:,} bytes: split or remove it"
                )
            # Reading as much again as is kept makes the scans of a long string add up linearly.
            more = stream.read(max(_BLOCK_BYTES, len(kept)))
            if not more:
                raise DataError(f"{file} ends in the middle of its array: fetch it again")
            buffer, position, begin = kept + more, position - begin, 0
            continue
        position = match.end()
        mark = buffer[position - 1]
        if mark in b"{[":
            depth += 1
        elif depth and mark in b"}]":
            depth -= 1
        elif not depth:
            element = buffer[begin : position - 1]
            if element.strip():
                yield element
            if mark in b"}]":
                _require_end(buffer[position:], stream, file)
                return
            begin = position


def _require_end(rest: bytes, stream: _Stream, file: SourceFile) -> None:
    """Nothing may stand behind an array: it would be rows that nobody reads and nobody counts."""
    while not rest.strip():
        rest = stream.read(_BLOCK_BYTES)
        if not rest:
            return
    raise DataError(
        f"{file} goes on behind its array with {rest.strip()[:20]!r}: make it one array, or one row"
        " a line"
    )


def _parsed(raw: bytes) -> Row:
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            # Python's own writes NaN and half surrogate pairs, and reads them.
            row = json.loads(raw.decode())
        except (ValueError, RecursionError):
            return _NOT_JSON
    return row if isinstance(row, dict) else "not an object"
