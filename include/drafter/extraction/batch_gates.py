"""Checks that every batch of hidden states must pass, by itself: count, ids, values. Pure.

Each stops faults that no other gate sees, with a DataError that names the sample and the likely
cause. The rest compare states with others of the same target: drafter.extraction.gates.

    check_rows      one state per token, of the right shape and type
    check_ids       the engine answered for the tokens that it was sent
    check_values    the two that follow, in as few passes over the numbers as they need
    check_finite    no NaN, no infinity
    check_varied    no state is constant, or repeated under another id

T = tokens of one row, A = auxiliary layers, D = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from drafter.errors import DataError
from drafter.extraction.shard_plan import Sample
from drafter.extraction.shards import Features

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""


def check_rows(
    samples: Sequence[Sample],
    computed: Sequence[Features],
    aux_layers: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
) -> None:
    """Each row of a batch has a state per token, of the right shape and type."""
    if len(computed) != len(samples):
        raise DataError(
            f"{samples[0].sample_id}: the engine returned {len(computed)} rows for a batch of "
            f"{len(samples)}: look at its log and run extract again"
        )
    for sample, got in zip(samples, computed, strict=True):
        tokens, aux, final = len(sample.input_ids), got.aux_TAD, got.final_TD
        states = len(final) if len(aux) == tokens else len(aux)
        if states != tokens:
            raise DataError(
                f"{sample.sample_id}: {states} states for {tokens} tokens, one each is needed: "
                "likely cause: a prefix-cache hit or chunked prefill returned the last rows only, "
                "switch both off"
            )
        shapes = [(tokens, len(aux_layers), hidden_size), (tokens, hidden_size)]
        if [aux.shape, final.shape] != shapes or (
            got.low_TD is not None and got.low_TD.shape != final.shape
        ):
            raise DataError(
                f"{sample.sample_id}: final is {list(final.shape)} and aux {list(aux.shape)}, "
                f"needed are layers {list(aux_layers)} of size {hidden_size}: likely cause: the "
                "engine was started for other layers"
            )
        if final.dtype != dtype or aux.dtype != dtype:
            raise DataError(
                f"{sample.sample_id}: states are {final.dtype} and {aux.dtype}, needed {dtype}: "
                "set extract.dtype to what the engine returns"
            )


def check_ids(samples: Sequence[Sample], computed: Sequence[Features]) -> None:
    """Where the engine says which tokens its states are of, they are those it was sent."""
    for sample, got in zip(samples, computed, strict=True):
        sent, returned = sample.input_ids, got.returned_ids
        if returned is None or list(returned) == sent:
            continue
        common = min(len(sent), len(returned))
        first = next((t for t in range(common) if sent[t] != returned[t]), common)
        foreign = next((s.sample_id for s in samples if s.input_ids == list(returned)), None)
        cause = (
            f"these are the states of its neighbour {foreign}"
            if foreign
            else "the states of an earlier request, or the engine added or cut tokens"
        )
        raise DataError(
            f"{sample.sample_id}: the engine answered for {len(returned)} tokens that differ from "
            f"the {len(sent)} it was sent, first at {first}: likely cause: {cause}"
        )


def check_values(
    samples: Sequence[Sample], computed: Sequence[Features], aux_layers: Sequence[int]
) -> None:
    """:func:`check_finite` and :func:`check_varied`."""
    ranges = [Range.of(got) for got in computed]
    check_finite(samples, ranges, aux_layers)
    check_varied(samples, computed, ranges, aux_layers)


@dataclass(frozen=True)
class Range:
    """Least and greatest number of each state [T, A + 1], a NaN where there is one."""

    least: torch.Tensor
    greatest: torch.Tensor

    @classmethod
    def of(cls, got: Features) -> Range:
        # Both together take a quarter of isfinite or of aminmax, in bfloat16 on a CPU.
        return cls(_by_layer(got, lambda s: s.amin(-1)), _by_layer(got, lambda s: s.amax(-1)))


def check_finite(
    samples: Sequence[Sample], ranges: Sequence[Range], aux_layers: Sequence[int]
) -> None:
    """No value of a batch is NaN or infinite."""
    faulty = [~(r.least.isfinite() & r.greatest.isfinite()) for r in ranges]
    fault = _first_fault(samples, aux_layers, faulty)
    if fault is not None:
        raise DataError(
            f"{fault.where} is not finite at {fault.extent}: likely cause: an overflow in the "
            "target, extract in another dtype"
        )


def check_varied(
    samples: Sequence[Sample],
    computed: Sequence[Features],
    ranges: Sequence[Range],
    aux_layers: Sequence[int],
) -> None:
    """No state of a batch is constant, or equals the one before it under another id."""
    fault = _first_fault(samples, aux_layers, [r.least == r.greatest for r in ranges])
    if fault is not None:
        raise DataError(
            f"{fault.where} is constant at {fault.extent}: likely cause: a buffer that the engine "
            "never filled"
        )
    repeated = [
        _by_layer(got, lambda s: (_bits(s)[1:] == _bits(s)[:-1]).all(-1)) for got in computed
    ]
    # With the same id at both places, low layers may well hold equal states.
    fault = _first_fault(samples, aux_layers, repeated, where=_ids_change)
    if fault is not None:
        raise DataError(
            f"{fault.where} repeats its state at {fault.extent}, under another id than before: "
            "likely cause: one row was copied over several"
        )


@dataclass(frozen=True)
class _Fault:
    where: str
    """Sample and layer."""
    extent: str
    """How many tokens of it, and the first."""


def _by_layer(got: Features, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """[T, A + 1]: a column per auxiliary layer, and one for final."""
    return torch.cat([of(got.aux_TAD), of(got.final_TD)[:, None]], dim=1)


def _bits(states: torch.Tensor) -> torch.Tensor:
    """The same bits as integers, the widest that states can be read as: up to four numbers are
    compared at once."""
    if states.stride(-1) != 1:
        states = states.contiguous()
    strides = states.storage_offset(), states.shape[-1], *states.stride()[:-1]
    size = states.element_size()
    return states.view(_INTEGERS[math.gcd(8, *(size * n for n in strides))])


def _ids_change(sample: Sample) -> torch.Tensor:
    ids_T = torch.tensor(sample.input_ids)
    return ids_T[1:] != ids_T[:-1]


def _first_fault(
    samples: Sequence[Sample],
    aux_layers: Sequence[int],
    faulty: Sequence[torch.Tensor],
    where: Callable[[Sample], torch.Tensor] | None = None,
) -> _Fault | None:
    """The first row and layer with a faulty token; with ``where``, of these tokens only.

    Every row's tokens come to the host in one transfer: a GPU that is asked row by row idles.
    """
    masks = torch.cat(list(faulty)).cpu()
    if not masks.any():
        return None
    names = [f"aux layer {k}" for k in aux_layers] + ["final"]
    for sample, mask in zip(samples, masks.split([len(m) for m in faulty]), strict=True):
        found = mask if where is None else mask & where(sample)[:, None]
        for name, column in zip(names, found.unbind(1), strict=True):
            if column.any():
                # A mask over pairs of neighbours counts from the second token.
                first = int(column.nonzero()[0]) + len(sample.input_ids) - len(column)
                return _Fault(
                    f"{sample.sample_id}: {name}",
                    f"{int(column.sum())} of {len(sample.input_ids)} tokens, first at {first}",
                )
    return None
