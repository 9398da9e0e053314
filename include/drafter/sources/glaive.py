"""Glaive function calling v2: flat text of turns, functions listed in ``system``.

``system`` holds JSON objects one after another, no array, with blank lines between and inside them.
``chat`` holds turns split by two blank lines and labelled USER, ASSISTANT, FUNCTION RESPONSE;
labels elsewhere are content. ``<|endoftext|>`` ends an assistant's turn and is no text. A call is
``<functioncall> {"name": .., "arguments": '{..}'}``: its arguments stand in single quotes and may
hold apostrophes.

The functions become ``tools`` (the template writes them out, so the words of ``system`` go), and
the chat is cut at a turn that the model answers, chosen by content.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from drafter.sources.prompt import (
    Message,
    Prompt,
    Row,
    chosen,
    clean,
    cuts,
    mapped,
    merged,
    opened_by_user,
    tool_call,
)

_LABEL = re.compile(r"(?:\A|\n\n\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_CALL = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*(?:,\s*"arguments"\s*:\s*(.*\S)\s*)?\}\s*\Z', re.DOTALL
)


def convert(row: Row) -> Prompt | str:
    system, chat = row.get("system"), row.get("chat")
    if not isinstance(chat, str) or not isinstance(system, str | None):
        return "no conversation"
    tools = _tools(system or "")
    if isinstance(tools, str):
        return tools
    messages, fault = _conversation(clean(chat))
    candidates = cuts(messages)
    if not candidates:
        return fault or "no user turn"
    return Prompt(chosen(messages, candidates), tools or None)


def _tools(system: str) -> list[dict[str, Any]] | str:
    tools: list[dict[str, Any]] = []
    decoder = json.JSONDecoder()
    begin = system.find("{")
    while begin >= 0:
        try:
            _, end = decoder.raw_decode(system, begin)
            # orjson is the stricter one: no NaN, no depth or number that cannot be written again.
            function = mapped(orjson.loads(system[begin:end]), clean)
            orjson.dumps(function)
        except (ValueError, TypeError, RecursionError):
            return "functions are not JSON"
        if not isinstance(function.get("name"), str) or not function["name"]:
            return "function without a name"
        tools.append({"type": "function", "function": _with_parameters(function)})
        begin = system.find("{", end)
    return tools


def _with_parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Templates walk ``parameters.properties``; some functions leave out one or the other."""
    given = function.get("parameters")
    parameters = dict(given) if isinstance(given, dict) else {}
    if not isinstance(parameters.get("properties"), dict):
        parameters["properties"] = {}
    if not isinstance(parameters.get("type"), str):
        parameters["type"] = "object"
    return {**function, "parameters": parameters}


def _conversation(chat: str) -> tuple[list[Message], str | None]:
    """The chat up to the first turn that cannot be read, and what is wrong with that one."""
    before, *labelled = _LABEL.split(chat)
    if before.strip() or not labelled:
        return [], "chat without a label"
    messages: list[Message] = []
    unanswered: list[str] = []
    num_calls = 0
    fault = None
    for label, text in zip(labelled[::2], labelled[1::2], strict=True):
        content = text.strip()
        if label == "USER":
            if content:
                messages.append({"role": "user", "content": content})
        elif label == "ASSISTANT":
            content, *calls = content.replace("<|endoftext|>", "").split("<functioncall>")
            read = [_call(call, num_calls + i) for i, call in enumerate(calls)]
            if None in read:
                fault = "unreadable function call"
                break
            if not content.strip() and not read:
                continue
            message: Message = {"role": "assistant", "content": content.strip()}
            if read:
                message["tool_calls"] = read
                unanswered = [call["id"] for call in read if call]
                num_calls += len(read)
            messages.append(message)
        elif unanswered:
            called = unanswered.pop(0)
            messages.append({"role": "tool", "tool_call_id": called, "content": content})
        else:
            fault = "function response without a call"
            break
    return opened_by_user(merged(messages)), fault


def _call(text: str, index: int) -> dict[str, Any] | None:
    match = _CALL.match(text.strip())
    if match is None:
        return None
    arguments = _arguments(match[2] or "{}")
    return None if arguments is None else tool_call(match[1], arguments, index)


def _arguments(text: str) -> str | None:
    """JSON text of an object, from an object in single quotes or bare."""
    if len(text) > 1 and text[0] == text[-1] == "'":
        text = text[1:-1].strip()
    try:
        return text if isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        pass
    try:
        # An apostrophe escaped for the quotes around it, or a line end inside a string.
        value = json.loads(text.replace("\\'", "'"), strict=False)
    except (ValueError, RecursionError):
        return None
    return clean(json.dumps(value, ensure_ascii=False)) if isinstance(value, dict) else None
