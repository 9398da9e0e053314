"""prepare: rows of every source to prompts, deduplicated, in a fixed order, rendered to ids.

One job over all datasets, because no prompt is to be answered twice: of rows with one content the
first dataset of the recipe keeps one, whatever the order of the rows. Contents that differ in case
or white space only count as one, and one that has an answer already stays. What is left is ordered
by sha256(seed, sample id), so that a shuffled source gives the same prompts; those above the cap of
prompt tokens are shortened where the format allows it and else dropped, then ``max_samples`` are
taken. Every row is accounted for: source_rows = prompts + sum(dropped).

Memory holds 40 bytes per row; prompts wait in their source or in temporary files.

Prompts that are there already, without a manifest, are somebody else's. Mode "adopt" keeps them
when they and their responses pass adoption.py; "restart" keeps them too, since the responses
move away; otherwise a dataset with responses is left alone and prompts without are archived.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from drafter import files, plan, rewrite, template
from drafter.errors import DataError, RecipeError
from drafter.generation import adoption, sessions
from drafter.identity import target_identity
from drafter.job import Job
from drafter.layout import ALL, Prepared
from drafter.preparation import parallel, prompts
from drafter.preparation.candidates import gather
from drafter.preparation.row_store import RowStore
from drafter.preparation.selection import select
from drafter.preparation.tally import Tally

_REPORT_S = 1.0


def run(job: Job) -> None:
    """Write prompts.jsonl and prompt_ids.jsonl of every dataset of the recipe.

    Raises RecipeError for a source or target that is not there and for responses of another target,
    DataError for a damaged source and for a dataset of which no prompt is left. In mode "restart"
    another target is accepted: generate moves the old responses of the datasets it restarts away,
    and on any other dataset generate and validate refuse them.
    """
    recipe, workspace = job.recipe, job.workspace
    for name in recipe.dataset_names:
        _finish_rewrite(workspace.prepared(name))
    inputs = plan.inputs("prepare", ALL, workspace, recipe)
    before = plan.read_phase("prepare", ALL, workspace, recipe)
    intact = not plan.changed_prompts(workspace, recipe)
    if before and before["inputs"] == inputs and intact:
        job.report(done=True, changed=False, line="the prompts are up to date")
        return
    identity = {"target": recipe.target.path, **target_identity(recipe)}
    if job.mode != "restart":
        for name in recipe.dataset_names:
            _refuse_another_identity(name, workspace.prepared(name), identity)
    tokenizer = template.load_tokenizer(Path(recipe.target.path))
    render = functools.partial(template.render, tokenizer, thinking=recipe.target.thinking)
    tallies = {name: Tally() for name in recipe.dataset_names}
    pace = _Pace(job)
    changed = False
    with _row_store(job) as store:
        paid = [prompts.paid(workspace.prepared(name)) for name in recipe.dataset_names]
        found = gather(recipe.datasets, recipe.generate.seed, paid, store, tallies, pace.tick)
        for source, candidates in zip(recipe.datasets, found, strict=True):
            tally, prepared = tallies[source.name], workspace.prepared(source.name)
            max_tokens = source.max_prompt_tokens or recipe.generate.max_prompt_tokens
            selected = select(source, candidates, max_tokens, store, render, tally, pace.tick)
            unknown = adoption.has_unknown_prompts(prepared)
            if not (selected or unknown or prompts.has_adopted(prepared)):
                continue
            with files.locked(prepared.lock):
                files.clear_partial(prepared.root)
                if unknown and not _may_touch(job, prepared, render):
                    continue
                written = prompts.write(
                    prepared,
                    selected,
                    store,
                    render,
                    adopt=unknown and job.mode != "resume",
                    max_samples=source.max_samples,
                )
                tally.adopted = written.adopted
                if written.surplus:
                    tally.prompts -= written.surplus
                    tally.dropped["beyond max_samples"] += written.surplus
                print(f"{source.name}: {tally.story()}", flush=True)
                section = {
                    "inputs": inputs,
                    "identity": identity,
                    "counts": {
                        "source_rows": tally.source_rows,
                        "prompts": tally.prompts,
                        "shortened": tally.shortened,
                        "retired": written.retired,
                        "adopted": written.adopted,
                        "dropped": dict(tally.dropped),
                    },
                    "files": {
                        path.name: files.file_record(path)
                        for path in (prepared.prompts, prepared.prompt_ids)
                    },
                }
                changed |= files.write_section(prepared.manifest, "prepare", section)
    _finish(job, tallies, changed)


def _finish_rewrite(prepared: Prepared) -> None:
    """What a person's `drafter repair` or `discard` decided comes before what this run writes."""
    if prepared.rewrite.is_dir():
        with files.locked(prepared.lock):
            rewrite.finish(prepared)


