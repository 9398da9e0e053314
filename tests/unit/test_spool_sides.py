"""Each side of a spool hears why the other ended for good, and nothing of a spool is in the way."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from unit.random_targets import greedy_rows, one_thread, save_target
from unit.spool_site import SpoolSite

from drafter import files, spool, train
from drafter.errors import Busy, DataError, DrafterError, RecipeError
from drafter.extraction.shard_maker import ShardMaker
from drafter.extraction.shards import Shard
from drafter.files import read_json, write_json
from drafter.layout import Workspace
from drafter.plan import decide
from drafter.training import spool_store


@dataclass(frozen=True)
class Target:
    directory: Path
    rows: list[dict[str, Any]]

    def site(self, root: Path, **settings: Any) -> SpoolSite:
        return SpoolSite(root, self.directory, self.rows, **settings)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(directory)
        yield Target(directory, greedy_rows(model, 40))


def ended(pid: int) -> int:
    """The exit code of a child that ends by itself."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


PATIENT = {"spool_patience_s": 3600}
IMPATIENT = {"spool_patience_s": 0.3}


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))


def bad_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> Shard:
        raise DataError("the states are not finite")

    monkeypatch.setattr(ShardMaker, "make", make)


@pytest.mark.parametrize(("fault", "kind"), [(full_disk, RecipeError), (bad_gate, DataError)])
def test_a_training_that_waits_ends_at_once_as_its_spool_did(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, fault: Any,
    kind: type[DrafterError],
) -> None:  # fmt: skip
    site = target.site(tmp_path, train=PATIENT)
    store = spool_store.of(site.workspace, site.recipe)
    trainer = site.start("train")
    store.wait_for_trainer(lambda: files.is_held(store.spool.trainer.lock) or None)
    fault(monkeypatch)
    with pytest.raises(kind) as said:
        spool.run(site.job("spool"))
    assert ended(trainer) == kind.exit_code
    words = {"exit_code": kind.exit_code, "reason": str(said.value)}
    assert read_json(store.spool.producer.end) == words
    assert not store.spool.trainer.end.exists()


def test_a_spool_that_is_full_ends_at_once_as_its_training_did(
    tmp_path: Path, target: Target
) -> None:
    site = target.site(tmp_path, train=PATIENT)
    store = spool_store.of(site.workspace, site.recipe)
    producer = site.start("spool")
    store.wait_for_producer(lambda: len(site.spool.shards()) == 3 or None)
    with pytest.raises(DataError), store.training():
        raise DataError("step 3: loss nan")
    assert ended(producer) == DataError.exit_code
    assert not store.spool.producer.end.exists()


def test_words_of_an_earlier_start_are_believed_once_nobody_starts_again(
    tmp_path: Path, target: Target
) -> None:
    site = target.site(tmp_path, train=IMPATIENT)
    end = site.spool.producer.end
    write_json(end, {"exit_code": 64, "reason": "the disk has 1 GiB: free disk space"})
    sentence = r"ended for good \(the disk has 1 GiB: free disk space\): .* start both again"
    with pytest.raises(RecipeError, match=sentence):
        train.run(site.job("train"))


def test_words_are_left_beside_older_ones_of_the_other_side(tmp_path: Path) -> None:
    store = spool_store.SpoolStore(Workspace(tmp_path).spool("run"), "sha", 1)
    write_json(store.spool.trainer.end, {"exit_code": 65, "reason": "step 3: loss nan"})
    with pytest.raises(RecipeError), store.producing():
        raise RecipeError("the disk has 1 GiB")
    assert read_json(store.spool.producer.end) == {"exit_code": 64, "reason": "the disk has 1 GiB"}


def test_both_sides_take_back_their_last_words_when_they_start_again(
    tmp_path: Path, target: Target
) -> None:
    site = target.site(tmp_path)
    for side in (site.spool.producer, site.spool.trainer):
        write_json(side.end, {"exit_code": 65, "reason": "of the last start"})
    sides = [site.start("train"), site.start("spool")]
    assert [ended(pid) for pid in sides] == [0, 0]
    assert decide("train", "all", site.workspace, site.recipe).action == "done"
    assert not site.spool.root.exists()


def test_what_a_retry_may_mend_is_no_last_word(tmp_path: Path, target: Target) -> None:
    site = target.site(tmp_path, train=IMPATIENT)
    for phase in (train, spool):
        with pytest.raises(Busy):
            phase.run(site.job(phase.__name__.rpartition(".")[2]))
    assert not site.spool.producer.end.exists() and not site.spool.trainer.end.exists()


@pytest.mark.parametrize("side", ["producer", "trainer"])
def test_a_spool_with_somebody_on_either_side_is_not_idle(tmp_path: Path, side: str) -> None:
    workspace = Workspace(tmp_path)
    store = spool_store.SpoolStore(workspace.spool("run"), "sha", 1)
    store.move(3)
    with store.producing() if side == "producer" else store.training():
        spool_store.remove_idle(workspace)
        assert store.position() == 3
    spool_store.remove_idle(workspace)
    assert not store.spool.root.exists() and workspace.spools() == []


class NetworkFileSystem:
    """Keeps the name of a file that somebody has open, and so its directory, as NFS does."""

    def __init__(self) -> None:
        self.rmtree = shutil.rmtree

    def __call__(self, root: Path) -> None:
        for fd in Path("/proc/self/fd").iterdir():
            if fd.exists() and fd.resolve().is_relative_to(root):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(root))
        self.rmtree(root)


def test_a_spool_goes_although_its_locks_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "rmtree", NetworkFileSystem())
    store = spool_store.SpoolStore(Workspace(tmp_path).spool("run"), "sha", 1)
    with store.producing(), store.training():
        store.move(1)
        spool_store.remove(store.spool)
    assert not store.spool.root.exists()


def test_no_shard_stays_in_memory_while_the_next_is_made(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Shard]] = []
    alive: list[int] = []
    make = ShardMaker.make

    def watched(maker: ShardMaker, number: int, rows: Sequence[int]) -> Shard:
        alive.append(sum(shard() is not None for shard in made))
        shard = make(maker, number, rows)
        made.append(weakref.ref(shard))
        return shard

    monkeypatch.setattr(ShardMaker, "make", watched)
    site = target.site(tmp_path, train=IMPATIENT)
    with pytest.raises(Busy):
        spool.run(site.job("spool"))
    assert alive == [0] * 4
