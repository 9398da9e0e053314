"""Source rows to prompts, and one key per prompt: all that memory keeps of it.

Sources are read in parts, by as many processes as ``parallel.py`` allows; what comes out
does not depend on how many there are. A row of plain JSON lines is converted again when its prompt
is asked for, since few are and its place is known; the prompts of all other rows wait in a
row store.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import orjson

from drafter.errors import DataError
from drafter.preparation import parallel
from drafter.preparation.likeness import hashes
from drafter.preparation.prompts import sample_id
from drafter.preparation.row_store import RowStore, json_line
from drafter.sections import Dataset
from drafter.source_files import local_files
from drafter.sources import COLUMNS, CONVERT, hub, reading
from drafter.sources.hub import HubFile
from drafter.sources.prompt import Prompt

KEY = numpy.dtype(
    [("near", ">u8"), ("near_rest", ">u8"), ("content", ">u8"), ("turn", ">u8"), ("address", ">u8")]
)
"""Hash of the content without case and white space, in two halves; hash of the content, as in the
sample id; hash of seed and sample id, by which prompts are ordered; address for :func:`recall`."""

_KEY = struct.Struct(">16s8s8sQ")

_PART_BYTES = 16 << 20
_ALONE_BYTES = 16 << 20
"""Local files of this size together are read before processes are forked."""

_IN_PLACE = 1 << 63
_NUMBER_BITS = 28
"""An address in place is offset and number of a row in its part."""

_BATCH_KEYS = 4096
_BATCH_S = 1.0


class Part(NamedTuple):
    """What one process reads at a time."""

    rank: int
    """Of its dataset in the recipe."""

    file: Path | HubFile
    part: reading.Part


class Batch(NamedTuple):
    """What became of some rows, neighbours in their :class:`Part`."""

    num_rows: int
    dropped: Counter[str]
    keys: bytes
    """One ``KEY`` behind another, in the order of the rows."""


def parts(sources: Sequence[Dataset]) -> list[Part]:
    """All that is to be read, in the order of the recipe. Asks the hub what files there are.

    Raises RecipeError for a source that is not there, DataError for one that cannot be read.
    """
    found: list[Part] = []
    for rank, source in enumerate(sources):
        if source.hub is not None:
            found += [Part(rank, file, None) for file in hub.files(source)]
            continue
        for path in local_files(source):
            found += [Part(rank, path, part) for part in reading.parts(path, _PART_BYTES)]
    return found


def num_processes(parts: Sequence[Part]) -> int:
    files = {part.file for part in parts}
    local_bytes = sum(file.stat().st_size for file in files if isinstance(file, Path))
    if local_bytes <= _ALONE_BYTES and all(isinstance(file, Path) for file in files):
        return 0
    return parallel.num_processes(len(parts))


def batches(
    parts: Sequence[Part], sources: Sequence[Dataset], seed: int, store: RowStore
) -> Iterator[tuple[int, Batch]]:
    """(index in ``parts``, batch) for all rows in their order."""
    convert = functools.partial(_converted, sources=sources, seed=seed, store=store)
    return parallel.spread(convert, parts, num_processes(parts), begin=store.use)


def recall(source: Dataset, part: Part, key: Any, store: RowStore) -> dict[str, Any]:
    """The prompt of a ``KEY`` as in prompts.jsonl, but without its sample id, and with the row's
    number in ``part``.

    Raises DataError when its file is not what it was.
    """
    address = int(key["address"])
    if address & _IN_PLACE:
        assert isinstance(part.file, Path) and isinstance(part.part, reading.Bytes)
        offset, number = divmod(address ^ _IN_PLACE, 1 << _NUMBER_BITS)
        row = reading.row_at(part.file, part.part, offset)
        prompt = row if isinstance(row, str) else CONVERT[source.format](row)
        recalled = {} if isinstance(prompt, str) else _recorded(prompt, number, source)
    else:
        recalled = orjson.loads(store.lines(address)[0])
    content = {name: recalled.get(name) for name in ("messages", "tools")}
    if not recalled or hashes(content)[0][:8] != int(key["content"]).to_bytes(8):
        raise DataError(f"{part.file} was changed while it was read: run prepare again")
    return recalled


def _recorded(prompt: Prompt, number: int, source: Dataset) -> dict[str, Any]:
    origin = {"id": prompt.source_id, "row": number, "revision": source.revision}
    return {**prompt.content, "source": origin}


def _converted(
    part: Part, sources: Sequence[Dataset], seed: int, store: RowStore
) -> Iterator[Batch]:
    source = sources[part.rank]
    convert = CONVERT[source.format]
    in_place = isinstance(part.part, reading.Bytes)
    rows = reading.placed_rows(part.file, part.part, COLUMNS[source.format])
    prefix = f"{seed} {sample_id(source.name, '')}".encode()
    num_rows, keys, dropped = 0, list[bytes](), Counter[str]()
    due = time.monotonic() + _BATCH_S
    for number, (offset, row) in enumerate(rows):
        num_rows += 1
        prompt = row if isinstance(row, str) else convert(row)
        if isinstance(prompt, str):
            dropped[prompt] += 1
        else:
            content = prompt.content
            whole, near = hashes(content)
            turn = hashlib.sha256(prefix + whole[:8].hex().encode()).digest()
            if in_place:
                address = _IN_PLACE | offset << _NUMBER_BITS | number
            else:
                address = store.append(json_line(_recorded(prompt, number, source)))
            keys.append(_KEY.pack(near, whole, turn, address))
        if len(keys) == _BATCH_KEYS or time.monotonic() >= due:
            store.flush()
            yield Batch(num_rows, dropped, b"".join(keys))
            num_rows, keys, dropped = 0, [], Counter()
            due = time.monotonic() + _BATCH_S
    store.flush()
    yield Batch(num_rows, dropped, b"".join(keys))
