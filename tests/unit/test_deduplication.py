"""Of prompts that count as one, one is kept: always the same, and the others have a reason."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy
import pytest

from drafter.preparation.conversion import KEY
from drafter.preparation.deduplication import deduplicate

NAMES = ["B1", "B2", "B3"]


def keys(rows: list[tuple[int, ...]]) -> Any:
    return numpy.array(rows, KEY)


def contents(*paid: list[int]) -> list[Any]:
    return [numpy.array(hashes, numpy.uint64) for hashes in paid]


def naive(
    rows: list[tuple[int, ...]], ends: list[int], paid: list[list[int]]
) -> tuple[list[list[int]], list[Any]]:
    """The same, a row at a time."""
    rank = [sum(end <= i for end in ends) for i in range(len(rows))]
    best: dict[tuple[int, int], int] = {}

    def merit(i: int) -> tuple[int, ...]:
        return rows[i][2] not in paid[rank[i]], rank[i], rows[i][2], i

    for i in sorted(range(len(rows)), key=merit):
        best.setdefault(rows[i][:2], i)
    kept: list[list[int]] = [[] for _ in ends]
    dropped = [Counter[str]() for _ in ends]
    for i, row in enumerate(rows):
        winner = best[row[:2]]
        if winner == i:
            kept[rank[i]].append(i)
        else:
            near = "" if rows[winner][2] == row[2] else "near "
            other = "" if rank[winner] == rank[i] else f" of {NAMES[rank[winner]]}"
            dropped[rank[i]][f"{near}duplicate{other}"] += 1
    for indices in kept:
        indices.sort(key=lambda i: (rows[i][3], rows[i][2]))
    return kept, dropped


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_the_plain_definition_gives(seed: int) -> None:
    dice = random.Random(seed)
    num_rows = dice.choice([0, 1, 2, 50, 400])
    kinds = dice.choice([1, 3, 20, 1 << 64])

    def row(i: int) -> tuple[int, ...]:
        near = dice.randrange(kinds)
        # Neighbours in one half of the hash only, equal contents, and equal places in the order.
        return near, near % 2, near * 10 % (1 << 64) + dice.randrange(2), dice.randrange(7), i

    rows = [row(i) for i in range(num_rows)]
    ends = [*sorted(dice.randint(0, num_rows) for _ in NAMES[1:]), num_rows]
    paid = [[hashes[2] for hashes in rows if dice.random() < 0.2] for _ in NAMES]
    kept, dropped = deduplicate(keys(rows), NAMES, ends, contents(*paid))
    assert ([indices.tolist() for indices in kept], dropped) == naive(rows, ends, paid)


def test_half_a_hash_in_common_is_not_enough() -> None:
    rows = [(5, 1, 10, 0, 0), (5, 2, 11, 1, 1), (5, 1, 12, 2, 2)]
    kept, dropped = deduplicate(keys(rows), ["B1"], [3], contents([]))
    assert kept[0].tolist() == [0, 1]
    assert dropped == [Counter({"near duplicate": 1})]


def test_hashes_are_compared_as_numbers_without_a_sign() -> None:
    rows = [(1, 0, 10, 1 << 63, 0), (2, 0, 11, 1, 1), (3, 0, 12, (1 << 64) - 1, 2)]
    kept, _ = deduplicate(keys(rows), ["B1"], [3], contents([]))
    assert kept[0].tolist() == [1, 0, 2]
