"""Samples as a person reads them: prompt, thinking, answer, tool calls, and what they are made of.

Ids are decoded by the target's tokenizer for the eye only. :func:`view` says what there is to see
of a sample, on a terminal (:func:`render`) as on the report's page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from drafter import template
from drafter.rows import Family, check_row
from drafter.samples import Sample
from drafter.sections import Target
from drafter.terminal import Paint, Style, elide, inert, mark, one_line, unmark
from drafter.validation.structure import verdict

ELIDED_AT = 2000
"""Characters of one text; the middle of a longer one goes."""

SHOWN_IDS = 8
"""At each end."""


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


class Text(NamedTuple):
    """Inert, control tokens marked; of any length."""

    title: str
    text: str


class View(NamedTuple):
    """What there is to see of a sample, every string inert."""

    sample_id: str
    place: str
    remarks: list[str]
    fault: str | None
    """Why it is no valid row."""

    told: str
    """Finish reason and numbers of a valid row; empty without one."""

    judged: tuple[str, bool] | None
    """What a valid row is, and whether that is good."""

    prompt: list[Text] | None
    """None when the prompt is unknown; a damaged line has none."""

    prompt_ids: str | None
    response: list[Text]
    output_ids: str | None


def view(sample: Sample, reader: Reader) -> View:
    place = "no response" if sample.line is None else f"raw_responses.jsonl:{sample.line}"
    retired = ", retired" if sample.prompt and sample.prompt.get("retired") else ""
    row = sample.row
    num_prompt_ids = None if sample.prompt_ids is None else len(sample.prompt_ids)
    fault = row and check_row(row, reader.family, num_prompt_ids)
    told, judged = "", None
    if row and not fault:
        said, kind = verdict(row, reader.family, reader.thinking)
        judged = f"{kind} ({said})", said == "sound"
        told = (
            f"finish_reason {row['finish_reason']}, {row['prompt_tokens']:,} prompt tokens,"
            f" {row['completion_tokens']:,} completion tokens"
        )
    output_ids = _ids(row)
    if output_ids is not None:
        response = [Text(title, reader.text(ids)) for title, ids in reader.parts(output_ids)]
    elif row:
        response = [Text("row", inert(json.dumps(row, ensure_ascii=False)))]
    else:
        response = [Text("line", inert(sample.damaged))] if sample.damaged else []
    return View(
        sample_id=one_line(sample.sample_id),
        place=place + retired,
        remarks=list(map(one_line, sample.remarks)),
        fault=one_line(fault) if fault else None,
        told=told,
        judged=judged,
        prompt=_prompt(sample),
        prompt_ids=None if sample.prompt_ids is None else ids_at_ends(sample.prompt_ids),
        response=response,
        output_ids=None if output_ids is None else ids_at_ends(output_ids),
    )


def _ids(row: dict[str, Any] | None) -> list[int] | None:
    """None where a row's ``output_ids`` are no list of integers."""
    ids = None if row is None else row.get("output_ids")
    return ids if isinstance(ids, list) and all(type(i) is int for i in ids) else None


def _prompt(sample: Sample) -> list[Text] | None:
    if sample.prompt is None:
        return [] if sample.damaged else None
    return list(_messages(sample.prompt))


def render(sample: Sample, reader: Reader, paint: Paint, limit: int | None = ELIDED_AT) -> str:
    """One sample for a terminal; texts longer than ``limit`` characters lose their middle."""
    return "\n".join(_lines(view(sample, reader), paint, limit))


def _lines(shown: View, paint: Paint, limit: int | None) -> Iterator[str]:
    yield f"{paint(shown.sample_id, 'bold')}  {shown.place}"
    for remark in shown.remarks:
        yield paint(elide(remark, limit), "yellow")
    if shown.fault:
        yield paint(f"not a valid row: {shown.fault}", "red")
    if shown.judged:
        kind, good = shown.judged
        style: Style = "green" if good else "red"
        yield f"{shown.told}, {paint(kind, style)}"

    def part(text: Text) -> Iterator[str]:
        yield paint(f"--- {text.title}", "cyan")
        yield unmark(elide(text.text, limit), lambda token: paint(token, "magenta"))

    if shown.prompt is None:
        yield paint("prompt unknown: not in prompts.jsonl", "yellow")
    for text in shown.prompt or ():
        yield from part(text)
    if shown.prompt_ids is not None:
        yield paint(f"prompt ids: {shown.prompt_ids}", "dim")
    for text in shown.response:
        yield from part(text)
    if shown.output_ids is not None:
        yield paint(f"output ids: {shown.output_ids}", "dim")


def ids_at_ends(ids: Sequence[Any]) -> str:
    """The first and the last ids, and how many stand between them."""
    if len(ids) <= 2 * SHOWN_IDS:
        return " ".join(map(str, ids))
    first, last = (" ".join(map(str, part)) for part in (ids[:SHOWN_IDS], ids[-SHOWN_IDS:]))
    return f"{first} [... {len(ids) - 2 * SHOWN_IDS:,} ...] {last}"


def _messages(prompt: dict[str, Any]) -> Iterator[Text]:
    if tools := prompt.get("tools"):
        yield Text("tools", inert(json.dumps(tools, ensure_ascii=False)))
    messages = prompt.get("messages")
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict):
            yield Text("message", inert(json.dumps(message, ensure_ascii=False)))
            continue
        more = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        text = "" if content is None else text
        rest = json.dumps(more, ensure_ascii=False) if more else ""
        yield Text(one_line(str(message.get("role"))), inert("\n".join(filter(None, [text, rest]))))
