"""What happened in a training, as one page: curves of loss, accuracy and learning rate, a table.

Made of the lines of metrics.jsonl alone; the same lines give the same bytes. No script, nothing
from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafter.report.html import Html, counted, section, table, tag
from drafter.report.html import page as html_page

_WIDTH, _HEIGHT, _LEFT, _FOOT, _TOP = 640, 230, 46, 20, 8
_POINTS = 300
"""Of a curve at most: means over as many steps as it takes."""

_TABLE_LINES = 12
_COLOURS = ("--plot", "--sound", "--cut", "--unasked", "--missing", "--empty", "--unjudged")


@dataclass(frozen=True)
class Curve:
    label: str
    points: list[tuple[float, float]]
    """(step, value), by step."""
    dashed: bool = False


def page(run: str, lines: Sequence[dict[str, Any]]) -> str:
    """``lines`` as metrics.jsonl has them, by step."""
    if not lines:
        return html_page(f"Training {run}", tag("h1", f"Training {run}"), tag("p", "no step yet"))
    steps = num_steps(lines[0])
    positions = range(steps)
    panels = [
        ("Loss", "cross entropy in nats, of all draft steps together, weighted",
         [curve("trained on", lines, "loss"), curve("held out", lines, "held_out_loss", True)]),
        ("Loss of each draft step", "cross entropy in nats, of the rows trained on",
         [curve(f"step {i}", lines, f"loss_{i}") for i in positions]),
        ("Accuracy of each draft step", "same likeliest token within the draft vocabulary",
         [curve(f"step {i}", lines, f"acc_{i}") for i in positions]),
        ("Accuracy on held-out rows", "the same, of rows that are never trained on",
         [curve(f"step {i}", lines, f"held_out_acc_{i}") for i in positions]),
        ("Expected acceptance", "tokens per verification, from these accuracies",
         [curve("trained on", lines, "acc_len"),
          curve("held out", lines, "held_out_acc_len", True)]),
        ("Learning rate", "", [curve("learning rate", lines, "lr")]),
    ]  # fmt: skip
    last = lines[-1]
    tokens = sum(line["tokens"] for line in lines)
    lead = f"{counted(last['step'], 'step')} over {tokens:,} tokens, loss {last['loss']:.3f}"
    shown = [
        section(title, plot([each for each in curves if each.points], title), note=note)
        for title, note, curves in panels
        if any(each.points for each in curves)
    ]
    header, rows = numbers(lines)
    shown.append(section("Numbers", table(header, rows, texts=())))
    title = f"Training {run}"
    return html_page(title, tag("h1", title), tag("p", lead, class_="lead"), *shown)


def text(lines: Sequence[dict[str, Any]]) -> list[str]:
    """A table of a dozen steps in plain text, for where no page can be shown."""
    if not lines:
        return []
    header, rows = numbers(lines)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]


def numbers(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: of a dozen steps, evenly, those with held-out numbers before others."""
    looked = [line for line in lines if "held_out_loss" in line] or list(lines)
    stride = max(1, math.ceil(len(looked) / _TABLE_LINES))
    chosen = looked[::-1][::stride][::-1]
    names = ["loss", "held_out_loss", "acc_0", "held_out_acc_0", "acc_len", "held_out_acc_len"]
    names = [name for name in names if name in chosen[-1]]
    header = ["step", *(name.replace("_", " ") for name in names), "lr"]
    rows = [
        [f"{line['step']:,}", *(f"{line[name]:.3f}" for name in names), f"{line['lr']:.2e}"]
        for line in chosen
    ]
    return header, rows


def num_steps(line: dict[str, Any]) -> int:
    """Draft steps that a line of metrics.jsonl is about."""
    return sum(name.startswith("loss_") for name in line)


def curve(label: str, lines: Sequence[dict[str, Any]], name: str, dashed: bool = False) -> Curve:
    """The number ``name`` of every line that has it, thinned out to means."""
    found = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    size = max(1, math.ceil(len(found) / _POINTS))
    parts = [found[begin : begin + size] for begin in range(0, len(found), size)]
    points = [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]
    return Curve(label, points, dashed)


def plot(curves: Sequence[Curve], title: str) -> Html:
    """Curves over the steps with one axis for all of them, and a legend where there are several."""
    places = [x for each in curves for x, _ in each.points]
    values = [y for each in curves for _, y in each.points]
    first, last = min(places), max(places)
    ticks = _ticks(max(values))
    across, high = last - first or 1.0, ticks[-1]

    def x(step: float) -> str:
        return _short(_LEFT + (_WIDTH - _LEFT - 8) * (step - first) / across)

    def y(value: float) -> str:
        return _short(_TOP + (_HEIGHT - _TOP) * (1 - value / high))

    drawn = []
    for value in ticks:
        drawn.append(tag("line", x1=_LEFT, x2=_WIDTH, y1=y(value), y2=y(value), class_="axis"))
        told = f"{value:.3g}"
        drawn.append(
            tag("text", told, x=_LEFT - 6, y=y(value), class_="tick", text_anchor="end", dy="0.3em")
        )
    for step, anchor in ((first, "start"), (last, "end")):
        told = f"step {step:,.0f}"
        below = _HEIGHT + 15
        drawn.append(tag("text", told, x=x(step), y=below, class_="tick", text_anchor=anchor))
    for number, each in enumerate(curves):
        points = " ".join(f"{x(step)},{y(value)}" for step, value in each.points)
        told = tag("title", f"{each.label}: {each.points[-1][1]:.4g} at the end")
        style = f"fill: none; stroke: var({_colour(number)}); stroke-width: 1.6"
        style += "; stroke-dasharray: 5 3" * each.dashed
        if len(each.points) == 1:
            points = f"{points} {points}"
            style += "; stroke-width: 5; stroke-linecap: round"
        drawn.append(tag("polyline", told, points=points, style=style))
    svg = tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT + _FOOT}",
        role="img",
        aria_label=f"{title}: "
        + ", ".join(f"{each.label} {each.points[-1][1]:.4g}" for each in curves),
    )
    legend = [
        tag("li", f"{each.label} {each.points[-1][1]:.3g}", style=f"--own: var({_colour(number)})")
        for number, each in enumerate(curves)
    ]
    return tag("figure", svg, tag("ul", *legend, class_="legend"))


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 to the first that is not below ``highest``, which is not negative: four
    to six."""
    step = 10 ** math.floor(math.log10(highest)) / 10 if highest > 0 else 0.25
    for factor in (1, 2, 2.5, 5, 10, 20):
        if (count := math.ceil(highest / (factor * step) - 1e-9)) <= 5:
            break
    return [place * factor * step for place in range(max(count, 1) + 1)]


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _short(value: float) -> str:
    return f"{value:.1f}"
