"""Every fault that others met in hidden states is stopped by a gate that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from unit.random_targets import AUX_LAYERS, greedy_rows, one_thread, save_target

from drafter import gates
from drafter.backends.transformers import TransformersBackend
from drafter.errors import DataError
from drafter.shards import Features, Row
from drafter.target_head import TargetHead, load_head

LATE, EARLY = "position t holds the state of t - 1", r"position t holds the state of t \+ 1"


@dataclass(frozen=True)
class Target:
    """A real target, greedy rows of it, and their true states."""

    backend: TransformersBackend
    head: TargetHead
    rows: list[Row]

    def reference(self, row: Row) -> gates.Reference:
        return self.backend.reference(row.input_ids_T.tolist())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(directory)
        backend = TransformersBackend(directory, torch.float32, AUX_LAYERS)
        tokenized = greedy_rows(model, 4)
        computed = backend.features([row["input_ids"] for row in tokenized])
        rows = [
            Row(
                row["sample_id"],
                torch.tensor(row["input_ids"]),
                row["prompt_tokens"],
                features.aux_TAD,
                features.final_TD,
            )
            for row, features in zip(tokenized, computed, strict=True)
        ]
        yield Target(backend, load_head(directory), rows)


def features(row: Row) -> Features:
    return Features(row.aux_TAD, row.final_TD)


def matches(target: Target, row: Row) -> int:
    start = max(row.prompt_tokens, 1)
    predicted = target.backend.logits_rows(row.final_TD[start - 1 : -1]).argmax(-1)
    return int((predicted == row.input_ids_T[start:]).sum())


# Faults: each takes the target, a row's true states and a neighbour's, and gives wrong states.


def row_late(_: Target, row: Row, __: Row) -> Features:
    return Features(row.aux_TAD.roll(1, 0), row.final_TD.roll(1, 0))


def row_early(_: Target, row: Row, __: Row) -> Features:
    return Features(row.aux_TAD.roll(-1, 0), row.final_TD.roll(-1, 0))


def final_late(_: Target, row: Row, __: Row) -> Features:
    return replace(features(row), final_TD=row.final_TD.roll(1, 0))


def layer_above(target: Target, row: Row, _: Row) -> Features:
    states = target.reference(row).layers
    return replace(features(row), aux_TAD=torch.stack([states[k + 1] for k in AUX_LAYERS], 1))


def layer_below(target: Target, row: Row, _: Row) -> Features:
    states = target.reference(row).layers
    return replace(features(row), aux_TAD=torch.stack([states[k - 1] for k in AUX_LAYERS], 1))


def final_a_layer_early(target: Target, row: Row, _: Row) -> Features:
    return replace(features(row), final_TD=target.reference(row).layers[-1])


def norm_applied(target: Target, row: Row, _: Row) -> Features:
    return replace(features(row), final_TD=target.head.normed(row.final_TD))


def neighbours_rows(_: Target, row: Row, other: Row) -> Features:
    tokens = len(row.input_ids_T)
    return Features(
        torch.cat([other.aux_TAD, row.aux_TAD[len(other.aux_TAD) :]])[:tokens],
        torch.cat([other.final_TD, row.final_TD[len(other.final_TD) :]])[:tokens],
    )


def last_row_foreign(_: Target, row: Row, other: Row) -> Features:
    final = row.final_TD.clone()
    final[-1] = other.final_TD[0]
    return replace(features(row), final_TD=final)


REFERENCE_FAULTS = [
    (row_late, LATE),
    (row_early, EARLY),
    (final_late, LATE),
    (layer_above, r"layer off by \+1, it is hidden_states\[2\]"),
    (layer_below, r"layer off by -1, it is hidden_states\[0\]"),
    (final_a_layer_early, r"layer off by -1, it is hidden_states\[5\]"),
    (norm_applied, "the last norm is already applied"),
    (neighbours_rows, "rows of its neighbour B1-0001"),
    (last_row_foreign, "none of the known faults fits"),
]


Fault = Callable[[Target, Row, Row], Features]


@pytest.mark.parametrize(
    ("fault", "cause"), REFERENCE_FAULTS, ids=lambda f: getattr(f, "__name__", "")
)
def test_states_that_are_not_those_of_a_plain_forward_are_refused(
    target: Target, fault: Fault, cause: str
) -> None:
    row, other = target.rows[0], target.rows[1]
    with pytest.raises(DataError, match=cause) as refused:
        gates.check_reference(
            row.sample_id,
            fault(target, row, other),
            AUX_LAYERS,
            target.reference(row),
            target.head,
            ((r.sample_id, target.reference(r)) for r in target.rows[1:]),
        )
    assert str(refused.value).startswith("B1-0000: ")


def test_right_states_pass_the_reference_with_a_tiny_error(target: Target) -> None:
    for row in target.rows:
        error = gates.check_reference(
            row.sample_id, features(row), AUX_LAYERS, target.reference(row), target.head, []
        )
        assert error < 1e-5


def test_bfloat16_rounding_passes_and_a_shift_of_bfloat16_states_does_not(target: Target) -> None:
    row = target.rows[0]
    half = Features(row.aux_TAD.bfloat16(), row.final_TD.bfloat16())
    reference = target.reference(row)
    assert gates.check_reference("s", half, AUX_LAYERS, reference, target.head, []) < 0.01
    late = Features(half.aux_TAD.roll(1, 0), half.final_TD.roll(1, 0))
    with pytest.raises(DataError, match=LATE):
        gates.check_reference("s", late, AUX_LAYERS, reference, target.head, [])


def test_a_head_that_is_not_the_targets_is_refused(target: Target) -> None:
    row = target.rows[0]
    other = replace(target.head, lm_head=target.head.lm_head * 1.5)
    with pytest.raises(DataError, match="head is more than RMS norm and one matrix"):
        gates.check_reference("s", features(row), AUX_LAYERS, target.reference(row), other, [])


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(row_late, LATE), (row_early, EARLY), (neighbours_rows, "rows of its neighbour B1-0001")],
)
def test_a_row_that_its_batch_changed_is_refused(target: Target, fault: Fault, cause: str) -> None:
    row, other = target.rows[0], target.rows[1]
    wrong = fault(target, row, other)
    with pytest.raises(DataError, match=cause):
        gates.check_alone(
            row.sample_id,
            wrong,
            features(row),
            AUX_LAYERS,
            ((r.sample_id, features(r)) for r in target.rows[1:]),
        )


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


def half_precision(row: Row) -> Features:
    return spoiled(row, final_TD=row.final_TD.half())


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (nan_somewhere, "aux layer 3 is not finite at 1 of 15 tokens, first at 3"),
        (infinite_somewhere, "final is not finite"),
        (last_row_never_filled, "final is constant at 1 of 15 tokens, first at 14"),
        (one_row_repeated, "aux layer 1 repeats its state"),
        (first_rows_missing, "11 states for 15 tokens.*prefix-cache hit or chunked prefill"),
        (a_layer_missing, "started for other layers"),
        (half_precision, "states are torch.float16"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_states_that_no_target_has_are_refused(
    target: Target, spoil: Callable[[Row], Features], sentence: str
) -> None:
    row = target.rows[0]
    ids = row.input_ids_T.tolist()
    gates.check_form(row.sample_id, ids, features(row), AUX_LAYERS, 32, torch.float32)
    with pytest.raises(DataError, match=sentence):
        gates.check_form(row.sample_id, ids, spoil(row), AUX_LAYERS, 32, torch.float32)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (row_late, LATE),
        (row_early, EARLY),
        (norm_applied, "the last norm is already applied"),
        (neighbours_rows, "rows of its neighbour B1-000"),
        (final_a_layer_early, "an earlier layer was taken as final"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_states_that_do_not_predict_the_response_are_refused(
    target: Target, fault: Fault, cause: str
) -> None:
    wrong = [fault(target, row, target.rows[i - 1]) for i, row in enumerate(target.rows)]
    rows = [
        replace(row, aux_TAD=w.aux_TAD, final_TD=w.final_TD)
        for row, w in zip(target.rows, wrong, strict=True)
    ]
    counts = [matches(target, row) for row in rows]
    with pytest.raises(DataError, match=cause):
        gates.check_next_tokens(rows, counts, 0.95, lambda: target.head)


def test_an_engine_whose_logits_miss_the_last_norm_is_named(target: Target) -> None:
    with pytest.raises(DataError, match="the engine's own logits miss the last norm"):
        gates.check_next_tokens(target.rows, [0] * 4, 0.95, lambda: target.head)


def test_greedy_rows_predict_themselves(target: Target) -> None:
    counts = [matches(target, row) for row in target.rows]
    assert gates.check_next_tokens(target.rows, counts, 0.99, lambda: target.head) == 1.0


@pytest.mark.parametrize(
    ("matches", "total", "bound", "low"),
    [
        (0, 0, 0.9, False),
        (0, 3, 0.3, False),
        (0, 40, 0.3, True),
        (280, 1000, 0.3, False),
        (250, 1000, 0.3, True),
        (999, 1000, 1.0, True),
        (0, 1000, 0.0, False),
    ],
)
def test_a_share_counts_as_low_only_beyond_chance(
    matches: int, total: int, bound: float, low: bool
) -> None:
    assert gates.share_too_low(matches, total, bound) is low
