"""Token budgets are met without bias: simulated through the classes that decide in production."""

from __future__ import annotations

import itertools
import statistics
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.budget import BUDGET, CAP, NoCanary, bias, mean_length, simulate, three_kills

from drafter.generation.budget import Budget, killed_in_flight
from drafter.generation.responses import Responses
from drafter.jsonl import Appender
from drafter.layout import Prepared


def test_overshoot_is_small_and_short_answers_are_not_favoured() -> None:
    runs = [simulate(seed) for seed in range(2)]
    overshoots = [run.overshoot for run in runs]
    assert min(overshoots) >= 0 and statistics.mean(overshoots) < 0.02 and max(overshoots) < 0.06
    assert abs(bias(runs)) < 2


@pytest.mark.parametrize("between", [(0.0, 1.0), (0.9, 1.0)], ids=["anywhere", "late"])
@pytest.mark.parametrize("redrawn", [False, True], ids=["the same lengths", "new lengths"])
def test_overshoot_stays_small_through_three_kills(
    between: tuple[float, float], redrawn: bool
) -> None:
    run = simulate(1, kills=three_kills(1, between), redrawn=redrawn)
    assert 0 <= run.overshoot < 0.04


@pytest.mark.parametrize(
    ("admits", "overshoot"),
    [
        (lambda budget, _: budget.tokens < BUDGET, 0.1),
        (lambda budget, _: budget.tokens + budget.in_flight * mean_length() < BUDGET, 0.02),
    ],
    ids=["stored tokens alone", "the mean for each in flight"],
)
def test_simpler_rules_overshoot_more(
    admits: Callable[[Budget, int], bool], overshoot: float
) -> None:
    assert simulate(0, admits=admits).overshoot > overshoot


def test_what_a_killed_job_had_in_flight_is_found_with_its_age() -> None:
    # Two at a time: 0 is long; 1, 2, 3, ... follow each other beside it, 100 tokens each.
    order = array("i", range(1, 41))
    killed = killed_in_flight(order, array("q", [100] * 40), [0])
    assert killed.keys() == {0}
    assert killed[0] == pytest.approx(4000, rel=0.3)
    # The next job sends 0 first, and is killed when 20 more have come.
    order.extend(range(41, 61))
    again = killed_in_flight(order, array("q", [100] * 60), [0, 40])
    assert again == killed
    order.append(0)
    assert killed_in_flight(order, array("q", [100] * 60 + [9000]), [0, 40, 60]) == {}


@pytest.mark.parametrize("failed", [False, True])
def test_holes_in_the_files_are_killed_answers_unless_they_failed(
    tmp_path: Path, failed: bool
) -> None:
    prepared = Prepared(tmp_path)
    with (
        Appender(prepared.prompt_ids) as prompts,
        Appender(prepared.responses) as answers,
        Appender(prepared.failed) as failures,
    ):
        for i in range(100):
            prompts.append({"sample_id": str(i), "input_ids": [i]})
        for i in range(2, 90):
            answers.append({"sample_id": str(i), "completion_tokens": 100})
        for i in range(2 if failed else 0):
            failures.append({"sample_id": str(i), "class": "abort", "reason": "a test"})
    with Responses(prepared, Budget(10**9, CAP), NoCanary(), None) as responses:  # type: ignore[arg-type]
        sent = [responses.next_prompt() for _ in range(4)]
        assert sent == [("0", [0]), ("1", [1]), ("90", [90]), ("91", [91])]
        responses.budget.start("0", 0.0)
        assert (responses.budget.expected(0.0) > 2500) == (not failed)


@pytest.mark.parametrize(
    ("positions", "starts"),
    [([], [0]), ([5], [0]), ([-1, -1], [0]), ([0, 1, 2], [0, 0, 3]), ([900, 20, 500], [0])],
    ids=["no answer", "one answer", "unknown prompts", "empty sessions", "another order"],
)
def test_nothing_is_concluded_from(positions: list[int], starts: list[int]) -> None:
    assert killed_in_flight(array("i", positions), array("q", [7] * len(positions)), starts) == {}


def test_a_killed_answer_is_expected_to_become_longer_than_it_was() -> None:
    books = Budget(10**9, CAP)
    books.found([100] * 1000 + [5000] * 100)
    books.start("fresh", 0.0)
    fresh = books.expected(0.0)
    books.fail("fresh")
    books.killed("long", 3000.0)
    books.start("long", 0.0)
    assert fresh < 1000 and books.expected(0.0) > 5000


def test_a_killed_answer_that_comes_shorter_the_next_time_counts_as_another() -> None:
    plain, other = Budget(10**9, CAP), Budget(10**9, CAP)
    other.killed("a", 3000.0)
    for books in (plain, other):
        books.found([100] * 50 + [5000] * 10)
        books.start("a", 0.0)
        books.finish("a", 80, 4.0)
        books.start("b", 4.0)
    assert other.expected(4.0) > plain.expected(4.0)


@pytest.mark.parametrize("budget", [10_000, 100_000])
def test_a_small_budget_learns_lengths_before_it_fills_the_engine(budget: int) -> None:
    books = Budget(budget, CAP)
    sent = 0
    while books.admits(0.0):
        books.start(str(sent), 0.0)
        sent += 1
    # What runs to the cap at worst; the last one crosses the line.
    assert sent == budget // CAP + 1


def test_admission_ends_only_when_the_budget_is_met() -> None:
    books = Budget(1000, 400)
    clock = itertools.count()
    while books.admits(next(clock)):
        books.start("a", next(clock))
        books.finish("a", 30, next(clock))
    assert 1000 <= books.tokens < 1030


def test_a_failed_request_gives_its_share_back() -> None:
    books = Budget(100, 100)
    books.start("a", 0.0)
    assert not books.admits(0.0)
    books.fail("a")
    assert books.admits(0.0) and books.tokens == 0


def test_no_budget_admits_everything() -> None:
    books = Budget(None, 100)
    books.found([10**9])
    assert books.admits(0.0)


def test_long_runners_count_with_what_they_will_still_write() -> None:
    books = Budget(10**9, CAP)
    for i in range(10_000):
        books.start(f"short {i}", 0.0)
        books.finish(f"short {i}", 100, 10.0)
    for i in range(2000):
        books.start(f"long {i}", 0.0)
        books.finish(f"long {i}", 2000, 200.0)
    books.start("new", 0.0)
    fresh = books.expected(0.0)
    assert fresh == pytest.approx((10 * 100 + 2 * 2000) / 12, rel=0.05)
    assert books.expected(100.0) == pytest.approx(2000, rel=0.05)
