"""Backends that are wrong as engines were in public: each is stopped, and no gate could be spared.

With one gate switched off, exactly the faults that are that gate's own go unnoticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from unit import wrong_backends, wrong_batches, wrong_target
from unit.random_targets import (
    AUX_LAYERS,
    LAYERS,
    VOCAB,
    greedy_rows,
    one_thread,
    save_target,
    validated_job,
)
from unit.wrong_backends import (
    VICTIM,
    Incomparable,
    Right,
    Target,
    WithoutAnything,
    WithoutReference,
)
from unit.wrong_target import Shifted, ShiftedLate

from drafter.backends.transformers import TransformersBackend
from drafter.errors import DataError, RecipeError
from drafter.extract import extract
from drafter.extraction import batch_gates, gates
from drafter.extraction.shard_maker import ShardMaker, Task
from drafter.extraction.shard_plan import Sample
from drafter.extraction.shards import Shard

NUM_ROWS, RUN = 20, "0" * 64
FAULTS: list[type[Right]] = [
    fault
    for module in (wrong_backends, wrong_target, wrong_batches)
    for fault in vars(module).values()
    if isinstance(fault, type) and fault.__module__ == module.__name__ and hasattr(fault, "gate")
]
GATES: dict[str, Any] = {
    "check_rows": batch_gates,
    "check_ids": batch_gates,
    "check_finite": batch_gates,
    "check_varied": batch_gates,
    "check_low_layer": gates,
    "check_reference": gates,
    "check_alone": gates,
    "check_next_tokens": gates,
    "check_again": gates,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(root / "target")
        backend = TransformersBackend(root / "target", torch.float32, range(LAYERS))
        samples = [Sample(**row) for row in greedy_rows(model, NUM_ROWS)]
        recipe = validated_job(root, root / "target", [], min_argmax_share=0.95).recipe
        yield Target(root / "target", model, backend, backend.head(), samples, recipe.extract)


def make(target: Target, backend: Right) -> Shard:
    """All rows in one shard; which row is drawn depends on nothing but RUN."""
    task = Task(Path("target"), RUN, RUN, target.settings, AUX_LAYERS, 32, VOCAB)
    maker = ShardMaker(task, target, lambda *_: backend, lambda _: None)
    return maker.make(0, range(NUM_ROWS))


def test_the_right_backend_passes_and_the_victim_is_not_computed_again(target: Target) -> None:
    numbers = make(target, Right(target)).header.gates
    assert numbers["argmax_matches"] == numbers["response_tokens"] > 300
    assert VICTIM not in {0, random.Random(f"{RUN} 0").randrange(NUM_ROWS)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_backend_is_stopped_by_its_gate_with_sample_and_cause(
    target: Target, fault: type[Right]
) -> None:
    with pytest.raises(DataError, match=rf"^B1-00\d\d: .*{fault.cause}") as refused:
        make(target, fault(target))
    assert {entry.name for entry in refused.traceback} & GATES.keys() == {fault.gate}


@pytest.fixture
def switched_off(gate: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The gate accepts everything; the others are as they were."""
    monkeypatch.setattr(GATES[gate], gate, lambda *_: 0.0)
    return gate


@pytest.mark.parametrize("gate", GATES)
def test_without_a_gate_exactly_its_own_faults_go_unnoticed(
    target: Target, switched_off: str
) -> None:
    unnoticed = set()
    for fault in FAULTS:
        try:
            make(target, fault(target))
        except DataError:
            continue
        except (RuntimeError, ValueError):
            pass  # Tensors that do not fit together: stopped, but nobody is told why.
        unnoticed.add(fault.__name__)
    assert unnoticed == {f.__name__ for f in FAULTS if f.own and f.gate == switched_off} != set()


def test_a_backend_with_neither_a_plain_forward_nor_layer_0_is_refused(target: Target) -> None:
    with pytest.raises(RecipeError, match="start the server with layer 0 among its ids"):
        make(target, WithoutAnything(target))


def test_a_layer_that_nothing_could_be_compared_with_is_refused_with_the_reason(
    target: Target,
) -> None:
    with pytest.raises(RecipeError, match=r"gives layer 1, but .* \(it is too large\): extract on"):
        make(target, Incomparable(target))


def test_layer_0_is_enough_where_the_target_is_too_large_to_run(target: Target) -> None:
    assert make(target, WithoutReference(target)).header.gates["reference_error"] == 0.0


@pytest.mark.parametrize("fault", [Shifted, ShiftedLate], ids=["at the probe", "in a shard"])
def test_nothing_is_written_of_a_wrong_backend(
    tmp_path: Path, target: Target, fault: type[Right]
) -> None:
    rows = [sample._asdict() for sample in target.samples]
    job = validated_job(tmp_path, target.directory, rows, min_argmax_share=0.95)
    with pytest.raises(DataError):
        extract(job, lambda *_: fault(target))
    assert list(job.workspace.hidden_states("B1").root.iterdir()) == []
