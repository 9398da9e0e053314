"""The audit sample on a dataset's page: the view of ``drafter show``, with verdict and reason."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from drafter.report.figures import Figures
from drafter.report.html import NAME_LENGTH, Html, section, tag
from drafter.show import ELIDED_AT, Text, View
from drafter.terminal import clip, elide, unmark

SHOWN_TURNS = 4
"""Of a prompt, at each end: agents talk for a hundred turns."""

_COLOURS = {"accepted": "good", "flagged": "warn", "rejected": "bad"}


class Audited(NamedTuple):
    view: View
    verdict: str
    kinds: str


def samples(audited: Sequence[Audited], figures: Figures) -> Html:
    """Closed until asked for: the list is what is read first."""
    return section(
        "Rows to read",
        *(_sample(row, f"audit-{place}") for place, row in enumerate(audited)),
        note=f"{len(audited):,} of {figures.rows:,} rows, drawn by the hash of their sample ids and"
        " the same each time, at least one of every class. Those that were not accepted come"
        f" first. Texts beyond {ELIDED_AT:,} characters and prompts beyond {2 * SHOWN_TURNS} turns"
        " lose their middle:"
        f" `drafter show {figures.dataset} --sample ID --full` has all of it.",
    )


def _sample(row: Audited, anchor: str) -> Html:
    shown = row.view
    summary = tag(
        "summary",
        tag("span", row.verdict, class_=_COLOURS.get(row.verdict, "")),
        tag("span", row.kinds),
        tag("span", clip(shown.sample_id, NAME_LENGTH), class_="id"),
    )
    return tag("details", summary, tag("div", *_body(row), class_="sample"), id=anchor)


def _body(row: Audited) -> Iterator[Html]:
    shown = row.view
    for remark in shown.remarks:
        yield tag("p", remark, class_=_COLOURS.get(row.verdict, ""))
    told = f"{shown.place}, {shown.told}" if shown.told else shown.place
    yield tag("p", told, class_="soft")
    if shown.prompt is None:
        yield tag("p", "prompt unknown: not in prompts.jsonl", class_="warn")
    yield from _prompt(shown.prompt or [])
    for text in shown.response:
        yield from _text(text, text.title)
    for name, ids in (("prompt ids", shown.prompt_ids), ("output ids", shown.output_ids)):
        if ids is not None:
            yield tag("p", f"{name}: ", tag("code", ids), class_="soft")


def _prompt(turns: list[Text]) -> Iterator[Html]:
    num_left_out = max(len(turns) - 2 * SHOWN_TURNS, 0)
    end = SHOWN_TURNS if num_left_out else len(turns)
    for text in turns[:end]:
        yield from _text(text, "prompt")
    if num_left_out:
        yield tag("p", f"[... {num_left_out:,} turns ...]", class_="soft")
    for text in turns[end + num_left_out :]:
        yield from _text(text, "prompt")


def _text(text: Text, class_: str) -> Iterator[Html]:
    yield tag("h3", clip(text.title, NAME_LENGTH))
    body = html.escape(elide(text.text, ELIDED_AT))
    yield tag("pre", Html(unmark(body, lambda token: f"<i>{token}</i>")), class_=class_)
