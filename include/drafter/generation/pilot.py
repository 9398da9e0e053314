"""What a person is asked to approve: a pilot's figures and samples; and what a rejection does.

Figures are those of the canary, over all rows of the pilot. Samples show first what is not sound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from drafter import jsonl, template
from drafter.files import file_record
from drafter.generation import discard
from drafter.generation.approval import Pending
from drafter.generation.responses import count_failures
from drafter.kinds import reason_class
from drafter.layout import Prepared
from drafter.recipe import Recipe
from drafter.rows import Family, read_row
from drafter.samples import Choice, find
from drafter.show import ELIDED_AT, Reader, render
from drafter.terminal import elide, one_line, painter
from drafter.validation.structure import look

SHOWN_MESSAGES = 4
"""Of a longer prompt: the first one and the last ones."""

SAMPLE_CHARACTERS = 20_000

Row = dict[str, Any]
Judged = list[tuple[str, bool]]
"""(sample id, does the canary call the row sound?)"""


def report(
    prepared: Prepared, recipe: Recipe, pilot: Pending, num_samples: int, limit: int | None
) -> dict[str, Any]:
    """{figures, story, samples, seen}: numbers, the same in sentences, texts, and the sha256 of the
    responses that all this is about. ``limit``: tokens of the budget."""
    target = Path(recipe.target.path)
    reader = Reader(template.load_tokenizer(target), template.family(target), recipe.target)
    rows = (line.value for line in islice(jsonl.rows(prepared.responses), pilot.first, None))
    found, judged = figures(rows, reader.family, reader.thinking)
    found["failed"] = count_failures(prepared)
    return {
        "figures": found,
        "story": list(story(found, limit)),
        "samples": [_text(prepared, reader, name) for name in chosen(judged, num_samples)],
        "seen": seen(prepared),
    }


def figures(rows: Iterable[Row], family: Family, thinking: bool) -> tuple[dict[str, Any], Judged]:
    """Counts over ``rows``: ``thinking`` by how it ended, of a target that thinks; ``faults`` by
    the canary's class, of the rows that it does not call sound."""
    verdicts = Counter[str](sound=0, cut=0, broken=0)
    thoughts, faults, finishes = Counter[str](), Counter[str](), Counter[str]()
    tokens = longest = num_tool_calls = 0
    judged: Judged = []
    for row in rows:
        marked = read_row(row, family, None)
        if isinstance(marked, str):
            judged.append((str(row.get("sample_id")), False))
            verdicts["broken"] += 1
            faults[reason_class(marked)] += 1
            continue
        shape = look(marked, family, thinking, row["finish_reason"] == "length")
        judged.append((row["sample_id"], shape.verdict == "sound"))
        verdicts[shape.verdict] += 1
        if shape.verdict != "sound":
            faults[shape.kind] += 1
        if thinking:
            thoughts[shape.reasoning] += 1
        finishes[row["finish_reason"]] += 1
        num_tool_calls += not family.tool_begin.isdisjoint(marked.tokens)
        tokens += row["completion_tokens"]
        longest = max(longest, row["completion_tokens"])
    return {
        "rows": len(judged),
        "verdicts": dict(verdicts),
        "faults": dict(faults.most_common()),
        "thinking": dict(thoughts.most_common()),
        "tool_calls": num_tool_calls,
        "finish_reasons": dict(finishes.most_common()),
        "completion_tokens": tokens,
        "longest": longest,
    }, judged


def story(figures: dict[str, Any], limit: int | None) -> Iterator[str]:
    """The figures as people read them. ``limit``: tokens of the budget."""
    rows, tokens, verdicts = figures["rows"], figures["completion_tokens"], figures["verdicts"]
    if not rows:
        yield "no rows"
        return
    mean = tokens / rows
    yield (
        f"{rows:,} rows, {tokens:,} completion tokens: mean {mean:,.0f}, most"
        f" {figures['longest']:,}"
    )
    faults = f" ({_counts(figures['faults'])})" if figures["faults"] else ""
    yield (
        f"sound: {verdicts['sound']:,} ({verdicts['sound'] / rows:.0%}); cut:"
        f" {verdicts['cut']:,}, broken: {verdicts['broken']:,}{faults}"
    )
    if figures["thinking"]:
        yield f"thinking: {_counts(figures['thinking'])}"
    yield f"rows with tool calls: {figures['tool_calls']:,}"
    if figures["finish_reasons"]:
        yield f"finish reasons: {_counts(figures['finish_reasons'])}"
    if figures["failed"]:
        yield f"prompts without an answer: {_counts(figures['failed'])}"
    if limit is not None and mean:
        yield f"at this mean the budget of {limit:,} tokens is met after {limit / mean:,.0f} rows"


def chosen(judged: Judged, number: int) -> list[str]:
    """Sample ids: of what is not sound first, all places but one at most; the others from all over
    the pilot."""
    bad = [sample_id for sample_id, is_sound in judged if not is_sound]
    sound = [sample_id for sample_id, is_sound in judged if is_sound]
    shown = bad[: number - 1 if sound else number]
    left = min(number - len(shown), len(sound))
    return shown + [sound[i * len(sound) // left] for i in range(left)]


def reject(prepared: Prepared, pilot: Pending, run_id: str) -> tuple[Path, discard.Selection]:
    """Move the pilot's rows, and every failure, to the archive. The caller holds the lock."""
    selection = discard.from_row(prepared, pilot.first)
    return discard.apply(prepared, selection, _rejected(run_id)), selection


def rejected(prepared: Prepared, run_id: str) -> Path | None:
    """Where the pilot is that was rejected in this run."""
    archive = prepared.archive(_rejected(run_id))
    return archive if archive.exists() else None


def seen(prepared: Prepared) -> str:
    """sha256 of the responses: an answer counts for the rows that the question showed."""
    return str(file_record(prepared.responses)["sha256"]) if prepared.responses.exists() else ""


def _rejected(run_id: str) -> str:
    return f"rejected-{run_id or 'by-hand'}"


def _text(prepared: Prepared, reader: Reader, sample_id: str) -> str:
    sample = find(prepared, Choice(sample_id=sample_id))[0][-1]
    messages = (sample.prompt or {}).get("messages")
    if isinstance(messages, list) and len(messages) > SHOWN_MESSAGES:
        left_out = {"role": "...", "content": f"[{len(messages) - SHOWN_MESSAGES:,} messages]"}
        kept = [messages[0], left_out, *messages[1 - SHOWN_MESSAGES :]]
        sample.prompt = {**(sample.prompt or {}), "messages": kept}
    return elide(render(sample, reader, painter(False), ELIDED_AT), SAMPLE_CHARACTERS)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {one_line(name)}" for name, number in counts.items())
