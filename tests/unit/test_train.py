"""The training phase on a made-up target: it learns, it resumes to the bit, it refuses bad data."""

import itertools
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.drafter_site import DrafterSite

from drafter import plan, train
from drafter.errors import DataError, DrafterError, RecipeError
from drafter.extraction.shards import Row
from drafter.files import read_json, read_section
from drafter.training import checkpoint, corpus, trainer


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small gain nothing from a second thread and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def metrics(path: Path) -> list[dict]:
    """Lines of metrics.jsonl without what depends on the clock."""
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def weights(run, step: int) -> dict[str, bytes]:
    directory = run.checkpoint(step)
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_the_drafter_learns_and_the_states_are_why(tmp_path):
    site = DrafterSite(tmp_path, train={"steps": 100, "checkpoint_every_steps": 70})
    train.run(site.job("train"))
    lines, blind = (metrics(r.metrics) for r in (site.run, checkpoint.no_states(site.run)))
    assert [line["step"] for line in lines] == list(range(1, 101))
    assert lines[0]["loss"] > 10 and lines[-1]["loss"] < 4
    assert lines[-1]["acc_0"] > 0.7
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in blind]
    assert blind[-1]["loss"] > 1.3 * lines[-1]["loss"]

    section = read_section(site.run.manifest, "train")
    counts = section["counts"]
    assert counts["steps"] == 100
    assert counts["trained_rows"] + counts["held_out_rows"] + sum(counts["left_out"].values()) == 80
    assert counts["last_loss"] == lines[-1]["loss"]
    assert section["no_states"]["last_loss"] == blind[-1]["loss"]
    assert checkpoint.steps(site.run) == [70, 100]

    progress = read_json(site.job("train").dir.progress)
    assert progress["done"] and progress["changed"] and "100 steps" in progress["line"]
    train.run(site.job("train"))
    assert not read_json(site.job("train").dir.progress)["changed"]


def test_a_baseline_asked_for_later_is_trained_beside_what_is_there(tmp_path):
    site = DrafterSite(tmp_path, train={"steps": 20, "no_states_baseline": False})
    train.run(site.job("train"))
    run, before = site.run, weights(site.run, 20)
    inodes = [path.stat().st_ino for path in run.checkpoint(20).iterdir()]
    site.train["no_states_baseline"] = True
    assert site.run == run
    assert plan.decide("train", "all", site.workspace, site.recipe).action == "start"
    train.run(site.job("train"))
    assert weights(run, 20) == before
    assert [path.stat().st_ino for path in run.checkpoint(20).iterdir()] == inodes
    assert read_section(run.manifest, "train")["no_states"]["steps"] == 20
    assert plan.decide("train", "all", site.workspace, site.recipe).action == "done"


def test_one_batch_is_learnt_by_heart(tmp_path):
    site = DrafterSite(tmp_path, num_rows=6, train={"batch_tokens": 10_000, "steps": 150})
    rows = corpus.collect(site.workspace, site.recipe)
    head = corpus.read_head(site.recipe, rows)
    drafter = train.untrained(site.recipe, rows, head)
    made = trainer.Trainer(site.recipe.train, head)
    batch = [entry.read() for entry in rows.trained]
    optimizer = torch.optim.AdamW(drafter.parameters())
    judge = head.lm_head[drafter.draft_ids]
    steps = [made.step(i, batch, drafter, optimizer, judge) for i in range(1, 150)]
    assert all(steps[-1][f"acc_{i}"] > 0.99 for i in range(3))


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from drafter import jsonl, train
from drafter.training import checkpoint
from drafter.job import load_job

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

append, write = jsonl.Appender.append, checkpoint.write_json
if sys.argv[2] == "between checkpoints":
    jsonl.Appender.append = lambda self, row: die() if row["step"] == 17 else append(self, row)
else:
    checkpoint.write_json = lambda at, state: die() if state["step"] == 20 else write(at, state)
