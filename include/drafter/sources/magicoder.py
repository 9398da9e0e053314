"""Magicoder: OSS-Instruct rows ask in ``problem``, the other variants in ``instruction``.

``seed`` is never read: it holds licences, secrets and debris.
"""

from __future__ import annotations

from drafter.sources.prompt import Prompt, Row, one_turn

COLUMNS = ("index", "problem", "instruction")


def convert(row: Row) -> Prompt | str:
    problem = row.get("problem")
    return one_turn(row.get("instruction") if problem is None else problem, row.get("index"))
