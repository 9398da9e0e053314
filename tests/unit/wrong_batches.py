"""Backends whose states depend on what else is in the batch: neighbours, padding, positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from unit.random_targets import LAYERS
from unit.wrong_backends import OneRow, Right

from drafter.extraction.shards import Features


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
    late, gate = True, "check_alone"
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

    late, gate, own = True, "check_alone", False
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
    late, gate, cause = True, "check_alone", "differs from the same row computed alone"


class PositionsRestarted(Right):
    """A real forward whose positions begin anew within the rows."""

    batched_only, gate, own = True, "check_reference", False
    cause = "tokens are right and none of the known faults fits"

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
    late, gate, cause = True, "check_alone", "differs from the same row computed alone"


def every_layer(model: Any, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T, LAYERS, D] that enters each layer and [B, T, D] that enters the last norm."""
    decoder = model.get_decoder()
    final: list[torch.Tensor] = []
    with decoder.norm.register_forward_pre_hook(lambda _, args: final.append(args[0])):
        output = decoder(output_hidden_states=True, use_cache=False, **inputs)
    return torch.stack(output.hidden_states[:LAYERS], dim=2), final[0]
