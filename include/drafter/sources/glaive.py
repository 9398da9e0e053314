"""Glaive function calling v2: flat text of turns, functions listed in ``system``.

``system`` holds JSON objects one after another, no array, with blank lines between and inside them.
``chat`` holds turns split by two blank lines and labelled USER, ASSISTANT, FUNCTION RESPONSE;
labels elsewhere are content. ``<|endoftext|>`` ends an assistant's turn and is no text. A call is
``<functioncall> {"name": .., "arguments": '{..}'}``: its arguments stand in single quotes and may
hold apostrophes.

Two republished forms (hiyouga's sharegpt, llamafactory's toolcall) hold ``conversations`` of human,
gpt, function_call and observation turns, with the functions as JSON text of an array in ``tools``;
a function_call turn holds one call or an array of them, its arguments an object.

The functions become ``tools`` (the template writes them out, so the words of ``system`` go), and
the chat is cut at a turn that the model answers, chosen by content. Many rows differ in a few words
only; prepare drops those that differ in case or white space.
"""

from __future__ import annotations

import json
import re
from typing import Any

from drafter.sources.functions import (
    NOT_JSON,
    arguments_of,
    declaration,
    declared,
    tool_call,
)
from drafter.sources.prompt import (
    Message,
    Prompt,
    Row,
    chosen,
    clean,
    cuts,
    merged,
    opened_by_user,
    parsed,
    role_of,
    text_of,
)

COLUMNS = ("system", "chat", "conversations", "tools")

Turn = tuple[str, str]
"""Label and text."""

USER, ASSISTANT, RESPONSE = "USER", "ASSISTANT", "FUNCTION RESPONSE"
CALL, SYSTEM = "call", "system"
LABELS = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": CALL,
    "observation": RESPONSE,
    "system": SYSTEM,
}
"""Who speaks in the republished forms -> label of the flat form, where that has one."""

# A run of white space is looked at once, from its begin: some are a million lines long.
_LABEL = re.compile(rf"(?:\A|(?<!\s)(?=\s*?\n\n\n))\s*+({USER}|{ASSISTANT}|{RESPONSE}):")
_CALL = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*(?:,\s*"arguments"\s*:\s*+(.*\S)\s*)?\}\s*\Z', re.DOTALL
)


def convert(row: Row) -> Prompt | str:
    listed = row.get("conversations")
    turns = _flat(row.get("chat")) if listed is None else _listed(listed)
    if isinstance(turns, str):
        return turns
    tools = declared(row["tools"]) if row.get("tools") is not None else _tools(row.get("system"))
    if isinstance(tools, str):
        return tools
    messages, fault = _conversation(turns)
    candidates = cuts(messages)
    if not candidates:
        return fault or "no user turn"
    return Prompt(chosen(messages, candidates), tools or None)


def _flat(chat: Any) -> list[Turn] | str:
    if not isinstance(chat, str):
        return "no conversation"
    before, *labelled = _LABEL.split(clean(chat))
    if before.strip() or not labelled:
        return "chat without a label"
    return list(zip(labelled[::2], labelled[1::2], strict=True))


def _listed(conversations: Any) -> list[Turn] | str:
    if not isinstance(conversations, list):
        return "no conversation"
    turns: list[Turn] = []
    for turn in conversations:
        if not isinstance(turn, dict):
            return "turn is not an object"
        label, text = role_of(turn.get("from"), LABELS), text_of(turn.get("value"))
        if label is None or text is None:
            return "unknown role" if label is None else "turn is not text"
        if label != SYSTEM:
            turns.append((label, text))
    return turns


def _tools(system: Any) -> list[dict[str, Any]] | str:
    if system is None:
        return []
    if not isinstance(system, str):
        return "no conversation"
    system = clean(system)
    tools: list[dict[str, Any]] = []
    decoder = json.JSONDecoder(strict=False)
    begin = system.find("{")
    while begin >= 0:
        try:
            function, end = decoder.raw_decode(system, begin)
        except (ValueError, RecursionError):
            return NOT_JSON
        tool = declaration(function)
        if isinstance(tool, str):
            return tool
        tools.append(tool)
        begin = system.find("{", end)
    return tools


def _conversation(turns: list[Turn]) -> tuple[list[Message], str | None]:
    """The chat up to the first turn that cannot be read, and what is wrong with that one."""
    messages: list[Message] = []
    unanswered: list[str] = []
    num_calls = 0
    fault = None
    for label, text in turns:
        content, calls = ("", _calls(text)) if label == CALL else (text.strip(), [])
        if label == ASSISTANT:
            content, *calls = content.replace("<|endoftext|>", "").split("<functioncall>")
        if label == USER:
            if content:
                messages.append({"role": "user", "content": content})
        elif label == RESPONSE:
            if not unanswered:
                fault = "function response without a call"
                break
            called = unanswered.pop(0)
            messages.append({"role": "tool", "tool_call_id": called, "content": content})
        else:
            made = [_call(call, num_calls + i) for i, call in enumerate(calls)]
            if None in made:
                fault = "unreadable function call"
                break
            message: Message = {"role": "assistant", "content": content.strip()}
            if made:
                message["tool_calls"] = made
                unanswered += [call["id"] for call in made if call]
                num_calls += len(made)
            if made or message["content"]:
                messages.append(message)
    return opened_by_user(merged(messages)), fault


def _calls(text: str) -> list[str]:
    """The calls of a function_call turn: one, or several in an array."""
    try:
        calls = parsed(text)
        return [json.dumps(call) for call in calls] if isinstance(calls, list) else [text]
    except (ValueError, RecursionError):
        return [text]


def _call(text: str, index: int) -> dict[str, Any] | None:
    match = _CALL.match(text.strip())
    if match is None:
        return None
    arguments = _arguments(match[2] or "{}")
    return None if arguments is None else tool_call(match[1], arguments, index)


def _arguments(text: str) -> str | None:
    """JSON text of an object, from one that is bare, in single quotes or a string of JSON."""
    if len(text) > 1 and text[0] == text[-1] == "'":
        text = text[1:-1].strip()
    arguments = arguments_of(text)
    if arguments is not None:
        return arguments
    try:
        # An apostrophe escaped for the quotes around it, or a line end inside a string.
        value = json.loads(text.replace("\\'", "'"), strict=False)
    except (ValueError, RecursionError):
        return None
    # A string that holds the object is read once more, an object is written out.
    return arguments_of(value)
