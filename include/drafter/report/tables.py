"""The figures of a report as a table for a task's log, and as ``summary.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from drafter.report.figures import EDGES, PARTS, Figures
from drafter.report.html import THIN, number, percent
from drafter.terminal import one_line


def lines(figures: Figures, report: Path) -> list[str]:
    """At most a dozen; numbers stand under each other."""
    counts: list[tuple[str, ...]] = [("", "rows", "share", "tokens")]
    for verdict, rows in figures.verdicts.items():
        tokens = number(figures.verdict_tokens[verdict])
        counts.append((verdict, number(rows), percent(rows, figures.rows), tokens))
    told = {
        "no reasoning": (figures.without_reasoning, figures.rows),
        "ended by length": (figures.finish.get("length", 0), figures.valid),
        "valid tool calls": (figures.valid_calls, figures.calls),
    }
    counts += [
        (name, number(rows), percent(rows, whole), "")
        for name, (rows, whole) in told.items()
        if whole
    ]
    spreads: list[tuple[str, ...]] = [("tokens per row", "median", "95 %", "longest")]
    for part in PARTS:
        spread = figures.spreads[part]
        each = (spread.median, spread.p95, spread.longest)
        spreads.append((f"  {part}", *map(number, each)))
    return [*_aligned([*counts, *spreads]), f"report: {report}"]


def _aligned(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    first, *rest = (max(map(len, column)) for column in zip(*cells, strict=True))
    for name, *numbers in cells:
        numbers = [cell.replace(THIN, " ") for cell in numbers]
        shown = [cell.rjust(width) for cell, width in zip(numbers, rest, strict=True)]
        yield "  ".join([name.ljust(first), *shown]).rstrip()


def summary(figures: Figures) -> str:
    """CSV: dataset, figure, label, value. Of histograms the label is a bin's least tokens."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("dataset", "figure", "label", "value"))
    for figure, label, value in _values(figures):
        writer.writerow((figures.dataset, figure, one_line(label), value))
    return text.getvalue()


def _values(figures: Figures) -> Iterator[tuple[str, str, object]]:
    yield "rows", "stored", figures.rows
    yield "rows", "valid", figures.valid
    for reason in figures.refused:
        yield "refused", reason, 1
    for name, entries in (
        ("reasoning", figures.groups),
        ("verdict", figures.verdicts),
        ("verdict tokens", figures.verdict_tokens),
        ("finish reason", figures.finish),
    ):
        for label, value in entries.items():
            yield name, label, value
    for kind in figures.kinds:
        yield "class", kind.name, kind.rows
    yield "tool calls", "begun", figures.calls
    yield "tool calls", "valid", figures.valid_calls
    yield "tool calls", "rows", figures.rows_with_calls
    yield "loops", "rows", figures.looping
    for label, number_of in (
        ("prompts", figures.prompts),
        ("failed", figures.failed),
        ("completion tokens", figures.generated),
        ("token budget", figures.token_budget),
        ("stop reason", figures.stop_reason),
    ):
        if number_of is not None:
            yield "generate", label, number_of
    for part, spread in figures.spreads.items():
        name = f"{part} tokens"
        yield name, "rows without", spread.num_none
        yield name, "median", spread.median
        yield name, "95 % within", spread.p95
        yield name, "longest", spread.longest
        yield name, "total", spread.total
        for edge, rows in zip(EDGES, spread.counts, strict=False):
            if rows:
                yield f"{name}, histogram", str(edge), rows
    for part, letters in figures.letters.items():
        for script, count in letters.items():
            yield f"{part} letters, audited rows", script, count
