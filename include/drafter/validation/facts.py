"""What validate finds out about each stored row, and who is told: the report, row by row, while the
file is read once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from drafter.kinds import Kind

Verdict = Literal["accepted", "flagged", "rejected"]
"""A flagged row is accepted."""


class Facts(NamedTuple):
    """One row. Of a row that is no valid one, the numbers are 0 and ``finish_reason`` is empty."""

    number: int
    """Of its line in raw_responses.jsonl, from 1."""

    offset: int
    """Of its first byte."""

    sample_id: str | None
    """None when the line has none."""

    verdict: Verdict
    kinds: tuple[Kind, ...]
    """All that apply, the deciding one first; of a valid row one of them says how its thinking
    ended."""

    reason: str
    """The deciding kind, ``"<class>"`` or ``"<class>: <detail>"``."""

    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    thinking_tokens: int = 0
    """Without its control tokens."""

    answer_tokens: int = 0
    """After the thinking and outside tool calls, without the stop id."""

    tool_tokens: int = 0
    """From the first mark of a call to the last, both included."""

    num_tool_calls: int = 0
    """Calls that were begun."""

    num_valid_tool_calls: int = 0
    """Of them, whose arguments are a JSON object and whose name is declared. 0 where calls are not
    judged."""

    repetition: float = 0.0
    """Share of the output that its longest loop covers; 0 when it has none to speak of."""

    period: int = 0
    """Tokens of one round of that loop."""


class Outcome(NamedTuple):
    """What became of a dataset."""

    dataset: str
    counts: dict[str, Any]
    """As in the manifest: stored, accepted (flagged among them), flagged, rejected, tokens,
    response_tokens, by_reason {class: rejected rows}, by_kind {kind: rows}."""

    breaches: tuple[str, ...]
    """Sentences: shares above what the recipe allows."""

    damaged: tuple[str, ...]
    """Sentences: file, line and remedy."""


class Collector(Protocol):
    def add(self, facts: Facts) -> None:
        """Called once per line, in file order."""

    def finish(self, outcome: Outcome) -> Iterable[Path]:
        """Called once all rows are written and before a breach fails the phase; gives the files
        that were made, in the dataset's directory."""


class Nobody:
    """Collects nothing."""

    def add(self, facts: Facts) -> None:
        pass

    def finish(self, _outcome: Outcome) -> Iterable[Path]:
        return ()
