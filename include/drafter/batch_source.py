"""Where training's batches come from: shards that extract stored, or a spool.

Either gives the same rows in the same order, so what is trained does not depend on which it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from drafter import corpus, plan, spool_plan, spool_store
from drafter.corpus import Corpus
from drafter.entries import Entry, Stored
from drafter.errors import DataError
from drafter.files import locked
from drafter.job import Job
from drafter.sections import Train
from drafter.shards import Row
from drafter.spool_plan import SpoolPlan
from drafter.spool_store import SpoolStore


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

    def after(self, done: int) -> Iterator[tuple[int, list[Row]]]:
        for number in range(self.plan.needed(done), len(self.plan.shards)):
            planned = self.plan.shards[number]
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
        self.store.move(len(self.plan.shards))


@contextlib.contextmanager
def opened(job: Job) -> Iterator[tuple[Corpus[Entry], Batches]]:
    """Rows and batches of a training; a spool knows that it trains for as long as this is open.

    Raises DataError when data is missing or damaged, Busy when nobody fills the spool.
    """
    recipe, workspace = job.recipe, job.workspace
    corpus.verify(workspace, recipe)
    if not recipe.spools:
        spool_store.remove_idle(workspace)
        stored = corpus.stored(workspace, recipe)
        yield stored, StoredBatches(stored.trained, recipe.train)
        return
    store = spool_store.of(workspace, recipe)
    with locked(store.spool.trainer, wait=True):
        split = corpus.tokenized(workspace, recipe)
        planned = spool_plan.plan_spool(split, recipe)
        witness = workspace.drafter(plan.run_name(workspace, recipe)).witness
        store.wait_for_producer(lambda: store.is_own(witness) or None)
        rows = corpus.spooled(workspace, recipe, split)
        sample_ids = [entry.sample_id for entry in split.trained]
        yield rows, SpooledBatches(store, planned, sample_ids)
