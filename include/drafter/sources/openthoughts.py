"""OpenThoughts 1 to 3: the first question of a row.

Version 3 writes human and gpt, the others user and assistant; the metadata variant of the first has
``problem`` instead of a conversation, with the ``starter_code`` that the problem speaks of apart;
the second version repeats its ``question``. ``system`` is dropped: it demands its own markup of
thoughts. Version 3 repeats each question 16 times; prepare keeps one.
"""

from __future__ import annotations

from typing import Any

from drafter.sources.prompt import Prompt, Row, one_turn, turns

COLUMNS = ("id", "conversations", "problem", "starter_code", "question")

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


def convert(row: Row) -> Prompt | str:
    identity = row.get("id")
    if row.get("conversations") is None:
        return one_turn(_question(row), identity)
    messages = turns(row["conversations"], ROLES, "from", "value")
    if isinstance(messages, str):
        return messages
    for message in messages:
        if message["role"] == "user":
            return one_turn(message["content"], identity)
    return "no user turn"


def _question(row: Row) -> Any:
    problem, code = row.get("problem"), row.get("starter_code")
    if problem is None:
        return row.get("question")
    if isinstance(problem, str) and isinstance(code, str) and code.strip():
        return f"{problem}\n\n```\n{code.rstrip()}\n```"
    return problem
