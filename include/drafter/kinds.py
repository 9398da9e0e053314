"""The classes that a stored row is counted in: what each means, and what becomes of such rows.

A recipe chooses a policy for each class that a target can produce by itself ([validate.policy]) and
the share of rows above which the phase fails ([validate.cap]). What is no response at all has no
policy: it is always rejected. A row may be in several classes; the one with the hardest policy
decides, of equal ones the first in this order. Standard library only.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Policy = Literal["accept", "flag", "reject"]
"""A flagged row is trained on like an accepted one, and counted."""

HARDNESS: dict[Policy, int] = {"accept": 0, "flag": 1, "reject": 2}

Fault = Literal[
    "damaged line",
    "torn last line",
    "older format",
    "invalid row",
    "unknown sample_id",
    "duplicate",
]
"""What is always rejected."""

Content = Literal[
    "thinking as text",
    "unclosed",
    "empty thinking",
    "thinking although off",
    "truncated in thinking",
    "no answer",
    "no stop id",
    "tool call not closed",
    "cut by length in a tool call",
    "tool call unbalanced",
    "tool call unparsable",
    "control token out of place",
    "several closes",
    "repetition",
    "tool not declared",
    "tool in thinking",
    "cut by length",
    "tool call not judged",
]
"""What a recipe has a policy for."""

Sound = Literal["closed", "not thinking"]
Kind = Literal[Fault, Content, Sound]

SOUND: frozenset[Kind] = frozenset(get_args(Sound))

MISSING_REASONING: frozenset[Kind] = frozenset({"thinking as text", "unclosed", "empty thinking"})
"""The rows of the incident behind this project: paid for, and without what they were paid for."""


class About(NamedTuple):
    text: str
    """For a person who reads a table."""

    cap: float
    """Share of the stored rows above which the phase fails, unless the recipe says otherwise."""

    policy: Policy | None = None
    """Unless the recipe says otherwise; None where it has no say."""


_FAULTS: dict[Kind, About] = {
    "damaged line": About("no JSON object: `drafter repair` sets it aside", 1),
    "torn last line": About("a kill cut the write of it short", 1),
    "older format": About("a row as another program wrote it", 0.01),
    "invalid row": About("a field is missing, wrong or contradicts another", 0.01),
    "unknown sample_id": About("no such prompt", 0.05),
    "duplicate": About("its prompt has an acceptable answer above it", 0.2),
}
_CONTENT: dict[Kind, About] = {
    "thinking as text": About(
        "the end of thinking is spelled out, no control token", 0.05, "reject"
    ),
    "unclosed": About("ended without having ended its thinking", 0.1, "reject"),
    "empty thinking": About("nothing was thought", 0.1, "reject"),
    "thinking although off": About("thought although told not to", 0.1, "reject"),
    "truncated in thinking": About("the length limit ended it in its thinking", 0.2, "reject"),
    "no answer": About("nothing follows the thinking", 0.1, "reject"),
    "no stop id": About("finish_reason is stop, the last id is none that stops", 0.02, "reject"),
    "tool call not closed": About("it ended inside a tool call", 0.1, "reject"),
    "cut by length in a tool call": About("the length limit ended it there", 0.2, "reject"),
    "tool call unbalanced": About("marks of tool calls do not pair up", 0.1, "reject"),
    "tool call unparsable": About("arguments are no JSON object, or no name", 0.1, "reject"),
    "control token out of place": About("a control token where text belongs", 0.05, "reject"),
    "several closes": About("thinking was ended more than once", 0.1, "reject"),
    "repetition": About("it went round in a loop", 0.1, "reject"),
    "tool not declared": About("calls a tool that the prompt does not offer", 0.3, "flag"),
    "tool in thinking": About("a tool call ended the thinking, as Kimi may", 1, "flag"),
    "cut by length": About("the length limit ended its answer", 0.5, "flag"),
    "tool call not judged": About("nobody knows how this family spells calls", 1, "accept"),
}
_SOUND: dict[Kind, About] = {
    "closed": About("something was thought, then answered", 1),
    "not thinking": About("answered, as told, without thinking", 1),
}
KINDS: dict[Kind, About] = {**_FAULTS, **_CONTENT, **_SOUND}
"""In the order in which they decide."""

assert list(KINDS) == [*get_args(Fault), *get_args(Content), *get_args(Sound)]

_REASONS: dict[str, Kind] = {name: name for name in get_args(Fault)}


def exceeds(rows: int, stored: int, cap: float) -> bool:
    """Are there more ``rows`` of a class than its cap allows? One row is no share, unless there
    must be none."""
    return rows > max(cap * stored, cap > 0)


def reason_class(reason: str) -> str:
    """The countable part of a reason, which is ``"<class>"`` or ``"<class>: <detail>"``."""
    return reason.partition(":")[0]


def fault_of(reason: str) -> Kind:
    """The kind of a row that is no response for ``reason``."""
    return _REASONS.get(reason_class(reason), "invalid row")
