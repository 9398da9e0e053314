"""ShareGPT: scraped chats in one JSON array, up to the last user turn.

Chats begin with an answer, hold empty turns and several turns of one speaker in a row, and name the
speakers in seven ways. Ids repeat, so they are kept for people only.

What people typed or pasted stays, HTML and all: they do that to a served model too. Around answers
the scrape left pieces of the page, the label of the copy button at the head of a code block and the
counter of answers tried ("2 / 3"). Those go, because a model writes what it sees in history.
"""

from __future__ import annotations

import re

from drafter.sources.prompt import Prompt, Row, cuts, source_id, turns

COLUMNS = ("id", "conversations")

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

_COUNTER = re.compile(r"\A\s*\d+ / \d+\n\s*")
_LABEL = r"([A-Za-z0-9+#.-]{0,16})Copy code"
_BUTTON = re.compile(rf"^(```)[ \t]*\n?{_LABEL}\n?|^{_LABEL}[ \t]*(?:\n|\Z)", re.MULTILINE)


def convert(row: Row) -> Prompt | str:
    messages = turns(row.get("conversations"), ROLES, "from", "value", _answer)
    if isinstance(messages, str):
        return messages
    candidates = cuts(messages)
    if not candidates:
        return "no user turn"
    return Prompt(messages[: candidates[-1]], source_id=source_id(row.get("id")))


def _answer(text: str) -> str:
    """``text`` without the page's buttons; a language that stood on one names its code block."""
    text = _COUNTER.sub("", text)
    return _BUTTON.sub(lambda button: f"```{button[2]}\n" if button[1] else "", text)
