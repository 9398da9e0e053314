"""Trajectories of software agents, cut before an assistant step chosen by content.

The schemas differ in where the steps are and in how they name things:

* nebius/SWE-agent-trajectories: ``trajectory``, roles system, user and ai; the system step keeps
  its text in ``system_prompt`` and has a null ``text``. Actions are text.
* SWE-bench/SWE-smith-trajectories: ``messages`` as a JSON string, contents as text or parts. Its
  ``xml`` and ``ticks`` renderings are text; ``tool`` has real calls, whose results name them in
  ``tool_call_ids`` or not at all. (The three are the same runs: a recipe names one.)
* SWE-Gym/OpenHands-Sampled-Trajectories and others made with OpenHands: ``messages`` or
  ``trajectory`` with real calls, and the functions in ``tools``.
* nvidia/Open-SWE-Traces: ``trajectory``, later ``messages``; results follow their calls without an
  id, ``tools`` holds JSON texts or is missing.

Call ids are written anew in the form that Kimi expects. Functions are never made up: a run whose
source does not declare them calls what its system prompt describes. What an agent thought
(``reasoning_content``, ``think``, ``<think>``) is not read, as in all history. Terminal output
stays as it was but for what :mod:`drafter.sources.terminal` says; that a run repeats itself or is
very long is how agents are, and prepare's limits deal with it.
"""

from __future__ import annotations

from typing import Any

from drafter.sources.functions import arguments_of, declared, tool_call
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
    source_id,
    text_of,
    without_thinking,
)
from drafter.sources.terminal import plain, redacted

COLUMNS = ("messages", "trajectory", "tools", "traj_id", "trajectory_id", "instance_id")

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
    tools = declared(row.get("tools"))
    if isinstance(tools, str):
        return tools
    messages, fault = _conversation(steps)
    candidates = [n for n in cuts(messages) if n < len(messages)]
    if not candidates:
        return fault or "no assistant step"
    identity = row.get("traj_id") or row.get("trajectory_id") or row.get("instance_id")
    # What is cut off need not be searched for secrets.
    told = [{**m, "content": redacted(m["content"])} for m in chosen(messages, candidates)]
    return Prompt(told, tools or None, source_id(identity))


def _steps(row: Row) -> list[Any] | str:
    steps = row.get("messages")
    if steps is None:
        steps = row.get("trajectory")
    if isinstance(steps, str):
        try:
            steps = parsed(steps)
        except ValueError:
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
            if role == "assistant":
                # It stands for the answer that a prompt may end before; no prompt holds it.
                messages.append({"role": role, "content": ""})
            break
        if role == "assistant":
            content = without_thinking(content)
        if role == "assistant" and calls:
            messages.append({"role": role, "content": content, "tool_calls": list(calls.values())})
            unanswered |= {theirs: call["id"] for theirs, call in calls.items()}
            num_calls += len(calls)
        elif role == "tool" and unanswered:
            called = unanswered.pop(_answered(step, unanswered))
            messages.append({"role": role, "tool_call_id": called, "content": content})
        elif content.strip():
            # A result of a call that is written out as text is something the user says.
            messages.append({"role": "user" if role == "tool" else role, "content": content})
    return opened_by_user(merged(messages)), fault


def _content(step: dict[str, Any]) -> str | None:
    for key in ("content", "text", "system_prompt"):
        if step.get(key) is not None:
            content = text_of(step[key])
            return None if content is None else plain(content)
    return ""


def _argument(text: str) -> str:
    return redacted(plain(clean(text)))


def _answered(step: dict[str, Any], unanswered: dict[str, str]) -> str:
    """Which of the ``unanswered`` calls a result answers: the one it names, or the oldest."""
    several = step.get("tool_call_ids")
    named = [step.get("tool_call_id"), *(several if isinstance(several, list) else ())]
    known = [theirs for theirs in named if isinstance(theirs, str) and theirs in unanswered]
    return known[0] if known else next(iter(unanswered))


def _calls(value: Any, num_before: int) -> dict[str, dict[str, Any]] | None:
    """Calls by the id they had in the source (or their number); None when one is unreadable."""
    if value is None:
        return {}
    if not isinstance(value, list):
        return None
    calls: dict[str, dict[str, Any]] = {}
    for number, given in enumerate(value, num_before):
        function = given.get("function") if isinstance(given, dict) else None
        if not isinstance(function, dict):
            return None
        name, arguments = function.get("name"), arguments_of(function.get("arguments"), _argument)
        if not isinstance(name, str) or not name or arguments is None:
            return None
        theirs = given.get("id")
        if not isinstance(theirs, str) or theirs in calls:
            theirs = f"call {number}"
        calls[theirs] = tool_call(clean(name), arguments, number)
    return calls
