"""Which rows each shard of a spool holds, and what the disk must have room for: known before work.

Shard k holds the rows of consecutive batches in the order of training, over all epochs. That order
follows from the lengths of the rows and the recipe alone (corpus.batches), so both sides of a spool
plan the same, and a shard that is made once more is the same bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from drafter.errors import RecipeError
from drafter.extraction import states
from drafter.extraction.shard_plan import gib
from drafter.recipe import Recipe
from drafter.sections import Train
from drafter.training import corpus
from drafter.training.entries import Tokenized

_SPARE = 1.02
"""Room beside the shards themselves: the witness, checkpoints, whole blocks."""

_WITNESS_ROWS, _WITNESS_TOKENS = 64, 8192
"""What is kept of a spool, at most: half a GB for a large target."""


@dataclass(frozen=True)
class SpoolShard:
    """Batches of row numbers, in training order."""

    first_step: int
    """Of its first batch; steps count from 1."""
    batches: list[list[int]]

    @property
    def rows(self) -> list[int]:
        return [row for batch in self.batches for row in batch]


@dataclass(frozen=True)
class SpoolPlan:
    """Everything that a training takes from its spool."""

    lengths: Sequence[int]
    """Tokens of each row that is trained on."""
    shards: list[SpoolShard]
    largest_bytes: int
    """Of one shard on disk."""
    num_ahead: int
    """Shards on disk at most, besides one that training still reads though it is deleted."""

    def needed(self, done: int) -> int:
        """The shard that holds the step after ``done``; their number when there is none."""
        if done >= sum(len(shard.batches) for shard in self.shards):
            return len(self.shards)
        return bisect_right(self.shards, done + 1, key=lambda shard: shard.first_step) - 1

    @property
    def bytes(self) -> int:
        """On disk at once, at most."""
        return (min(self.num_ahead, len(self.shards)) + 1) * self.largest_bytes

    @property
    def story(self) -> str:
        return (
            f"spool of {gib(self.bytes)} at once: {self.num_ahead} + 1 of {len(self.shards):,} "
            f"shards, {sum(self.lengths):,} tokens per epoch"
        )

    def check_room(self, room_bytes: int) -> None:
        """``room_bytes`` is what is free and what the spool takes now. Raises RecipeError, with the
        number of shards that would fit, when it is too little."""
        if self.bytes * _SPARE <= room_bytes:
            return
        fitting = int(room_bytes / _SPARE / self.largest_bytes) - 1
        remedy = (
            f"set train.spool_shards to {fitting}"
            if fitting >= 2
            else "lower extract.shard_tokens, or train.batch_tokens where that is larger"
        )
        raise RecipeError(
            f"{self.num_ahead} + 1 shards of the spool, {gib(self.largest_bytes)} each, need "
            f"{gib(self.bytes * _SPARE)}, the disk has {gib(room_bytes)} for them: {remedy}, or "
            "free disk space"
        )


def plan_spool(split: corpus.Split[Tokenized], recipe: Recipe) -> SpoolPlan:
    """Shards of at most ``extract.shard_tokens`` tokens, or one larger batch."""
    lengths = [entry.tokens for entry in split.trained]
    footprint = states.footprint(recipe)
    shards = group(lengths, recipe.train, recipe.extract.shard_tokens)
    sizes = [
        footprint.bytes(1, len(rows := shard.rows), sum(lengths[row] for row in rows))
        for shard in shards
    ]
    assert recipe.train.spool_shards is not None
    return SpoolPlan(lengths, shards, max(sizes, default=0), recipe.train.spool_shards)


def group(lengths: Sequence[int], train: Train, shard_tokens: int) -> list[SpoolShard]:
    """The batches of every step, in shards."""
    order = islice(corpus.batches(lengths, train.batch_tokens, train.seed), train.steps)
    shards: list[SpoolShard] = []
    room = 0
    for step, batch in enumerate(order, start=1):
        tokens = sum(lengths[row] for row in batch)
        if not shards or tokens > room:
            shards.append(SpoolShard(step, []))
            room = shard_tokens
        shards[-1].batches.append(batch)
        room -= tokens
    return shards


def witnesses(split: corpus.Split[Tokenized]) -> list[int]:
    """Which of the rows ``[*trained, *held_out]`` are kept when the spool is gone: the shortest
    that were never trained on, then the shortest others."""
    rows = [*split.trained, *split.held_out]
    first = len(split.trained)
    order = sorted(range(len(rows)), key=lambda i: (i < first, rows[i].tokens, i))
    chosen: list[int] = []
    tokens = 0
    for i in order[:_WITNESS_ROWS]:
        tokens += rows[i].tokens
        if chosen and tokens > _WITNESS_TOKENS:
            break
        chosen.append(i)
    return chosen
