"""Backends over a real target that are wrong as engines were in public, and the gate against each.

Each spoils what one fault spoils; those of padding and positions are real wrong forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from unit.random_targets import AUX_LAYERS, VOCAB

from drafter.backends.transformers import TransformersBackend
from drafter.extraction import gates
from drafter.extraction.shard_plan import Sample
from drafter.extraction.shards import Features
from drafter.sections import Extract
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
    """The real target behind a backend. Subclasses are wrong."""

    checked_tokens = 1_000_000
    low_layer = 0
    late = False
    """Only after the probe: a cache that has filled, a server that was started again."""
    batched_only = False
    gives_layer_0 = True
    no_reference = "it is too large"
    layers: Sequence[int] = AUX_LAYERS
    gate: ClassVar[str]
    own: ClassVar[bool]
    """What stops it, and whether nothing else would."""
    cause: ClassVar[str]

    def __init__(self, target: Target) -> None:
        self._target, self._proven = target, False

    def features(self, batch: list[list[int]]) -> list[Features]:
        if (self.late and not self._proven) or (self.batched_only and len(batch) == 1):
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

    def prove(self, input_ids: list[int], judge: Callable[[str, Features], None]) -> None:
        judge("the server", self.features([input_ids])[0])
        self._proven = True

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        return self._target.backend.logits_rows(final_TD)

    def head(self) -> TargetHead:
        return self._target.head


class OneRow(Right):
    """Spoils a row that is neither the drawn one nor, as long as it predicts, the worst."""

    late = True

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


class Incomparable(WithoutReference):
    """Gives a layer that only a plain forward could confirm."""

    low_layer = 1


# Rows.


class CacheHit(Right):
    """Only the rows behind the cached prefix (sglang #8066)."""

    late, gate, own = True, "check_rows", True
    cause = "states for .* a prefix-cache hit or chunked prefill"

    def spoil(self, right: list[Features]) -> list[Features]:
        return [Features(got.aux_TAD[3:], got.final_TD[3:]) for got in right]


class RowLost(Right):
    late, batched_only, gate, own = True, True, "check_rows", True
    cause = "rows for a batch of"

    def spoil(self, right: list[Features]) -> list[Features]:
        return right[1:]


# Ids.


class AnotherPrompt(Right):
    """Runs one row with another token in its prompt, and says so."""

    gives_layer_0 = False
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
