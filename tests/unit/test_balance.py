"""Which endpoint gets the next request: the balancer alone, with times passed in."""

from __future__ import annotations

import random
from typing import Any

import pytest

from drafter.engines import balance, client
from drafter.engines.balance import FULL_STREAK, TRIAL_S, Balancer, Slot


def take(balancer: Balancer, number: int, now: float = 0.0, **wish: Any) -> list[Slot]:
    """As many slots of 10 prompt tokens as it gives, ``number`` at most."""
    slots = []
    for _ in range(number):
        slot = balancer.pick(10, 100, now, **wish)
        if slot is None:
            break
        slots.append(slot)
    return slots


def kill(balancer: Balancer, url: str, now: float) -> None:
    """A connection to ``url`` is refused."""
    while (slot := balancer.pick(10, 100, now)) and slot.endpoint.url != url:
        balancer.release(slot, 0.0)
    assert slot is not None
    balancer.failed(slot, now, refused=True)
    balancer.release(slot, 0.0)


def test_the_endpoint_with_the_fewest_outstanding_tokens_is_next() -> None:
    balancer = Balancer(["a", "b"], 8)
    long = balancer.pick(1000, 100, 0.0)
    assert long is not None and long.endpoint.url == "a"
    urls = [slot.endpoint.url for slot in take(balancer, 10)]
    assert urls == ["b"] * 8 + ["a"] * 2
    balancer.release(long, 0.0)
    assert long.endpoint.tokens == 2 * 110


def test_answers_teach_how_long_an_answer_will_be() -> None:
    balancer = Balancer(["a"], 8)
    (slot,) = take(balancer, 1)
    assert slot.tokens == 110
    balancer.answered(slot, 20, 0.0)
    balancer.release(slot, 0.0)
    (slot,) = take(balancer, 1)
    assert slot.tokens == 30


def test_a_prompt_that_failed_goes_elsewhere_unless_there_is_only_one_place() -> None:
    balancer = Balancer(["a", "b"], 2)
    assert [slot.endpoint.url for slot in take(balancer, 9, avoid="a")] == ["b", "b", "a", "a"]


def test_a_burst_of_refusals_cuts_the_concurrency_once_and_answers_let_it_grow_back() -> None:
    balancer = Balancer(["a"], 100)
    slots = take(balancer, 200)
    assert len(slots) == 100
    (endpoint,) = balancer.endpoints
    for number, slot in enumerate(slots[:40]):
        balancer.throttled(slot, now=0.01 * number + 1)
        balancer.release(slot, 0.0)
    assert endpoint.limit == 75
    # Sent before the cut, refused long after it: of the same burst.
    balancer.throttled(slots[40], now=500)
    balancer.release(slots[40], 0.0)
    assert endpoint.limit == 75 and endpoint.state == "closed"
    assert len(take(balancer, 99, now=600)) == 75 - 59
    for slot in slots[41:]:
        balancer.answered(slot, 10, 0.0)
        balancer.release(slot, 0.0)
    assert endpoint.limit == 75 + 59 // balance.GROW_AFTER
    for _ in range(1000):
        (slot,) = take(balancer, 1, now=700)
        balancer.answered(slot, 10, 0.0)
        balancer.release(slot, 0.0)
    assert endpoint.limit == 100


def test_a_full_engine_is_left_alone_longer_and_longer_or_as_long_as_it_says() -> None:
    balancer, now, pauses = Balancer(["a"], 100), 10.0, []
    for _ in range(9):
        (slot,) = take(balancer, 1, now)
        balancer.throttled(slot, now)
        balancer.release(slot, 0.0)
        assert not take(balancer, 1, now)
        pause_s = balancer.next_change_s(now)
        assert pause_s is not None
        pauses.append(pause_s)
        now += pause_s + 1
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30])
    (slot,) = take(balancer, 1, now)
    balancer.throttled(slot, now, pause_s=77)
    assert balancer.next_change_s(now) == pytest.approx(77)
    assert balancer.endpoints[0].limit == 1


def one_answer(balancer: Balancer, now: float) -> None:
    (slot,) = take(balancer, 1, now)
    balancer.answered(slot, 10, now)
    balancer.release(slot, now)


