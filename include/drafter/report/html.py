"""HTML made of elements: what is not :class:`Html` is foreign text and is escaped, always.

A page holds everything it needs, runs no script, and is readable with neither colours nor width.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence

from drafter.report.style import STYLE
from drafter.terminal import inert

THIN = "\u202f"
"""A narrow space that no line breaks at: between a number and its unit."""

NAME_LENGTH = 120
"""Characters of a name that a page shows: ids and roles may be as long as their file."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Should foreign text ever become markup after all, the browser loads and runs nothing."""


class Html(str):
    """Markup of ours."""

    __slots__ = ()


Child = str | Html


def escaped(text: str) -> Html:
    """Also inert: text that runs right to left, or that no one sees, cannot pose as another."""
    return text if isinstance(text, Html) else Html(html.escape(inert(text)))


def join(children: Iterable[Child], between: str = "") -> Html:
    return Html(between.join(map(escaped, children)))


def tag(name: str, *children: Child, **attributes: str | float) -> Html:
    """``class_`` is written as class; other underscores in names of attributes become hyphens."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def page(title: str, *body: Child) -> str:
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body><main>\n{join(body, chr(10))}\n</main></body></html>\n"
    )


def section(title: str, *body: Child, note: Child = "") -> Html:
    """``note`` says what the numbers are."""
    said = [tag("p", note, class_="note")] if note else []
    return tag("section", tag("h2", title), *said, *body)


def table(
    header: Sequence[Child],
    lines: Iterable[Sequence[Child]],
    texts: Collection[int] = (0,),
    class_: str = "",
) -> Html:
    """The columns in ``texts`` hold text, the others numbers, which stand to the right."""

    def line(kind: str, cells: Sequence[Child]) -> Html:
        return tag(
            "tr",
            *(
                tag(kind, cell, class_="text" if place in texts else "number")
                for place, cell in enumerate(cells)
            ),
        )

    body = [line("td", cells) for cells in lines]
    whole = tag("table", tag("thead", line("th", header)), tag("tbody", *body), class_=class_)
    return tag("div", whole, class_="scroll", tabindex=0)


def number(value: float) -> str:
    return f"{value:,.0f}"


def counted(value: int, thing: str) -> str:
    return f"{value:,} {thing}{'' if value == 1 else 's'}"


def percent(part: float, whole: float) -> str:
    """One decimal; never 0 for something, nor 100 for less than all."""
    if not whole:
        return "–"
    share = 100 * part / whole
    if 0 < share < 0.05:
        text = "<" + THIN + "0.1"
    elif share >= 99.95 and part < whole:
        text = ">" + THIN + "99.9"
    elif part in (0, whole):
        text = f"{share:.0f}"
    else:
        text = f"{share:.1f}"
    return f"{text}{THIN}%"
