"""The classes that every answer of an engine falls into, and what becomes of each: one table.

RULES is that table; the README shows it (a test keeps the two equal). A prompt is sent again only
when that can help and at most as often as ``sends`` says, so over a run an engine gets no more
requests than rows and faults together. "failed, for good" means that nobody asks again. Prompts of
the other failures are asked once more at the end of the run, with as many sends (workers.py).
What fails then too is written to failed.jsonl and asked by the next run, for which this one ends as
busy; a prompt that failed so in MAX_RUNS runs has failed for good.

What a valid row is, is decided in drafter.rows, for validate too.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Kind = Literal[
    "ok", "length", "empty", "abort", "transient", "malformed", "permanent", "prompt too long"
]


class Rule(NamedTuple):
    what: str
    """What the answer is."""

    sends: int | None
    """Of one prompt at most; None for the recipe's ``attempts``."""

    counts: bool
    """The row is stored, and its completion tokens count towards the budget."""

    final: bool
    """Nobody asks again."""

    @property
    def goes_to(self) -> str:
        if self.counts:
            return "raw_responses"
        return "failed, for good" if self.final else "failed"


RULES: dict[Kind, Rule] = {
    "ok": Rule("complete, ended by a stop id", 1, True, True),
    "length": Rule("complete, ended by max_new_tokens", 1, True, True),
    "empty": Rule("no output ids", 2, False, False),
    "abort": Rule("cut off by the engine or a person, under HTTP 200", None, False, False),
    "transient": Rule(
        "connection lost, timeout, 401, 403-405, 408, 425, 429, 5xx", None, False, False
    ),
    "malformed": Rule(
        "HTTP 200 without a row that `rows` accepts, any other 2xx or 3xx", None, False, False
    ),
    "permanent": Rule("any other 4xx, or ids that no engine may be sent", 1, False, True),
    "prompt too long": Rule("leaves no room in the engine's context", 1, False, True),
}

MAX_RUNS = 3
"""Runs in which a prompt may fail, whatever its classes, before it has failed for good."""


class Outcome(NamedTuple):
    """How one answer, or after its retries one prompt, ended."""

    kind: Kind
    reason: str
    """Empty for a stored row."""

    row: dict[str, Any] | None
    """The five keys of raw_responses.jsonl, when ``kind`` is ok or length."""


def failure_fault(row: dict[str, Any]) -> str | None:
    """Why a row of failed.jsonl cannot be counted."""
    if type(row.get("sample_id")) is not str:
        return f"sample_id is {row.get('sample_id')!r:.60}, needs a string"
    if type(row.get("class")) is not str or row["class"] not in RULES:
        return f"class is {row.get('class')!r:.60}, needs one of {', '.join(RULES)}"
    return None
