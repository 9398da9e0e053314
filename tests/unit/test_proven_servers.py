"""A server is believed only when it gives the states that were compared with the target: at first,
at every URL, after every loss, and at the end of every shard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from unit.fake_engine import Reply
from unit.fake_states import layers_of
from unit.random_targets import (
    AUX_LAYERS,
    LAYERS,
    greedy_rows,
    one_thread,
    save_target,
    validated_job,
)
from unit.test_vllm_states import ALL, fake

from drafter.backends import handover, servers
from drafter.backends.transformers import TransformersBackend
from drafter.errors import DataError
from drafter.extract import run
from drafter.extraction.shards import read_shard
from drafter.job import Job


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "BACKOFF_S", 0.01)
    monkeypatch.setattr(servers, "PATIENCE_S", 0.1)
    monkeypatch.setattr(handover, "APPEAR_S", 0.05)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        save_target(directory)
        yield directory


def other_layers(target: Path) -> Any:
    """As many as are needed, one of them another: nothing that a server says tells them apart."""
    return layers_of(target, LAYERS, (0, 1, 2, 4, LAYERS))


WRONG_STATES = r"^B1-\d+: aux layer 3 of {url} differs from its proven states .*start it as it was"


def test_a_server_that_comes_back_with_other_layers_is_refused_and_nothing_of_it_is_stored(
    tmp_path: Path, target: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    rows = saved_rows(target, 24)
    with fake(target, files) as server:

        def disturb(number: int) -> Reply | None:
            if number != 18:
                return None
            server.states = other_layers(target)
            return Reply(cut="reset")

        server.disturb = disturb
        job = validated_job(tmp_path, target, rows, backend="vllm", urls=[server.url])
        with pytest.raises(DataError, match=WRONG_STATES.format(url=server.url)):
            run(job)
        stored = right_rows(job, target)
        assert 0 < len(stored) < len(rows) and all(stored)
        server.states, server.disturb = layers_of(target, LAYERS, ALL), lambda _: None
        run(job)
    assert right_rows(job, target) == [True] * len(rows)
    assert os.listdir(files) == []


def test_a_server_that_changes_unseen_is_found_out_at_the_end_of_the_shard(
    tmp_path: Path, target: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    with fake(target, files) as server:

        def disturb(number: int) -> None:
            if number == 18:
                server.states = other_layers(target)

        server.disturb = disturb
        rows = saved_rows(target, 24)
        job = validated_job(tmp_path, target, rows, backend="vllm", urls=[server.url])
        with pytest.raises(DataError, match="differs from"):
            run(job)
    assert all(right_rows(job, target))


@pytest.mark.parametrize("wrong", [0, 1], ids=["the first", "the second"])
def test_of_two_servers_each_must_give_the_proven_states(
    tmp_path: Path, target: Path, wrong: int
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    rows = saved_rows(target, 12)
    with fake(target, files) as one, fake(target, files) as other:
        (one, other)[wrong].states = other_layers(target)
        job = validated_job(tmp_path, target, rows, backend="vllm", urls=[one.url, other.url])
        with pytest.raises(DataError, match="aux layer 3 "):
            run(job)
    assert right_rows(job, target) == []


def saved_rows(target: Path, count: int) -> list[dict[str, Any]]:
    with one_thread():
        return greedy_rows(AutoModelForCausalLM.from_pretrained(target), count)


def right_rows(job: Job, target: Path) -> list[bool]:
    """Of each row that is stored, whether its auxiliary states are the target's."""
    plain = TransformersBackend(target, torch.float32, AUX_LAYERS)
    shards = sorted(job.workspace.hidden_states("B1").root.glob("shard-*"))
    rows = [row for path in shards for row in read_shard(path).rows()]
    return [
        torch.allclose(row.aux_TAD, plain.features([row.input_ids_T.tolist()])[0].aux_TAD, 1e-3)
        for row in rows
    ]