def test_after_an_outage_each_answer_is_one_more_in_flight_up_to_what_it_took_before() -> None:
    balancer, now = Balancer(["a"], 150), 10.0
    (endpoint,) = balancer.endpoints
    for _ in range(10):
        slots = take(balancer, 150, now)
        for slot in slots:
            balancer.throttled(slot, now)
            balancer.release(slot, now)
        now += 60
    assert endpoint.limit < 10
    answers = 0
    while endpoint.limit < 0.75 * 150:
        one_answer(balancer, now)
        answers += 1
    assert answers <= 0.75 * 150
    while endpoint.limit < 150:
        one_answer(balancer, now)
        answers += 1
    assert answers <= 0.75 * 150 + balance.GROW_AFTER * 0.25 * 150 + 1


def test_an_engine_that_takes_less_than_before_is_not_overrun_again_and_again() -> None:
    balancer, now, refusals = Balancer(["a"], 150), 0.0, 0
    for _ in range(600):
        now += 2
        slots = take(balancer, 150, now)
        for slot in slots[20:]:
            balancer.throttled(slot, now)
            refusals += 1
        for slot in slots[:20]:
            balancer.answered(slot, 10, now)
        for slot in slots:
            balancer.release(slot, now)
    assert balancer.endpoints[0].limit <= 26
    assert refusals < 0.2 * 600 * 20


@pytest.mark.parametrize("pause_s", [0, None])
def test_a_trial_that_is_refused_opens_again_and_leaves_the_limit(pause_s: float | None) -> None:
    balancer = Balancer(["a"], 150, down=["a"])
    (endpoint,) = balancer.endpoints
    balancer.probed(endpoint, up=True)
    (trial,) = take(balancer, 9, 100)
    balancer.throttled(trial, 101, pause_s)
    balancer.release(trial, 101)
    assert endpoint.limit == 150 and endpoint.state == "open"


def test_a_timeout_at_the_end_of_a_job_is_no_reason_to_send_one_by_one() -> None:
    balancer = Balancer(["a"], 150)
    first, *_ = take(balancer, 3, 10)
    balancer.throttled(first, 700, pause_s=0)
    assert balancer.endpoints[0].limit > 50


def test_an_engine_that_refuses_everything_is_down_and_blames_no_prompt() -> None:
    balancer = Balancer(["a", "b"], 50)
    slots = take(balancer, 100)
    for slot in slots:
        balancer.refused(slot, 5, None)
        balancer.release(slot, 5)
    assert [slot.fault for slot in slots].count("full") == 2 * (51 - FULL_STREAK)
    assert balancer.down_since == 5
    one_answer(balancer, 100)
    assert balancer.down_since is None


def test_an_answer_from_an_open_endpoint_shows_that_it_lives() -> None:
    balancer = Balancer(["a"], 8)
    first, second = take(balancer, 2)
    balancer.failed(first, 10, refused=True)
    assert balancer.down_since == 10
    balancer.answered(second, 10, 500)
    assert balancer.endpoints[0].state == "open" and balancer.down_since == 500


@pytest.mark.parametrize(("refused", "failures"), [(True, 1), (False, balance.FAILURES_TO_OPEN)])
def test_the_breaker_opens_at_once_or_after_failures_in_a_row(refused: bool, failures: int) -> None:
    balancer = Balancer(["a"], 100)
    answered, *slots = take(balancer, 50)
    for slot in slots[: failures - 1]:
        balancer.failed(slot, 1, refused)
    if not refused:
        balancer.answered(answered, None, 0.0)  # an answer between them: not in a row
        for slot in slots[: failures - 1]:
            balancer.failed(slot, 1, refused)
    assert balancer.endpoints[0].state == "closed" and balancer.down_since is None
    balancer.failed(slots[failures], 2, refused)
    assert balancer.endpoints[0].state == "open" and balancer.down_since == 2
    assert not take(balancer, 1, now=1e9)


def test_no_number_of_refusals_of_a_full_engine_opens_the_breaker() -> None:
    balancer = Balancer(["a"], 100)
    for number in range(1000):
        (slot,) = take(balancer, 1, 100.0 * number)
        balancer.throttled(slot, 100.0 * number)
        balancer.release(slot, 0.0)
    assert balancer.endpoints[0].state == "closed"


