"""The rows that a person reads: drawn by the hash of their sample ids, every class among them.

The same rows are drawn whenever and in whatever order they were stored. They are decoded for the
eye, as ``drafter show`` does it, and for the scripts that thinking and answers are written in: to
decode every row would take longer than all else that validate does.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from drafter import samples
from drafter.errors import DataError
from drafter.layout import Prepared
from drafter.samples import Place, Sample
from drafter.show import View
from drafter.terminal import unmark
from drafter.validation.findings import SEPARATOR, Findings

if TYPE_CHECKING:
    import pandas as pd

NOT_ACCEPTED_FIRST = {"rejected": 0, "flagged": 1, "accepted": 2}

PARTS = ("thinking", "answer")


class Drawn(NamedTuple):
    """One row for reading; the first remark is verdict and reason."""

    sample: Sample
    verdict: str
    kinds: str


def draw(frame: pd.DataFrame, num_rows: int) -> list[int]:
    """Positions in the table: the first ``num_rows`` of the draw, then one of each class that is
    not among them; those that were not accepted first."""
    if not num_rows:
        return []
    drawn = frame.sort_values(["draw", "line"])
    chosen = list(drawn.index[:num_rows])
    seen = {kind for kinds in frame["kinds"].loc[chosen] for kind in kinds.split(SEPARATOR)}
    for position, kinds in drawn.drop_duplicates("kinds")["kinds"].items():
        missing = set(kinds.split(SEPARATOR)) - seen
        if missing:
            chosen.append(position)
            seen |= missing
    order = frame.loc[chosen].assign(rank=frame["verdict"].map(NOT_ACCEPTED_FIRST))
    return list(order.sort_values(["rank", "kind", "draw", "line"]).index)


def read(prepared: Prepared, found: Findings, num_rows: int) -> tuple[list[int], list[Drawn]]:
    """(positions in the table, what the files hold) of the rows that are drawn. DataError when
    these are not the files that validate saw."""
    positions = draw(found.frame, num_rows)
    rows = found.frame.loc[positions]
    size, seen = responses_bytes(prepared), found.about["responses_bytes"]
    if size != seen:
        raise DataError(
            f"{prepared.responses} has {size:,} bytes, validate saw {seen:,}: run validate again"
        )
    places = [Place(int(x), int(y)) for x, y in zip(rows["line"], rows["offset"], strict=True)]
    drawn = []
    for sample, row in zip(samples.read(prepared, places), rows.itertuples(), strict=True):
        sample.remarks.append(f"{row.verdict}: {row.reason}")
        drawn.append(Drawn(sample, row.verdict, row.kinds))
    return positions, drawn


def responses_bytes(prepared: Prepared) -> int:
    return prepared.responses.stat().st_size if prepared.responses.exists() else 0


def mark_scripts(found: Findings, positions: list[int], views: Sequence[View]) -> None:
    """Fill in the columns ``audited`` and ``*_script``, and ``letters`` over all of them."""
    import pandas as pd

    frame = found.frame
    totals = {part: Counter[str]() for part in PARTS}
    scripts_of: dict[str, list[str | None]] = {part: [None] * len(frame) for part in PARTS}
    audited = [False] * len(frame)
    for position, shown in zip(positions, views, strict=True):
        audited[position] = True
        for text in shown.response:
            if text.title in PARTS:
                letters = scripts(unmark(text.text, lambda _: ""))
                totals[text.title] += letters
                scripts_of[text.title][position] = main_script(letters)
    frame["audited"] = audited
    for part, each in scripts_of.items():
        frame[f"{part}_script"] = pd.Series(each, dtype="str")
    found.about["letters"] = {
        part: dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))
        for part, counts in totals.items()
    }


def scripts(text: str) -> Counter[str]:
    """{script: letters}, a script being the first word of its letters' names in Unicode."""
    letters = Counter(text)
    found = Counter[str]()
    for letter, number in letters.items():
        if letter.isalpha():
            word = unicodedata.name(letter, "UNNAMED").partition(" ")[0]
            found[_NAMES.get(word, word.capitalize())] += number
    return found


_NAMES = {"CJK": "Han", "HIRAGANA": "Japanese kana", "KATAKANA": "Japanese kana"}


def main_script(letters: Counter[str]) -> str | None:
    return min(letters, key=lambda script: (-letters[script], script), default=None)
