"""Extraction stores the states of a plain forward or stops, and ends the same wherever killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.random_targets import (
    AUX_LAYERS,
    greedy_rows,
    one_thread,
    save_target,
    validated_job,
    write_tokenized,
)

from drafter.errors import DataError, DrafterError
from drafter.extract import extract, run
from drafter.extraction.shard_maker import ShardMaker
from drafter.extraction.shards import Shard, read_rows, read_shard, shard_paths, write_shard
from drafter.files import read_json, read_section
from drafter.job import Job
from drafter.layout import HiddenStates
from drafter.plan import decide
from drafter.target_head import load_head

GIVE_UP_S = 30


@dataclass(frozen=True)
class Target:
    directory: Path
    model: Any
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(directory)
        yield Target(directory, model, greedy_rows(model, 20))


def hidden_of(job: Job) -> HiddenStates:
    return job.workspace.hidden_states("B1")


def digests(hidden: HiddenStates) -> dict[str, str]:
    files = sorted(hidden.root.iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def no_engine(*_: Any) -> Any:
    raise AssertionError("an engine was opened for nothing")


# The phase.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_lands_in_order_with_the_states_of_a_plain_forward(
    tmp_path: Path, target: Target, dtype: str
) -> None:
    job = validated_job(tmp_path, target.directory, target.rows, dtype=dtype)
    run(job)
    stored = list(read_rows(hidden_of(job)))
    assert [row.sample_id for row in stored] == [row["sample_id"] for row in target.rows]
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 1e-2, "atol": 1e-2}
    for row, source in zip(stored, target.rows, strict=True):
        assert row.input_ids_T.tolist() == source["input_ids"]
        assert row.prompt_tokens == source["prompt_tokens"]
        plain = target.model(input_ids=row.input_ids_T[None], output_hidden_states=True)
        for a, k in enumerate(AUX_LAYERS):
            want = plain.hidden_states[k][0]
            torch.testing.assert_close(row.aux_TAD[:, a].float(), want, **close)
        normed = load_head(target.directory).normed(row.final_TD)
        want = plain.hidden_states[-1][0]
        assert float((normed - want).norm() / want.norm()) < 1e-2
    for path in shard_paths(hidden_of(job)):
        assert len(read_shard(path).input_ids_T) <= 200


def test_the_manifest_says_what_is_there_and_the_plan_is_done(
    tmp_path: Path, target: Target
) -> None:
    job = validated_job(tmp_path, target.directory, target.rows, max_length=30)
    run(job)
    section = read_section(hidden_of(job).manifest, "extract")
    assert section is not None
    kept = [row for row in target.rows if len(row["input_ids"]) <= 30]
    counts = section["counts"]
    assert counts["rows"] == len(kept) < len(target.rows)
    assert counts["tokens"] == sum(len(row["input_ids"]) for row in kept)
    assert counts["left_out"] == {"longer than max_length": len(target.rows) - len(kept)}
    assert counts["shards"] == len(section["files"]) == len(digests(hidden_of(job))) - 1
    for name, record in section["files"].items():
        assert record["sha256"] == digests(hidden_of(job))[name]
    assert section["identity"] == {
        "target": str(target.directory),
        "revision": "r1",
        "aux_layers": list(AUX_LAYERS),
        "dtype": "float32",
        "norm": "before",
        "hidden_size": 32,
    }
    assert section["gates"]["argmax_share"] == 1.0
    assert section["gates"]["reference_error"] < 1e-5 > section["gates"]["alone_error"]
    assert decide("extract", "B1", job.workspace, job.recipe).action == "done"
    progress = read_json(job.dir.progress)
    assert progress["done"] and progress["changed"]


def test_a_second_run_opens_no_engine_and_changes_no_byte(tmp_path: Path, target: Target) -> None:
    job = validated_job(tmp_path, target.directory, target.rows)
    run(job)
    before = digests(hidden_of(job))
    extract(job, no_engine)
    assert digests(hidden_of(job)) == before
    assert read_json(job.dir.progress)["changed"] is False


class Disk:
    """Writes a shard only once the target is at work on the next one, or never will be."""

    def __init__(self, waits: int) -> None:
        self.waits, self.turns = waits, threading.Semaphore(0)
        self.late = 0

    def write(self, path: Path, shard: Shard) -> dict[str, Any]:
        if self.waits:
            self.waits -= 1
            self.late += not self.turns.acquire(timeout=GIVE_UP_S)
        return write_shard(path, shard)


def test_a_shard_is_written_while_the_target_makes_the_next_one(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = validated_job(tmp_path / "calm", target.directory, target.rows)
    run(calm)
    disk = Disk(waits=len(shard_paths(hidden_of(calm))) - 1)
    make = ShardMaker.make

    def making(self: ShardMaker, number: int, rows: Sequence[int]) -> Shard:
        if number:
            disk.turns.release()
        return make(self, number, rows)

    monkeypatch.setattr("drafter.extract.write_shard", disk.write)
    monkeypatch.setattr(ShardMaker, "make", making)
    job = validated_job(tmp_path / "late", target.directory, target.rows)
    run(job)
    assert (disk.waits, disk.late) == (0, 0)
    shards = [path.read_bytes() for path in shard_paths(hidden_of(job))]
    assert len(shards) > 2
    assert shards == [path.read_bytes() for path in shard_paths(hidden_of(calm))]


def test_a_disk_that_is_full_ends_the_job_though_the_target_is_at_work(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _shard: Shard) -> dict[str, Any]:
        raise DrafterError(f"no room for {path}")

    monkeypatch.setattr("drafter.extract.write_shard", full)
    job = validated_job(tmp_path, target.directory, target.rows)
    with pytest.raises(DrafterError, match=r"no room for .*shard-00000"):
        run(job)
    assert read_section(hidden_of(job).manifest, "extract") is None


def test_no_accepted_row_is_no_shard_and_a_valid_manifest(tmp_path: Path, target: Target) -> None:
    job = validated_job(tmp_path, target.directory, [])
    extract(job, no_engine)
    assert shard_paths(hidden_of(job)) == []
    assert decide("extract", "B1", job.workspace, job.recipe).action == "done"


def test_a_lost_shard_is_made_again_to_the_same_bytes(tmp_path: Path, target: Target) -> None:
    job = validated_job(tmp_path, target.directory, target.rows)
    run(job)
    before = digests(hidden_of(job))
    hidden_of(job).shard(1).unlink()
    hidden_of(job).shard(0).write_bytes(b"torn")
    run(job)
    assert digests(hidden_of(job)) == before


def test_shards_of_other_inputs_go_and_leave_no_trace(tmp_path: Path, target: Target) -> None:
    fresh = validated_job(tmp_path / "fresh", target.directory, target.rows[:5])
    run(fresh)
    job = validated_job(tmp_path / "used", target.directory, target.rows)
    run(job)
    write_tokenized(job.workspace.prepared("B1"), target.rows[:5])
    assert decide("extract", "B1", job.workspace, job.recipe).action == "start"
    run(job)
    assert digests(hidden_of(job)) == digests(hidden_of(fresh))


def test_another_bound_is_judged_without_extracting_again(tmp_path: Path, target: Target) -> None:
    strict = validated_job(tmp_path, target.directory, target.rows, min_argmax_share=1.0)
    run(strict)
    lax = validated_job(tmp_path, target.directory, target.rows, min_argmax_share=0.1)
    extract(lax, no_engine)
    assert decide("extract", "B1", lax.workspace, lax.recipe).action == "done"


def test_sampled_rows_below_the_bound_are_refused_now_and_later(
    tmp_path: Path, target: Target
) -> None:
    chance = random.Random(0)
    noise = [
        {**row, "input_ids": [chance.randrange(80) for _ in row["input_ids"]]}
        for row in target.rows
    ]
    lax = validated_job(tmp_path, target.directory, noise, min_argmax_share=0.0)
    run(lax)
    strict = validated_job(tmp_path, target.directory, noise, min_argmax_share=0.5)
    with pytest.raises(DataError, match=r"lower extract\.min_argmax_share"):
        extract(strict, no_engine)
    with pytest.raises(DataError, match=r"check target\.revision"):
        run(validated_job(tmp_path / "new", target.directory, noise, min_argmax_share=0.5))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda rows: rows[2]["input_ids"].append(97), "the target has 0..96"),
        (lambda rows: rows[2]["input_ids"].append(-1), "the target has 0..96"),
        (lambda rows: rows[2].update(prompt_tokens=99), "tokenized_data.jsonl:3 has no input_ids"),
        (lambda rows: rows[2].update(input_ids=[]), "tokenized_data.jsonl:3 has no input_ids"),
    ],
)
def test_a_row_that_cannot_be_run_is_named(
    tmp_path: Path, target: Target, spoil: Callable[[Any], Any], sentence: str
) -> None:
    rows = [{**row, "input_ids": list(row["input_ids"])} for row in target.rows]
    spoil(rows)
    with pytest.raises(DataError, match=sentence):
        run(validated_job(tmp_path, target.directory, rows))


def test_tokenized_data_that_changed_since_validate_is_refused(
    tmp_path: Path, target: Target
) -> None:
    job = validated_job(tmp_path, target.directory, target.rows)
    with open(job.workspace.prepared("B1").tokenized, "ab") as file:
        file.write(b"{}\n")
    with pytest.raises(DataError, match="not as validate left it"):
        run(job)


# Kills.


def in_a_child(job: Job, kill_at_shards: int | None = None) -> bool:
    """Extract in a forked process, SIGKILL it once so many shards are there; whether it died so."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            run(job)
            os._exit(0)
        finally:
            os._exit(1)
    ended, status = 0, 0
    while not ended:
        time.sleep(0.001)
        shards = len(list(hidden_of(job).root.glob("shard-*")))
        if kill_at_shards is not None and shards >= kill_at_shards:
            os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0)
        else:
            ended, status = os.waitpid(child, os.WNOHANG)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_killed_at_random_points_it_ends_in_the_bytes_of_an_undisturbed_run(
    tmp_path: Path, target: Target
) -> None:
    rows = target.rows
    calm = validated_job(tmp_path / "calm", target.directory, rows, shard_tokens=40)
    assert not in_a_child(calm)
    disturbed = validated_job(tmp_path / "disturbed", target.directory, rows, shard_tokens=40)
    points = sorted(random.Random(0).sample(range(1, 16), 5))
    assert sum(in_a_child(disturbed, point) for point in points) >= 3
    assert not in_a_child(disturbed)
    assert digests(hidden_of(disturbed)) == digests(hidden_of(calm))
