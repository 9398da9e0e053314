"""Samples as a person reads them: prompt, thinking, answer, tool calls, and what they are made of.

Ids are decoded by the target's tokenizer for the eye only. What stands in the files may be torn,
damaged, of another shape or without a prompt: it is shown as it is, or counted.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from drafter import jsonl, template
from drafter.errors import DataError, RecipeError
from drafter.layout import Prepared
from drafter.rows import Family, check_row, verdict
from drafter.sections import Target
from drafter.terminal import Paint, Style, elide, inert, mark, one_line, unmark

ELIDED_AT = 2000
"""Characters of one text; the middle of a longer one goes."""

SHOWN_IDS = 8
"""At each end."""


class Choice(NamedTuple):
    """Which samples: of one id, at random, or the last ones."""

    sample_id: str | None = None
    random: int | None = None
    last: int = 3
    rejected: bool = False
    """Only those that validate did not accept."""


@dataclass
class Sample:
    """What the files hold of one sample id; ``row`` and ``line`` are None without a response."""

    sample_id: str
    line: int | None = None
    row: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    prompt_ids: list[int] | None = None
    remarks: list[str] = field(default_factory=list)
    """Why it was rejected, or failed."""


def find(prepared: Prepared, choice: Choice) -> tuple[list[Sample], list[str]]:
    """(samples in file order, remarks on the files). RecipeError when there is no such sample."""
    rejected = _rejected(prepared) if prepared.rejected.exists() else {}
    if choice.rejected and not prepared.rejected.exists():
        raise DataError(f"{prepared.rejected} is missing: run validate first")
    offsets: list[tuple[int, int]] = []
    notes, num_damaged = [], 0
    for line in jsonl.scan(prepared.responses):
        if line.torn:
            notes.append(f"{prepared.responses}:{line.number} is torn, the next job sets it aside")
        elif not isinstance(line.value, dict):
            num_damaged += 1
        elif choice.sample_id in (None, line.value.get("sample_id")) and (
            not choice.rejected or _id(line.value) in rejected
        ):
            offsets.append((line.number, line.offset))
    if num_damaged:
        notes.append(f"{num_damaged:,} damaged lines: see `drafter repair {prepared.root.name}`")
    samples = []
    for number, offset in _chosen(offsets, choice):
        row = jsonl.row_at(prepared.responses, offset)
        samples.append(Sample(_id(row), number, row))
    if choice.sample_id is not None and not samples:
        samples.append(Sample(choice.sample_id))
    _add_prompts(prepared, samples)
    _add_remarks(prepared, samples, rejected)
    if samples and samples[0] == Sample(samples[0].sample_id):
        raise RecipeError(f"no sample {choice.sample_id!r} in {prepared.root}: see prompts.jsonl")
    return samples, notes


class Reader:
    """Decodes ids with their control tokens marked, and knows the parts of an answer."""

    def __init__(self, tokenizer: Any, family: Family, target: Target) -> None:
        self.family = family
        self.thinking = target.thinking and family.think_close is not None
        self._tokenizer = tokenizer
        self._known = min(len(tokenizer), family.vocab_size)
        self._controls = {
            *template.control_tokens(tokenizer).values(),
            *family.tool_ids,
            *family.stop_ids,
        }

    def text(self, ids: Sequence[int]) -> str:
        """Inert text, control tokens marked."""
        text = ""
        for is_control, run in groupby(ids, self._is_control):
            for piece in ([i] for i in run) if is_control else [list(run)]:
                decoded = inert(self._decode(piece))
                text += mark(decoded) if is_control else decoded
        return text

    def parts(self, output_ids: list[int]) -> list[tuple[str, list[int]]]:
        """(thinking, answer, tool calls) of an answer, in order, those that are there."""
        close, tools = self.family.think_close, self.family.tool_begin
        begin = 0
        if self.thinking:
            stop = next((i for i, x in enumerate(output_ids) if x == close or x in tools), None)
            begin = len(output_ids) if stop is None else stop + (output_ids[stop] == close)
        calls = next((i for i in range(begin, len(output_ids)) if output_ids[i] in tools), None)
        end = len(output_ids) if calls is None else calls
        parts = {
            "thinking": output_ids[:begin],
            "answer": output_ids[begin:end],
            "tool calls": output_ids[end:],
        }
        return [(name, ids) for name, ids in parts.items() if ids]

    def _is_control(self, token: int) -> bool:
        return token in self._controls or not 0 <= token < self._known

    def _decode(self, ids: list[int]) -> str:
        if not 0 <= ids[0] < self._known:
            return f"<id {ids[0]}>"
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def render(sample: Sample, reader: Reader, paint: Paint, limit: int | None = ELIDED_AT) -> str:
    """One sample; texts longer than ``limit`` characters lose their middle."""
    return "\n".join(_lines(sample, reader, paint, limit))


def _lines(sample: Sample, reader: Reader, paint: Paint, limit: int | None) -> Iterator[str]:
    place = "no response" if sample.line is None else f"raw_responses.jsonl:{sample.line}"
    retired = ", retired" if sample.prompt and sample.prompt.get("retired") else ""
    yield f"{paint(one_line(sample.sample_id), 'bold')}  {place}{retired}"
    for remark in sample.remarks:
        yield paint(elide(one_line(remark), limit), "yellow")
    num_prompt_ids = None if sample.prompt_ids is None else len(sample.prompt_ids)
    fault = sample.row and check_row(sample.row, reader.family, num_prompt_ids)
    if fault:
        yield paint(f"not a valid row: {one_line(fault)}", "red")
    elif sample.row:
        judged, kind = verdict(sample.row, reader.family, reader.thinking)
        style: Style = "green" if judged == "sound" else "red"
        yield (
            f"finish_reason {sample.row['finish_reason']}, {sample.row['prompt_tokens']:,} prompt"
            f" tokens, {sample.row['completion_tokens']:,} completion tokens,"
            f" {paint(f'{kind} ({judged})', style)}"
        )

    def section(title: str, text: str) -> Iterator[str]:
        yield paint(f"--- {title}", "cyan")
        yield unmark(elide(text, limit), lambda token: paint(token, "magenta"))

    if sample.prompt is None:
        yield paint("prompt unknown: not in prompts.jsonl", "yellow")
    else:
        for title, text in _messages(sample.prompt):
            yield from section(title, text)
    if sample.prompt_ids is not None:
        yield paint(f"prompt ids: {ids_at_ends(sample.prompt_ids)}", "dim")
    if sample.row is None:
        return
    output_ids = sample.row.get("output_ids")
    if not isinstance(output_ids, list) or any(type(i) is not int for i in output_ids):
        yield from section("row", inert(json.dumps(sample.row, ensure_ascii=False)))
        return
    for title, ids in reader.parts(output_ids):
        yield from section(title, reader.text(ids))
    yield paint(f"output ids: {ids_at_ends(output_ids)}", "dim")


def ids_at_ends(ids: Sequence[Any]) -> str:
    """The first and the last ids, and how many stand between them."""
    if len(ids) <= 2 * SHOWN_IDS:
        return " ".join(map(str, ids))
    first, last = (" ".join(map(str, part)) for part in (ids[:SHOWN_IDS], ids[-SHOWN_IDS:]))
    return f"{first} [... {len(ids) - 2 * SHOWN_IDS:,} ...] {last}"


def _messages(prompt: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if tools := prompt.get("tools"):
        yield "tools", inert(json.dumps(tools, ensure_ascii=False))
    messages = prompt.get("messages")
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict):
            yield "message", inert(json.dumps(message, ensure_ascii=False))
            continue
        more = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        text = "" if content is None else text
        rest = json.dumps(more, ensure_ascii=False) if more else ""
        yield one_line(str(message.get("role"))), inert("\n".join(filter(None, [text, rest])))


def _chosen(offsets: list[tuple[int, int]], choice: Choice) -> Sequence[tuple[int, int]]:
    if choice.sample_id is not None:
        return offsets
    if choice.random is not None:
        return sorted(random.sample(offsets, min(choice.random, len(offsets))))
    return deque(offsets, maxlen=choice.last)


def _id(row: dict[str, Any]) -> str:
    return str(row.get("sample_id"))


def _rejected(prepared: Prepared) -> dict[str, str]:
    return {
        _id(line.value): str(line.value.get("reason")) for line in jsonl.rows(prepared.rejected)
    }


def _add_prompts(prepared: Prepared, samples: list[Sample]) -> None:
    wanted = {sample.sample_id for sample in samples}
    for path, key in ((prepared.prompts, "prompt"), (prepared.prompt_ids, "prompt_ids")):
        found = {}
        for line in jsonl.scan(path) if wanted else ():
            if isinstance(line.value, dict) and _id(line.value) in wanted:
                value = line.value if key == "prompt" else line.value.get("input_ids")
                found[_id(line.value)] = value
        for sample in samples:
            setattr(sample, key, found.get(sample.sample_id))


def _add_remarks(prepared: Prepared, samples: list[Sample], rejected: dict[str, str]) -> None:
    wanted = {sample.sample_id: sample for sample in samples}
    for sample in samples:
        if reason := rejected.get(sample.sample_id):
            sample.remarks.append(f"rejected: {reason}")
    for line in jsonl.scan(prepared.failed):
        failure = line.value
        if isinstance(failure, dict) and (failed := wanted.get(_id(failure))):
            failed.remarks.append(f"failed: {failure.get('class')}, {failure.get('reason')}")
