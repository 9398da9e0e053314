"""All rows of all sources, converted, counted and deduplicated: what prompts can be taken from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from drafter.preparation import conversion
from drafter.preparation.deduplication import Contents, deduplicate
from drafter.preparation.row_store import RowStore
from drafter.preparation.tally import Tally
from drafter.sections import Dataset

_KEY_BYTES = conversion.KEY.itemsize

Tick = Callable[..., None]
"""Is told how far the work is, as numbers for the progress report."""


class Candidates(NamedTuple):
    """The prompts of one dataset that are nobody's duplicate, in the order of answering."""

    keys: NDArray[Any]
    """Of ``conversion.KEY``."""

    part_of: NDArray[Any]
    """For each, index in ``parts``."""

    parts: Sequence[conversion.Part]
    rows_before: Sequence[int]
    """Rows of the dataset before each part."""

    contents: NDArray[Any]
    """``content`` of every prompt that was read, of all datasets, ascending."""


def gather(
    sources: Sequence[Dataset],
    seed: int,
    paid: Sequence[Contents],
    store: RowStore,
    tallies: dict[str, Tally],
    tick: Tick,
) -> list[Candidates]:
    """Read everything; what each dataset keeps. What it does not is counted in ``tallies``.
    ``paid``: of each dataset, the prompts that have an answer."""
    parts = conversion.parts(sources)
    read = bytearray()
    ends = [0] * len(sources)
    part_begins, rows_before = list[int](), list[int]()
    for index, batch in conversion.batches(parts, sources, seed, store):
        rank = parts[index].rank
        name = sources[rank].name
        tally = tallies[name]
        if index == len(part_begins):
            part_begins.append(len(read) // _KEY_BYTES)
            rows_before.append(tally.source_rows)
        read += batch.keys
        ends[rank] = len(read) // _KEY_BYTES
        tally.source_rows += batch.num_rows
        tally.dropped.update(batch.dropped)
        tick(dataset=name, source_rows=tally.source_rows)
    keys = numpy.frombuffer(read, conversion.KEY)
    kept, dropped = deduplicate(keys, [source.name for source in sources], ends, paid)
    for source, reasons in zip(sources, dropped, strict=True):
        tallies[source.name].dropped.update(reasons)
    contents = numpy.sort(keys["content"].astype(numpy.uint64))

    def candidates(indices: NDArray[Any]) -> Candidates:
        part_of = numpy.searchsorted(part_begins, indices, side="right") - 1
        return Candidates(keys[indices], part_of, parts, rows_before, contents)

    return [candidates(indices) for indices in kept]
