"""Two processes train what one trains, and end together."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file
from unit.drafter_site import DrafterSite
from unit.random_targets import greedy_rows, one_thread, save_target
from unit.spool_site import SpoolSite

from drafter import train
from drafter.errors import Busy, DataError, DrafterError, RecipeError
from drafter.extraction.shards import Row
from drafter.files import read_json, read_section
from drafter.processes import look
from drafter.training import checkpoint, distributed
from drafter.training.distributed import Group, share_out

INCLUDE = str(Path(train.__file__).parents[1])
OPTIONS = {"steps": 8, "checkpoint_every_steps": 4, "evaluate_every_steps": 3}
ENDS_WITHIN_S = 60
"""Far more than an end takes on a busy machine: what must not happen is that it never comes."""


def start(site: DrafterSite | SpoolSite, stderr: Any = None) -> subprocess.Popen[bytes]:
    """``stderr``: pytest's own unless told, which it shows when the test fails."""
    command = [sys.executable, "-m", "drafter", "run", str(site.job("train").dir.root)]
    environment = {**os.environ, "PYTHONPATH": INCLUDE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)


def lines(site: DrafterSite | SpoolSite) -> list[dict[str, Any]]:
    path = site.run.metrics
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("lengths", "size", "shares"),
    [
        ([5, 3, 4], 1, [[0, 1, 2]]),
        ([5, 3, 4], 2, [[0], [1, 2]]),
        ([7], 3, [[0], [], []]),
        ([2, 2, 2, 2], 2, [[0, 2], [1, 3]]),
        ([], 2, [[], []]),
    ],
)
def test_rows_are_shared_out_by_their_tokens(lengths, size, shares) -> None:
    assert share_out(lengths, size) == shares


def test_every_row_of_a_batch_is_somebodys() -> None:
    lengths = [(37 * i) % 101 + 2 for i in range(40)]
    for size in (1, 2, 3, 8):
        shares = [Group(rank, size).share(lengths) for rank in range(size)]
        assert sorted(itertools.chain(*shares)) == list(range(40))
        tokens = [sum(lengths[row] for row in share) for share in shares]
        assert max(tokens) - min(tokens) <= max(lengths)


def test_without_gpus_one_process_trains_unless_the_recipe_says_more() -> None:
    assert (distributed.processes(None), distributed.processes(3)) == (1, 3)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.processes(None) == 2
    with pytest.raises(RecipeError, match=r"train\.processes is 3, this machine has 2 GPUs"):
        distributed.processes(3)


# 300 tokens are a dozen rows; 2 make every batch a single row, which one of the two has to do.
@pytest.mark.parametrize("batch_tokens", [300, 2])
def test_two_processes_train_what_one_trains(tmp_path: Path, batch_tokens: int) -> None:
    options = {**OPTIONS, "batch_tokens": batch_tokens}
    one, two = (DrafterSite(tmp_path / str(n), train={**options, "processes": n}) for n in (1, 2))
    with one_thread():
        train.run(one.job("train"))
    assert start(two).wait(ENDS_WITHIN_S) == 0
    for alone, shared in ((one.run, two.run), map(checkpoint.no_states, (one.run, two.run))):
        pairs = zip(
            *([orjson.loads(line) for line in run.metrics.read_bytes().splitlines()]
              for run in (alone, shared)),
            strict=True,
        )  # fmt: skip
        for wanted, found in pairs:
            assert wanted.keys() == found.keys()
            for name in wanted.keys() - {"tokens_per_s"}:
                assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
        weights = [load_file(run.checkpoint(8) / checkpoint.WEIGHTS) for run in (alone, shared)]
        for name, tensor in weights[0].items():
            assert torch.allclose(tensor.float(), weights[1][name].float(), atol=1e-4), name
    sections = [read_section(site.run.manifest, "train") for site in (one, two)]
    assert sections[0] and sections[1]
    assert sections[0]["counts"]["tokens"] == sections[1]["counts"]["tokens"]
    assert read_json(two.job("train").dir.progress)["done"]


def await_lines(site: DrafterSite, job: subprocess.Popen[bytes], count: int) -> None:
    while len(lines(site)) < count:
        assert job.poll() is None
        time.sleep(0.001)


