"""UltraChat 200k (HuggingFaceH4): ``messages``, cut at one user turn chosen by content.

``prompt`` repeats the first message, sometimes trimmed or in other words: ``messages`` decide, and
``prompt`` only stands in for a first question that is empty. ``prompt_id`` repeats with it.
"""

from __future__ import annotations

from typing import Any

from drafter.sources.prompt import Prompt, Row, chosen, cuts, role_of, source_id, text_of, turns

COLUMNS = ("messages", "prompt", "prompt_id")

ROLES = {"system": "system", "user": "user", "assistant": "assistant"}


def convert(row: Row) -> Prompt | str:
    messages = turns(_asked(row), ROLES)
    if isinstance(messages, str):
        return messages
    candidates = cuts(messages)
    if not candidates:
        return "no user turn"
    return Prompt(chosen(messages, candidates), source_id=source_id(row.get("prompt_id")))


def _asked(row: Row) -> Any:
    """``messages`` with a first question."""
    messages, prompt = row.get("messages"), row.get("prompt")
    if not isinstance(messages, list) or not messages or not isinstance(prompt, str):
        return messages
    first = messages[0]
    if not isinstance(first, dict) or role_of(first.get("role"), ROLES) != "user":
        return messages
    content = text_of(first.get("content"))
    if content is None or content.strip():
        return messages
    return [{**first, "content": prompt}, *messages[1:]]
