"""What no target ever gives is refused in a batch, with the row, the layer and the token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafter.errors import DataError
from drafter.extraction import batch_gates
from drafter.extraction.shard_plan import Sample
from drafter.extraction.shards import Features, Row

AUX_LAYERS = (1, 3, 4)


def random_row(number: int, tokens: int) -> Row:
    generator = torch.Generator().manual_seed(number)
    return Row(
        f"B1-{number:04d}",
        torch.randint(0, 90, (tokens,), generator=generator),
        4,
        torch.randn(tokens, len(AUX_LAYERS), 32, generator=generator),
        torch.randn(tokens, 32, generator=generator),
    )


ROWS = [random_row(number, tokens) for number, tokens in enumerate([15, 30, 8, 15])]


def features(row: Row) -> Features:
    return Features(row.aux_TAD, row.final_TD)


def spoiled(row: Row, **parts: Any) -> Features:
    return replace(features(row), **parts)


def nan_somewhere(row: Row) -> Features:
    aux = row.aux_TAD.clone()
    aux[3, 1, 5] = torch.nan
    return spoiled(row, aux_TAD=aux)


def infinite_somewhere(row: Row) -> Features:
    final = row.final_TD.clone()
    final[2, 0] = torch.inf
    return spoiled(row, final_TD=final)


def last_row_never_filled(row: Row) -> Features:
    final = row.final_TD.clone()
    final[-1] = 0
    return spoiled(row, final_TD=final)


def one_row_repeated(row: Row) -> Features:
    aux = row.aux_TAD.clone()
    aux[1:4] = aux[1]
    return spoiled(row, aux_TAD=aux)


def first_rows_missing(row: Row) -> Features:
    return Features(row.aux_TAD[4:], row.final_TD[4:])


def a_layer_missing(row: Row) -> Features:
    return spoiled(row, aux_TAD=row.aux_TAD[:, 1:])


def layer_0_of_other_tokens(row: Row) -> Features:
    return spoiled(row, low_TD=row.final_TD[1:])


def half_precision(row: Row) -> Features:
    return spoiled(row, final_TD=row.final_TD.half())


def other_ids(row: Row) -> Features:
    return spoiled(row, returned_ids=[*row.input_ids_T.tolist()[:-1], 96])


def an_id_too_many(row: Row) -> Features:
    return spoiled(row, returned_ids=[1, *row.input_ids_T.tolist()])


def the_ids_it_was_sent(row: Row) -> Features:
    return spoiled(row, returned_ids=tuple(row.input_ids_T.tolist()))


def check_batch(samples: list[Sample], computed: list[Features]) -> None:
    batch_gates.check_rows(samples, computed, AUX_LAYERS, 32, torch.float32)
    batch_gates.check_ids(samples, computed)
    batch_gates.check_values(samples, computed, AUX_LAYERS)


def as_sample(row: Row) -> Sample:
    return Sample(row.sample_id, row.input_ids_T.tolist(), row.prompt_tokens)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (nan_somewhere, "aux layer 3 is not finite at 1 of 15 tokens, first at 3"),
        (infinite_somewhere, "final is not finite at 1 of 15 tokens, first at 2"),
        (last_row_never_filled, "final is constant at 1 of 15 tokens, first at 14"),
        (one_row_repeated, "aux layer 1 repeats its state at 2 of 15 tokens, first at 2"),
        (first_rows_missing, "11 states for 15 tokens.*prefix-cache hit or chunked prefill"),
        (a_layer_missing, "started for other layers"),
        (layer_0_of_other_tokens, "started for other layers"),
        (half_precision, r"states are torch\.float16"),
        (other_ids, "answered for 15 tokens that differ from the 15 it was sent, first at 14"),
        (an_id_too_many, "answered for 16 tokens that differ from the 15 it was sent, first at 0"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
@pytest.mark.parametrize("place", [0, 2])
def test_states_that_no_target_has_are_refused_wherever_they_are_in_a_batch(
    spoil: Callable[[Row], Features], sentence: str, place: int
) -> None:
    row, *others = ROWS
    others.insert(place, row)
    samples = list(map(as_sample, others))
    check_batch(samples, list(map(features, others)))
    computed = [spoil(row) if r is row else features(r) for r in others]
    with pytest.raises(DataError, match=f"^B1-0000: .*{sentence}"):
        check_batch(samples, computed)


def test_a_lost_row_is_refused() -> None:
    with pytest.raises(DataError, match=r"^B1-0000: the engine returned 3 rows for a batch of 4"):
        check_batch(list(map(as_sample, ROWS)), list(map(features, ROWS[1:])))


def test_a_neighbours_ids_are_named() -> None:
    samples = list(map(as_sample, ROWS))
    computed = list(map(features, ROWS))
    computed[0] = spoiled(ROWS[0], returned_ids=ROWS[3].input_ids_T.tolist())
    with pytest.raises(DataError, match=r"^B1-0000: .*states of its neighbour B1-0003"):
        check_batch(samples, computed)


def test_ids_that_come_back_as_they_were_sent_pass() -> None:
    row = ROWS[0]
    check_batch([as_sample(row)], [the_ids_it_was_sent(row)])


def test_equal_states_under_equal_ids_pass() -> None:
    row = ROWS[0]
    ids = [5] * len(row.input_ids_T)
    same = Features(row.aux_TAD[:1].expand(15, 3, 32), row.final_TD[:1].expand(15, 32))
    check_batch([Sample("s", ids, 1)], [same])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("begin", "size", "step"), [(0, 32, 1), (1, 32, 1), (3, 5, 1), (0, 8, 2)])
def test_repeated_states_are_found_in_whatever_part_of_memory_they_lie(
    dtype: torch.dtype, begin: int, size: int, step: int
) -> None:
    memory = torch.randn(4, 80, generator=torch.Generator().manual_seed(1)).to(dtype)
    part = memory[:, begin : begin + step * size : step]
    sample = Sample("s", [5, 6, 7, 8], 1)
    computed = Features(part[:, None].expand(4, 3, size), part)
    batch_gates.check_values([sample], [computed], AUX_LAYERS)
    memory[2] = memory[1]
    with pytest.raises(
        DataError, match="aux layer 1 repeats its state at 1 of 4 tokens, first at 2"
    ):
        batch_gates.check_values([sample], [computed], AUX_LAYERS)


def test_a_single_token_has_nothing_to_repeat() -> None:
    row = ROWS[0]
    check_batch([Sample("s", [5], 1)], [Features(row.aux_TAD[:1], row.final_TD[:1])])