train.run(load_job(Path(sys.argv[1])))
"""


def test_killed_anywhere_it_ends_in_the_same_bits(tmp_path, capsys):
    whole, killed = DrafterSite(tmp_path / "whole"), DrafterSite(tmp_path / "killed")
    train.run(whole.job("train"))
    include = str(Path(train.__file__).parents[1])
    for moment in ("between checkpoints", "within a checkpoint"):
        command = [sys.executable, "-c", KILLED, str(killed.job("train").dir.root), moment]
        process = subprocess.run(command, env={"PYTHONPATH": include}, capture_output=True)
        assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert checkpoint.steps(killed.run) == [10]
    assert len(metrics(killed.run.metrics)) == 20
    capsys.readouterr()
    train.run(killed.job("train"))
    assert "with the target's states: from step 10 to 30" in capsys.readouterr().out
    for one, other in (
        (whole.run, killed.run),
        *[map(checkpoint.no_states, (whole.run, killed.run))],
    ):
        assert weights(one, 30) == weights(other, 30)
        assert metrics(one.metrics) == metrics(other.metrics)
    assert not list(killed.run.root.glob(".step-*"))


def test_no_steps_leave_the_untrained_drafter(tmp_path):
    site = DrafterSite(tmp_path, train={"steps": 0, "no_states_baseline": False})
    train.run(site.job("train"))
    rows = corpus.collect(site.workspace, site.recipe)
    untrained = train.untrained(site.recipe, rows, corpus.read_head(site.recipe, rows))
    saved = load_file(site.run.checkpoint(0) / checkpoint.WEIGHTS)
    assert all(torch.equal(saved[name], tensor) for name, tensor in untrained.state_dict().items())
    assert read_section(site.run.manifest, "train")["counts"]["steps"] == 0
    assert read_section(site.run.manifest, "train")["no_states"] is None


def test_a_full_disk_in_the_middle_of_a_checkpoint_leaves_the_one_before(tmp_path):
    site = DrafterSite(tmp_path, train={"steps": 10, "no_states_baseline": False})
    train.run(site.job("train"))
    before = weights(site.run, 10)
    rows = corpus.collect(site.workspace, site.recipe)
    drafter = checkpoint.load_drafter(site.run.checkpoint(10), corpus.read_head(site.recipe, rows))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(DrafterError, match=r"step-000020 cannot be written .* free disk space"):
            checkpoint.save(site.run, 20, drafter, torch.optim.AdamW(drafter.parameters()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.steps(site.run) == [10] and weights(site.run, 10) == before
    assert not list(site.run.root.glob(".step-*"))


def test_a_damaged_checkpoint_is_named(tmp_path):
    site = DrafterSite(tmp_path, train={"steps": 10, "no_states_baseline": False})
    train.run(site.job("train"))
    path = site.run.checkpoint(10) / checkpoint.WEIGHTS
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"step-000010/drafter\.safetensors cannot be read"):
        train.run(site.job("train"))


@pytest.mark.parametrize("guilty", [True, False])
def test_a_loss_that_is_not_finite_names_the_samples(tmp_path, guilty):
    site = DrafterSite(tmp_path, datasets=("B1",), train={"learning_rate": 3e-3})
    rows = site.rows("B1")
    if guilty:
        bad = rows[3].aux_TAD.clone()
        bad[0] = float("nan")
        rows[3] = Row(rows[3].sample_id, rows[3].input_ids_T, rows[3].prompt_tokens, bad,
                      rows[3].final_TD)  # fmt: skip
        site.extract("B1", rows)
        with pytest.raises(DataError, match=r"the states of B1-0003 are not finite"):
            train.run(site.job("train"))
    else:
        found = corpus.collect(site.workspace, site.recipe)
        head = corpus.read_head(site.recipe, found)
        drafter = train.untrained(site.recipe, found, head)
        drafter.fc.weight.data[0, 0] = float("inf")
        made = trainer.Trainer(site.recipe.train, head)
        batch = [entry.read() for entry in found.trained]
        optimizer = torch.optim.AdamW(drafter.parameters())
        with pytest.raises(DataError, match=r"finite states, in a batch of B1-.* and \d+ more"):
            judge = head.lm_head[drafter.draft_ids]
            made.step(1, batch, drafter, optimizer, judge)


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        ({"revision": "r2"}, "B1 and B2 were extracted differently .revision: r1 and r2"),
        ({"aux_layers": [2, 3, 4]}, "aux_layers"),
        ({"norm": "after"}, "norm: before and after"),
        ({"hidden_size": 64}, "hidden_size: 32 and 64"),
    ],
)
def test_datasets_of_different_extractions_are_not_mixed(tmp_path, identity, said):
    site = DrafterSite(tmp_path)
    site.extract("B2", site.rows("B2"), **identity)
    with pytest.raises(DataError, match=said):
        train.run(site.job("train"))


def test_states_of_another_revision_than_the_recipes_are_refused(tmp_path):
    site = DrafterSite(tmp_path, revision="old")
    with pytest.raises(DataError, match=r"revision old .* target is r1"):
        train.run(site.job("train"))


def test_states_of_other_weights_under_the_same_revision_are_refused(tmp_path):
    site = DrafterSite(tmp_path)
    weights = load_file(site.root / "target" / "model.safetensors")
    other = {name: tensor.roll(1, 0) for name, tensor in weights.items()}
    save_file(other, site.root / "target" / "model.safetensors")
    with pytest.raises(DataError, match=r"0\.\d\d of the states, .*not those of the extraction"):
        train.run(site.job("train"))


def test_an_empty_dataset_is_named(tmp_path):
    site = DrafterSite(tmp_path)
    site.extract("B2", [])
    with pytest.raises(DataError, match="B2 has no extracted rows"):
        train.run(site.job("train"))


def test_a_dataset_that_is_not_extracted_is_named(tmp_path):
    site = DrafterSite(tmp_path)
    site.workspace.hidden_states("B2").manifest.unlink()
    with pytest.raises(DataError, match="B2"):
        train.run(site.job("train"))


def test_rows_too_short_to_draft_in_are_counted(tmp_path):
    site = DrafterSite(tmp_path, datasets=("B1",))
    rows = site.rows("B1")
    short = [Row(f"short-{i}", torch.arange(4), 3, torch.zeros(4, 3, 32), torch.zeros(4, 32))
             for i in range(2)]  # fmt: skip
    before = corpus.collect(site.workspace, site.recipe).left_out.get("response too short", 0)
    site.extract("B1", rows + short)
    found = corpus.collect(site.workspace, site.recipe)
    assert found.left_out == {"response too short": before + 2}


def test_the_split_depends_on_the_sample_id_alone():
    ids = [f"B1-{i}" for i in range(4000)]
    small = {i for i in ids if corpus.is_held_out(i, 0.02)}
    large = {i for i in ids if corpus.is_held_out(i, 0.2)}
    assert small < large
    assert 50 < len(small) < 110 and 700 < len(large) < 900


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    tokens = [30, 200, 10, 45, 99, 60, 77, 20]
    order = corpus.batches(tokens, 100, seed=1)
    epochs = []
    for _ in range(2):
        epoch: list[list[int]] = []
        while sum(map(len, epoch)) < len(tokens):
            epoch.append(next(order))
        assert sorted(itertools.chain(*epoch)) == list(range(len(tokens)))
        assert all(len(b) == 1 or sum(tokens[i] for i in b) <= 100 for b in epoch)
        epochs.append(epoch)
    assert epochs[0] != epochs[1]
    again = corpus.batches(tokens, 100, seed=1)
    assert list(itertools.islice(again, len(epochs[0]))) == epochs[0]
    other = corpus.batches(tokens, 100, seed=2)
    assert list(itertools.islice(other, len(epochs[0]))) != epochs[0]


def test_the_learning_rate_warms_up_and_falls_to_zero(tmp_path):
    options = DrafterSite(tmp_path, train={"steps": 100, "warmup_share": 0.1}).recipe.train
    rates = [trainer.learning_rate(done, options) / options.learning_rate for done in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[10] == 1.0
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001


def test_a_batch_that_does_not_fit_the_gpu_is_a_sentence_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train.Trainer, "fit", full)
    with pytest.raises(RecipeError, match=r"lower train\.batch_tokens, set train\.recompute"):
        train.run(DrafterSite(tmp_path).job("train"))
