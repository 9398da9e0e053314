"""Hidden states of the target over prompt and response, as EAGLE-3 training reads them.

Rows go into shards in the order of tokenized_data.jsonl; inside a shard, rows of similar length
share a batch. Which rows make a shard, and which a batch, follows from the file and the recipe
alone (shard_plan.py), so a run that was killed anywhere ends in the same bytes: whole shards are
kept, the rest is made (shard_maker.py), past every gate (gates.py).
Memory holds two shards, one of them on its way to the disk, and two numbers per row, whatever the
dataset's size.

Manifest section ``extract``: identity {target, revision, aux_layers, dtype, norm, hidden_size},
counts {rows, tokens, shards, left_out: {reason: n}}, gates {reference_error, alone_error: largest
median relative errors; argmax_share, response_tokens}, files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter import plan
from drafter.backends import OpenBackend, opener
from drafter.errors import DataError
from drafter.extraction import gates, states
from drafter.extraction.forecast import hours_for
from drafter.extraction.shard_maker import ShardMaker, Task
from drafter.extraction.shard_plan import (
    Footprint,
    RowIndex,
    check_room,
    gib,
    index_rows,
    plan_shards,
)
from drafter.extraction.shards import ShardHeader, read_header, write_shard
from drafter.files import file_record, read_section, write_section
from drafter.job import Job
from drafter.layout import HiddenStates
from drafter.training import start_config

TOO_LONG = "longer than max_length"
_REPORT_SECONDS = 1.0


def run(job: Job) -> None:
    """The phase. DataError when a gate fails, RecipeError when target or disk do not fit."""
    extract(job, opener(job.recipe.extract))


def extract(job: Job, open_backend: OpenBackend) -> None:
    """``run`` with the engine given. It is opened only when a shard is missing.

    States that were imported (drafter.interchange) are left as they are: they cannot be made here.
    """
    section = read_section(job.workspace.hidden_states(job.dataset).manifest, "extract")
    if section is not None and "imported" in section["inputs"]:
        decision = plan.decide("extract", job.dataset, job.workspace, job.recipe)
        if decision.action != "done":
            raise DataError(f"{job.dataset}: {decision.reason}")
        _finish(job, section, changed=False)
        return
    work = _work(job)
    if section is not None and section["inputs"] == work.inputs and _intact(work.hidden, section):
        _finish(job, section, changed=False)
        return
    index = index_rows(work.tokenized, work.task.settings.max_length)
    shards = plan_shards(index.lengths, work.task.settings.shard_tokens)
    kept, stale = _on_disk(work, len(shards))
    _forecast(job, work, index, len(shards), len(kept))
    if stale or len(kept) < len(shards):
        # Not even for a while may a manifest stand beside shards that it does not describe.
        work.hidden.manifest.unlink(missing_ok=True)
    for path in stale:
        path.unlink()
    files = {work.hidden.shard(i).name: file_record(work.hidden.shard(i)) for i in kept}
    rate = None
    if len(kept) < len(shards):
        present = sum(index.lengths[row] for i in kept for row in shards[i])
        progress = _Progress(job, present, sum(index.lengths))
        maker = ShardMaker(work.task, index, open_backend, progress.advance)
        missing = sorted(set(range(len(shards))) - set(kept))
        for i, record, kept[i] in _made(maker, work.hidden, shards, missing):
            files[work.hidden.shard(i).name] = record
        rate = progress.tokens_per_second()
    section = _section(work, index, [kept[i] for i in range(len(shards))], files)
    changed = write_section(work.hidden.manifest, "extract", section)
    _finish(job, section, changed=changed, rate=rate)


def _made(
    maker: ShardMaker, hidden: HiddenStates, shards: Sequence[Sequence[int]], missing: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any], dict[str, float]]]:
    """Number, file record and what the gates measured of each missing shard, once it is on disk.

    One is written while the next one is made, so the target does not wait for the disk; memory
    holds two at most. When a gate fails, the shard before it is there all the same.
    """
    with ThreadPoolExecutor(1) as disk:
        writing: list[_Writing] = []
        for number in missing:
            path, shard = hidden.shard(number), maker.make(number, shards[number])
            yield from map(_Writing.end, writing)
            measured, written = shard.header.gates, disk.submit(write_shard, path, shard)
            line = (
                f"shard {number + 1} of {len(shards)}: {len(shard)} rows, "
                f"{len(shard.input_ids_T):,} tokens, argmax share {_share([measured]):.1%}"
            )
            writing = [_Writing(number, measured, line, written)]
            # Memory lets it go when it is written.
            del shard
        yield from map(_Writing.end, writing)


@dataclass(frozen=True)
class _Writing:
    """A shard on its way to the disk."""

    number: int
    measured: dict[str, float]
    line: str
    record: Future[dict[str, Any]]

    def end(self) -> tuple[int, dict[str, Any], dict[str, float]]:
        """Wait until it is there. Raises as write_shard."""
        record = self.record.result()
        print(self.line, flush=True)
        return self.number, record, self.measured


@dataclass(frozen=True)
class _Work:
    """One dataset's extraction as files and recipe describe it, before anything is loaded."""

    inputs: dict[str, Any]
    identity: dict[str, Any]
    hidden: HiddenStates
    tokenized: Path
    task: Task


