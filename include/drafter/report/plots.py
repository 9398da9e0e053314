"""The plots of the report, as inline SVG: a bar of shares, a histogram of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from drafter.report.figures import EDGES, GROUPS, PARTS, Figures, Spread
from drafter.report.html import THIN, Child, Html, counted, number, percent, tag

_LEAST = 4
"""Of 1000: what is there can be seen."""

_WIDTH, _HEIGHT, _FOOT = 300, 78, 18
"""Of a histogram, in pixels where its panel is as wide; the ticks' words stand at the foot."""

_TICKS = tuple(4**power for power in range(11))


def bar(groups: Mapping[str, int]) -> Html:
    """Rows by what can be said of their reasoning, the worst at the right end."""
    total = sum(groups.values())
    widths = [1000 * rows / total if total else 0 for rows in groups.values()]
    widths = [max(width, _LEAST) if width else 0 for width in widths]
    scale = 1000 / sum(widths) if total else 0
    pieces, begin = [], 0.0
    for (group, rows), width in zip(groups.items(), widths, strict=True):
        if rows:
            told = f"{GROUPS[group]}: {counted(rows, 'row')}, {percent(rows, total)}"
            pieces.append(_box(begin, 0, width * scale, 10, group, told))
        begin += width * scale
    said = ", ".join(f"{rows:,} {GROUPS[group]}" for group, rows in groups.items() if rows)
    return tag(
        "svg",
        *pieces,
        class_="bar",
        viewBox="0 0 1000 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=said or "no rows",
    )


def share_bar(part: float, whole: float, group: str) -> Html:
    return tag(
        "svg",
        *([_box(0, 0, max(1000 * part / whole, _LEAST), 10, group, "")] if part and whole else []),
        class_="bar",
        viewBox="0 0 1000 10",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def used_bins(spreads: Iterable[Spread]) -> tuple[int, int]:
    """(first, last + 1) of the bins that any of them uses, so that panels share an axis."""
    used = [place for spread in spreads for place, rows in enumerate(spread.counts) if rows]
    return (min(used), max(used) + 1) if used else (0, 1)


def peak(spread: Spread) -> float:
    """The highest column, as a share of the rows that have the part."""
    return max(spread.counts, default=0) / max(sum(spread.counts), 1)


def panels(
    figures: Figures, bins: tuple[int, int], peaks: Mapping[str, float], title: Child = ""
) -> Html:
    """A histogram per part. ``peaks`` give parts a scale that other datasets share."""
    heading = [tag("h3", title)] if title else []
    shown = []
    for part in PARTS:
        spread = figures.spreads[part]
        told = f"median {number(spread.median)} · 95{THIN}% within {number(spread.p95)}"
        caption = tag("figcaption", tag("b", part), tag("span", told, class_="soft"))
        if not any(spread.counts):
            nothing = tag("div", f"no row has one: {part}", class_="nothing")
            shown.append(tag("figure", tag("figcaption", tag("b", part)), nothing))
            continue
        plot = histogram(spread, bins, peaks.get(part, peak(spread)))
        shown.append(tag("figure", caption, plot))
    return tag("div", *heading, *shown, class_="plots titled" if title else "plots")


def histogram(spread: Spread, bins: tuple[int, int], highest: float) -> Html:
    """Columns are shares of the rows that have the part; ``highest`` of them fills the height."""
    first, last = bins
    low, high = math.log(EDGES[first]), math.log(EDGES[last])

    def x(tokens: float) -> float:
        return _WIDTH * (math.log(tokens) - low) / (high - low)

    total = sum(spread.counts)
    columns = []
    for place in range(first, last):
        rows = spread.counts[place]
        if rows:
            tall = max((_HEIGHT - 4) * rows / total / highest, 1)
            left, right = x(EDGES[place]), x(EDGES[place + 1])
            told = f"{EDGES[place]:,} to {EDGES[place + 1] - 1:,} tokens"
            told = f"{told}: {counted(rows, 'row')}, {percent(rows, total)}"
            columns.append(_box(left + 0.5, _HEIGHT - tall, right - left - 1, tall, "column", told))
    words = [
        tag("text", _short(tick), x=_x(x(tick)), y=_HEIGHT + 14, class_="tick", text_anchor=anchor)
        for tick, anchor in _ticks(EDGES[first], EDGES[last])
    ]
    middle = x(min(max(spread.median, EDGES[first]), EDGES[last]))
    return tag(
        "svg",
        *columns,
        tag("line", x1=0, x2=_WIDTH, y1=_HEIGHT, y2=_HEIGHT, class_="axis"),
        tag("line", x1=_x(middle), x2=_x(middle), y1=0, y2=_HEIGHT, class_="median"),
        *words,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT + _FOOT}",
        role="img",
        aria_label=f"median {number(spread.median)}, 95 % up to {number(spread.p95)} tokens",
    )


def _ticks(low: int, high: int) -> Iterable[tuple[int, str]]:
    """Those inside the axis, and where their words are anchored so that none is cut off."""
    reach = math.log(high / low)
    for tick in _TICKS:
        if low <= tick <= high:
            place = math.log(tick / low) / reach
            yield tick, "start" if place < 0.04 else "end" if place > 0.95 else "middle"


def _short(tokens: int) -> str:
    """1k is 1,024."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)


def _box(x: float, y: float, width: float, height: float, class_: str, told: str) -> Html:
    title = [tag("title", told)] if told else []
    place = {"x": _x(x), "y": _x(y), "width": _x(width), "height": _x(height)}
    return tag("rect", *title, **place, class_=class_)


def _x(value: float) -> str:
    """As short as it can be: the same bytes on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
