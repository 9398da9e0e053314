"""The spool on disk: how extraction stays a few shards ahead of a training that deletes them.

``spool/<run>/``::

    shard-000123.safetensors   whole or not there; see drafter.extraction.shards
    position.json              {need}: the shard that training needs next, written by training
    producer.end.json          {exit_code, reason}: why a side ended for good; it takes this back
    trainer.end.json           when it starts again

``spool/.<run>.producer`` and ``spool/.<run>.trainer`` are flocks that each side holds while it
runs.

The producer makes the shards [need, need + N) that are missing and deletes every other. Training
waits for shard ``need``, trains on it, then moves the position, which also may go back: after a
crash it continues from a checkpoint, and the producer makes those shards once more, the same bytes.
Shards that are whole survive a crash of either side. At most N shards are on disk, and one more
that training has mapped when it is deleted.

Each side knows from the other's lock whether it is there: the kernel drops it however a process
ends. While the other is gone, nobody waits longer than the patience; and not even that when it has
left word that another start would end the same way.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drafter import plan
from drafter.errors import Busy, DataError, RecipeError
from drafter.extraction import states
from drafter.extraction.shard_maker import Task
from drafter.extraction.shards import Shard, read_header, read_shard
from drafter.files import digest, is_held, locked, read_json, write_json
from drafter.layout import ALL, Spool, SpoolSide, Workspace
from drafter.recipe import Recipe
from drafter.training import start_config

T = TypeVar("T")
LOOK_S = 0.2
STARTING_S = 120.0
"""Whoever starts both sides again may start this one first: for so long the last words of the other
may still be those of its last start."""


@dataclass(frozen=True)
class SpoolStore:
    """One run's spool, as both sides see it."""

    spool: Spool
    shards_sha256: str
    """Of all that decides the bytes of its shards; others are not its own."""
    patience_s: float

    def position(self) -> int | None:
        """The shard that training needs next; None before it said so."""
        if not self.spool.position.exists():
            return None
        need: int = read_json(self.spool.position)["need"]
        return need

    def move(self, need: int) -> None:
        if self.position() != need:
            write_json(self.spool.position, {"need": need})

    def take(self, number: int) -> Shard:
        """Shard ``number``, once it is there. Raises Busy when nobody makes it for too long."""
        path = self.spool.shard(number)

        def opened() -> Shard | None:
            try:
                return read_shard(path) if path.exists() else None
            except DataError:
                # The producer had not read the position yet, and deleted it.
                if path.exists():
                    raise
                return None

        if (shard := opened()) is not None:
            return shard
        print(f"waiting for shard {number} of the spool", flush=True)
        return self.wait_for_producer(opened)

    def keep(self, window: range) -> int:
        """Delete the shards outside of ``window``; returns how many."""
        wanted = {self.spool.shard(number) for number in window}
        return _remove(path for path in self.spool.shards() if path not in wanted)

    def sort_out(self) -> int:
        """Delete shards that are torn or of other inputs, and what killed writers left; returns how
        many shards. Only the producer does, before anything else."""
        for partial in self.spool.root.glob(".shard-*.partial"):
            partial.unlink()
        return _remove(path for path in self.spool.shards() if not self.is_own(path))

    def is_own(self, path: Path) -> bool:
        try:
            return path.exists() and read_header(path).extract_sha256 == self.shards_sha256
        except DataError:
            return False

    @contextlib.contextmanager
    def producing(self) -> Iterator[None]:
        """For as long as the producer is there."""
        with _there(self.spool.producer, self.spool.trainer):
            yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """For as long as the trainer is there."""
        with _there(self.spool.trainer, self.spool.producer):
            yield

    def wait_for_producer(self, condition: Callable[[], T | None]) -> T:
        return _wait(condition, self.spool.producer, "the spool's extraction", self.patience_s)

    def wait_for_trainer(self, condition: Callable[[], T | None]) -> T:
        return _wait(condition, self.spool.trainer, "training", self.patience_s)


def of(workspace: Workspace, recipe: Recipe) -> SpoolStore:
    """The spool of what is trained now. Raises as ``task`` does."""
    run = workspace.spool(plan.run_name(workspace, recipe))
    return SpoolStore(run, task(workspace, recipe).shards_sha256, recipe.train.spool_patience_s)


def task(workspace: Workspace, recipe: Recipe) -> Task:
    """What decides the bytes of its shards.

    Raises as plan.inputs, states.task and start_config.check_for do.
    """
    inputs = plan.inputs("spool", ALL, workspace, recipe)
    made = states.task(recipe, inputs, digest(inputs["tokenized"]))
    start_config.check_for(recipe, made.aux_layers)
    return made


def room_bytes(workspace: Workspace, spool: Spool) -> int:
    """What is free on the disk, and what the spool takes of it now."""
    present = sum(path.stat().st_size for path in spool.shards())
    return shutil.disk_usage(workspace.root).free + present


def remove(spool: Spool) -> int:
    """Delete a spool; returns how many shards it held."""
    count = len(spool.shards())
    shutil.rmtree(spool.root)
    return count


def remove_idle(workspace: Workspace, own: Spool | None = None) -> None:
    """Delete the spools of other runs, unless somebody fills them or trains on them."""
    for other in workspace.spools():
        held = is_held(other.producer.lock) or is_held(other.trainer.lock)
        if other != own and not held:
            count = remove(other)
            print(f"{count} shards of another run removed with {other.root}", flush=True)


def _remove(paths: Iterable[Path]) -> int:
    found = list(paths)
    for path in found:
        path.unlink()
    return len(found)


@contextlib.contextmanager
def _there(side: SpoolSide, other: SpoolSide) -> Iterator[None]:
    """``side`` is there. What ends it for good it leaves as its last words, unless it only ends
    because of those of ``other``."""
    with locked(side.lock, wait=True):
        side.end.unlink(missing_ok=True)
        try:
            yield
        except (RecipeError, DataError) as error:
            theirs = _last_words(other)
            if theirs is None or theirs["reason"] not in str(error):
                # A full disk must not hide the error; the other side then waits its patience.
                with contextlib.suppress(OSError):
                    write_json(side.end, {"exit_code": error.exit_code, "reason": str(error)})
            raise


def _wait(condition: Callable[[], T | None], side: SpoolSide, who: str, patience_s: float) -> T:
    """What ``condition`` gives once it gives something.

    Raises RecipeError or DataError as ``side`` did when that ended for good, Busy when it has not
    been there for ``patience_s``.
    """
    seen = time.monotonic()
    earlier = _last_words(side)
    while (found := condition()) is None:
        now = time.monotonic()
        words = _last_words(side)
        if is_held(side.lock):
            seen, earlier = now, None
        elif words and (words != earlier or now - seen > min(patience_s, STARTING_S)):
            kind = RecipeError if words["exit_code"] == RecipeError.exit_code else DataError
            raise kind(
                f"{who} ended for good ({words['reason']}): mend that, then start both again"
            )
        elif now - seen > patience_s:
            raise Busy(
                f"{who} has not been running for {patience_s:g} s (train.spool_patience_s): start "
                "it again, this side goes on from where it is"
            )
        time.sleep(LOOK_S)
    return found


def _last_words(side: SpoolSide) -> dict[str, Any] | None:
    """{exit_code, reason}; None when it has not ended for good since its last start."""
    try:
        return read_json(side.end) if side.end.exists() else None
    except DataError:
        # Taken back in this moment.
        return None
