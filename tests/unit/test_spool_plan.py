"""What each shard of a spool holds, and whether the disk has room: decided before any work."""

from __future__ import annotations

import random
from itertools import islice, pairwise

import pytest

from drafter.errors import RecipeError
from drafter.extraction.shard_plan import Footprint
from drafter.sections import Train
from drafter.training import corpus, spool_plan
from drafter.training.spool_plan import SpoolPlan, SpoolShard


def test_the_batches_of_a_spool_are_those_of_stored_states() -> None:
    chance = random.Random(3)
    lengths = [chance.randrange(10, 120) for _ in range(50)]
    options = Train(steps=90, batch_tokens=150, seed=4)
    shards = spool_plan.group(lengths, options, 400)
    order = corpus.batches(lengths, options.batch_tokens, options.seed)
    assert [batch for shard in shards for batch in shard.batches] == list(islice(order, 90))
    tokens = [sum(lengths[row] for row in shard.rows) for shard in shards]
    assert max(tokens) <= 400
    assert sum(tokens) > 2 * sum(lengths)
    assert all(a + b > 250 for a, b in pairwise(tokens))


def test_a_batch_larger_than_a_shard_is_a_shard() -> None:
    lengths = [30, 300, 30, 30]
    options = Train(steps=8, batch_tokens=60)
    shards = spool_plan.group(lengths, options, 100)
    assert any(shard.rows == [1] for shard in shards)
    assert [s.first_step for s in shards] == [
        1 + sum(len(t.batches) for t in shards[:i]) for i in range(len(shards))
    ]


@pytest.mark.parametrize(
    ("done_steps", "number"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2), (6, 3), (9, 3)]
)
def test_the_shard_that_holds_the_next_step(done_steps: int, number: int) -> None:
    shards = [SpoolShard(1, [[0], [1]]), SpoolShard(3, [[2], [3], [4]]), SpoolShard(6, [[5]])]
    assert SpoolPlan([1] * 6, shards, 10, 2).needed(done_steps) == number
    assert SpoolPlan([], [], 0, 2).needed(0) == 0


def test_a_disk_without_room_is_told_how_many_shards_fit() -> None:
    shards = [SpoolShard(i + 1, [[0]]) for i in range(50)]
    planned = SpoolPlan([65_536], shards, Footprint(3, 7168, 2).bytes(1, 1, 65_536), 20)
    assert planned.bytes == 21 * planned.largest_bytes
    planned.check_room(10**12)
    with pytest.raises(RecipeError, match=r"20 \+ 1 shards of the spool, 3\.5 GiB each") as no:
        planned.check_room(40 * 2**30)
    assert "set train.spool_shards to 10, or free disk space" in str(no.value)
    SpoolPlan([65_536], shards, planned.largest_bytes, 10).check_room(40 * 2**30)
    with pytest.raises(RecipeError, match=r"lower extract\.shard_tokens"):
        planned.check_room(2**30)
