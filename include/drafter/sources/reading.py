"""Rows of a source file in bounded memory: JSON lines or one JSON array, plain or gzipped.

What a file is shows in its bytes, not in its name. A row that is no JSON object becomes a str, the
reason, and reading goes on; a file that cannot be read on (a torn gzip stream, a row beyond
``MAX_ROW_BYTES``) raises DataError, and so does one that ends in the middle of a row or an array:
half a download would else be a small dataset.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import orjson

from drafter.errors import DataError

MAX_ROW_BYTES = 64 << 20
"""The longest known rows (agent trajectories with tool output) are below 10 MB."""

_NOT_JSON = "not JSON"
_BLOCK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+[{}\[\]]", re.DOTALL)
_TO_BRACKET_OR_COMMA = re.compile(rb'(?:[^",{}\[\]]++|' + _STRING + rb")*+[,{}\[\]]", re.DOTALL)


def rows(path: Path, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[dict[str, Any] | str]:
    """Each row of ``path`` in order: an object, or why it is none."""
    try:
        with _opened(path) as file:
            if _first_byte(file) == b"[":
                yield from map(_parsed, _elements(file, path, max_row_bytes))
            else:
                file.seek(0)
                yield from _lines(file, path, max_row_bytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}): fetch it again") from None


def _opened(path: Path) -> IO[bytes]:
    with open(path, "rb") as file:
        zipped = file.read(2) == _GZIP_MAGIC
    return cast(IO[bytes], gzip.open(path, "rb")) if zipped else open(path, "rb")


def _first_byte(file: IO[bytes]) -> bytes:
    """The first byte that means something; the file is left behind it."""
    while byte := file.read(1):
        if not byte.isspace() and byte not in codecs.BOM_UTF8:
            return byte
    return b""


def _lines(file: IO[bytes], path: Path, max_row_bytes: int) -> Iterator[dict[str, Any] | str]:
    first = True
    while line := file.readline(max_row_bytes):
        if first:
            line, first = line.removeprefix(codecs.BOM_UTF8), False
        if len(line) == max_row_bytes and not line.endswith(b"\n"):
            while (rest := file.readline(_BLOCK_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield "row too long"
        elif line.strip():
            row = _parsed(line)
            if row == _NOT_JSON and not line.endswith(b"\n"):
                raise DataError(f"{path} ends in the middle of a row: fetch it again")
            yield row


def _elements(file: IO[bytes], path: Path, max_row_bytes: int) -> Iterator[bytes]:
    """The bytes of each element of the array whose ``[`` was just read.

    One step goes to the next bracket (or comma between elements) and skips over strings in C.
    """
    buffer = b""
    begin = position = depth = 0
    while True:
        match = (_TO_BRACKET if depth else _TO_BRACKET_OR_COMMA).match(buffer, position)
        if match is None:
            kept = buffer[begin:]
            if len(kept) > max_row_bytes:
                raise DataError(
                    f"{path} holds a row of more than {max_row_bytes:,} bytes: split or remove it"
                )
            # Reading as much again as is kept makes the scans of a long string add up linearly.
            more = file.read(max(_BLOCK_BYTES, len(kept)))
            if not more:
                raise DataError(f"{path} ends in the middle of its array: fetch it again")
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
                return
            begin = position


def _parsed(raw: bytes) -> dict[str, Any] | str:
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            # Python's own writes NaN and half surrogate pairs, and reads them.
            row = json.loads(raw.decode())
        except (ValueError, RecursionError):
            return _NOT_JSON
    return row if isinstance(row, dict) else "not an object"
