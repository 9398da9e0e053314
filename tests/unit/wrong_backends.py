"""Backends over a real target that are wrong as engines were in public, and the gate against each.

Each spoils what one fault spoils; those of padding and positions are real wrong forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from unit.random_targets import AUX_LAYERS, LAYERS, VOCAB

from drafter import gates
from drafter.backends.transformers import TransformersBackend
from drafter.sections import Extract
from drafter.shard_plan import Sample
from drafter.shards import Features
from drafter.target_head import TargetHead

VICTIM = 6
"""The row that a fault of a single row befalls."""


@dataclass(frozen=True)
class Target:
    directory: Path
    model: Any
    backend: TransformersBackend
    """Watching every layer."""
    head: TargetHead
    samples: Sequence[Sample]
    settings: Extract

    @property
    def lengths(self) -> list[int]:
        return [len(sample.input_ids) for sample in self.samples]

    def sample(self, row: int) -> Sample:
        return self.samples[row]


class Right:
    """The real target behind a backend. Subclasses are wrong: from call ``begin`` on."""

    checked_tokens = 1_000_000
    low_layer = 0
    begin = 0
    """1 is after the probe: a cache that has filled, a server that was started again."""
    batched_only = False
    gives_layer_0 = True
    layers: Sequence[int] = AUX_LAYERS
    gate: ClassVar[str]
    own: ClassVar[bool]
    """What stops it, and whether nothing else would."""
    cause: ClassVar[str]

    def __init__(self, target: Target) -> None:
        self._target, self._calls = target, 0

    def features(self, batch: list[list[int]]) -> list[Features]:
        self._calls += 1
        if self._calls <= self.begin or (self.batched_only and len(batch) == 1):
            return self.right(batch)
        self._batch, self._right = batch, self.right(batch)
        return self.spoil(self._right)

    def right(self, batch: list[list[int]]) -> list[Features]:
        return [
            self.captured(got.aux_TAD, got.final_TD) for got in self._target.backend.features(batch)
        ]

    def captured(self, layers_TLD: torch.Tensor, final_TD: torch.Tensor) -> Features:
        first = self.layers[0] - AUX_LAYERS[0]
        return Features(
            layers_TLD[:, list(self.layers)],
            final_TD.clone(),
            layers_TLD[:, first] if self.gives_layer_0 and first >= 0 else None,
        )

    def spoil(self, right: list[Features]) -> list[Features]:
        return right

    def reference(self, input_ids: list[int]) -> gates.Reference | None:
        return self._target.backend.reference(input_ids)

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        return self._target.backend.logits_rows(final_TD)

    def head(self) -> TargetHead:
        return self._target.head


class OneRow(Right):
    """Spoils a row that is neither the drawn one nor, as long as it predicts, the worst."""

    begin = 1

    def spoil(self, right: list[Features]) -> list[Features]:
        victim = self._target.samples[VICTIM].input_ids
        return [
            self.spoil_row(got) if ids == victim else got
            for ids, got in zip(self._batch, right, strict=True)
        ]

    def spoil_row(self, got: Features) -> Features:
        raise NotImplementedError


class WithoutReference(Right):
    def reference(self, _: list[int]) -> None:
        return None


class WithoutAnything(WithoutReference):
    gives_layer_0 = False


# Rows.


class CacheHit(Right):
    """Only the rows behind the cached prefix (sglang #8066)."""

    begin, gate, own = 1, "check_rows", True
    cause = "states for .* a prefix-cache hit or chunked prefill"

    def spoil(self, right: list[Features]) -> list[Features]:
        return [Features(got.aux_TAD[3:], got.final_TD[3:]) for got in right]


class RowLost(Right):
    begin, batched_only, gate, own = 1, True, "check_rows", True
    cause = "rows for a batch of"

    def spoil(self, right: list[Features]) -> list[Features]:
        return right[1:]


# Ids.


class AnotherPrompt(Right):
    """Runs one row with another token in its prompt, and says so."""

    gate, own, cause = "check_ids", True, "first at 0: .* the engine added or cut tokens"

    def spoil(self, _: list[Features]) -> list[Features]:
        victim = self._target.samples[VICTIM].input_ids
        run = [[(ids[0] + 1) % VOCAB, *ids[1:]] if ids == victim else ids for ids in self._batch]
        return [
            replace(got, returned_ids=ids) for got, ids in zip(self.right(run), run, strict=True)
        ]


# Values.


class NotFinite(OneRow):
    gate, own, cause = "check_finite", True, "aux layer 1 is not finite at 1 of"

    def spoil_row(self, got: Features) -> Features:
        got.aux_TAD[0, 0, 0] = torch.nan
        return got


class Constant(OneRow):
    gate, own, cause = "check_varied", True, "a buffer that the engine never filled"

    def spoil_row(self, got: Features) -> Features:
        got.aux_TAD[2:, 1] = 1.5
        return got


class Repeated(OneRow):
    gate, own, cause = "check_varied", True, "one row was copied over several"

    def spoil_row(self, got: Features) -> Features:
        got.aux_TAD[1:, 2] = got.aux_TAD[0, 2]
        return got


# Against the target.


def rolled(got: Features, by: int) -> Features:
    low_TD = got.low_TD
    return Features(
        got.aux_TAD.roll(by, 0),
        got.final_TD.roll(by, 0),
        low_TD.roll(by, 0) if low_TD is not None else None,
    )


class Shifted(Right):
    gate, own = "check_low_layer", False
    cause = "row off by one, position t holds the state of t - 1"

    def spoil(self, right: list[Features]) -> list[Features]:
        return [rolled(got, 1) for got in right]


class ShiftedWithoutLayer0(Shifted):
    gives_layer_0, gate = False, "check_reference"


class ShiftedLate(Shifted):
    begin, gate, own = 1, "check_next_tokens", True


class AuxShiftedEarly(WithoutReference):
    """Final states are right, so the next tokens are."""

    gate, own = "check_low_layer", True
    cause = r"row off by one, position t holds the state of t \+ 1"

    def spoil(self, right: list[Features]) -> list[Features]:
        return [replace(rolled(got, -1), final_TD=got.final_TD) for got in right]


class EveryLayerAbove(WithoutReference):
    """Counts the outputs of layers (sglang #25454) from 0 on; the target is too large to run."""

    layers = tuple(k + 1 for k in AUX_LAYERS)
    gate, own, cause = "check_low_layer", True, "layer 0 differs from the embedding of its ids"


class LayerAbove(Right):
    layers, gives_layer_0 = tuple(k + 1 for k in AUX_LAYERS), False
    gate, own, cause = "check_reference", True, r"layer off by \+1, it is hidden_states\[2\]"


class LayerBelow(Right):
    layers = tuple(k - 1 for k in AUX_LAYERS)
    gate, own, cause = "check_reference", True, r"layer off by -1, it is hidden_states\[0\]"


class LastButOne(Right):
    """Takes what enters the last layer for its output (vllm #46973)."""

    gate, own, cause = "check_reference", False, r"layer off by -1, it is hidden_states\[5\]"

    def spoil(self, right: list[Features]) -> list[Features]:
        states = self._target.backend.features(self._batch)
        return [
            replace(got, final_TD=all_layers.aux_TAD[:, -1])
            for got, all_layers in zip(right, states, strict=True)
        ]


class Normed(Right):
    """After the last norm, so that whoever reads it norms twice (speculators #313)."""

    gate, own, cause = "check_reference", False, "the last norm is already applied"

    def spoil(self, right: list[Features]) -> list[Features]:
        return [replace(got, final_TD=self.head().normed(got.final_TD)) for got in right]


class NormedLate(Normed):
    begin, gate, own = 1, "check_next_tokens", True


class NormMissing(Right):
    gate, own, cause = "check_next_tokens", True, "the engine's own logits miss the last norm"

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        return final_TD @ self.head().lm_head.T


# Against the row alone.


def given(right: list[Features], others: Sequence[Features]) -> list[Features]:
    """Each row with another one's states, as many as it had."""
    return [
        Features(
            torch.cat([other.aux_TAD, got.aux_TAD[len(other.aux_TAD) :]])[: len(got.aux_TAD)],
            torch.cat([other.final_TD, got.final_TD[len(other.final_TD) :]])[: len(got.final_TD)],
        )
        for got, other in zip(right, others, strict=True)
    ]


class Swapped(Right):
    """Rows of a batch trade places (sglang #4997)."""

    batched_only, gate, own = True, "check_reference", False
    cause = "rows of its neighbour B1-000"

    def spoil(self, right: list[Features]) -> list[Features]:
        return given(right, [*right[1:], right[0]])


class SwappedLate(Swapped):
    begin, gate = 1, "check_alone"
    cause = "differs from the same row computed alone"


class AuxSwappedLate(SwappedLate):
    own = True

    def spoil(self, right: list[Features]) -> list[Features]:
        return [
            replace(got, aux_TAD=other.aux_TAD)
            for got, other in zip(right, given(right, [*right[1:], right[0]]), strict=True)
        ]


class NeighboursRow(OneRow):
    """One row of many: the share of its shard hardly moves."""

    batched_only, gate, own = True, "check_alone", True
    cause = "differs from the same row computed alone.* rows of its neighbour"

    def spoil_row(self, got: Features) -> Features:
        at = next(i for i, right in enumerate(self._right) if right is got)
        return given([got], [self._right[at - 1]])[0]


class Stale(Right):
    """Answers with what it still has of the request before."""

    begin, gate, own = 1, "check_alone", False
    cause = "differs from the same row computed alone"

    _now: tuple[Features, ...] = ()

    def right(self, batch: list[list[int]]) -> list[Features]:
        self._stale, self._now = self._now, tuple(super().right(batch))
        return [*self._now]

    def spoil(self, right: list[Features]) -> list[Features]:
        return given(right, [*self._stale, *right][: len(right)])


class LeftPadded(Right):
    """A real forward over rows padded on the left, whose padding the rows attend to."""

    batched_only, gate, own = True, "check_reference", False
    cause = "none of the known faults fits"

    def spoil(self, _: list[Features]) -> list[Features]:
        batch, width = self._batch, max(map(len, self._batch))
        ids_BT = torch.tensor([[0] * (width - len(ids)) + ids for ids in batch])
        return [
            self.captured(layers_TLD[-len(ids) :], final_TD[-len(ids) :])
            for ids, layers_TLD, final_TD in zip(
                batch, *every_layer(self._target.model, input_ids=ids_BT), strict=True
            )
        ]


class LeftPaddedLate(LeftPadded):
    begin, gate, cause = 1, "check_alone", "differs from the same row computed alone"


class PositionsRestarted(Right):
    """A real forward whose positions begin anew within the rows."""

    batched_only, gate, own = True, "check_reference", False
    cause = "none of the known faults fits"

    def spoil(self, _: list[Features]) -> list[Features]:
        batch, width = self._batch, max(map(len, self._batch))
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in batch])
        mask_BT = torch.arange(width) < torch.tensor([[len(ids)] for ids in batch])
        states = every_layer(
            self._target.model,
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=(torch.arange(width) % (min(map(len, batch)) // 2)).expand(len(batch), -1),
        )
        return [
            self.captured(layers_TLD[: len(ids)], final_TD[: len(ids)])
            for ids, layers_TLD, final_TD in zip(batch, *states, strict=True)
        ]


class PositionsRestartedLate(PositionsRestarted):
    begin, gate, cause = 1, "check_alone", "differs from the same row computed alone"


FAULTS: list[type[Right]] = [
    CacheHit, RowLost, AnotherPrompt, NotFinite, Constant, Repeated, Shifted,
    ShiftedWithoutLayer0, ShiftedLate, AuxShiftedEarly, EveryLayerAbove, LayerAbove, LayerBelow,
    LastButOne, Normed, NormedLate, NormMissing, Swapped, SwappedLate, AuxSwappedLate,
    NeighboursRow, Stale, LeftPadded, LeftPaddedLate, PositionsRestarted, PositionsRestartedLate,
]  # fmt: skip


def every_layer(model: Any, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T, LAYERS, D] that enters each layer and [B, T, D] that enters the last norm."""
    decoder = model.get_decoder()
    final: list[torch.Tensor] = []
    with decoder.norm.register_forward_pre_hook(lambda _, args: final.append(args[0])):
        output = decoder(output_hidden_states=True, use_cache=False, **inputs)
    return torch.stack(output.hidden_states[:LAYERS], dim=2), final[0]
