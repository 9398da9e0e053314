"""The page over all datasets: where reasoning is missing, what was accepted, how long it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from drafter.report.figures import PARTS, Figures
from drafter.report.glance import glance, headline, refusal
from drafter.report.html import Child, Html, join, number, page, percent, section, table, tag
from drafter.report.page import ABOUT_LENGTH
from drafter.report.plots import panels, peak, used_bins


class Entry(NamedTuple):
    """A dataset that validate has looked at."""

    figures: Figures
    outdated: bool
    """Have its answers changed since?"""

    @property
    def link(self) -> Html:
        name = self.figures.dataset
        return tag("a", join(name.split("_"), "_<wbr>"), href=f"prepared/{name}/report.html")


def overview(recipe: str, entries: Sequence[Entry], missing: Sequence[str]) -> str:
    """``missing``: datasets of the recipe without findings, or with those of another version."""
    each = [entry.figures for entry in entries]
    return page(
        f"{recipe}: what validate found",
        tag("p", f"Recipe {recipe}", class_="trail"),
        headline(each),
        tag("p", _outcome(entries), class_="lead"),
        *(_missing(missing)),
        *(piece for figures in each for piece in refusal(figures)),
        glance([(entry.link, entry.figures) for entry in entries]),
        _datasets(entries),
        _matrix(entries),
        _lengths(entries),
    )


def _outcome(entries: Sequence[Entry]) -> str:
    each = [entry.figures for entry in entries]
    rows = sum(figures.rows for figures in each)
    kept = sum(figures.rows - figures.verdicts["rejected"] for figures in each)
    tokens = sum(figures.tokens - figures.verdict_tokens["rejected"] for figures in each)
    worst = max(each, key=lambda figures: figures.without_reasoning, default=None)
    most = ""
    if len(each) > 1 and worst and worst.without_reasoning:
        most = f"{worst.without_reasoning:,} of them in {worst.dataset}. "
    return f"{most}{kept:,} of {rows:,} rows accepted, with {tokens:,} completion tokens."


def _missing(names: Sequence[str]) -> list[Html]:
    if not names:
        return []
    return [tag("p", f"Not validated, or by another version: {', '.join(names)}.", class_="warn")]


def _datasets(entries: Sequence[Entry]) -> Html:
    def line(entry: Entry) -> list[Child]:
        figures = entry.figures
        refused = tag("span", "refused", class_="bad")
        state = refused if figures.refused else tag("span", "accepted", class_="good")
        if entry.outdated:
            state = tag("span", "outdated", class_="warn", title="its answers changed since")
        return [
            entry.link,
            state,
            number(figures.rows),
            *(percent(figures.verdicts[name], figures.rows) for name in ("flagged", "rejected")),
            number(figures.tokens),
            percent(figures.generated or 0, figures.token_budget or 0),
            percent(figures.finish.get("length", 0), figures.valid),
            number(figures.num_rows("duplicate")),
            percent(figures.valid_calls, figures.calls),
            number(figures.looping),
        ]

    header = [
        *("dataset", "state", "rows", "flagged", "rejected", "completion tokens"),
        *("of budget", "ended by length", "duplicates", "valid tool calls", "loops"),
    ]
    return section("Datasets", table(header, map(line, entries), texts=(0, 1)))


def _lengths(entries: Sequence[Entry]) -> Html:
    each = [entry.figures for entry in entries]
    bins = used_bins(spread for figures in each for spread in figures.spreads.values())
    peaks = {part: max((peak(f.spreads[part]) for f in each), default=1) for part in PARTS}
    plots = [panels(entry.figures, bins, peaks, entry.link) for entry in entries]
    note = f"{ABOUT_LENGTH} All axes are the same; columns are shares of a dataset's rows."
    return section("Length", *plots, note=note)


def _matrix(entries: Sequence[Entry]) -> Html:
    """Classes by datasets; the deeper the red, the larger the share of rows not accepted for it."""
    totals: dict[str, int] = {}
    policies: dict[str, str] = {}
    for entry in entries:
        for kind in entry.figures.kinds:
            totals[kind.name] = totals.get(kind.name, 0) + kind.rows
            policies[kind.name] = kind.policy

    def line(name: str) -> list[Child]:
        cells: list[Child] = [tag("span", name, class_="kind")]
        for entry in entries:
            rows, all_rows = entry.figures.num_rows(name), entry.figures.rows
            share = percent(rows, all_rows) if rows else ""
            depth = min(rows / all_rows / 0.2, 1) if all_rows and policies[name] == "reject" else 0
            tinted = (
                {"style": f"background: rgba(var(--tint), {0.45 * depth:.2f})"} if depth else {}
            )
            cells.append(tag("span", share, class_="cell", title=f"{rows:,} rows", **tinted))
        return [*cells, number(totals[name])]

    heads = [_short(entry.figures.dataset, entries) for entry in entries]
    names = sorted(totals, key=lambda name: (-totals[name], name))
    return section(
        "Classes",
        table(["class", *heads, "rows"], map(line, names), class_="matrix"),
        note="Share of a dataset's rows in each class; a row may be in several.",
    )


def _short(name: str, entries: Sequence[Entry]) -> Html:
    """``B1`` for ``B1_glaive`` where that tells them apart."""
    begin = name.partition("_")[0]
    others = [entry.figures.dataset.partition("_")[0] for entry in entries]
    return tag("span", begin if others.count(begin) == 1 else name, title=name)
