"""Phase spool: the target's states beside training, a few shards ahead of it, none of them kept.

Runs while train runs, where the recipe says ``train.spool_shards``, and ends when training has
ended. spool_plan.py says which rows a shard holds, spool_store.py how the two sides meet on disk;
shards are made and judged as extract makes them (shard_maker.py, gates.py). Killed at any moment it
keeps whole shards and makes the others again, the same bytes. Of all states it leaves
``drafter/<run>/witness.safetensors``, a few short rows by which evaluate and export see whether the
target's head is still the one of these states.

Manifest section ``spool`` of the run: identity (states.py), counts {shards, tokens, rows,
left_out: {reason: n}}, files: the witness.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from drafter import plan
from drafter.backends import OpenBackend, opener
from drafter.extraction import states
from drafter.extraction.shard_maker import ShardMaker, Task
from drafter.extraction.shard_plan import Sample, gib
from drafter.extraction.shards import write_shard
from drafter.files import clear_partial, file_record, write_section
from drafter.job import Job
from drafter.layout import ALL, DrafterRun
from drafter.training import checkpoint, corpus, spool_plan, spool_store
from drafter.training.entries import Tokenized
from drafter.training.spool_plan import SpoolPlan
from drafter.training.spool_store import SpoolStore

_REPORT_SECONDS = 1.0


def run(job: Job) -> None:
    """The phase. DataError when a gate fails, RecipeError when target or disk do not fit, either
    when training ended so for good, Busy when it has been gone for too long."""
    spool(job, opener(job.recipe.extract))


def spool(job: Job, open_backend: OpenBackend) -> None:
    """``run`` with the engine given. It is opened only when a shard is missing."""
    recipe, workspace = job.recipe, job.workspace
    inputs = plan.inputs("spool", ALL, workspace, recipe)
    run_ = workspace.drafter(plan.run_name(workspace, recipe))
    store = spool_store.of(workspace, recipe)
    with store.producing():
        corpus.verify(workspace, recipe)
        split = corpus.tokenized(workspace, recipe)
        planned = spool_plan.plan_spool(split, recipe)
        spool_store.remove_idle(workspace, store.spool)
        if removed := store.sort_out():
            print(f"{removed} shards of other inputs removed from {store.spool.root}", flush=True)
        room = spool_store.room_bytes(workspace, store.spool)
        planned.check_room(room)
        print(f"{planned.story}; {gib(room)} for it on the disk", flush=True)
        rows = _Rows([*split.trained, *split.held_out])
        task = spool_store.task(workspace, recipe)
        producer = _Producer(job, store, planned, run_, rows, task, open_backend)
        record = producer.leave_witness(spool_plan.witnesses(split))
        producer.fill()
        spool_store.remove(store.spool)
    section = {
        "inputs": inputs,
        "identity": states.identity(recipe),
        "counts": {
            "shards": len(planned.shards),
            "tokens": sum(planned.lengths[i] for shard in planned.shards for i in shard.rows),
            "rows": len(planned.lengths),
            "left_out": split.left_out,
        },
        "files": {run_.witness.name: record},
    }
    changed = write_section(run_.manifest, "spool", section)
    counts = section["counts"]
    line = (
        f"{counts['shards']:,} shards of {counts['tokens']:,} tokens for {recipe.train.steps:,} "
        f"steps, {producer.made:,} made by this job; the spool is removed"
    )
    print(line, flush=True)
    job.report(done=True, changed=changed, line=line, shards=counts["shards"], made=producer.made)


@dataclass(frozen=True)
class _Rows:
    """Rows of all datasets as shard_maker numbers them."""

    entries: Sequence[Tokenized]

    @cached_property
    def lengths(self) -> list[int]:
        return [entry.tokens for entry in self.entries]

    def sample(self, row: int) -> Sample:
        return self.entries[row].sample()


class _Producer:
    """Keeps the spool filled."""

    def __init__(
        self,
        job: Job,
        store: SpoolStore,
        planned: SpoolPlan,
        run_: DrafterRun,
        rows: _Rows,
        task: Task,
        open_backend: OpenBackend,
    ) -> None:
        self._job, self._store, self._plan, self._run = job, store, planned, run_
        self._rows, self._task, self._open_backend = rows, task, open_backend
        self.made = 0
        self._position = 0
        self._tokens = 0
        self._started = self._reported = time.monotonic()

    def leave_witness(self, rows: Sequence[int]) -> dict[str, Any]:
        """Make the witness unless it is there; returns its {bytes, sha256}."""
        path = self._run.witness
        clear_partial(path.parent, path.name)
        if self._store.is_own(path):
            return file_record(path)
        return write_shard(path, self._maker.make(-1, rows))

    def fill(self) -> None:
        """Stay ahead of training until it has ended. Raises as wait_for_trainer and the gates."""
        while (number := self._store.wait_for_trainer(self._next)) < len(self._plan.shards):
            self._make(number)

    def _make(self, number: int) -> None:
        """One shard. Nothing of it stays in memory while the next one is made."""
        shards = self._plan.shards
        shard = self._maker.make(number, shards[number].rows)
        write_shard(self._store.spool.shard(number), shard)
        self.made += 1
        numbers = shard.header.gates
        share = numbers["argmax_matches"] / max(numbers["response_tokens"], 1)
        print(
            f"shard {number + 1} of {len(shards)}: {len(shard)} rows, "
            f"{len(shard.input_ids_T):,} tokens, argmax share {share:.1%}",
            flush=True,
        )

    def _next(self) -> int | None:
        """The shard to make now; the number of all when training has ended; None for neither."""
        position = self._store.position()
        if position is None:
            # Training has yet to start; where it will, its last checkpoint says.
            position = self._plan.needed(max(checkpoint.steps(self._run), default=0))
        total = len(self._plan.shards)
        window = range(position, min(position + self._plan.num_ahead, total))
        removed = self._store.keep(window)
        if position < self._position:
            print(f"training went back to shard {position}: {removed} shards deleted", flush=True)
        self._position = position
        for number in window:
            if not self._store.spool.shard(number).exists():
                return number
        if position == total and self._is_trained():
            return total
        return None

    def _is_trained(self) -> bool:
        workspace, recipe = self._job.workspace, self._job.recipe
        return plan.decide("train", ALL, workspace, recipe).action == "done"

    @cached_property
    def _maker(self) -> ShardMaker:
        return ShardMaker(self._task, self._rows, self._open_backend, self._advance)

    def _advance(self, tokens: int) -> None:
        self._tokens += tokens
        now = time.monotonic()
        if now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        self._job.report(
            shards=len(self._plan.shards),
            needed=self._position,
            made=self.made,
            tokens_per_second=round(self._tokens / (now - self._started), 1),
        )
