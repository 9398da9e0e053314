"""Makes shards with an engine that runs the target, and lets none past a gate.

A task is everything that decides a shard's bytes. The engine is opened once per run, proves itself
on the first rows, and then makes one shard after another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafter import gates
from drafter.backends import OpenBackend
from drafter.errors import DataError
from drafter.sections import Extract
from drafter.shard_plan import Rows, Sample, plan_batches
from drafter.shards import DTYPES, Features, Shard, ShardHeader

_LOGITS_AT_ONCE = 1 << 28
"""Elements of one block of logits, whatever the vocabulary: 1 GiB in float32."""
_PROBE_ROWS = 4
"""First rows that share a batch for the comparison with a plain forward."""


@dataclass(frozen=True)
class Task:
    """What decides the bytes of shards, besides their rows."""

    target: Path
    tokenized_sha256: str
    shards_sha256: str
    """Over all that decides the bytes of a shard."""
    settings: Extract
    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.settings.dtype]


class ShardMaker:
    """``advance`` is told the tokens of each batch as it is done.

    Raises DataError when the engine does not reproduce the target on the first rows.
    """

    def __init__(
        self,
        task: Task,
        rows: Rows,
        open_backend: OpenBackend,
        advance: Callable[[int], None],
    ) -> None:
        self._task = task
        self._rows = rows
        self._advance = advance
        self._backend = open_backend(task.target, task.dtype, task.aux_layers)
        self._reference_error = self._probe()

    def make(self, number: int, rows: Sequence[int]) -> Shard:
        """Shard ``number``, with the states of ``rows``. Raises DataError when a gate fails."""
        settings = self._task.settings
        samples = [self._sample(row) for row in rows]
        shard = self._blank(samples)
        matches = [0] * len(samples)
        for batch in plan_batches([len(s.input_ids) for s in samples], settings.batch_tokens):
            batched = [samples[i] for i in batch]
            computed = self._features(batched)
            counts = self._matches(batched, computed)
            for i, features, count in zip(batch, computed, counts, strict=True):
                row = shard.row(i)
                row.aux_TAD.copy_(features.aux_TAD)
                row.final_TD.copy_(features.final_TD)
                matches[i] = count
            self._advance(sum(len(sample.input_ids) for sample in batched))
        stored = list(shard.rows())
        alone_error = max(
            self._check_alone(i, samples, shard) for i in self._doubted(number, samples, matches)
        )
        gates.check_next_tokens(stored, matches, settings.min_argmax_share, self._backend.head)
        numbers = {
            "reference_error": self._reference_error,
            "alone_error": alone_error,
            "argmax_matches": sum(matches),
            "response_tokens": sum(map(gates.response_tokens, stored)),
        }
        return replace(shard, header=replace(shard.header, gates=numbers))

    def _probe(self) -> float:
        """Of the first rows the most padded one, in a batch and in a plain forward."""
        count = min(_PROBE_ROWS, len(self._rows.lengths))
        batch: list[Sample] = []
        for sample in sorted(map(self._sample, range(count)), key=lambda s: len(s.input_ids)):
            padded = (len(batch) + 1) * len(sample.input_ids)
            if not batch or padded <= self._task.settings.batch_tokens:
                batch.insert(0, sample)
        got = self._features(batch)[-1]
        return gates.check_reference(
            batch[-1].sample_id,
            Features(got.aux_TAD.cpu(), got.final_TD.cpu()),
            self._task.aux_layers,
            self._reference(batch[-1]),
            self._backend.head().to("cpu", torch.float32),
            ((s.sample_id, self._reference(s)) for s in batch[:-1]),
        )

    def _reference(self, sample: Sample) -> gates.Reference:
        reference = self._backend.reference(sample.input_ids)
        assert reference is not None
        return reference

    def _doubted(self, number: int, samples: Sequence[Sample], matches: Sequence[int]) -> set[int]:
        """Rows to compute once more: one drawn by seed, and the one whose states predict least.

        A single row that got a neighbour's states hardly moves the share of its shard.
        """

        def share(i: int) -> float:
            total = len(samples[i].input_ids) - samples[i].first_predicted
            return matches[i] / total if total else 1.0

        chance = random.Random(f"{self._task.shards_sha256} {number}")
        return {chance.randrange(len(samples)), min(range(len(samples)), key=share)}

    def _check_alone(self, chosen: int, samples: Sequence[Sample], shard: Shard) -> float:
        row = shard.row(chosen)
        return gates.check_alone(
            row.sample_id,
            Features(row.aux_TAD, row.final_TD),
            self._features([samples[chosen]])[0],
            self._task.aux_layers,
            (
                (other.sample_id, self._features([other])[0])
                for other in samples
                if other is not samples[chosen]
            ),
        )

    def _features(self, batch: list[Sample]) -> list[Features]:
        computed = self._backend.features([sample.input_ids for sample in batch])
        if len(computed) != len(batch):
            raise DataError(
                f"{batch[0].sample_id}: the engine returned {len(computed)} rows for a batch of "
                f"{len(batch)}: look at its log and run extract again"
            )
        for sample, features in zip(batch, computed, strict=True):
            gates.check_form(
                sample.sample_id,
                sample.input_ids,
                features,
                self._task.aux_layers,
                self._task.hidden_size,
                self._task.dtype,
            )
        return computed

    def _matches(self, batch: Sequence[Sample], computed: Sequence[Features]) -> list[int]:
        """Per row, response tokens that are the argmax of the state before them."""
        following = [sample.input_ids[sample.first_predicted :] for sample in batch]
        states = torch.cat(
            [
                features.final_TD[sample.first_predicted - 1 : -1]
                for sample, features in zip(batch, computed, strict=True)
            ]
        )
        block = max(1, _LOGITS_AT_ONCE // self._task.vocab_size)
        predicted = torch.cat(
            [self._backend.logits_rows(part).argmax(-1).cpu() for part in states.split(block)]
        )
        equal = predicted == torch.tensor([token for ids in following for token in ids])
        return [int(part.sum()) for part in equal.split([len(ids) for ids in following])]

    def _blank(self, samples: Sequence[Sample]) -> Shard:
        """A shard whose ids are there and whose states are filled in row by row."""
        task = self._task
        lengths = torch.tensor([0, *(len(sample.input_ids) for sample in samples)])
        tokens = int(lengths.sum())
        return Shard(
            header=ShardHeader(
                sample_ids=tuple(sample.sample_id for sample in samples),
                aux_layers=task.aux_layers,
                dtype=task.settings.dtype,
                tokenized_sha256=task.tokenized_sha256,
                extract_sha256=task.shards_sha256,
                gates={},
            ),
            input_ids_T=torch.tensor([token for s in samples for token in s.input_ids]),
            offsets_N1=lengths.cumsum(0),
            prompt_tokens_N=torch.tensor([sample.prompt_tokens for sample in samples]),
            aux_TAD=torch.empty(tokens, len(task.aux_layers), task.hidden_size, dtype=task.dtype),
            final_TD=torch.empty(tokens, task.hidden_size, dtype=task.dtype),
        )

    def _sample(self, row: int) -> Sample:
        sample = self._rows.sample(row)
        ids = sample.input_ids
        if not 0 <= min(ids) <= max(ids) < self._task.vocab_size:
            raise DataError(
                f"{sample.sample_id}: input_ids reach from {min(ids)} to {max(ids)}, the target "
                f"has 0..{self._task.vocab_size - 1}: validate with the target that wrote them"
            )
        return sample
