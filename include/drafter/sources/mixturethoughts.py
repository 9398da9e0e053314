"""Mixture-of-Thoughts (open-r1): ``messages`` whose answers begin with written-out thinking.

The prompt ends with the last user turn. Thinking is cut out of earlier answers: in history,
templates show answers only, and the text would look like markup of the target.
"""

from __future__ import annotations

import re

from drafter.sources.prompt import Prompt, Row, turns

ROLES = {"system": "system", "user": "user", "assistant": "assistant"}

_THINKING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


def convert(row: Row) -> Prompt | str:
    messages = turns(row.get("messages"), ROLES)
    if isinstance(messages, str):
        return messages
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        return "no user turn"
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = _THINKING.sub("", message["content"])
    return Prompt(messages)