def test_a_killed_process_ends_the_job_and_the_next_start_resumes_to_the_bit(
    tmp_path: Path,
) -> None:
    options = {"steps": 60, "checkpoint_every_steps": 5, "no_states_baseline": False}
    calm, site = (
        DrafterSite(tmp_path / name, train={**options, "processes": 2}) for name in ("c", "k")
    )
    assert start(calm).wait(ENDS_WITHIN_S) == 0
    with open(tmp_path / "errors", "wb") as errors:
        job = start(site, errors)
        await_lines(site, job, 12)
        first, second = children(job.pid)
        os.kill(second, signal.SIGKILL)
        assert job.wait(ENDS_WITHIN_S) != 0
    said = (tmp_path / "errors").read_text()
    assert said.splitlines()[-1].startswith("drafter: process 2 of 2 was killed by SIGKILL")
    assert "Traceback" not in said and "terminate called" not in said
    assert look(first) is None and look(second) is None
    assert 10 <= checkpoint.steps(site.run)[-1] < 60
    assert start(site).wait(ENDS_WITHIN_S) == 0
    for path in calm.run.root.glob("step-*/*"):
        assert path.read_bytes() == (site.run.root / path.relative_to(calm.run.root)).read_bytes()
    assert [line["loss"] for line in lines(calm)] == [line["loss"] for line in lines(site)]


def test_a_killed_launcher_takes_its_processes_with_it(tmp_path: Path) -> None:
    site = DrafterSite(tmp_path, train={"steps": 2000, "processes": 2})
    job = start(site)
    await_lines(site, job, 2)
    both = children(job.pid)
    job.kill()
    job.wait()
    give_up = time.monotonic() + ENDS_WITHIN_S
    while any(look(pid) for pid in both):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_loss_that_is_not_finite_in_one_process_stops_all_with_the_samples_named(
    tmp_path: Path,
) -> None:
    site = DrafterSite(tmp_path, datasets=("B1",), train={**OPTIONS, "processes": 2})
    rows = site.rows("B1")
    row = rows[3]
    bad = row.aux_TAD.clone()
    bad[0] = float("nan")
    rows[3] = Row(row.sample_id, row.input_ids_T, row.prompt_tokens, bad, row.final_TD)
    site.extract("B1", rows)
    with open(tmp_path / "errors", "wb") as errors:
        assert start(site, errors).wait(ENDS_WITHIN_S) == DataError.exit_code
    said = (tmp_path / "errors").read_text()
    assert said.count("the states of B1-0003 are not finite") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("codes", "said", "wanted", "sentence"),
    [
        ([0, 0], "", None, ""),
        ([1, 65], "65 row B1-3 is damaged", DataError, "^row B1-3 is damaged$"),
        ([-9, 75], "75 nobody fills the spool", Busy, "^nobody fills the spool$"),
        ([1, -9], "", DrafterError, "process 2 of 2 was killed by SIGKILL"),
        ([None, 1], "", SystemExit, "1"),
    ],
)
def test_the_job_ends_as_the_one_that_knows_why(codes, said, wanted, sentence) -> None:
    if wanted is None:
        distributed._judge(codes, said)
        return
    with pytest.raises(wanted, match=sentence):
        distributed._judge(codes, said)


def test_two_processes_train_from_a_spool_what_one_trains_from_stored_states(
    tmp_path: Path,
) -> None:
    options = {"steps": 16, "checkpoint_every_steps": 6, "step_decay": 0.8}
    with one_thread():
        rows = greedy_rows(save_target(tmp_path / "target"), 30)
        stored, spooled = (
            SpoolSite(tmp_path / name, tmp_path / "target", rows, train={**options, **how})
            for name, how in (("stored", {"spool_shards": None}), ("spooled", {"processes": 2}))
        )
        stored.store()
        train.run(stored.job("train"))
        producer = spooled.start("spool")
        assert start(spooled).wait(ENDS_WITHIN_S) == 0
        assert os.waitstatus_to_exitcode(os.waitpid(producer, 0)[1]) == 0
    assert not spooled.spool.root.exists()
    for wanted, found in zip(stored.metrics(), spooled.metrics(), strict=True):
        for name in wanted:
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-4), name
    looked = [line for line in lines(spooled) if "held_out_loss" in line]
    assert [line["step"] for line in looked] == [6, 12, 16]
