"""What a report says first: is the reasoning there, in a sentence and a bar per dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drafter.report.figures import GROUPS, NO_REASONING, Figures
from drafter.report.html import Child, Html, counted, percent, tag
from drafter.report.plots import bar

LOUD = 0.01
"""Share of rows without reasoning that is set in bold."""


def headline(each: Sequence[Figures]) -> Html:
    """The sentence that nobody may miss."""
    told, bad = _headline(each)
    return tag("h1", told, class_="bad" if bad else "")


def _headline(each: Sequence[Figures]) -> tuple[str, bool]:
    rows = sum(figures.rows for figures in each)
    lost = sum(figures.without_reasoning for figures in each)
    if not rows:
        return "No rows are stored", True
    if lost:
        verb = "has" if lost == 1 else "have"
        return (
            f"{lost:,} of {counted(rows, 'row')} ({percent(lost, rows)}) {verb} no reasoning",
            True,
        )
    unasked = sum(figures.groups["unasked"] for figures in each)
    if not any(figures.thinking for figures in each):
        told = "Thinking is off for this target"
        return (
            (f"{told}, yet {unasked:,} of {counted(rows, 'row')} think", True)
            if unasked
            else (f"{told}, and no row thinks", False)
        )
    sound = sum(figures.groups["sound"] for figures in each)
    if sound == rows:
        return f"All {counted(rows, 'row')} have their reasoning", False
    return f"No row lost its reasoning: {sound:,} of {rows:,} are as they should be", False


def outcome(figures: Figures) -> str:
    kept = figures.verdicts["accepted"] + figures.verdicts["flagged"]
    tokens = figures.verdict_tokens["accepted"] + figures.verdict_tokens["flagged"]
    return (
        f"{kept:,} of {counted(figures.rows, 'row')} accepted, with {tokens:,} completion tokens;"
        f" {figures.verdicts['rejected']:,} rejected"
    )


def refusal(figures: Figures) -> Iterator[Html]:
    """Why the dataset as a whole is not accepted, if so."""
    if figures.refused:
        told = f"{figures.dataset} is refused: validate failed, nothing may be trained on it."
        reasons = [tag("p", reason) for reason in figures.refused]
        yield tag("div", tag("p", tag("b", told)), *reasons, class_="refused")


def glance(lines: Sequence[tuple[Child, Figures]]) -> Html:
    """A bar per (name, figures); what has no reasoning stands at its right end, in red."""
    cells: list[Child] = []
    for name, figures in lines:
        lost = figures.without_reasoning
        share = percent(lost, figures.rows) if lost else "none"
        cells += [
            tag("span", name, class_="name"),
            bar(figures.groups),
            tag("span", share, class_=f"share {_colour(lost, figures.rows)}"),
            tag("span", f"{lost:,} of {counted(figures.rows, 'row')}", class_="count"),
        ]
    heads = [tag("span", text, class_="head") for text in ("", "", "no reasoning", "")]
    legend = [
        tag("li", f"{'no reasoning: ' * (group in NO_REASONING)}{told}", class_=group)
        for group, told in GROUPS.items()
        if any(figures.groups[group] for _, figures in lines)
    ]
    bars = tag("div", *heads, *cells, class_="glance")
    return tag("section", bars, tag("ul", *legend, class_="legend"))


def _colour(lost: int, rows: int) -> str:
    if not lost:
        return "good"
    return "bad" if lost >= LOUD * rows else "some"
