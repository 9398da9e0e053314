"""Recomputed activations, held-out losses, the best checkpoint, and what is made of the numbers."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from unit.drafter_site import DrafterSite
from unit.random_targets import one_thread
from unit.spool_site import forked
from unit.test_model import DECAY, ROWS, STEPS, drafter, head

from drafter import train
from drafter.errors import DataError
from drafter.extraction.shards import Row
from drafter.files import read_json, read_section
from drafter.layout import DrafterRun
from drafter.plan import decide
from drafter.training import checkpoint, corpus, held_out_rows, trainer
from drafter.training.alignment import align, packed
from drafter.training.checkpoint import Best
from drafter.training.loss import Judge, soft_cross_entropy

LOOKS = {"steps": 30, "checkpoint_every_steps": 10, "no_states_baseline": False}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


def metrics(run: DrafterRun) -> list[dict[str, Any]]:
    lines = [orjson.loads(line) for line in run.metrics.read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def kept(run: DrafterRun) -> dict[str, bytes]:
    """Every file of every checkpoint, and the curves."""
    paths = [*run.root.glob("step-*/*"), run.curves]
    return {str(path.relative_to(run.root)): path.read_bytes() for path in sorted(paths)}


def losses_of(recompute: bool, kept_bytes: list[int]) -> tuple[Tensor, list[Tensor]]:
    model, target, batch = drafter(), head(), align(ROWS)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = model.train_states(batch, STEPS, recompute)
    judge = Judge(target.normed(batch.final_QH), target.lm_head[model.draft_ids], batch.left_Q)
    losses = soft_cross_entropy(states, model.lm_head.weight, judge, DECAY)
    losses.total.backward()
    kept_bytes.append(sum(storages.values()))
    return losses.mean, [parameter.grad for parameter in model.parameters()]


def test_recomputed_activations_are_the_same_bits_and_are_not_kept() -> None:
    sizes: list[int] = []
    (mean, grads), (again, others) = (losses_of(flag, sizes) for flag in (False, True))
    assert torch.equal(mean, again)
    assert all(torch.equal(one, other) for one, other in zip(grads, others, strict=True))
    assert 3 * sizes[1] < sizes[0]


def test_a_run_that_recomputes_ends_in_the_weights_of_one_that_keeps(tmp_path: Path) -> None:
    sites = [
        DrafterSite(tmp_path / str(flag), train={**LOOKS, "recompute_activations": flag})
        for flag in (False, True)
    ]
    for site in sites:
        train.run(site.job("train"))
    assert metrics(sites[0].run) == metrics(sites[1].run)
    assert kept(sites[0].run) == kept(sites[1].run)


def test_held_out_rows_are_looked_at_when_due_and_always_with_a_checkpoint(tmp_path: Path) -> None:
    options = {**LOOKS, "steps": 25, "evaluate_every_steps": 4}
    site = DrafterSite(tmp_path, train=options)
    train.run(site.job("train"))
    looked = [line["step"] for line in metrics(site.run) if "held_out_loss" in line]
    assert looked == [4, 8, 10, 12, 16, 20, 24, 25]
    last = metrics(site.run)[-1]
    assert last["held_out_loss"] < metrics(site.run)[3]["held_out_loss"]

    rows = corpus.collect(site.workspace, site.recipe)
    target = corpus.read_head(site.recipe, rows)
    model = checkpoint.load_drafter(site.run.checkpoint(25), target)
    judge = target.lm_head[model.draft_ids]
    chosen = held_out_rows.chosen(rows, 0.3)
    assert {row.sample_id for row in chosen} == {entry.sample_id for entry in rows.held_out}
    batch = align(chosen)
    states = model.train_states(batch, 3)
    judged = Judge(target.normed(batch.final_QH), judge, batch.left_Q)
    weight = model.lm_head.weight.detach()
    whole = soft_cross_entropy([state.detach() for state in states], weight, judged, 0.8)
    assert last["held_out_loss"] == pytest.approx(float(whole.total), rel=1e-5)
    for i in range(3):
        assert last[f"held_out_acc_{i}"] == pytest.approx(float(whole.accuracy[i]), rel=1e-5)


def test_the_targets_matrices_stay_as_they_are_stored(tmp_path: Path) -> None:
    site = DrafterSite(tmp_path, train=LOOKS)
    rows = corpus.collect(site.workspace, site.recipe)
    wide = corpus.read_head(site.recipe, rows)
    stored = replace(wide, embed=wide.embed.bfloat16(), lm_head=wide.lm_head.bfloat16())
    exact = replace(wide, embed=stored.embed.float(), lm_head=stored.lm_head.float())
    batch, lines = [entry.read() for entry in rows.trained], []
    for each in (stored, exact):
        made = trainer.Trainer(site.recipe.train, each)
        assert made.head.embed is each.embed and made.head.lm_head is each.lm_head
        model = train.untrained(site.recipe, rows, each)
        judge = each.lm_head[model.draft_ids].float()
        optimizer = torch.optim.AdamW(model.parameters())
        lines.append(made.step(1, batch, model, optimizer, judge))
    assert lines[0] | {"tokens_per_s": 0} == lines[1] | {"tokens_per_s": 0}


@pytest.mark.parametrize(
    ("accuracies", "length"), [([], 0.0), ([0.5], 0.5), ([1, 1, 1], 3.0), ([0.8, 0.5, 0.5], 1.4)]
)
def test_the_acceptance_length_is_the_sum_of_cumulative_products(accuracies, length) -> None:
    assert trainer.acceptance_length(accuracies) == pytest.approx(length)


def test_held_out_rows_are_bounded_fixed_and_of_every_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = DrafterSite(tmp_path)
    rows = corpus.collect(site.workspace, site.recipe)
    monkeypatch.setattr(held_out_rows, "_MAX_TOKENS", 200)
    chosen = held_out_rows.chosen(rows, 0.3)
    assert chosen and sum(len(row.input_ids_T) for row in chosen) <= 200
    assert {row.sample_id[:2] for row in chosen} == {"B1", "B2"}
    packs = packed(chosen, 60)
    assert [row for pack in packs for row in pack] == chosen
    assert all(len(p) == 1 or sum(len(r.input_ids_T) for r in p) <= 60 for p in packs)


class Worsening(trainer.Trainer):
    """The held-out loss is least at step 10, whatever is learnt."""

    def look(self, step: int, drafter: Any, judge_DH: Tensor) -> dict[str, float]:
        return super().look(step, drafter, judge_DH) | {"held_out_loss": abs(step - 10) + 1.0}


def test_the_best_checkpoint_is_kept_and_exported_where_the_recipe_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "Trainer", Worsening)
    site = DrafterSite(tmp_path, train={**LOOKS, "steps": 50})
    train.run(site.job("train"))
    assert checkpoint.steps(site.run) == [10, 40, 50]
    assert checkpoint.best(site.run) == Best(10, 1.0)
    section = read_section(site.run.manifest, "train")
    assert section is not None
    assert (section["counts"]["best_step"], section["counts"]["best_held_out_loss"]) == (10, 1.0)
    assert [name[:11] for name in section["files"]] == ["step-000010", "step-000050"]
    assert checkpoint.chosen(site.run, site.recipe.train) == site.run.checkpoint(50)

    other = DrafterSite(tmp_path, train={**LOOKS, "steps": 50, "export": "best"})
    assert other.run == site.run
    assert decide("train", "all", other.workspace, other.recipe).action == "done"
    assert checkpoint.chosen(other.run, other.recipe.train) == site.run.checkpoint(10)
    # The newest is damaged and removed: the one before it knows its best.
    shutil.rmtree(site.run.checkpoint(50))
    assert checkpoint.best(site.run) == Best(10, 1.0)
    shutil.rmtree(site.run.checkpoint(10))
    with pytest.raises(DataError, match="no checkpoint with a held-out loss"):
        checkpoint.chosen(other.run, other.recipe.train)


def test_without_held_out_rows_the_best_is_refused_before_the_first_step(tmp_path: Path) -> None:
    site = DrafterSite(tmp_path, train={"export": "best", "held_out_share": 1e-9})
    with pytest.raises(DataError, match="no row with states is held out"):
        train.run(site.job("train"))
    last = DrafterSite(tmp_path / "last", train={**LOOKS, "held_out_share": 1e-9})
    train.run(last.job("train"))
    assert checkpoint.best(last.run) is None and checkpoint.steps(last.run) == [20, 30]


def test_held_out_states_that_are_not_finite_are_named(tmp_path: Path) -> None:
    site = DrafterSite(tmp_path, train=LOOKS)
    rows = site.rows("B1")
    at = next(i for i, row in enumerate(rows) if corpus.is_held_out(row.sample_id, 0.3))
    bad = rows[at].aux_TAD.clone()
    bad[:] = float("nan")
    row = rows[at]
    rows[at] = Row(row.sample_id, row.input_ids_T, row.prompt_tokens, bad, row.final_TD)
    site.extract("B1", rows)
    with pytest.raises(
        DataError, match=f"step 10: held-out loss nan: the states of {row.sample_id}"
    ):
        train.run(site.job("train"))


def scalars(run: DrafterRun) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0})
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags}


def test_killed_at_random_it_ends_in_the_same_bits_with_the_same_curves(tmp_path: Path) -> None:
    options = {"steps": 40, "checkpoint_every_steps": 5, "evaluate_every_steps": 2}
    calm, site = (DrafterSite(tmp_path / name, train=options) for name in ("calm", "killed"))
    train.run(calm.job("train"))
    chance = random.Random(3)
    log = tmp_path / "log"
    least = [chance.randrange(6, 20), chance.randrange(20, 38), chance.randrange(6, 20)]
    runs = [site.run, site.run, checkpoint.no_states(site.run)]
    for steps, run in zip(least, runs, strict=True):
        pid = start(site, log)
        while count(run) < steps:
            assert os.waitpid(pid, os.WNOHANG)[0] == 0
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    train.run(site.job("train"))
    resumed = re.findall(r"from step (\d+) to 40", log.read_text())
    assert sum(int(step) > 0 for step in resumed) >= 2
    for one, other in ((calm.run, site.run), map(checkpoint.no_states, (calm.run, site.run))):
        assert metrics(one) == metrics(other)
        assert kept(one) == kept(other)
        assert checkpoint.best(one) == checkpoint.best(other) is not None
        drawn = scalars(other)
        assert drawn.pop("tokens_per_s")
        for tag, points in drawn.items():
            name = tag.replace("/", "_")
            wanted = [(line["step"], line[name]) for line in metrics(one) if name in line]
            assert [step for step, _ in points] == [step for step, _ in wanted], tag
            assert all(
                math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12)
                for (_, a), (_, b) in zip(points, wanted, strict=True)
            ), tag
    assert read_section(calm.run.manifest, "train") == read_section(site.run.manifest, "train")


def count(run: DrafterRun) -> int:
    return run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0


def start(site: DrafterSite, log: Path) -> int:
    def work() -> None:
        with open(log, "a") as file, contextlib.redirect_stdout(file):
            train.run(site.job("train"))

    return forked(work)


def test_the_task_gets_the_numbers_and_where_the_curves_are(tmp_path: Path) -> None:
    site = DrafterSite(tmp_path, train=LOOKS)
    train.run(site.job("train"))
    told = read_json(site.job("train").dir.progress)
    assert Path(told["curves"]).read_text().startswith("<!doctype html>")
    assert told["numbers"][0].split()[:2] == ["step", "loss"]
    assert [line.split()[0] for line in told["numbers"][1:]] == ["10", "20", "30"]
