"""JSON rows on disk, found again by address: what is being worked on may be larger than memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, Any

import orjson

_FILE_BITS = 48
"""An address is an offset below them, and above them the number of the file."""

_WRITE_BYTES = 128 << 10
_READ_BYTES = 1 << 16


def json_line(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


class RowStore:
    """Appends to one of several open, empty files and reads from all of them.

    The files belong to the caller. Processes forked later share them, and each appends to one of
    its own: see :meth:`use`.
    """

    def __init__(self, files: Sequence[IO[bytes]]) -> None:
        self._fds = [file.fileno() for file in files]
        self._waiting: list[bytes] = []
        self._num_waiting = self._number = self._end = 0

    @property
    def num_files(self) -> int:
        return len(self._fds)

    def use(self, number: int) -> None:
        """From now on append to file ``number``, which nobody else does."""
        self.flush()
        self._number = number
        self._end = os.fstat(self._fds[number]).st_size

    def append(self, *lines: bytes) -> int:
        """Write ``lines``, newlines included, one behind another; the address of the first. They
        can be read after :meth:`flush`."""
        address = self._number << _FILE_BITS | self._end
        for line in lines:
            self._end += len(line)
            self._num_waiting += len(line)
        self._waiting += lines
        if self._num_waiting >= _WRITE_BYTES:
            self.flush()
        return address

    def flush(self) -> None:
        data = memoryview(b"".join(self._waiting))
        offset = self._end - len(data) if data else 0
        while data:
            written = os.pwrite(self._fds[self._number], data, offset)
            data, offset = data[written:], offset + written
        self._waiting.clear()
        self._num_waiting = 0

    def lines(self, address: int, num_lines: int = 1) -> list[bytes]:
        """The ``num_lines`` lines that begin at ``address``, newlines included."""
        fd, offset = self._fds[address >> _FILE_BITS], address & (1 << _FILE_BITS) - 1
        data = b""
        while data.count(b"\n") < num_lines:
            more = os.pread(fd, max(_READ_BYTES, len(data)), offset + len(data))
            assert more, f"nothing is stored at {address}"
            data += more
        return [line + b"\n" for line in data.split(b"\n", num_lines)[:num_lines]]
