"""A spool trains the drafter that stored states train, on a few shards, whoever is killed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from safetensors.torch import load_file, save_file
from unit.random_targets import VOCAB, greedy_rows, one_thread, save_target
from unit.spool_site import DATASETS, SpoolSite, forked

from drafter import export, files, spool, train
from drafter.backends import opener
from drafter.errors import Busy, DataError, RecipeError
from drafter.evaluate import evaluate
from drafter.files import file_record, locked, read_json, read_section, write_section
from drafter.foresee import foresee
from drafter.plan import decide
from drafter.rows import Family
from drafter.training import batch_source, corpus, spool_plan, spool_store
from drafter.training.spool_plan import SpoolPlan


@dataclass(frozen=True)
class Target:
    directory: Path
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(directory)
        yield Target(directory, greedy_rows(model, 40))


@pytest.fixture
def site(tmp_path: Path, target: Target) -> SpoolSite:
    return SpoolSite(tmp_path / "w", target.directory, target.rows)


@dataclass
class Watched:
    """Both sides of a spool as processes, and what the disk was seen to hold meanwhile."""

    site: SpoolSite
    most: int = 0

    def __post_init__(self) -> None:
        self.pids = {phase: self.site.start(phase) for phase in ("spool", "train")}
        self.codes: dict[str, int] = {}

    def look(self) -> None:
        self.most = max(self.most, len(list(self.site.spool.root.glob("*shard-*"))))
        for phase, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[phase] = os.waitstatus_to_exitcode(status)
                del self.pids[phase]
        time.sleep(0.001)

    def kill_when(self, phase: str, condition: Callable[[], bool]) -> bool:
        """SIGKILL a side once something is so, and start it again; False when it ended before."""
        while phase in self.pids and not condition():
            self.look()
        if phase not in self.pids:
            return False
        os.kill(self.pids[phase], signal.SIGKILL)
        os.waitpid(self.pids[phase], 0)
        self.pids[phase] = self.site.start(phase)
        return True

    def end(self) -> None:
        while self.pids:
            self.look()
        assert self.codes == {"spool": 0, "train": 0}


def done(site: SpoolSite) -> bool:
    return all(decide(p, "all", site.workspace, site.recipe).action == "done"
               for p in ("spool", "train"))  # fmt: skip


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, target: Target) -> SpoolSite:
    """A spooled run that nothing disturbed."""
    site = SpoolSite(tmp_path_factory.mktemp("calm"), target.directory, target.rows)
    watched = Watched(site)
    watched.end()
    assert 1 < watched.most <= 3 + 1
    return site


def test_a_spool_trains_the_very_drafter_of_stored_states(
    tmp_path: Path, target: Target, calm: SpoolSite
) -> None:
    stored = SpoolSite(tmp_path, target.directory, target.rows, train={"spool_shards": None})
    stored.store()
    forgotten = stored.workspace.spool("of another recipe")
    forgotten.root.mkdir(parents=True)
    train.run(stored.job("train"))
    assert not forgotten.root.exists()
    assert calm.metrics() == stored.metrics()
    assert calm.weights() == stored.weights()


def test_what_a_spool_leaves_is_done_and_holds_no_shard(calm: SpoolSite) -> None:
    assert not calm.spool.root.exists()
    assert done(calm)
    section = read_section(calm.run.manifest, "spool")
    assert section is not None
    long = sum(len(row["input_ids"]) > 36 for row in _tokenized(calm))
    assert long and section["counts"]["left_out"][corpus.TOO_LONG] == long
    trained = read_section(calm.run.manifest, "train")
    assert trained is not None and trained["counts"]["left_out"] == section["counts"]["left_out"]
    assert section["counts"]["tokens"] == trained["counts"]["tokens"]
    assert section["counts"]["tokens"] > 2 * section["counts"]["rows"]
    assert section["files"] == {"witness.safetensors": file_record(calm.run.witness)}
    found = corpus.collect(calm.workspace, calm.recipe)
    assert found.witnesses[0].sample_id in {entry.sample_id for entry in found.held_out}
    assert found.argmax_share == 1.0


def _tokenized(site: SpoolSite) -> list[dict[str, Any]]:
    paths = [site.workspace.prepared(dataset).tokenized for dataset in DATASETS]
    return [orjson.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def test_evaluation_and_export_need_no_state_of_the_spool(
    tmp_path: Path, target: Target, calm: SpoolSite
) -> None:
    shutil.copytree(calm.root, tmp_path / "w")
    site = SpoolSite(tmp_path / "w", target.directory, target.rows)
    site.answer_greedily()
    family = Family(None, None, False, frozenset(), frozenset(), frozenset({0}), VOCAB)
    for dataset in DATASETS:
        evaluate(site.job("evaluate", dataset), family, opener(site.recipe.extract))
        result = read_json(site.run.evaluation(dataset))
        assert result["counts"]["prompts"] > 0
        assert result["acceptance_length"]["ngram"] and result["acceptance_length"]["trained"]
        assert result["acceptance_length"]["no_states"] is None
    export.run(site.job("export"))
    section = read_section(site.run.manifest, "export")
    assert section is not None
    assert all(d < 1e-4 for d in section["counts"]["logit_difference"].values())


def test_killed_on_either_side_at_random_it_ends_in_the_same_bits(
    tmp_path: Path, target: Target, calm: SpoolSite
) -> None:
    site = SpoolSite(tmp_path, target.directory, target.rows)
    chance = random.Random(5)
    last = len(_planned(site).shards)
    points = sorted(chance.sample(range(1, last - 6), 5))
    sides = ["spool", "train", "train", "spool", "train"]
    chance.shuffle(sides)
    watched = Watched(site)
    store = spool_store.of(site.workspace, site.recipe)
    killed = 0
    for side, point in zip(sides, points, strict=True):
        killed += watched.kill_when(side, lambda p=point: (store.position() or 0) >= p)
    assert killed >= 3
    watched.end()
    assert site.metrics() == calm.metrics()
    assert [line["step"] for line in site.metrics()] == list(range(1, 41))
    assert site.weights() == calm.weights()
    assert site.run.witness.read_bytes() == calm.run.witness.read_bytes()
    assert watched.most <= 3 + 1
    assert not site.spool.root.exists() and done(site)


def _planned(site: SpoolSite) -> SpoolPlan:
    return spool_plan.plan_spool(corpus.tokenized(site.workspace, site.recipe), site.recipe)


# Beforehand.


def test_the_plan_foretells_the_spool_and_a_full_disk_refuses_it(
    site: SpoolSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for phase in ("train", "spool"):
        line = foresee(phase, "all", site.workspace, site.recipe)
        assert line.action == "start"
        story = r"spool of [\d.]+ GiB at once: 3 \+ 1 of 19 shards, 753 tokens per epoch"
        assert re.fullmatch(f"not done yet; {story}", line.reason), line.reason
    usage = shutil.disk_usage(site.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=350_000))
    refused = foresee("train", "all", site.workspace, site.recipe)
    assert refused.action == "refuse"
    with pytest.raises(RecipeError) as no:
        spool.spool(site.job("spool"), no_engine)
    assert str(no.value) == refused.reason
    assert "set train.spool_shards to 2" in refused.reason
    assert site.spool.shards() == []


# The two sides.


def test_without_training_the_spool_fills_up_and_ends_as_busy(
    tmp_path: Path, target: Target
) -> None:
    site = SpoolSite(tmp_path, target.directory, target.rows, train={"spool_patience_s": 0.3})
    with pytest.raises(Busy, match=r"training has not been running for 0\.3 s .* start it again"):
        spool.run(site.job("spool"))
    assert [path.name for path in site.spool.shards()] == [
        f"shard-{number:06d}.safetensors" for number in range(3)
    ]


def test_without_a_spool_training_ends_as_busy(tmp_path: Path, target: Target) -> None:
    site = SpoolSite(tmp_path, target.directory, target.rows, train={"spool_patience_s": 0.3})
    with pytest.raises(Busy, match=r"the spool's extraction has not been running for 0\.3 s"):
        train.run(site.job("train"))


def test_a_side_that_is_there_is_waited_for_beyond_the_patience(
    tmp_path: Path, target: Target
) -> None:
    site = SpoolSite(tmp_path, target.directory, target.rows, train={"spool_patience_s": 0.01})
    store = spool_store.of(site.workspace, site.recipe)
    looks: list[None] = []

    def after_five() -> bool | None:
        looks.append(None)
        return True if len(looks) == 5 else None

    assert not files.is_held(store.spool.producer.lock)
    holder_up, holder_down = os.pipe(), os.pipe()

    def hold() -> None:
        with locked(store.spool.producer.lock, wait=True):
            os.write(holder_up[1], b".")
            os.read(holder_down[0], 1)

    holder = forked(hold)
    os.read(holder_up[0], 1)
    assert store.wait_for_producer(after_five)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert not files.is_held(store.spool.producer.lock)


def test_a_position_that_moved_back_is_followed_to_the_same_bytes(
    tmp_path: Path, target: Target
) -> None:
    site = SpoolSite(tmp_path, target.directory, target.rows, train={"spool_patience_s": 0.1})
    store = spool_store.of(site.workspace, site.recipe)

    def filled(position: int) -> dict[str, str]:
        store.move(position)
        with pytest.raises(Busy):
            spool.run(site.job("spool"))
        return {path.name: file_record(path)["sha256"] for path in site.spool.shards()}

    first, later, again = filled(0), filled(4), filled(0)
    assert first == again and not first.keys() & later.keys()
    assert len(first) == len(later) == 3


def test_shards_that_are_not_this_runs_go_with_a_count(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    site = SpoolSite(tmp_path, target.directory, target.rows, train={"spool_patience_s": 0.1})
    other = SpoolSite(tmp_path, target.directory, target.rows,
                      train={"spool_patience_s": 0.1, "seed": 1})  # fmt: skip
    for each in (other, site):
        with pytest.raises(Busy):
            spool.run(each.job("spool"))
    assert f"3 shards of another run removed with {other.spool.root}" in capsys.readouterr().out
    assert not other.spool.root.exists()
    site.spool.shard(1).write_bytes(b"torn")
    (site.spool.root / ".shard-000002.safetensors.1.partial").write_bytes(b"half")
    kept = site.spool.shard(0).stat().st_mtime_ns
    with pytest.raises(Busy):
        spool.run(site.job("spool"))
    assert "1 shards of other inputs removed" in capsys.readouterr().out
    assert site.spool.shard(0).stat().st_mtime_ns == kept
    assert len(list(site.spool.root.glob("*shard-*"))) == 3


def test_a_trained_run_whose_spool_died_before_its_last_word_is_tidied_up(
    calm: SpoolSite,
) -> None:
    sections = read_json(calm.run.manifest)
    write_section(calm.run.manifest, "spool", {"inputs": {}, "counts": {}})
    spool_store.of(calm.workspace, calm.recipe).move(len(_planned(calm).shards))
    assert decide("spool", "all", calm.workspace, calm.recipe).action == "start"
    spool.spool(calm.job("spool"), no_engine)
    assert read_json(calm.run.manifest) == sections
    assert done(calm) and not calm.spool.root.exists()


def no_engine(*_: Any) -> Any:
    raise AssertionError("an engine was opened for nothing")


def test_a_lost_checkpoint_is_trained_again_with_a_spool_from_there(
    tmp_path: Path, target: Target, calm: SpoolSite
) -> None:
    shutil.copytree(calm.root, tmp_path / "w")
    site = SpoolSite(tmp_path / "w", target.directory, target.rows)
    shutil.rmtree(site.run.checkpoint(40))
    for phase in ("spool", "train"):
        assert decide(phase, "all", site.workspace, site.recipe).action == "start"
    Watched(site).end()
    assert site.weights() == calm.weights() and done(site)
    made = read_json(site.job("spool").dir.progress)["made"]
    assert made == len(_planned(site).shards) - _planned(site).needed(35)


def test_shards_that_hold_other_rows_are_not_trained_on(site: SpoolSite) -> None:
    planned = _planned(site)
    store = spool_store.of(site.workspace, site.recipe)
    maker = forked(lambda: spool.run(site.job("spool")))
    try:
        store.wait_for_producer(lambda: site.spool.shard(0).exists() or None)
    finally:
        os.kill(maker, signal.SIGKILL)
        os.waitpid(maker, 0)
    batches = batch_source.SpooledBatches(store, planned, [f"x-{i}" for i in range(99)])
    with pytest.raises(DataError, match=r"shard-000000.* holds other rows than step 1 needs"):
        next(batches.after(0))


def test_tokenized_rows_that_changed_since_validate_are_refused(site: SpoolSite) -> None:
    with open(site.workspace.prepared("B2").tokenized, "ab") as file:
        file.write(b"{}\n")
    for phase in (spool, train):
        with pytest.raises(DataError, match="not as validate left it"):
            phase.run(site.job(phase.__name__.rpartition(".")[2]))


def test_the_head_of_other_weights_is_refused(
    tmp_path: Path, target: Target, calm: SpoolSite
) -> None:
    directory = tmp_path / "target"
    shutil.copytree(target.directory, directory)
    site = SpoolSite(calm.root, directory, target.rows)
    found = corpus.collect(calm.workspace, calm.recipe)
    corpus.read_head(site.recipe, found)
    path = next(p for p in directory.glob("*.safetensors") if "lm_head.weight" in load_file(p))
    weights = load_file(path)
    save_file({name: w.roll(1, 0) for name, w in weights.items()}, path, {"format": "pt"})
    with pytest.raises(DataError, match="are not those of the extraction"):
        corpus.read_head(site.recipe, found)
