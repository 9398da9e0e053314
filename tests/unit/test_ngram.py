"""Tables of n-grams against counting by hand."""

from collections import Counter, defaultdict
from random import Random

import numpy as np
import pytest

from drafter.evaluation import ngram
from drafter.evaluation.replay import Tally


def response(ids: list[int], prompt: int) -> ngram.Response:
    return np.array(ids, dtype=np.int64), prompt


def drawn(count: int, seed: int) -> list[ngram.Response]:
    """Rows in which some contexts repeat and some do not."""
    dice = Random(seed)
    rows = []
    for _ in range(count):
        ids = [dice.randrange(6)]
        for _ in range(dice.randrange(3, 30)):
            ids.append((ids[-1] * 5 + 1) % 6 if dice.random() < 0.8 else dice.randrange(6))
        rows.append(response(ids, dice.randrange(1, len(ids))))
    return rows


def by_hand(taught, asked, order: int, drafted: int) -> Tally:
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for ids, prompt in taught:
        padded = [-1] * order + ids.tolist()
        for i in range(prompt, len(ids)):
            counts[tuple(padded[i : i + order])][padded[i + order]] += 1
    best = {c: min(n, key=lambda token, n=n: (-n[token], token)) for c, n in counts.items()}
    generated = verifications = 0
    for ids, prompt in asked:
        newest = prompt
        while newest < len(ids) - 1:
            context = ([-1] * order + ids[: newest + 1].tolist())[-order:]
            accepted = 0
            while accepted < drafted and newest + 1 + accepted < len(ids):
                token = best.get(tuple(context))
                if token != ids[newest + 1 + accepted]:
                    break
                accepted, context = accepted + 1, [*context[1:], token]
            step = min(accepted + 1, len(ids) - 1 - newest)
            newest, generated, verifications = newest + step, generated + step, verifications + 1
    return Tally(generated, verifications)


@pytest.mark.parametrize("order", ngram.ORDERS)
@pytest.mark.parametrize("drafted", [1, 3])
def test_replay_equals_counting_by_hand(order, drafted):
    taught, asked = drawn(40, 1), drawn(30, 2)
    found = ngram.replay(ngram.fit(taught, order), asked, drafted)
    assert found == by_hand(taught, asked, order, drafted)
    assert 1 < found.acceptance_length < drafted + 1


def test_the_most_frequent_follower_wins_and_ties_go_to_the_lower_id():
    taught = [response([1, 7, 7, 3], 1), response([1, 5, 5, 2], 1), response([1, 5, 9, 9], 1)]
    table = ngram.fit(taught, 1)
    windows = np.array([[1], [7], [5], [42]])
    assert table.lookup(ngram._hashes(windows)).tolist() == [5, 3, 2, -1]


def test_only_responses_are_learnt_but_the_prompt_is_context():
    table = ngram.fit([response([8, 8, 8, 4], 3)], 2)
    assert len(table.tokens) == 1
    assert table.lookup(ngram._hashes(np.array([[8, 8]]))).tolist() == [4]


def test_no_rows_give_no_tally():
    table = ngram.fit([response([1, 2, 3], 1)], 1)
    assert ngram.replay(table, [response([1, 2], 1)], 3) == Tally(0, 0)
