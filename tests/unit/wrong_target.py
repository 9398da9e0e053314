"""Backends whose states are not those of the target: shifted, of other layers, normed twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from unit.random_targets import AUX_LAYERS
from unit.wrong_backends import OneRow, Right, WithoutReference

from drafter.extraction.shards import Features


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
    late = True


class ShiftedLateWithoutLayer0(ShiftedLate):
    gives_layer_0, gate = False, "check_next_tokens"


class AuxShiftedInOneRow(OneRow):
    """Final states are right, and no other row is wrong."""

    gate, own = "check_low_layer", True
    cause = "row off by one, position t holds the state of t - 1"

    def spoil_row(self, got: Features) -> Features:
        return replace(rolled(got, 1), final_TD=got.final_TD)


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
    late, gate, own = True, "check_next_tokens", False


class NormMissing(Right):
    gate, own, cause = "check_next_tokens", True, "the engine's own logits miss the last norm"

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        return final_TD @ self.head().lm_head.T


class ShiftedFar(ShiftedWithoutLayer0):
    """Right in the first tokens of every row: a second chunk of prefill, a window that slides."""

    cause = "its first 16 tokens are right"

    def spoil(self, right: list[Features]) -> list[Features]:
        return [far(got, rolled(got, -1)) for got in right]


class AuxFar(Right):
    """Final states are right, so the next tokens are."""

    gate, own, cause = "check_reference", True, "its first 16 tokens are right"

    def spoil(self, right: list[Features]) -> list[Features]:
        return [
            replace(far(got, rolled(got, -1)), final_TD=got.final_TD, low_TD=got.low_TD)
            for got in right
        ]


class OtherLayersLate(Right):
    """A server that was started again, with other ids."""

    late, gate, own = True, "check_again", True
    cause = "aux layer 3 of the server differs from its proven states"

    def spoil(self, right: list[Features]) -> list[Features]:
        return [replace(got, aux_TAD=self.other_layers(ids)) for ids, got in self.paired(right)]

    def paired(self, right: list[Features]) -> list[tuple[list[int], Features]]:
        return list(zip(self._batch, right, strict=True))

    def other_layers(self, ids: list[int]) -> torch.Tensor:
        (every,) = self._target.backend.features([ids])
        return every.aux_TAD[:, [AUX_LAYERS[0], AUX_LAYERS[1] - 1, AUX_LAYERS[2]]]


class SecondServer(OtherLayersLate):
    """Two servers, of which the one that was not probed was started with other ids."""

    cause = "aux layer 3 of the second differs from its proven states"

    def spoil(self, right: list[Features]) -> list[Features]:
        wrong = super().spoil(right)
        return [pair[i % 2] for i, pair in enumerate(zip(right, wrong, strict=True))]

    def prove(self, input_ids: list[int], judge: Callable[[str, Features], None]) -> None:
        (right,) = self.right([input_ids])
        judge("the first", right)
        judge("the second", replace(right, aux_TAD=self.other_layers(input_ids)))
        self._proven = True


FAR = 16
"""Tokens of a row that are right."""


def far(near: Features, spoiled: Features) -> Features:
    """``near`` at the first tokens of the row, then ``spoiled``."""
    low = near.low_TD is not None and spoiled.low_TD is not None
    return Features(
        torch.cat([near.aux_TAD[:FAR], spoiled.aux_TAD[FAR:]]),
        torch.cat([near.final_TD[:FAR], spoiled.final_TD[FAR:]]),
        torch.cat([near.low_TD[:FAR], spoiled.low_TD[FAR:]]) if low else None,
    )
