"""Loops are measured on ids: found wherever they are, whatever their period, and no text is one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.rows import IdArray
from drafter.validation.repetition import ROUNDS, SHORTEST, Loop, longest_loop


def array(ids: list[int]) -> IdArray:
    return np.array(ids, dtype=np.uint32)


def words(seed: int, number: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(10, 5000) for _ in range(number)]


@pytest.mark.parametrize("period", [1, 2, 7, 40, 100, 300])
@pytest.mark.parametrize("before", [0, 13, 500])
@pytest.mark.parametrize("after", [0, 400])
def test_a_loop_is_found_wherever_it_begins_and_however_long_its_rounds_are(
    period: int, before: int, after: int
) -> None:
    unit = words(1, period)
    rounds = -(-1000 // period) + ROUNDS
    ids = [*words(2, before), *(unit * rounds), *words(3, after)]
    found = longest_loop(array(ids), 96, 0.25)
    assert found == Loop(rounds * period, period, before)


def test_text_has_no_loop_and_neither_has_what_comes_twice() -> None:
    assert longest_loop(array(words(0, 3000)), 96, 0.25) is None
    assert longest_loop(array(words(0, 500) * 2), 96, 0.25) is None


@pytest.mark.parametrize(("in_loop", "is_found"), [(249, False), (250, True)])
def test_a_loop_counts_from_its_share_on(in_loop: int, is_found: bool) -> None:
    ids = [*words(0, 1000 - in_loop), *[7] * in_loop]
    assert bool(longest_loop(array(ids), 96, 0.25)) is is_found


@pytest.mark.parametrize(("in_loop", "is_found"), [(95, False), (96, True)])
def test_short_loops_never_count(in_loop: int, is_found: bool) -> None:
    assert bool(longest_loop(array([7] * in_loop), 96, 0.25)) is is_found


def test_of_two_loops_the_longer_one_is_told() -> None:
    ids = [*[7] * 400, *words(0, 50), *(words(1, 20) * 30)]
    assert longest_loop(array(ids), 96, 0.25) == Loop(600, 20, 450)


def test_a_loop_may_hold_another_one() -> None:
    ids = [*([7] * 30 + words(1, 30)) * 20, *words(2, 10)]
    assert longest_loop(array(ids), 96, 0.25) == Loop(1200, 60, 0)


def longest_by_hand(ids: list[int], least: int) -> int:
    longest = 0
    for period in range(1, len(ids) // ROUNDS + 1):
        run = 0
        for i in range(period, len(ids)):
            run = run + 1 if ids[i] == ids[i - period] else 0
            if run and run + period >= max(least, ROUNDS * period):
                longest = max(longest, run + period)
    return longest


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 20),
    st.lists(st.integers(0, 3), max_size=60),
)
def test_it_agrees_with_comparing_every_period_by_hand(
    before: list[int], unit: list[int], rounds: int, after: list[int]
) -> None:
    ids = [*before, *unit * rounds, *after]
    least = max(SHORTEST, -(-len(ids) // 5))
    found = longest_loop(array(ids), SHORTEST, 0.2)
    assert (found.num_tokens if found else 0) == longest_by_hand(ids, least)
