"""Phase validate: the gate between paid-for tokens and training. Every row, every field.

Reads ``raw_responses.jsonl`` against ``prompt_ids.jsonl`` and writes, whole, what may be trained on
(``tokenized_data.jsonl``: prompt ids followed by output ids, never decoded) and what may not
(``rejected.jsonl``, with a reason). Accepted + rejected = stored, or the phase fails. The same
inputs give the same bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from drafter import plan, rewrite, template
from drafter.errors import DataError
from drafter.identity import target_identity
from drafter.job import Job
from drafter.jsonl import Line, damage, row_at, rows, scan
from drafter.layout import (
    Prepared,
    drop_sections,
    file_record,
    whole_file,
    write_section,
)
from drafter.rows import Family, check_row, reason_class, verdict
from drafter.sections import Validate
from drafter.sessions import refuse_other_identity, refuse_other_prompts

REPORT_S = 1.0


def run(job: Job) -> None:
    validate(job, template.family(Path(job.recipe.target.path)))


def validate(job: Job, family: Family) -> None:
    """Raises RecipeError when prompts or responses are not of the recipe's target, DataError when
    the file is damaged or too much of it is rejected; in the latter case both files are written all
    the same, the manifest is not."""
    prepared = job.workspace.prepared(job.dataset)
    rewrite.finish(prepared)
    rules = job.recipe.validate_
    inputs = plan.inputs("validate", job.dataset, job.workspace, job.recipe)
    target = target_identity(job.recipe)
    refuse_other_prompts(prepared, target)
    refuse_other_identity(prepared, target)
    gate = Gate(family, rules, job.recipe.target.thinking, index_prompts(prepared.prompt_ids))
    count = _write(job, prepared, gate)
    try:
        _check(job.dataset, prepared, rules, count)
    except DataError:
        # What an earlier, successful validation said no longer describes the files.
        drop_sections(prepared.manifest, ("validate",))
        raise
    section = {
        "inputs": inputs,
        "counts": count.as_json(),
        "files": {path.name: file_record(path) for path in (prepared.tokenized, prepared.rejected)},
    }
    changed = write_section(prepared.manifest, "validate", section)
    line = _story(count)
    job.report(**count.as_json(), done=True, changed=changed, line=line)
    print(f"{job.dataset}: {line}", flush=True)
    for reason, number in count.by_reason.most_common():
        print(f"{job.dataset}:   {number:,} {reason}", flush=True)


class StoredPrompt(NamedTuple):
    """Where a prompt's ids are and how many there are: the ids of a whole dataset fill memory."""

    offset: int
    num_tokens: int


def index_prompts(prompt_ids: Path) -> dict[str, StoredPrompt]:
    """sample_id -> where its prompt is. DataError when the file is missing or damaged."""
    if not prompt_ids.exists():
        raise DataError(f"{prompt_ids} is missing: run prepare first")
    return {
        line.value["sample_id"]: StoredPrompt(line.offset, len(line.value["input_ids"]))
        for line in rows(prompt_ids)
    }


@dataclass
class Gate:
    """Decides row by row, in file order: pure but for what it has accepted so far."""

    family: Family
    rules: Validate
    thinking: bool
    prompts: dict[str, StoredPrompt]
    accepted: set[str] = field(default_factory=set)

    def reject(self, line: Line) -> str | None:
        """Why the row is not accepted; None when it is."""
        if line.torn:
            return "torn last line"
        if line.fault:
            return f"damaged line: line {line.number}, {line.fault}"
        row, sample_id = line.value, _sample_id(line.value)
        prompt = self.prompts.get(sample_id) if sample_id else None
        reason = check_row(row, self.family, prompt.num_tokens if prompt else None)
        if reason is None and prompt is None:
            reason = "unknown sample_id"
        if reason is None and sample_id in self.accepted:
            reason = "duplicate"
        reason = reason or self._judge_content(row)
        if reason is None:
            self.accepted.add(row["sample_id"])
        return reason

    def _judge_content(self, row: dict[str, Any]) -> str | None:
        cut = row["finish_reason"] == "length"
        if cut and not self.rules.accept_truncated:
            return "cut by length"
        judged, kind = verdict(row, self.family, self.thinking)
        if cut and kind in ("closed", "not thinking", "no answer"):
            return None
        if cut and kind == "tool in thinking":
            return "cut by length in a tool call"
        return None if judged == "sound" else kind


