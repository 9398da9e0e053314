"""Which layers, which shards, which batches, and whether the disk has room: decided up front."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from drafter.errors import RecipeError
from drafter.extraction.shard_plan import Footprint, check_room, plan_batches, plan_shards
from drafter.extraction.states import choose_aux_layers


@pytest.mark.parametrize(
    ("num_layers", "chosen", "layers"),
    [
        (61, None, (2, 30, 58)),
        (7, None, (2, 3, 4)),
        (4, None, None),
        (6, None, None),
        (4, (0, 1, 3), (0, 1, 3)),
        (4, (1, 2, 4), None),
        (4, (1, 1, 2), None),
        (4, (-1, 1, 2), None),
    ],
)
def test_auxiliary_layers_are_three_of_the_target_or_asked_for(
    num_layers: int, chosen: Sequence[int] | None, layers: tuple[int, ...] | None
) -> None:
    if layers is not None:
        assert choose_aux_layers(num_layers, chosen) == layers
        return
    with pytest.raises(RecipeError, match=r"set extract\.aux_layers"):
        choose_aux_layers(num_layers, chosen)


def test_shards_are_consecutive_bounded_and_batches_nearly_unpadded() -> None:
    chance = random.Random(1)
    lengths = [min(8192, 10 + int(chance.lognormvariate(6.8, 0.8))) for _ in range(4000)]
    shards = plan_shards(lengths, 65_536)
    assert [row for shard in shards for row in shard] == list(range(4000))
    assert all(sum(lengths[row] for row in shard) <= 65_536 for shard in shards)
    padded = 0
    for shard in shards:
        inside = [lengths[row] for row in shard]
        batches = plan_batches(inside, 16_384)
        assert sorted(row for batch in batches for row in batch) == list(range(len(inside)))
        widths = [len(batch) * max(inside[row] for row in batch) for batch in batches]
        assert max(widths) <= 16_384
        padded += sum(widths)
    assert 1 - sum(lengths) / padded < 0.03


def test_a_row_longer_than_a_shard_or_a_batch_stands_alone() -> None:
    assert plan_shards([5, 300, 5, 5], 100) == [range(1), range(1, 2), range(2, 4)]
    assert plan_batches([5, 300, 4], 100) == [[1], [0, 2]]
    assert plan_shards([], 100) == []


def test_a_disk_without_room_is_refused_with_the_length_that_would_fit() -> None:
    footprint = Footprint(num_aux=3, hidden_size=7168, state_bytes=2)
    lengths = [1000] * 50 + [4000] * 25 + [8000] * 10
    needed = check_room("B1", lengths, 4, footprint, 10**12)
    assert needed == pytest.approx(sum(lengths) * 4 * 7168 * 2, rel=0.01)
    with pytest.raises(RecipeError, match=r"230,000 tokens need 12\.5 GiB, .* has 10 GiB") as no:
        check_room("B1", lengths, 4, footprint, 10 * 2**30)
    assert "set extract.max_length to 7999" in str(no.value)
    kept = [length for length in lengths if length <= 7999]
    assert check_room("B1", kept, 4, footprint, 10 * 2**30) < 10 * 2**30
    with pytest.raises(RecipeError, match="no row would fit"):
        check_room("B1", lengths, 4, footprint, 1000)
