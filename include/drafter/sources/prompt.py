"""What a source row becomes, and the few rules that all sources share.

A converter is a pure function from one source row to a :class:`Prompt`, or to a str: the reason why
the row gives none. Reasons are a few fixed words, because they are counted. What people and tools
wrote stays as it is, control-looking text included; only NUL bytes, ``\\r\\n`` and halves of
surrogate pairs are mended (no Unicode normalisation: it would alter code).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.layout import digest

Message = dict[str, Any]
"""``role`` and ``content``; ``tool_calls`` or ``tool_call_id`` where the role has them."""

Row = dict[str, Any]

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Prompt:
    """A conversation up to where the target speaks: the last message is a user's or a tool's."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    source_id: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        """What the sample id is made of."""
        return {"messages": self.messages, "tools": self.tools}


Converter = Callable[[Row], Prompt | str]


def prompt_fault(row: Row) -> str | None:
    """Why a row of prompts.jsonl holds no :class:`Prompt` with a sample id."""
    sample_id, messages, tools = row.get("sample_id"), row.get("messages"), row.get("tools")
    if type(sample_id) is not str or not sample_id:
        return f"sample_id is {sample_id!r:.60}, needs a string"
    if not isinstance(messages, list) or not messages:
        return f"messages of {sample_id:.60} is {messages!r:.60}, needs a list of messages"
    for message in messages:
        if not isinstance(message, dict) or type(message.get("role")) is not str:
            return f"messages of {sample_id:.60} holds {message!r:.60}, needs role and content"
    if tools is not None and not isinstance(tools, list):
        return f"tools of {sample_id:.60} is {tools!r:.60}, needs a list or null"
    return None


def clean(text: str) -> str:
    """``text`` as UTF-8 can hold it, with one kind of line end."""
    text = text.replace("\0", "").replace("\r\n", "\n")
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text)
    return text


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON ``value`` with ``change`` done to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): mapped(item, change) for key, item in value.items()}
    return value


def text_of(content: Any) -> str | None:
    """The clean text of a string, of null, or of a list of text parts; None for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return clean("\n".join(texts)) if len(texts) == len(parts) else None


def source_id(value: Any) -> str | None:
    """An id of the source, for people; never a key, as sources repeat theirs."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return clean(str(value)) or None


def one_turn(text: Any, identity: Any = None) -> Prompt | str:
    """A prompt of one user turn."""
    content = text_of(text)
    if content is None:
        return "prompt is not text"
    if not content.strip():
        return "empty prompt"
    return Prompt([{"role": "user", "content": content}], source_id=source_id(identity))


def role_of(value: Any, roles: Mapping[str, str]) -> str | None:
    """Our name of a source's role; None when it is not one of ``roles``."""
    return roles.get(value.strip().lower()) if isinstance(value, str) else None


def turns(
    value: Any, roles: Mapping[str, str], role_key: str = "role", text_key: str = "content"
) -> list[Message] | str:
    """A source's list of turns as messages that begin with a user's, system turns kept.

    ``roles`` maps the source's spelling (lower case) to ours. Empty turns and what an assistant
    says before the first user turn are left out; neighbours of one role become one message.
    """
    if not isinstance(value, list):
        return "no conversation"
    messages: list[Message] = []
    for turn in value:
        if not isinstance(turn, dict):
            return "turn is not an object"
        role = role_of(turn.get(role_key), roles)
        if role is None:
            return "unknown role"
        content = text_of(turn.get(text_key))
        if content is None:
            return "turn is not text"
        if content.strip():
            messages.append({"role": role, "content": content})
    return opened_by_user(merged(messages))


def merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role joined by a blank line; tool calls and tool results stand alone."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else None
        alike = last and last["role"] == message["role"]
        if last and alike and last.keys() == message.keys() == {"role", "content"}:
            last["content"] += "\n\n" + message["content"]
        else:
            result.append(dict(message))
    return result


def opened_by_user(messages: list[Message]) -> list[Message]:
    """Without what an assistant or a tool says before the first user turn."""
    roles = [message["role"] for message in messages]
    begin = roles.index("user") if "user" in roles else len(roles)
    return [m for m in messages[:begin] if m["role"] == "system"] + messages[begin:]


def cuts(messages: Sequence[Message]) -> list[int]:
    """Every n for which ``messages[:n]`` ends in a user or tool turn that the model answers."""
    asks = [message["role"] in ("user", "tool") for message in messages]
    return [n for n in range(1, len(asks) + 1) if asks[n - 1] and not any(asks[n : n + 1])]


def chosen(messages: list[Message], candidates: Sequence[int]) -> list[Message]:
    """``messages`` up to one of ``candidates``, picked by content, so that late turns occur too."""
    return messages[: candidates[int(digest(messages), 16) % len(candidates)]]


def call_id(name: str, index: int) -> str:
    """The form that Kimi writes and expects; ``index`` counts over the conversation."""
    return f"functions.{name}:{index}"


def tool_call(name: str, arguments: str, index: int) -> dict[str, Any]:
    """One entry of ``tool_calls``; ``arguments`` is JSON text."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id(name, index), "type": "function", "function": function}
