"""OpenCodeInstruct (nvidia/OpenCodeInstruct): rows of strings; the prompt is ``input``.

Scores, verdicts and tests are not read: they judge answers that are made anew here, and some are
empty or no numbers.
"""

from __future__ import annotations

from drafter.sources.prompt import Prompt, Row, one_turn

COLUMNS = ("id", "input")


def convert(row: Row) -> Prompt | str:
    return one_turn(row.get("input"), row.get("id"))