def _work(job: Job) -> _Work:
    recipe, prepared = job.recipe, job.workspace.prepared(job.dataset)
    inputs = plan.inputs("extract", job.dataset, job.workspace, recipe)
    if not prepared.tokenized.exists() or file_record(prepared.tokenized) != inputs["tokenized"]:
        raise DataError(f"{prepared.tokenized} is not as validate left it: run validate again")
    task = states.task(recipe, inputs, inputs["tokenized"]["sha256"])
    start_config.check_for(recipe, task.aux_layers)
    return _Work(
        inputs=inputs,
        identity=states.identity(recipe),
        hidden=job.workspace.hidden_states(job.dataset),
        tokenized=prepared.tokenized,
        task=task,
    )


def _intact(hidden: HiddenStates, section: dict[str, Any]) -> bool:
    """Whether the files of a finished section are all there, in their sizes."""
    return all(
        (path := hidden.root / name).exists() and path.stat().st_size == record["bytes"]
        for name, record in section["files"].items()
    )


def _on_disk(work: _Work, num_shards: int) -> tuple[dict[int, dict[str, float]], list[Path]]:
    """What the gates measured on shards of this very work, and files of any other that must go."""
    wanted = {work.hidden.shard(i): i for i in range(num_shards)}
    kept: dict[int, dict[str, float]] = {}
    stale = []
    for path in sorted(work.hidden.root.glob("*shard-*")):
        header = _header(path) if path in wanted else None
        if header is None or header.extract_sha256 != work.task.shards_sha256:
            stale.append(path)
            continue
        kept[wanted[path]] = numbers = header.gates
        bound = work.task.settings.min_argmax_share
        if gates.share_too_low(numbers["argmax_matches"], numbers["response_tokens"], bound):
            raise DataError(
                f"{path}: argmax lm_head(norm(final)) is the next token for "
                f"{_share([numbers]):.1%} of its response tokens, needed {bound:.1%}: lower "
                "extract.min_argmax_share, or delete the shard to have it made anew"
            )
    return kept, stale


def _header(path: Path) -> ShardHeader | None:
    try:
        return read_header(path)
    except DataError:
        return None


def _forecast(job: Job, work: _Work, index: RowIndex, num_shards: int, num_kept: int) -> None:
    """Say what will be written, before anything is. RecipeError when the disk lacks room."""
    work.hidden.root.mkdir(parents=True, exist_ok=True)
    footprint = Footprint(
        len(work.task.aux_layers), work.task.hidden_size, work.task.dtype.itemsize
    )
    present = sum(path.stat().st_size for path in work.hidden.root.glob("*shard-*"))
    free = shutil.disk_usage(work.hidden.root).free
    needed = check_room(job.dataset, index.lengths, num_shards, footprint, free + present)
    _, hours = hours_for(sum(index.lengths), job.workspace, job.recipe)
    print(
        f"{job.dataset}: {len(index.lengths):,} rows, {sum(index.lengths):,} tokens, {num_shards} "
        f"shards of {gib(needed)} in all, {num_kept} of them kept; {gib(free)} free; "
        f"{hours} for all; "
        f"{index.left_out:,} rows left out, {TOO_LONG} {work.task.settings.max_length}",
        flush=True,
    )


def _section(
    work: _Work,
    index: RowIndex,
    measured: Sequence[dict[str, float]],
    files: dict[str, Any],
) -> dict[str, Any]:
    numbers = {}
    if measured:
        numbers = {
            "reference_error": max(shard["reference_error"] for shard in measured),
            "alone_error": max(shard["alone_error"] for shard in measured),
            "argmax_share": _share(measured),
            "response_tokens": sum(shard["response_tokens"] for shard in measured),
        }
    return {
        "inputs": work.inputs,
        "identity": work.identity,
        "counts": {
            "rows": len(index.lengths),
            "tokens": sum(index.lengths),
            "shards": len(measured),
            "left_out": {TOO_LONG: index.left_out} if index.left_out else {},
        },
        "gates": numbers,
        "files": files,
    }


def _share(measured: Sequence[dict[str, float]]) -> float:
    total = sum(shard["response_tokens"] for shard in measured)
    return sum(shard["argmax_matches"] for shard in measured) / total if total else 1.0


def _finish(job: Job, section: dict[str, Any], *, changed: bool, rate: float | None = None) -> None:
    counts, numbers = section["counts"], section["gates"]
    share = f", argmax share {numbers['argmax_share']:.1%}" if numbers else ""
    left_out = "".join(f", {n:,} left out ({why})" for why, n in counts["left_out"].items())
    line = (
        f"{counts['rows']:,} rows, {counts['tokens']:,} tokens in {counts['shards']} shards"
        f"{left_out}{share}{'' if changed else ', unchanged'}"
    )
    print(f"{job.dataset}: {line}", flush=True)
    job.report(
        done=True,
        changed=changed,
        line=line,
        rows=counts["rows"],
        tokens=counts["tokens"],
        shards=counts["shards"],
        **({} if rate is None else {"tokens_per_second": rate}),
    )


class _Progress:
    """Reports about once a second how far this run has come."""

    def __init__(self, job: Job, present_tokens: int, dataset_tokens: int) -> None:
        self._job = job
        self._present_tokens = present_tokens
        self._dataset_tokens = dataset_tokens
        self._tokens = 0
        self._started = self._reported = time.monotonic()

    def advance(self, tokens: int) -> None:
        self._tokens += tokens
        now = time.monotonic()
        if now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        self._job.report(
            tokens=self._present_tokens + self._tokens,
            dataset_tokens=self._dataset_tokens,
            tokens_per_second=self.tokens_per_second(),
        )

    def tokens_per_second(self) -> float:
        """Of this run, from its first shard on."""
        return round(self._tokens / (time.monotonic() - self._started), 1)
