"""Every fault that others met in hidden states is stopped by a gate that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from unit.random_targets import AUX_LAYERS, greedy_rows, one_thread, save_target

from drafter.backends.transformers import TransformersBackend
from drafter.errors import DataError
from drafter.extraction import gates
from drafter.extraction.shards import Features, Row
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


def compared(rows: list[Row]) -> list[int]:
    return [len(row.input_ids_T) - max(row.prompt_tokens, 1) for row in rows]


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
            lambda: target.head,
            ((r.sample_id, target.reference(r)) for r in target.rows[1:]),
        )
    assert str(refused.value).startswith("B1-0000: ")


def test_right_states_pass_the_reference_with_a_tiny_error(target: Target) -> None:
    for row in target.rows:
        error = gates.check_reference(
            row.sample_id, features(row), AUX_LAYERS, target.reference(row), lambda: target.head, []
        )
        assert error < 1e-5


def test_bfloat16_rounding_passes_and_a_shift_of_bfloat16_states_does_not(target: Target) -> None:
    row = target.rows[0]
    half = Features(row.aux_TAD.bfloat16(), row.final_TD.bfloat16())
    reference = target.reference(row)
    assert gates.check_reference("s", half, AUX_LAYERS, reference, lambda: target.head, []) < 0.01
    late = Features(half.aux_TAD.roll(1, 0), half.final_TD.roll(1, 0))
    with pytest.raises(DataError, match=LATE):
        gates.check_reference("s", late, AUX_LAYERS, reference, lambda: target.head, [])


def test_a_head_that_is_not_the_targets_is_refused(target: Target) -> None:
    row = target.rows[0]
    other = replace(target.head, lm_head=target.head.lm_head * 1.5)
    with pytest.raises(DataError, match="head is more than RMS norm and one matrix"):
        gates.check_reference(
            "s", features(row), AUX_LAYERS, target.reference(row), lambda: other, []
        )


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


# Layer 0.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda rows_TD, _: rows_TD.roll(1, 0), LATE),
        (lambda rows_TD, _: rows_TD.roll(-1, 0), EARLY),
        (lambda rows_TD, _: rows_TD * 5.657, r"scales its embeddings by 5\.6"),
        (lambda _, reference: reference.layers[1], r"layer off by \+1"),
        (lambda rows_TD, _: rows_TD * 1.02, r"scales its embeddings by 1\.02"),
        (lambda rows_TD, _: rows_TD + 0.1, "none of the known faults fits"),
    ],
    ids=["late", "early", "scaled", "layer above", "slightly scaled", "moved"],
)
def test_a_layer_0_that_is_not_the_embedding_of_the_ids_is_refused(
    target: Target, spoil: Callable[[Any, Any], torch.Tensor], cause: str, dtype: torch.dtype
) -> None:
    row = target.rows[0]
    rows_TD, reference = target.head.embed[row.input_ids_T], target.reference(row)
    gates.check_low_layer("s", rows_TD.to(dtype), 0, reference.layers, [])
    gates.check_low_layer("s", rows_TD.to(dtype), 0, [rows_TD], [])
    with pytest.raises(DataError, match=f"^s: layer 0 differs.*{cause}"):
        gates.check_low_layer("s", spoil(rows_TD, reference).to(dtype), 0, reference.layers, [])


def test_a_layer_0_of_other_precision_or_of_a_neighbour_is_named(target: Target) -> None:
    row, other = target.rows[:2]
    rows_TD = target.head.embed[row.input_ids_T]
    with pytest.raises(DataError, match="computes in bfloat16"):
        gates.check_low_layer("s", rows_TD.bfloat16().float(), 0, [rows_TD], [])
    others_TD = target.head.embed[other.input_ids_T]
    got_TD = torch.cat([others_TD, rows_TD[len(others_TD) :]])[: len(rows_TD)]
    with pytest.raises(DataError, match="rows of its neighbour n"):
        gates.check_low_layer("s", got_TD, 0, [rows_TD], [("n", others_TD)])


def test_a_scaled_layer_0_passes_where_a_plain_forward_scales_too(target: Target) -> None:
    rows_TD = target.head.embed[target.rows[0].input_ids_T] * 5.656854
    assert gates.check_low_layer("s", rows_TD.bfloat16(), 0, [rows_TD], []) < 0.01


def test_only_the_layers_that_a_plain_forward_ran_are_compared(target: Target) -> None:
    row = target.rows[0]
    whole = target.reference(row)
    first = gates.Reference(whole.layers[: AUX_LAYERS[0] + 1])

    def unused() -> TargetHead:
        raise AssertionError("a head was read for nothing")

    assert gates.check_reference("s", features(row), AUX_LAYERS, first, unused, []) < 1e-5
    later_wrong = layer_above(target, row, row).aux_TAD
    later_wrong[:, 0] = row.aux_TAD[:, 0]
    got = spoiled(row, aux_TAD=later_wrong)
    assert gates.check_reference("s", got, AUX_LAYERS, first, unused, []) < 1e-5
    with pytest.raises(DataError, match=r"aux layer 1 differs.*layer off by -1"):
        gates.check_reference("s", layer_below(target, row, row), AUX_LAYERS, first, unused, [])


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
        gates.check_next_tokens(rows, counts, compared(rows), 0.95, lambda: target.head)


def test_an_engine_whose_logits_miss_the_last_norm_is_named(target: Target) -> None:
    with pytest.raises(DataError, match="the engine's own logits miss the last norm"):
        gates.check_next_tokens(
            target.rows, [0] * 4, compared(target.rows), 0.95, lambda: target.head
        )


def test_greedy_rows_predict_themselves(target: Target) -> None:
    counts = [matches(target, row) for row in target.rows]
    numbers = counts, compared(target.rows)
    assert gates.check_next_tokens(target.rows, *numbers, 0.99, lambda: target.head) == 1.0


def test_a_row_of_which_nothing_was_compared_is_never_the_worst(target: Target) -> None:
    with pytest.raises(DataError, match=r"^B1-0002: .* for 1 of its 4 response tokens and 28\.6%"):
        gates.check_next_tokens(target.rows, [0, 1, 1, 0], [0, 3, 4, 0], 0.95, lambda: target.head)


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