def test_an_endpoint_that_is_back_gets_one_request_first() -> None:
    balancer = Balancer(["a"], 8, down=["a"], now=5)
    (endpoint,) = balancer.endpoints
    assert balancer.down_since == 5 and not take(balancer, 1, 6)
    waits = []
    for _ in range(7):
        waits.append(endpoint.probe_wait_s)
        balancer.probed(endpoint, up=False)
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    balancer.probed(endpoint, up=True)
    (trial,) = take(balancer, 8, 100)
    balancer.failed(trial, 101, refused=False)
    balancer.release(trial, 0.0)
    assert endpoint.state == "open" and endpoint.probe_wait_s == 1
    assert balancer.down_since == 5, "health alone is no answer"
    balancer.probed(endpoint, up=True)
    (trial,) = take(balancer, 8, 102)
    balancer.answered(trial, 10, 0.0)
    balancer.release(trial, 0.0)
    assert endpoint.state == "closed" and len(take(balancer, 9, 103)) == 8
    assert balancer.down_since is None


def test_a_trial_that_has_not_failed_for_a_while_will_do() -> None:
    balancer = Balancer(["a"], 8, down=["a"])
    balancer.probed(balancer.endpoints[0], up=True)
    assert len(take(balancer, 8, 100)) == 1
    assert balancer.next_change_s(101) == TRIAL_S - 1
    assert len(take(balancer, 8, 100 + TRIAL_S)) == 7


def test_others_take_over_from_one_that_is_gone() -> None:
    balancer = Balancer(["a", "b"], 8)
    kill(balancer, "a", 1)
    assert balancer.down_since is None
    assert [slot.endpoint.url for slot in take(balancer, 99, 2)] == ["b"] * 8
    balancer.failed(take_back(balancer), 3, refused=True)
    assert balancer.down_since == 3


def take_back(balancer: Balancer) -> Slot:
    slot = Slot(balancer.endpoints[1], 0, 2)
    slot.endpoint.in_flight += 1
    return slot


def test_whatever_happens_the_books_balance() -> None:
    dice = random.Random(7)
    balancer, now, flying = Balancer(["a", "b", "c"], 20), 0.0, list[Slot]()
    for _ in range(20_000):
        now += dice.expovariate(10)
        if dice.random() < 0.6:
            if slot := balancer.pick(dice.randrange(1, 99), 100, now):
                flying.append(slot)
        elif flying:
            slot = flying.pop(dice.randrange(len(flying)))
            happens = dice.random()
            if happens < 0.7:
                balancer.answered(slot, dice.randrange(100), 0.0)
            elif happens < 0.75:
                balancer.refused(slot, now, dice.choice([None, 0, 3]))
            elif happens < 0.85:
                balancer.throttled(slot, now, dice.choice([None, 0, 3]))
            elif happens < 0.98:
                balancer.failed(slot, now, refused=dice.random() < 0.2)
            balancer.release(slot, 0.0)
        for endpoint in balancer.endpoints:
            assert 1 <= endpoint.limit <= 20 and 0 <= endpoint.in_flight <= 20
            if endpoint.state == "open":
                balancer.probed(endpoint, up=dice.random() < 0.2)
        unwell = [e.state == "open" or e.refusals >= FULL_STREAK for e in balancer.endpoints]
        assert balancer.down_since is not None or not all(unwell)
        assert balancer.down_since is None or not any(
            e.state == "closed" and not e.refusals for e in balancer.endpoints
        )
    for slot in flying:
        balancer.release(slot, 0.0)
    assert all(e.in_flight == 0 and abs(e.tokens) < 1e-6 for e in balancer.endpoints)


RETRY_AFTER = [
    (None, None),
    ("7", 7),
    (" 0 ", 0),
    ("99999", client.RETRY_AFTER_CAP_S),
    ("Thu, 01 Jan 1970 00:16:50 GMT", 10),
    ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
    ("soon", None),
    ("-3", None),
    ("", None),
]


@pytest.mark.parametrize(("header", "seconds"), RETRY_AFTER)
def test_retry_after_is_read_in_both_spellings(header: str | None, seconds: float | None) -> None:
    assert client.retry_after_s(header, now=1000.0) == seconds
