"""SWE-agent trajectories, cut before an assistant step chosen by content.

nebius/SWE-agent-trajectories: ``trajectory`` of steps whose roles are system, user and ai; the
system step keeps its text in ``system_prompt`` and has a null ``text``.
SWE-bench/SWE-smith-trajectories: ``messages`` as a JSON string, contents as text or parts, and in
its ``tool`` rendering real tool calls whose results do not say which call they answer. (Its three
renderings are the same runs: a recipe names one.) Call ids are written anew in the form that Kimi
expects.
"""

from __future__ import annotations

from typing import Any

import orjson

from drafter.sources.prompt import (
    Message,
    Prompt,
    Row,
    chosen,
    clean,
    cuts,
    merged,
    opened_by_user,
    role_of,
    source_id,
    text_of,
    tool_call,
)

ROLES = {
    "system": "system",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


def convert(row: Row) -> Prompt | str:
    steps = _steps(row)
    if isinstance(steps, str):
        return steps
    messages, fault = _conversation(steps)
    candidates = [n for n in cuts(messages) if n < len(messages)]
    if not candidates:
        return fault or "no assistant step"
    identity = row.get("traj_id") or row.get("instance_id")
    return Prompt(chosen(messages, candidates), source_id=source_id(identity))


def _steps(row: Row) -> list[Any] | str:
    steps = row.get("trajectory")
    if steps is None:
        steps = row.get("messages")
    if isinstance(steps, str):
        try:
            steps = orjson.loads(steps)
        except orjson.JSONDecodeError:
            return "messages are not JSON"
    return steps if isinstance(steps, list) else "no conversation"


def _conversation(steps: list[Any]) -> tuple[list[Message], str | None]:
    """The steps up to the first that cannot be read, and what is wrong with that one."""
    messages: list[Message] = []
    unanswered: dict[str, str] = {}
    num_calls = 0
    fault = None
    for step in steps:
        if not isinstance(step, dict):
            fault = "turn is not an object"
            break
        role = role_of(step.get("role"), ROLES)
        content = _content(step)
        calls = _calls(step.get("tool_calls"), num_calls)
        if role is None or content is None or calls is None:
            fault = "unknown role" if role is None else "turn is not text"
            fault = "unreadable tool call" if calls is None else fault
            break
        if role == "assistant" and calls:
            messages.append({"role": role, "content": content, "tool_calls": list(calls.values())})
            unanswered = {theirs: call["id"] for theirs, call in calls.items()}
            num_calls += len(calls)
        elif role == "tool" and unanswered:
            theirs = step.get("tool_call_id")
            if not isinstance(theirs, str) or theirs not in unanswered:
                theirs = next(iter(unanswered))
            called = unanswered.pop(theirs)
            messages.append({"role": role, "tool_call_id": called, "content": content})
        elif content.strip():
            # A result of a call that is written out as text is something the user says.
            messages.append({"role": "user" if role == "tool" else role, "content": content})
    return opened_by_user(merged(messages)), fault


def _content(step: dict[str, Any]) -> str | None:
    for key in ("content", "text", "system_prompt"):
        if step.get(key) is not None:
            return text_of(step[key])
    return ""


def _calls(value: Any, num_before: int) -> dict[str, dict[str, Any]] | None:
    """Calls by the id they had in the source (or their position); None when one is unreadable."""
    if value is None:
        return {}
    if not isinstance(value, list):
        return None
    calls: dict[str, dict[str, Any]] = {}
    for i, given in enumerate(value):
        function = given.get("function") if isinstance(given, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = _arguments(function.get("arguments")) if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or arguments is None:
            return None
        theirs = given.get("id")
        if not isinstance(theirs, str) or theirs in calls:
            theirs = f"position {i}"
        calls[theirs] = tool_call(clean(name), arguments, num_before + i)
    return calls


def _arguments(value: Any) -> str | None:
    """JSON text of a call's arguments, which the source gives as text."""
    if isinstance(value, str):
        return clean(value)
    try:
        return orjson.dumps(value or {}).decode() if isinstance(value, dict | None) else None
    except TypeError:  # nested too deep, or half a surrogate pair
        return None
