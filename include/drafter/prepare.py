"""prepare: rows of every source to prompts, deduplicated, in a fixed order, rendered to ids.

One job over all datasets, because no prompt is to be answered twice: of rows with one content the
first dataset of the recipe keeps one, whatever the order of the rows. Contents that differ in case
or white space only count as one. What is left is ordered by sha256(seed, sample id), so that a
shuffled source gives the same prompts; those above ``max_prompt_tokens`` are dropped, then
``max_samples`` are taken. Every row is accounted for: source_rows = prompts + sum(dropped).

Prompts that are there already, without a manifest, are somebody else's. Mode "adopt" keeps them
when they and their responses pass drafter.adoption; "restart" keeps them too, since the responses
move away; otherwise a dataset with responses is left alone and prompts without are archived.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from drafter import adoption, layout, plan, prompts, rewrite, sessions, template
from drafter.errors import DataError, RecipeError
from drafter.identity import target_identity
from drafter.job import Job
from drafter.layout import ALL, Prepared
from drafter.sections import Dataset
from drafter.sources import CONVERT, reading
from drafter.sources.prompt import Prompt, mapped
from drafter.spool import Spool

_KEY = struct.Struct(">16sH8sQ")
"""What memory keeps of a converted row: hash of its content without case and white space, position
of its dataset in the recipe, hash of its content, offset in the spool. Of equal contents the one
that sorts first wins."""

Kept = tuple[str, int]
"""Sample id, offset in the spool."""


@dataclass
class Tally:
    """Where the rows of one dataset went."""

    source_rows: int = 0
    prompts: int = 0
    adopted: int = 0
    """Prompts that were there already, of an older run."""
    dropped: Counter[str] = field(default_factory=Counter)

    def story(self) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items()))
        adopted = f", {self.adopted} adopted" if self.adopted else ""
        return (
            f"{self.prompts} prompts of {self.source_rows} rows"
            f" ({reasons or 'none dropped'}){adopted}"
        )


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
    with tempfile.TemporaryFile(dir=job.dir.root) as file:
        spool = Spool(file)
        kept = _deduplicated(list(_converted(recipe.datasets, spool, tallies, pace)), tallies)
        for source in recipe.datasets:
            tally, prepared = tallies[source.name], workspace.prepared(source.name)
            selected = _selected(job, source, kept.pop(source.name), spool, render, tally, pace)
            unknown = adoption.has_unknown_prompts(prepared)
            if not (selected or unknown or prompts.has_adopted(prepared)):
                continue
            with layout.locked(prepared.lock):
                layout.clear_partial(prepared.root)
                if unknown and not _may_touch(job, prepared, render):
                    continue
                written = prompts.write(
                    prepared,
                    selected,
                    spool,
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
                        "retired": written.retired,
                        "adopted": written.adopted,
                        "dropped": dict(tally.dropped),
                    },
                    "files": {
                        path.name: layout.file_record(path)
                        for path in (prepared.prompts, prepared.prompt_ids)
                    },
                }
                changed |= layout.write_section(prepared.manifest, "prepare", section)
    _finish(job, tallies, changed)


def _finish_rewrite(prepared: Prepared) -> None:
    """What a person's `drafter repair` or `discard` decided comes before what this run writes."""
    if prepared.rewrite.is_dir():
        with layout.locked(prepared.lock):
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
            with layout.whole_file(kept) as partial:
                shutil.copyfile(prepared.prompts, partial)
    return True


def _refuse_another_identity(name: str, prepared: Prepared, identity: dict[str, Any]) -> None:
    """Ids of one tokenizer must not stand beside responses of another."""
    section = layout.read_section(prepared.manifest, "prepare")
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


