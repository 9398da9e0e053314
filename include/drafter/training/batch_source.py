"""Where training's batches come from: shards that extract stored, or a spool.

Either gives the same rows in the same order, so what is trained does not depend on which it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from drafter import plan
from drafter.errors import DataError
from drafter.extraction.shards import Row
from drafter.job import Job
from drafter.sections import Train
from drafter.training import corpus, spool_plan, spool_store
from drafter.training.corpus import Corpus
from drafter.training.entries import Entry, Stored
from drafter.training.spool_plan import SpoolPlan
from drafter.training.spool_store import SpoolStore


class Batches(Protocol):
    """The rows of every optimiser step."""

    def after(self, done: int) -> Iterator[tuple[int, list[Row]]]:
        """(step, its rows) for each step from ``done + 1`` on. The rows may be gone once the next
        ones are asked for."""


@dataclass(frozen=True)
class StoredBatches:
    """From shards that stay on disk."""

    entries: Sequence[Stored]
    options: Train

    def after(self, done: int) -> Iterator[tuple[int, list[Row]]]:
        lengths = [entry.tokens for entry in self.entries]
        order = corpus.batches(lengths, self.options.batch_tokens, self.options.seed)
        for step, batch in enumerate(islice(order, done, self.options.steps), start=done + 1):
            yield step, [self.entries[row].read() for row in batch]


@dataclass(frozen=True)
class SpooledBatches:
    """From shards that another job makes meanwhile, each deleted after its last step."""

    store: SpoolStore
    plan: SpoolPlan
    sample_ids: Sequence[str]
    """Of every row that is trained on."""
    moves: bool = True
    """Whether this process says where training is: of several, one does. The others have every
    shard mapped by then, since no step ends before all of them have taken it."""

    def after(self, done: int) -> Iterator[tuple[int, list[Row]]]:
        for number in range(self.plan.needed(done), len(self.plan.shards)):
            planned = self.plan.shards[number]
            if self.moves:
                self.store.move(number)
            shard = self.store.take(number)
            if shard.header.sample_ids != tuple(self.sample_ids[row] for row in planned.rows):
                raise DataError(
                    f"{self.store.spool.shard(number)} holds other rows than step "
                    f"{planned.first_step} needs: delete {self.store.spool.root}, start again"
                )
            rows = shard.rows()
            for step, batch in enumerate(planned.batches, start=planned.first_step):
                taken = list(islice(rows, len(batch)))
                if step > done:
                    yield step, taken
        if self.moves:
            self.store.move(len(self.plan.shards))


@contextlib.contextmanager
def held(job: Job) -> Iterator[None]:
    """Verified data; a spool knows that it is trained from for as long as this is open.

    Raises DataError when data is missing or damaged. What ends training for good while this is
    open, the extraction that fills its spool hears.
    """
    recipe, workspace = job.recipe, job.workspace
    if recipe.spools:
        with spool_store.of(workspace, recipe).training():
            corpus.verify(workspace, recipe)
            yield
        return
    corpus.verify(workspace, recipe)
    spool_store.remove_idle(workspace)
    yield


def read(job: Job, moves: bool = True) -> tuple[Corpus[Entry], Batches]:
    """Rows and batches of a training that holds its data. ``moves``: see :class:`SpooledBatches`.

    Raises DataError when data is missing, Busy when nobody fills the spool, and what ended its
    extraction for good.
    """
    recipe, workspace = job.recipe, job.workspace
    if not recipe.spools:
        stored = corpus.stored(workspace, recipe)
        return stored, StoredBatches(stored.trained, recipe.train)
    store = spool_store.of(workspace, recipe)
    split = corpus.tokenized(workspace, recipe)
    planned = spool_plan.plan_spool(split, recipe)
    witness = workspace.drafter(plan.run_name(workspace, recipe)).witness
    store.wait_for_producer(lambda: store.is_own(witness) or None)
    rows = corpus.spooled(workspace, recipe, split)
    sample_ids = [entry.sample_id for entry in split.trained]
    return rows, SpooledBatches(store, planned, sample_ids, moves)
