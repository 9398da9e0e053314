"""Mixture-of-Thoughts (open-r1): ``messages`` whose answers begin with written-out thinking.

The prompt ends with the last user turn. Long fixed preambles stay, and so does a problem that comes
with two of them: people write both.
"""

from __future__ import annotations

from drafter.sources.prompt import Prompt, Row, cuts, turns

COLUMNS = ("messages",)

ROLES = {"system": "system", "user": "user", "assistant": "assistant"}


def convert(row: Row) -> Prompt | str:
    messages = turns(row.get("messages"), ROLES)
    if isinstance(messages, str):
        return messages
    candidates = cuts(messages)
    return Prompt(messages[: candidates[-1]]) if candidates else "no user turn"
