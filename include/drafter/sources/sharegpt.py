"""ShareGPT: scraped chats in one JSON array, up to the last user turn.

Chats begin with an answer, hold empty turns and several turns of one speaker in a row, and name the
speakers in seven ways. Ids repeat, so they are kept for people only.
"""

from __future__ import annotations

from drafter.sources.prompt import Prompt, Row, cuts, source_id, turns

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}


def convert(row: Row) -> Prompt | str:
    messages = turns(row.get("conversations"), ROLES, "from", "value")
    if isinstance(messages, str):
        return messages
    candidates = cuts(messages)
    if not candidates:
        return "no user turn"
    return Prompt(messages[: candidates[-1]], source_id=source_id(row.get("id")))