@dataclass
class Count:
    """What became of the rows."""

    stored: int = 0
    accepted: int = 0
    rejected: int = 0
    tokens: int = 0
    """Prompt and response, of accepted rows."""
    response_tokens: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    damaged: list[DataError] = field(default_factory=list)

    def accept(self, tokenized: dict[str, Any]) -> None:
        self.accepted += 1
        self.tokens += len(tokenized["input_ids"])
        self.response_tokens += len(tokenized["input_ids"]) - tokenized["prompt_tokens"]

    def reject(self, reason: str) -> None:
        self.rejected += 1
        self.by_reason[reason_class(reason)] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "stored": self.stored,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "tokens": self.tokens,
            "response_tokens": self.response_tokens,
            "by_reason": dict(sorted(self.by_reason.items())),
        }


def _write(job: Job, prepared: Prepared, gate: Gate) -> Count:
    """Both files, whole; every line of the responses goes to one of them."""
    count, reported = Count(), time.monotonic()
    with (
        whole_file(prepared.tokenized) as tokenized_partial,
        whole_file(prepared.rejected) as rejected_partial,
        open(tokenized_partial, "wb") as tokenized,
        open(rejected_partial, "wb") as rejected,
    ):
        for line in scan(prepared.responses):
            count.stored += 1
            reason = gate.reject(line)
            if reason is None:
                row = _tokenized(line.value, gate.prompts, prepared.prompt_ids)
                count.accept(row)
                tokenized.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            else:
                count.reject(reason)
                if not line.torn and not isinstance(line.value, dict):
                    count.damaged.append(damage(prepared.responses, line))
                refused = {"sample_id": _sample_id(line.value), "reason": reason}
                rejected.write(orjson.dumps(refused, option=orjson.OPT_APPEND_NEWLINE))
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                job.report(**count.as_json())
    return count


def _tokenized(
    row: dict[str, Any], prompts: dict[str, StoredPrompt], prompt_ids: Path
) -> dict[str, Any]:
    prompt: list[int] = row_at(prompt_ids, prompts[row["sample_id"]].offset)["input_ids"]
    return {
        "sample_id": row["sample_id"],
        "input_ids": prompt + row["output_ids"],
        "prompt_tokens": len(prompt),
    }


def _sample_id(row: object) -> str | None:
    sample_id = row.get("sample_id") if isinstance(row, dict) else None
    return sample_id if isinstance(sample_id, str) else None


def _check(dataset: str, prepared: Prepared, rules: Validate, count: Count) -> None:
    written = plan.count_lines(prepared.tokenized) + plan.count_lines(prepared.rejected)
    if not count.accepted + count.rejected == count.stored == written:
        raise DataError(
            f"{dataset}: {count.accepted} accepted + {count.rejected} rejected, {written} written,"
            f" but {count.stored} stored: a writer is at work, stop it and validate again"
        )
    if count.damaged:
        more = f" ({len(count.damaged) - 1} more such lines)" if count.damaged[1:] else ""
        raise DataError(f"{dataset}: {count.damaged[0]}{more}")
    if count.rejected > rules.max_rejected_share * count.stored:
        reasons = ", ".join(
            f"{number} {reason}" for reason, number in count.by_reason.most_common()
        )
        raise DataError(
            f"{dataset}: {count.rejected} of {count.stored} rows rejected ({reasons}), at most"
            f" {rules.max_rejected_share:.0%} may be: read {prepared.rejected}, then mend and"
            " generate anew, or raise validate.max_rejected_share"
        )


def _story(count: Count) -> str:
    return (
        f"{count.accepted:,} of {count.stored:,} rows accepted, {count.rejected:,} rejected,"
        f" {count.tokens:,} tokens, {count.response_tokens:,} of them responses"
    )
