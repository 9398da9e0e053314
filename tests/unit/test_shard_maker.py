"""Where logits are dear, a part of every row's tokens stands for all of them."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from unit.random_targets import greedy_rows, one_thread, save_target, validated_job

from drafter.backends.transformers import TransformersBackend
from drafter.errors import DataError
from drafter.extract import extract
from drafter.extraction.gates import Reference
from drafter.extraction.shard_maker import ShardMaker, checked_tokens
from drafter.extraction.shard_plan import Sample
from drafter.extraction.shards import Features, Shard, read_header, shard_paths
from drafter.files import read_section


def samples(*shapes: tuple[int, int]) -> list[Sample]:
    """Of (prompt tokens, response tokens)."""
    return [Sample("s", [1] * (prompt + response), prompt) for prompt, response in shapes]


@pytest.mark.parametrize(
    ("shapes", "limit", "wanted"),
    [
        ([(2, 3), (1, 2)], 5, [[2, 3, 4], [1, 2]]),
        ([(2, 3), (1, 2)], 4, [[2, 4], [1]]),
        ([(2, 9), (1, 2)], 4, [[2, 5, 8], [1]]),
        ([(2, 9), (4, 0), (1, 2)], 2, [[2], [], [1]]),
        ([(2, 9), (1, 2), (1, 4)], 2, [[2], [1], []]),
        ([(0, 3)], 9, [[1, 2]]),
        ([(3, 0)], 9, [[]]),
        ([], 9, []),
    ],
)
def test_an_even_part_of_every_row_is_compared(
    shapes: list[tuple[int, int]], limit: int, wanted: list[list[int]]
) -> None:
    assert [list(at) for at in checked_tokens(samples(*shapes), limit)] == wanted


def test_the_part_is_within_the_limit_and_even_in_every_row() -> None:
    chance = random.Random(0)
    for _ in range(200):
        rows = samples(*((chance.randrange(1, 9), chance.randrange(1, 80)) for _ in range(12)))
        limit = chance.randrange(12, 700)
        checked = checked_tokens(rows, limit)
        assert sum(map(len, checked)) <= limit
        assert all(checked)
        assert len({at.step for at in checked}) == 1
        for at, row in zip(checked, rows, strict=True):
            assert at[0] == row.first_predicted
            assert at[-1] < len(row.input_ids) <= at[-1] + at.step


class Asked(TransformersBackend):
    """Remembers which rows were compared with a plain forward."""

    asked: ClassVar[list[list[int]]] = []

    def reference(self, input_ids: list[int]) -> Reference:
        self.asked.append(input_ids)
        return super().reference(input_ids)


@pytest.mark.parametrize("batch_tokens", [40, 400], ids=["alone", "in their batch"])
def test_rows_of_several_tokens_are_compared_the_shortest_and_the_longest(
    tmp_path: Path, batch_tokens: int
) -> None:
    with one_thread():
        rows = greedy_rows(save_target(tmp_path / "target"), 6)
        ones = [
            {"sample_id": f"B1-1{i:03d}", "input_ids": [i], "prompt_tokens": 1} for i in range(5)
        ]
        job = validated_job(
            tmp_path, tmp_path / "target", [*ones, *rows], batch_tokens=batch_tokens
        )
        Asked.asked.clear()
        extract(job, Asked)
        lengths = sorted(len(row["input_ids"]) for row in rows[:4])
        assert [len(ids) for ids in Asked.asked] == [lengths[0], lengths[-1]]
        alone = validated_job(tmp_path / "ones", tmp_path / "target", ones)
        extract(alone, TransformersBackend)


class Watched(TransformersBackend):
    """Remembers how many shards' states were alive whenever a row of the next was asked for."""

    shards: ClassVar[list[weakref.ref[torch.Tensor]]] = []
    alive: ClassVar[list[int]] = []

    def features(self, batch: list[list[int]]) -> list[Features]:
        self.alive.append(sum(shard() is not None for shard in self.shards))
        return super().features(batch)


def test_memory_holds_the_shard_that_is_made_and_the_one_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blank = ShardMaker._blank

    def watched(maker: ShardMaker, samples: list[Sample]) -> Shard:
        shard = blank(maker, samples)
        Watched.shards.append(weakref.ref(shard.aux_TAD))
        return shard

    monkeypatch.setattr(ShardMaker, "_blank", watched)
    with one_thread():
        rows = greedy_rows(save_target(tmp_path / "target"), 30)
        extract(validated_job(tmp_path, tmp_path / "target", rows), Watched)
    assert len(Watched.shards) > 3
    assert max(Watched.alive) <= 2


class FewLogits(TransformersBackend):
    """Counts the states that logits were made of."""

    checked_tokens = 60
    low_layer = 0
    made = 0

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        type(self).made += len(final_TD)
        return super().logits_rows(final_TD)


class FewWrongLogits(FewLogits):
    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        return -super().logits_rows(final_TD)


def test_the_numbers_of_a_shard_are_of_the_tokens_that_were_compared(tmp_path: Path) -> None:
    with one_thread():
        rows = greedy_rows(save_target(tmp_path / "target"), 12)
        job = validated_job(tmp_path, tmp_path / "target", rows, shard_tokens=1000)
        extract(job, FewLogits)
        hidden = job.workspace.hidden_states("B1")
        (path,) = shard_paths(hidden)
        numbers = read_header(path).gates
        assert 12 < numbers["response_tokens"] == FewLogits.made <= FewLogits.checked_tokens
        assert numbers["argmax_matches"] == numbers["response_tokens"]
        section = read_section(hidden.manifest, "extract")
        assert section is not None
        assert section["gates"]["response_tokens"] == FewLogits.made
        before = path.read_bytes()
        path.unlink()
        extract(job, FewLogits)
        assert path.read_bytes() == before
        path.unlink()
        with pytest.raises(DataError, match="the next token for 0 of its"):
            extract(job, FewWrongLogits)
