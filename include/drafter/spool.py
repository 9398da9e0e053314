"""JSON rows on disk, found again by offset: what is being worked on may be larger than memory."""

from __future__ import annotations

import itertools
from typing import IO, Any

import orjson


def json_line(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


class Spool:
    """Appends to and reads from an open, empty file; the file belongs to the caller."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._end = 0

    def append(self, *rows: dict[str, Any]) -> int:
        """Write ``rows`` one behind another; the offset of the first."""
        begin = self._end
        self._file.seek(begin)
        self._end += self._file.write(b"".join(map(json_line, rows)))
        return begin

    def lines(self, offset: int, num_lines: int = 1) -> list[bytes]:
        """The ``num_lines`` lines that begin at ``offset``, newlines included."""
        self._file.seek(offset)
        return list(itertools.islice(self._file, num_lines))
