"""The page of one dataset: is there reasoning, what was accepted, how long, and rows to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from drafter.kinds import KINDS, exceeds
from drafter.report.figures import Figures, Kind
from drafter.report.glance import glance, headline, outcome, refusal
from drafter.report.html import (
    NAME_LENGTH,
    Child,
    Html,
    join,
    number,
    page,
    percent,
    section,
    table,
    tag,
)
from drafter.report.plots import panels, share_bar, used_bins
from drafter.report.reading import Audited, samples
from drafter.terminal import clip

ABOUT_LENGTH = (
    "Tokens of each part, over the valid rows that have it. Two columns per doubling; 1k is 1,024."
    " The dashed line is the median."
)

NUM_SCRIPTS = 8


def dataset_page(figures: Figures, audited: Sequence[Audited]) -> str:
    anchors: dict[str, str] = {}
    for place, row in enumerate(audited):
        anchors.setdefault(row.view.sample_id, f"#audit-{place}")
    return page(
        f"{figures.dataset}: what validate found",
        tag("p", tag("a", "All datasets", href="../../report.html"), class_="trail"),
        headline([figures]),
        tag("p", f"{figures.dataset}: {outcome(figures)}.", class_="lead"),
        *refusal(figures),
        glance([(figures.dataset, figures)]),
        _numbers(figures),
        _kinds(figures, anchors),
        section(
            "Length",
            panels(figures, used_bins(figures.spreads.values()), {}),
            note=ABOUT_LENGTH,
        ),
        _scripts(figures),
        samples(audited, figures),
    )


def _numbers(figures: Figures) -> Html:
    rejected, tokens = figures.verdict_tokens["rejected"], figures.tokens
    cut = figures.finish.get("length", 0)
    finish = [f"{percent(rows, figures.valid)} {name}" for name, rows in figures.finish.items()]
    tiles: list[tuple[str, str, str]] = [
        ("Stored rows", number(figures.rows), _of_prompts(figures)),
        ("Completion tokens", number(tokens), _budget(figures)),
        ("Rejected tokens", percent(rejected, tokens), f"{rejected:,} paid for in vain"),
        ("Ended by length", percent(cut, figures.valid), f"finish reasons: {', '.join(finish)}"),
        ("Duplicates", number(figures.num_rows("duplicate")), "of a row accepted before"),
        ("Loops", number(figures.looping), "rows that go round in a loop"),
    ]
    if figures.calls:
        told = f"of {figures.calls:,}, in {figures.rows_with_calls:,} rows"
        tiles.insert(4, ("Valid tool calls", percent(figures.valid_calls, figures.calls), told))
    entries = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", told)))
        for name, value, told in tiles
    ]
    return tag("section", tag("dl", *entries, class_="tiles"))


def _of_prompts(figures: Figures) -> str:
    if figures.prompts is None:
        return "generation has not ended"
    failed = f", {figures.failed:,} got no answer" if figures.failed else ""
    return f"of {figures.prompts:,} prompts{failed}"


def _budget(figures: Figures) -> str:
    ended = f"; ended by {figures.stop_reason}" if figures.stop_reason else ""
    if figures.token_budget is None or figures.generated is None:
        return f"no budget set{ended}"
    share = percent(figures.generated, figures.token_budget)
    return f"{share} of a budget of {figures.token_budget:,}{ended}"


def _kinds(figures: Figures, anchors: Mapping[str, str]) -> Html:
    def line(kind: Kind) -> list[Child]:
        over = kind.cap is not None and exceeds(kind.rows, figures.rows, kind.cap)
        share = tag("span", percent(kind.rows, figures.rows), class_="bad" if over else "")
        cap = "" if kind.cap is None else f"{100 * kind.cap:g}\u202f%"
        told = [tag("small", about.text) for name, about in KINDS.items() if name == kind.name]
        return [
            join([tag("span", kind.name, class_="kind"), *told]),
            tag("span", kind.policy, class_=_COLOURS.get(kind.policy, "")),
            number(kind.rows),
            share,
            cap,
            number(kind.tokens),
            _examples(kind, anchors),
        ]

    header = ["class", "policy", "rows", "share", "cap", "completion tokens", "examples"]
    return section(
        "Classes",
        table(header, map(line, figures.kinds), texts=(0, 1, 6)),
        note="A row may be in several classes. A share above its cap refuses the whole dataset.",
    )


_COLOURS = {"accept": "good", "flag": "warn", "reject": "bad"}


def _examples(kind: Kind, anchors: Mapping[str, str]) -> Html:
    links = []
    for name in kind.examples:
        said = clip(name, NAME_LENGTH)
        links.append(tag("code", tag("a", said, href=anchors[name]) if name in anchors else said))
    reason = [] if kind.reason in (kind.name, "") else [tag("small", kind.reason)]
    return tag("div", *links, *reason, class_="examples")


def _scripts(figures: Figures) -> Html:
    parts = figures.letters
    total = {part: sum(letters.values()) for part, letters in parts.items()}
    names = Counter[str]()
    for letters in parts.values():
        names.update(letters)
    lines: list[list[Child]] = []
    for name, _ in names.most_common(NUM_SCRIPTS):
        cells: list[Child] = [name]
        for part, letters in parts.items():
            share = percent(letters.get(name, 0), total[part])
            cells += [share_bar(letters.get(name, 0), total[part], "column"), share]
        lines.append(cells)
    heads = [cell for part in parts for cell in ("", f"{part} letters")]
    others = len(names) - len(lines)
    more = f" {others} more scripts have fewer letters than these." if others > 0 else ""
    return section(
        "Scripts",
        table(["script", *heads], lines, class_="shares"),
        note=f"Of the {figures.audited:,} rows of the audit sample only, out of {figures.rows:,}:"
        f" to decode every row would take longer than to check it.{more}",
    )
