"""UltraChat 200k (HuggingFaceH4): ``messages``, cut at one user turn chosen by content.

``prompt`` is not read: it repeats the first message, sometimes trimmed.
"""

from __future__ import annotations

from drafter.sources.prompt import Prompt, Row, chosen, cuts, source_id, turns

ROLES = {"system": "system", "user": "user", "assistant": "assistant"}


def convert(row: Row) -> Prompt | str:
    messages = turns(row.get("messages"), ROLES)
    if isinstance(messages, str):
        return messages
    candidates = cuts(messages)
    if not candidates:
        return "no user turn"
    return Prompt(chosen(messages, candidates), source_id=source_id(row.get("prompt_id")))
