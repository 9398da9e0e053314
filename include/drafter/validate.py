"""Phase validate: the gate between paid-for tokens and training. Every row, every field.

Reads ``raw_responses.jsonl`` against ``prompt_ids.jsonl`` and writes, whole, what may be trained on
(``tokenized_data.jsonl``: prompt ids followed by output ids, never decoded) and what may not
(``rejected.jsonl``, with a reason). Accepted + rejected = stored, or the phase fails. The same
inputs give the same bytes, and while inputs, rules and what was written are unchanged nothing is
done at all. What a row is, decides gate.py; the report hears of each row as it is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from drafter import behaviour, jsonl, plan, rewrite, template
from drafter.errors import DataError, DrafterError
from drafter.files import (
    count_lines,
    drop_sections,
    file_record,
    read_section,
    whole_file,
    write_section,
)
from drafter.generation.sessions import refuse_other_identity, refuse_other_prompts
from drafter.identity import target_identity
from drafter.job import Job
from drafter.kinds import Kind, exceeds, reason_class
from drafter.layout import Prepared
from drafter.rows import Family
from drafter.sections import Validate
from drafter.validation import toolcalls
from drafter.validation.declared import Tools
from drafter.validation.facts import Collector, Facts, Outcome
from drafter.validation.gate import Gate
from drafter.validation.tokenized import Prompts
from drafter.validation.toolcalls import Judge

REPORT_S = 1.0

NAMED = 20
"""Damaged lines that are named; the rest is a count."""

_REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space or raise the quota",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "mount it writable",
    errno.EISDIR: "move it away",
}


def run(job: Job) -> None:
    """Raises what :func:`validate` raises."""
    prepared = job.workspace.prepared(job.dataset)
    rewrite.finish(prepared)
    if done := _done(job, prepared):
        _tell(job, prepared, done["counts"], changed=False)
        return
    from drafter.report import Report

    target = Path(job.recipe.target.path)
    tokenizer = template.load_tokenizer(target)
    family = template.family(target, tokenizer)
    template.require_thinking(job.recipe.target, family)
    behaviour.refuse_change(prepared, behaviour.fingerprint(target, tokenizer))
    spelling = toolcalls.learn(tokenizer, family)
    judge = Judge(family, spelling, lambda ids: template.decode(tokenizer, ids))
    validate(job, family, judge, Report(job, prepared, tokenizer, family))


def _done(job: Job, prepared: Prepared) -> dict[str, Any] | None:
    """The section of an earlier validation of the same bytes by the same rules, if what it wrote
    is there; neither tokenizer nor torch is loaded to find out."""
    section = read_section(prepared.manifest, "validate")
    if section is None:
        return None
    same = section["inputs"] == plan.inputs("validate", job.dataset, job.workspace, job.recipe)
    spoilt = plan.changed_files("validate", job.dataset, job.workspace, job.recipe)
    return section if same and not spoilt else None


def validate(job: Job, family: Family, judge: Judge, collector: Collector) -> None:
    """Raises RecipeError when prompts or responses are not of the recipe's target, DataError when
    a file is damaged or a class of rows has more than its share; in the latter case all files are
    written all the same, the manifest is not."""
    prepared = job.workspace.prepared(job.dataset)
    rules = job.recipe.validate_
    inputs = plan.inputs("validate", job.dataset, job.workspace, job.recipe)
    target = target_identity(job.recipe)
    refuse_other_prompts(prepared, target)
    refuse_other_identity(prepared, target)
    tools = Tools(prepared.prompts)
    with Prompts(prepared.prompt_ids) as prompts, _explained(prepared):
        gate = Gate(family, rules, job.recipe.target.thinking, prompts, tools, judge)
        count = _write(job, prepared, gate, collector)
    damaged = [*count.damaged, *tools.damaged, *_altered(prepared, inputs["responses"])]
    breaches = tuple(_breaches(rules, count))
    outcome = Outcome(job.dataset, count.as_json(), breaches, tuple(map(str, damaged)))
    with _explained(prepared):
        made = collector.finish(outcome)
    try:
        _check(prepared, outcome, inputs["responses"]["bytes"], count.num_bytes)
    except DataError:
        # What an earlier, successful validation said no longer describes the files.
        drop_sections(prepared.manifest, ("validate",))
        raise
    section = {
        "inputs": inputs,
        "counts": outcome.counts,
        "files": _records((prepared.tokenized, prepared.rejected)),
        "report": _records(made),
    }
    changed = write_section(prepared.manifest, "validate", section)
    _tell(job, prepared, outcome.counts, changed)


@contextlib.contextmanager
def _explained(prepared: Prepared) -> Iterator[None]:
    """What the operating system refuses to write, as one sentence."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        if number not in _REMEDIES:
            raise
        raise DrafterError(
            f"cannot write {error.filename2 or error.filename or prepared.root}"
            f" ({os.strerror(number)}): {_REMEDIES[number]}, then run validate again; the answers"
            " are untouched"
        ) from None


def _records(paths: Iterable[Path]) -> dict[str, Any]:
    return {path.name: file_record(path) for path in paths}


