"""What a file is packed with, by its first bytes, and how it is unpacked as a stream."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol, cast

from drafter.errors import DataError

HEAD_BYTES = 32
"""Enough to tell what a file is."""

DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
"""What unpacking raises for a torn or spoilt stream; for some, an OSError without an errno."""


class SourceFile(Protocol):
    """A :class:`pathlib.Path`, or a file of the hub; ``str`` of it names it in a sentence."""

    def open(self, mode: Any, buffering: int = -1) -> IO[bytes]: ...


def _unpack_gzip(file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file))


def _unpack_bzip2(file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], bz2.BZ2File(file))


def _unpack_xz(file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], lzma.LZMAFile(file))


def _unpack_zstandard(file: IO[bytes]) -> IO[bytes]:
    # Heavy, and for few files.
    import pyarrow

    return cast(IO[bytes], pyarrow.CompressedInputStream(file, "zstd"))


_UNPACK: Mapping[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": _unpack_gzip,
    b"BZh": _unpack_bzip2,
    b"\xfd7zXZ\0": _unpack_xz,
    b"\x28\xb5\x2f\xfd": _unpack_zstandard,
}

_REFUSED = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it",
    b"ARROW1": "an Arrow file: write it as Parquet",
    b"version https://git-lfs": "a pointer of Git LFS, not the data: fetch it with git lfs pull",
}


def damaged(file: SourceFile, error: Exception) -> DataError:
    """Libraries write their reasons over several lines."""
    return DataError(f"{file} is damaged ({' '.join(str(error).split())}): fetch it again")


def head(file: SourceFile) -> bytes:
    """The first bytes of ``file``. Raises DataError for what no rows can be read from."""
    with file.open("rb", buffering=0) as raw:
        begin = raw.read(HEAD_BYTES) or b""
    for magic, what in _REFUSED.items():
        if begin.startswith(magic):
            raise DataError(f"{file} is {what}")
    return begin


def is_packed(begin: bytes) -> bool:
    return any(begin.startswith(magic) for magic in _UNPACK)


def unpacked(file: IO[bytes], begin: bytes) -> IO[bytes]:
    """``file``, of which ``begin`` are the first bytes, as a stream of what was packed."""
    for magic, unpack in _UNPACK.items():
        if begin.startswith(magic):
            return unpack(file)
    return file
