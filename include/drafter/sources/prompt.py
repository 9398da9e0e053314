"""What a source row becomes, and the few rules that all sources share.

A converter is a pure function from one source row to a :class:`Prompt`, or to a str: the reason why
the row gives none. Reasons are a few fixed words, because they are counted. What people and tools
wrote stays as it is, control-looking text included; only NUL bytes, ``\\r\\n`` and halves of
surrogate pairs are mended (no Unicode normalisation: it would alter code). Where a source asks for
more, its module says what and why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

Message = dict[str, Any]
"""``role`` and ``content``; ``tool_calls`` or ``tool_call_id`` where the role has them."""

Row = dict[str, Any]

_SPACES = bytes(i for i in range(128) if chr(i).isspace())
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_THINKING = re.compile(r"\A\s*<think>.*?(?:</think>\s*|\Z)", re.DOTALL)


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
    if "\0" in text or "\r" in text:
        text = text.replace("\0", "").replace("\r\n", "\n")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text)
    return text


def parsed(text: str) -> Any:
    """JSON ``text``, also as Python's own writer has it: NaN, half surrogate pairs. ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("nested too deep") from None


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON ``value`` with ``change`` done to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): mapped(item, change) for key, item in value.items()}
    return value


def folded(text: str) -> str:
    """``text`` without what near-exact duplicates differ in: case and the length of white space."""
    return " ".join(text.casefold().split())


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


def without_thinking(text: str) -> str:
    """An assistant's turn without the thinking written out at its beginning.

    In history, templates show answers only; the text would look like markup of the target.
    """
    return _THINKING.sub("", text) if "<think>" in text else text


def turns(
    value: Any,
    roles: Mapping[str, str],
    role_key: str = "role",
    text_key: str = "content",
    answer: Callable[[str], str] = without_thinking,
) -> list[Message] | str:
    """A source's list of turns as messages that begin with a user's, system turns kept.

    ``roles`` maps the source's spelling (lower case) to ours; ``answer`` is done to what an
    assistant said. Empty turns and what an assistant says before the first user turn are left out;
    neighbours of one role become one message.
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
        if role == "assistant":
            content = answer(content)
        if content.strip():
            messages.append({"role": role, "content": content})
    return opened_by_user(merged(messages))


def merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message: texts joined by a blank line, calls as made at once.

    Tool results stand alone, and so does what is said after a call: it must not come before it.
    """
    result: list[Message] = []
    for message in messages:
        last: Message = result[-1] if result else {"role": None}
        alike = last["role"] == message["role"] != "tool"
        if alike and ("tool_calls" in message or "tool_calls" not in last):
            texts = [m["content"] for m in (last, message) if m["content"]]
            last["content"] = "\n\n".join(texts)
            if "tool_calls" in message:
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        else:
            result.append(dict(message))
    return result


def opened_by_user(messages: list[Message]) -> list[Message]:
    """Without what an assistant or a tool says before the first user turn."""
    roles = [message["role"] for message in messages]
    begin = roles.index("user") if "user" in roles else len(roles)
    return [m for m in messages[:begin] if m["role"] == "system"] + messages[begin:]


def cuts(messages: Sequence[Message]) -> list[int]:
    """Every n for which ``messages[:n]`` ends in a user or tool turn that the model answers.

    Nothing behind a call that never got its result: engines refuse such conversations.
    """
    asks = [message["role"] in ("user", "tool") for message in messages]
    candidates: list[int] = []
    unanswered: set[str] = set()
    for n, message in enumerate(messages, 1):
        if message["role"] == "tool":
            unanswered.discard(message["tool_call_id"])
        elif unanswered:
            break
        unanswered.update(call["id"] for call in message.get("tool_calls", ()))
        if asks[n - 1] and not unanswered and not any(asks[n : n + 1]):
            candidates.append(n)
    return candidates


def chosen(messages: list[Message], candidates: Sequence[int]) -> list[Message]:
    """``messages`` up to one of ``candidates``, picked by content, so that late turns occur too.

    Conversations that differ in case or white space only are cut at the same place, so that one of
    them is seen to repeat the other.
    """
    pieces = [piece for m in messages for piece in (m["role"].encode(), _letters(m["content"]))]
    picked = int.from_bytes(hashlib.sha256(b"\0".join(pieces)).digest(), "big")
    return messages[: candidates[picked % len(candidates)]]


def _letters(text: str) -> bytes:
    """What is equal in texts that are equal when folded, and many times faster to be had."""
    if text.isascii():
        return text.lower().encode().translate(None, _SPACES)
    return folded(text).replace(" ", "").encode()
