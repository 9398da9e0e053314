"""Makes shards with an engine that runs the target, and lets none past a gate.

A task is everything that decides a shard's bytes. The engine is opened once per run, proves itself
on the first rows, and then makes one shard after another. After each, every server must still give
the states that one of these rows had.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafter.backends import OpenBackend
from drafter.errors import DataError, RecipeError
from drafter.extraction import batch_gates, gates
from drafter.extraction.shard_plan import Rows, Sample, plan_batches
from drafter.extraction.shards import DTYPES, Features, Shard, ShardHeader
from drafter.sections import Extract

_LOGITS_AT_ONCE = 1 << 28
"""Elements of one block of logits, whatever the vocabulary: 1 GiB in float32."""
_PROBE_ROWS = 4
"""First rows that share a batch for the comparison with a plain forward."""
_PROBE_TOKENS = 8
"""Rows shorter than this prove little: one token has no neighbour, and no position but 0."""


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

    Raises DataError when the engine does not reproduce the target on the first rows, RecipeError
    when it gives nothing that they could be compared with.
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
        self._embeds = False
        """Whether layer 0, where it comes along, is the plain embedding of the ids."""
        self._reference_error, self._proven = self._probe()
        self._prove()

    def make(self, number: int, rows: Sequence[int]) -> Shard:
        """Shard ``number``, with the states of ``rows``. Raises DataError when a gate fails."""
        settings = self._task.settings
        samples = [self._sample(row) for row in rows]
        shard = self._blank(samples)
        checked = checked_tokens(samples, self._backend.checked_tokens)
        matches = [0] * len(samples)
        for batch in plan_batches([len(s.input_ids) for s in samples], settings.batch_tokens):
            batched = [samples[i] for i in batch]
            computed = self._features(batched)
            counts = self._matches(batched, computed, [checked[i] for i in batch])
            for i, features, count in zip(batch, computed, counts, strict=True):
                row = shard.row(i)
                row.aux_TAD.copy_(features.aux_TAD)
                row.final_TD.copy_(features.final_TD)
                matches[i] = count
            self._advance(sum(len(sample.input_ids) for sample in batched))
        compared = list(map(len, checked))
        alone_error = max(
            self._check_alone(i, samples, shard) for i in self._doubted(number, matches, compared)
        )
        gates.check_next_tokens(
            list(shard.rows()), matches, compared, settings.min_argmax_share, self._backend.head
        )
        # Last: whatever changed while these rows were made shows now.
        self._prove()
        numbers = {
            "reference_error": self._reference_error,
            "alone_error": alone_error,
            "argmax_matches": sum(matches),
            "response_tokens": sum(compared),
        }
        return replace(shard, header=replace(shard.header, gates=numbers))

    def _probe(self) -> tuple[float, tuple[Sample, Features]]:
        """The shortest of the first rows, as the most padded, and the longest, for what begins late
        in a row, in a batch and in a plain forward; the largest error, and the shortest proven."""
        proven, errors = [], []
        for probed, others, got in self._probed():
            want = self._backend.reference(probed.input_ids)
            on_cpu = Features(got.aux_TAD.cpu(), got.final_TD.cpu())
            proven.append((probed, on_cpu))
            low_TD = got.low_TD.cpu() if got.low_TD is not None else None
            if low_TD is not None:
                errors += self._check_low_layer(probed, low_TD, want, others)
            if want is not None and self._is_comparable(want):
                errors.append(
                    gates.check_reference(
                        probed.sample_id,
                        on_cpu,
                        self._task.aux_layers,
                        want,
                        lambda: self._backend.head().to("cpu", torch.float32),
                        self._references(others),
                    )
                )
            if not errors:
                raise self._unproven(given=low_TD is not None)
            if low_TD is not None and self._backend.low_layer == 0:
                rows_TD = self._backend.head().embed[torch.tensor(probed.input_ids)]
                self._embeds = want is None or torch.allclose(want.layers[0], rows_TD.float())
        return max(errors), proven[0]

    def _probed(self) -> Iterator[tuple[Sample, list[Sample], Features]]:
        """(row to compare, others of its batch, its states): the shortest, then the longest."""
        batch_tokens = self._task.settings.batch_tokens
        batch: list[Sample] = []
        left: list[Sample] = []
        for sample in sorted(map(self._sample, self._probe_rows()), key=lambda s: len(s.input_ids)):
            fits = (len(batch) + 1) * len(sample.input_ids) <= batch_tokens
            (batch if fits or not batch else left).append(sample)
        batch.reverse()
        computed = self._features(batch)
        yield batch[-1], batch[:-1], computed[-1]
        longest = next((s for s in reversed(left) if len(s.input_ids) <= batch_tokens), None)
        if longest is not None:
            yield longest, [], self._features([longest])[0]
        elif len(batch) > 1:
            yield batch[0], batch[1:], computed[0]

    def _probe_rows(self) -> list[int]:
        """The first rows of several tokens; shorter ones only where there are no others."""
        lengths = self._rows.lengths
        telling = (row for row, length in enumerate(lengths) if length >= _PROBE_TOKENS)
        rows = list(itertools.islice(telling, _PROBE_ROWS))
        return rows or heapq.nlargest(_PROBE_ROWS, range(len(lengths)), key=lengths.__getitem__)

    def _unproven(self, *, given: bool) -> RecipeError:
        low, target = self._backend.low_layer, self._task.target
        reason = self._backend.no_reference
        if given:
            return RecipeError(
                f"the server gives layer {low}, but there is nothing to compare it with: no plain "
                f"forward of the first layers of {target} runs in this process ({reason}): "
                "extract on a host, or from a checkpoint, where that is not so"
            )
        return RecipeError(
            f"no plain forward of the target {target} reaches a stored layer in this process "
            f"({reason or 'too large, or quantised'}), and the server does not give layer {low} to "
            f"check instead: start the server with layer {low} among its ids"
        )

    def _prove(self) -> None:
        """Of every server the proven row again: one may have been started anew, or for others."""
        probed, proven = self._proven

        def judge(maker: str, got: Features) -> None:
            task = self._task
            batch_gates.check_rows([probed], [got], task.aux_layers, task.hidden_size, task.dtype)
            batch_gates.check_ids([probed], [got])
            gates.check_again(probed.sample_id, maker, got, proven, task.aux_layers)

        self._backend.prove(probed.input_ids, judge)

    def _is_comparable(self, want: gates.Reference) -> bool:
        """Whether a plain forward reached a layer that is stored."""
        return want.normed_TD is not None or min(self._task.aux_layers) < len(want.layers)

    def _check_low_layer(
        self,
        probed: Sample,
        low_TD: torch.Tensor,
        want: gates.Reference | None,
        others: Sequence[Sample],
    ) -> list[float]:
        """The error, if there is anything to compare the low layer with."""
        low, embed = self._backend.low_layer, self._backend.head().embed

        def layers(sample: Sample, known: gates.Reference | None) -> Sequence[torch.Tensor]:
            return known.layers if known else [embed[torch.tensor(sample.input_ids)]]

        if low >= len(layers(probed, want)):
            return []
        neighbours = (
            (s.sample_id, layers(s, want and self._backend.reference(s.input_ids))[low])
            for s in others
        )
        return [
            gates.check_low_layer(probed.sample_id, low_TD, low, layers(probed, want), neighbours)
        ]

    def _references(self, samples: Sequence[Sample]) -> Iterator[tuple[str, gates.Reference]]:
        for sample in samples:
            reference = self._backend.reference(sample.input_ids)
            if reference is not None:
                yield sample.sample_id, reference

    def _doubted(self, number: int, matches: Sequence[int], compared: Sequence[int]) -> set[int]:
        """Rows to compute once more: one drawn by seed, and the one whose states predict least.

        A single row that got a neighbour's states hardly moves the share of its shard.
        """
        shares = [m / n if n else 1.0 for m, n in zip(matches, compared, strict=True)]
        chance = random.Random(f"{self._task.shards_sha256} {number}")
        return {chance.randrange(len(shares)), shares.index(min(shares))}

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
        task = self._task
        computed = self._backend.features([sample.input_ids for sample in batch])
        batch_gates.check_rows(batch, computed, task.aux_layers, task.hidden_size, task.dtype)
        batch_gates.check_ids(batch, computed)
        batch_gates.check_values(batch, computed, task.aux_layers)
        if self._embeds:
            self._check_embeddings(batch, computed)
        return computed

    def _check_embeddings(self, batch: Sequence[Sample], computed: Sequence[Features]) -> None:
        embed = self._backend.head().embed
        for sample, got in zip(batch, computed, strict=True):
            if got.low_TD is None:
                continue
            rows_TD = embed[torch.tensor(sample.input_ids)]
            others = (
                (s.sample_id, embed[torch.tensor(s.input_ids)]) for s in batch if s is not sample
            )
            gates.check_low_layer(sample.sample_id, got.low_TD.cpu(), 0, [rows_TD], others)

    def _matches(
        self, batch: Sequence[Sample], computed: Sequence[Features], checked: Sequence[range]
    ) -> list[int]:
        """Per row, how many of the tokens at ``checked`` are the argmax of the state before."""
        following = [
            sample.input_ids[at.start : at.stop : at.step]
            for sample, at in zip(batch, checked, strict=True)
        ]
        states = torch.cat(
            [
                features.final_TD[at.start - 1 : at.stop - 1 : at.step]
                for features, at in zip(computed, checked, strict=True)
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


def checked_tokens(samples: Sequence[Sample], limit: int) -> list[range]:
    """Positions of each row whose tokens are compared with what the state before predicts.

    All response tokens when those of all rows are at most ``limit``. Else every n-th of each row,
    its first among them, with the least n that leaves at most ``limit``; where there are more rows
    than that, one token each of the first rows.
    """
    responses = [range(s.first_predicted, len(s.input_ids)) for s in samples]

    def too_many(step: int) -> bool:
        return sum(len(at[::step]) for at in responses) > limit

    longest = max(map(len, responses), default=0)
    step = 1 + bisect.bisect_left(range(1, longest), True, key=lambda n: not too_many(n))
    checked, left = [], limit
    for at in responses:
        kept = at[::step] if left else at[:0]
        checked.append(kept)
        left -= len(kept)
    return checked