@dataclass
class Count:
    """What became of the rows."""

    stored: int = 0
    accepted: int = 0
    flagged: int = 0
    """Accepted ones."""
    rejected: int = 0
    tokens: int = 0
    """Prompt and response, of accepted rows."""
    response_tokens: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    """Of rejected rows, the deciding class of each."""
    by_kind: Counter[Kind] = field(default_factory=Counter)
    """Of all rows, each of their classes."""
    num_bytes: int = 0
    damaged: list[DataError] = field(default_factory=list)
    """The first NAMED of them."""

    def add(self, facts: Facts) -> None:
        self.stored += 1
        for kind in facts.kinds:
            self.by_kind[kind] += 1
        if facts.verdict == "rejected":
            self.rejected += 1
            self.by_reason[reason_class(facts.reason)] += 1
            return
        self.accepted += 1
        self.flagged += facts.verdict == "flagged"
        self.tokens += facts.prompt_tokens + facts.completion_tokens
        self.response_tokens += facts.completion_tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "stored": self.stored,
            "accepted": self.accepted,
            "flagged": self.flagged,
            "rejected": self.rejected,
            "tokens": self.tokens,
            "response_tokens": self.response_tokens,
            "by_reason": dict(sorted(self.by_reason.items())),
            "by_kind": dict(sorted(self.by_kind.items())),
        }


def _write(job: Job, prepared: Prepared, gate: Gate, collector: Collector) -> Count:
    """Both files, whole; every line of the responses goes to one of them."""
    count, reported = Count(), time.monotonic()
    with (
        whole_file(prepared.tokenized) as tokenized_partial,
        whole_file(prepared.rejected) as rejected_partial,
        open(tokenized_partial, "wb", buffering=1 << 20) as tokenized,
        open(rejected_partial, "wb") as rejected,
    ):
        for line in jsonl.scan(prepared.responses):
            facts, row = gate.look(line)
            count.add(facts)
            count.num_bytes += line.num_bytes
            collector.add(facts)
            if row is not None:
                tokenized.write(row)
            else:
                if facts.kinds == ("damaged line",) and len(count.damaged) < NAMED:
                    count.damaged.append(jsonl.damage(prepared.responses, line))
                refused = {"sample_id": facts.sample_id, "reason": facts.reason}
                rejected.write(orjson.dumps(refused, option=orjson.OPT_APPEND_NEWLINE))
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                job.report(**count.as_json())
    return count


def _altered(prepared: Prepared, now: dict[str, Any]) -> Iterable[DataError]:
    """A file of the size that generate left, and not of its bytes: whatever its rows look like."""
    section = read_section(prepared.manifest, "generate") or {}
    left = section.get("files", {}).get(prepared.responses.name, now)
    if left["bytes"] == now["bytes"] and left != now:
        yield DataError(
            f"{prepared.responses} has the size and not the bytes that generate left: restore it"
            " from a copy, or `drafter restart` the dataset"
        )


def _breaches(rules: Validate, count: Count) -> Iterable[str]:
    def share(number: int, what: str, most: float) -> str:
        return f"{number} of {count.stored} rows {what}, at most {100 * most:g}% may be"

    if count.rejected > rules.max_rejected_share * count.stored:
        reasons = ", ".join(
            f"{number} {reason}" for reason, number in count.by_reason.most_common()
        )
        yield share(count.rejected, f"rejected ({reasons})", rules.max_rejected_share)
    for kind, number in count.by_kind.most_common():
        if exceeds(number, count.stored, rules.cap[kind]):
            yield share(number, f"are of class {kind!r}", rules.cap[kind])


def _check(prepared: Prepared, outcome: Outcome, num_bytes: int, num_read: int) -> None:
    dataset, counts = outcome.dataset, outcome.counts
    written = count_lines(prepared.tokenized) + count_lines(prepared.rejected)
    if (
        not counts["accepted"] + counts["rejected"] == counts["stored"] == written
        or num_bytes != num_read
    ):
        raise DataError(
            f"{dataset}: {counts['accepted']} accepted + {counts['rejected']} rejected, {written}"
            f" written, but {counts['stored']} stored in {num_read} of {num_bytes} bytes: a writer"
            " is at work, stop it and validate again"
        )
    if outcome.damaged:
        more = max(counts["by_kind"].get("damaged line", 0), len(outcome.damaged)) - 1
        told = f" ({more} more such lines)" if more else ""
        raise DataError(f"{dataset}: {outcome.damaged[0]}{told}")
    if outcome.breaches:
        raise DataError(
            f"{dataset}: {'; '.join(outcome.breaches)}: read {prepared.rejected}, then mend and"
            " generate anew, or raise validate.max_rejected_share or validate.cap"
        )


def _tell(job: Job, prepared: Prepared, counts: dict[str, Any], changed: bool) -> None:
    line = (
        f"{counts['accepted']:,} of {counts['stored']:,} rows accepted, {counts['flagged']:,} of"
        f" them flagged, {counts['rejected']:,} rejected, {counts['tokens']:,} tokens,"
        f" {counts['response_tokens']:,} of them responses{'' if changed else ', as before'}"
    )
    job.report(**counts, done=True, changed=changed, line=line, report=str(prepared.report))
    print(f"{job.dataset}: {line}", flush=True)