def _converted(
    sources: tuple[Dataset, ...], spool: Spool, tallies: dict[str, Tally], pace: _Pace
) -> Iterator[bytes]:
    """Write the prompt of every row to the spool; a key for each."""
    for rank, source in enumerate(sources):
        convert, tally = CONVERT[source.format], tallies[source.name]
        for number, row in enumerate(reading.rows(Path(source.path))):
            pace.tick(dataset=source.name, source_rows=number)
            tally.source_rows += 1
            prompt = convert(row) if isinstance(row, dict) else row
            if isinstance(prompt, str):
                tally.dropped[prompt] += 1
                continue
            content = prompt.content
            whole = layout.digest(content)
            folded = layout.digest(mapped(content, _fold))
            origin = {"id": prompt.source_id, "row": number, "revision": source.revision}
            offset = spool.append({**content, "source": origin})
            yield _KEY.pack(bytes.fromhex(folded)[:16], rank, bytes.fromhex(whole)[:8], offset)


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


def _deduplicated(keys: list[bytes], tallies: dict[str, Tally]) -> dict[str, list[Kept]]:
    """What each dataset keeps; the rest is counted as dropped."""
    names = list(tallies)
    kept: dict[str, list[Kept]] = {name: [] for name in names}
    keys.sort()
    for _, alike in itertools.groupby(keys, key=lambda key: key[:16]):
        best, *others = alike
        _, first, winner, offset = _KEY.unpack(best)
        kept[names[first]].append((prompts.sample_id(names[first], winner.hex()), offset))
        for key in others:
            _, rank, whole, _ = _KEY.unpack(key)
            reason = "duplicate" if whole == winner else "near duplicate"
            place = "" if rank == first else f" of {names[first]}"
            tallies[names[rank]].dropped[reason + place] += 1
    return kept


def _selected(
    job: Job,
    source: Dataset,
    kept: list[Kept],
    spool: Spool,
    render: prompts.Render,
    tally: Tally,
    pace: _Pace,
) -> dict[str, int]:
    """Sample id -> offset of its lines for the two files, in the order of answering."""
    rules = job.recipe.generate
    kept.sort(key=lambda prompt: hashlib.sha256(f"{rules.seed} {prompt[0]}".encode()).digest())
    selected: dict[str, int] = {}
    for number, (identity, offset) in enumerate(kept):
        if len(selected) == source.max_samples:
            tally.dropped["beyond max_samples"] += len(kept) - number
            break
        pace.tick(dataset=source.name, rendered=number, prompts=len(selected))
        row = orjson.loads(spool.lines(offset)[0])
        try:
            input_ids = render(Prompt(row["messages"], row["tools"]))
        except DataError:
            tally.dropped["refused by the template"] += 1
            continue
        if len(input_ids) > rules.max_prompt_tokens:
            tally.dropped["longer than max_prompt_tokens"] += 1
            continue
        selected[identity] = spool.append(
            {"sample_id": identity, **row}, {"sample_id": identity, "input_ids": input_ids}
        )
    tally.prompts = len(selected)
    return selected


def _finish(job: Job, tallies: dict[str, Tally], changed: bool) -> None:
    empty = [
        f"{name}: {tally.story()}"
        for name, tally in tallies.items()
        if not tally.prompts + tally.adopted
    ]
    if empty:
        raise DataError(
            f"no prompt is left in {'; '.join(empty)}: correct its path, its format or"
            " generate.max_prompt_tokens in the recipe"
        )
    source_rows = sum(tally.source_rows for tally in tallies.values())
    num_prompts = sum(tally.prompts for tally in tallies.values())
    line = f"{num_prompts} prompts of {source_rows} rows in {len(tallies)} datasets"
    print(line, flush=True)
    job.report(done=True, changed=changed, source_rows=source_rows, prompts=num_prompts, line=line)


class _Pace:
    """Reports once a second, however often it is asked."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._next = time.monotonic()

    def tick(self, **numbers: Any) -> None:
        if time.monotonic() >= self._next:
            self._job.report(**numbers)
            self._next = time.monotonic() + 1
