"""Of prompts that count as one, one: whatever the order in which their rows were read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

Keys = NDArray[Any]
"""Of :data:`drafter.preparation.conversion.KEY`, in the order of the recipe and of the rows."""

Indices = NDArray[numpy.int64]

Contents = NDArray[numpy.uint64]
"""Hashes of contents, as in sample ids."""


def deduplicate(
    keys: Keys, names: Sequence[str], ends: Sequence[int], paid: Sequence[Contents]
) -> tuple[list[Indices], list[Counter[str]]]:
    """Per dataset: indices of the keys it keeps, in the order of answering, and why others go.

    The keys of a dataset lie before its ``ends``. Of contents that are alike but for case and white
    space one is kept: one that has an answer (``paid``, per dataset) before any other, or a row
    that comes later would have its like asked and paid for again; else one of the first dataset of
    the recipe, and of its own the one whose hash is smallest.
    """
    lost, winners = _lost(keys, _doubtful(keys), ends, paid)
    is_kept = numpy.ones(len(keys), bool)
    is_kept[lost] = False
    kept, begin = [], 0
    for end in ends:
        mine = begin + numpy.flatnonzero(is_kept[begin:end])
        kept.append(mine[_in_order(keys["turn"][mine], keys["content"][mine])])
        begin = end
    return kept, _reasons(keys, lost, winners, names, ends)


def _in_order(turns: NDArray[Any], contents: NDArray[Any]) -> Indices:
    # One key of the machine's own kind is sorted ten times as fast as two, and all but decides.
    turns = turns.astype(numpy.uint64)
    order = numpy.argsort(turns)
    if (numpy.diff(turns[order]) == 0).any():
        order = numpy.lexsort((contents, turns))
    return order


def _doubtful(keys: Keys) -> Indices:
    """Those that share the first half of their hash with another: few, and all that is compared
    in full."""
    near = keys["near"].astype(numpy.uint64)
    order = numpy.argsort(near)
    is_alike = numpy.zeros(len(keys), bool)
    is_alike[1:] = numpy.diff(near[order]) == 0
    is_alike[:-1] |= is_alike[1:]
    return numpy.sort(order[is_alike])


def _lost(
    keys: Keys, doubtful: Indices, ends: Sequence[int], paid: Sequence[Contents]
) -> tuple[Indices, Indices]:
    """Every one of ``doubtful`` that is not kept, and for each the one that is."""
    some, ranks = keys[doubtful], _ranks(doubtful, ends)
    is_unpaid = numpy.ones(len(some), bool)
    for rank, contents in enumerate(paid):
        mine = ranks == rank
        is_unpaid[mine] = ~numpy.isin(some["content"][mine].astype(numpy.uint64), contents)
    # Of equal contents in one dataset the first row: that is the order in which they come.
    best_first = numpy.lexsort((some["content"], ranks, is_unpaid, some["near_rest"], some["near"]))
    some, doubtful = some[best_first], doubtful[best_first]
    is_first = numpy.ones(len(some), bool)
    is_first[1:] = (some["near"][1:] != some["near"][:-1]) | (
        some["near_rest"][1:] != some["near_rest"][:-1]
    )
    winners = doubtful[is_first][numpy.cumsum(is_first) - 1]
    return doubtful[~is_first], winners[~is_first]


def _reasons(
    keys: Keys, lost: Indices, winners: Indices, names: Sequence[str], ends: Sequence[int]
) -> list[Counter[str]]:
    dropped = [Counter[str]() for _ in names]
    is_same = keys["content"][lost] == keys["content"][winners]
    kinds = numpy.stack([_ranks(lost, ends), _ranks(winners, ends), is_same], axis=1)
    for (rank, first, same), count in zip(
        *numpy.unique(kinds, axis=0, return_counts=True), strict=True
    ):
        reason = "duplicate" if same else "near duplicate"
        place = "" if rank == first else f" of {names[first]}"
        dropped[rank][reason + place] += int(count)
    return dropped


def _ranks(indices: Indices, ends: Sequence[int]) -> Indices:
    """Which dataset each key is of."""
    return numpy.searchsorted(numpy.asarray(ends), indices, side="right")