def _may_touch(job: Job, prepared: Prepared, render: prompts.Render) -> bool:
    """May prompts without a manifest be kept or replaced? Says why not."""
    name, target = prepared.root.name, Path(job.recipe.target.path)
    if job.mode == "adopt":
        try:
            adoption.check(prepared, job.recipe, render, template.family(target))
        except DataError as error:
            print(f"{name}: refused, nothing is touched: {error}", flush=True)
            return False
    elif job.mode == "restart":
        for _ in adoption.checked_prompts(prepared):
            pass
    elif prompts.has_responses(prepared):
        print(f"{name}: left alone, {adoption.UNKNOWN}", flush=True)
        return False
    else:
        kept = prepared.archive(job.run_id) / prepared.prompts.name
        if not kept.exists():
            with files.whole_file(kept) as partial:
                shutil.copyfile(prepared.prompts, partial)
    return True


def _refuse_another_identity(name: str, prepared: Prepared, identity: dict[str, Any]) -> None:
    """Ids of one tokenizer must not stand beside responses of another."""
    section = files.read_section(prepared.manifest, "prepare")
    if section is None or not prompts.has_responses(prepared):
        return
    # The responses' own identity, where it is known: after a restart of other datasets the prompts
    # beside them may be of another target already.
    for known in sessions.known_identities(prepared) or [section["identity"]]:
        for key, wanted in identity.items():
            # The target may have moved: what it is made of decides.
            if key != "target" and known.get(key) != wanted:
                raise RecipeError(
                    f"{name} has responses for {key} {known.get(key)}, the recipe now means"
                    f" {wanted}: restore the recipe, use another workspace, or trigger generate"
                    " with mode restart for this dataset"
                )


@contextmanager
def _row_store(job: Job) -> Iterator[RowStore]:
    with ExitStack() as opened:
        yield RowStore(
            [
                opened.enter_context(tempfile.TemporaryFile(dir=job.dir.root))
                for _ in range(parallel.MAX_PROCESSES)
            ]
        )


def _finish(job: Job, tallies: dict[str, Tally], changed: bool) -> None:
    empty = [
        f"{name}: {tally.story()}"
        for name, tally in tallies.items()
        if not tally.prompts + tally.adopted
    ]
    if empty:
        raise DataError(
            f"no prompt is left in {'; '.join(empty)}: correct its path, its format or"
            " max_prompt_tokens in the recipe"
        )
    source_rows = sum(tally.source_rows for tally in tallies.values())
    num_prompts = sum(tally.prompts for tally in tallies.values())
    line = f"{num_prompts} prompts of {source_rows} rows in {len(tallies)} datasets"
    print(line, flush=True)
    job.report(done=True, changed=changed, source_rows=source_rows, prompts=num_prompts, line=line)


class _Pace:
    """Reports every ``_REPORT_S``, however often it is asked."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._next = time.monotonic()

    def tick(self, **numbers: Any) -> None:
        if time.monotonic() >= self._next:
            self._job.report(**numbers)
            self._next = time.monotonic() + _REPORT_S
