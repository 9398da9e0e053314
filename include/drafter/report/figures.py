"""The figures of a report: counted once from the table of rows, shown as page, table and CSV.

Pure: a table of ``findings.py`` in, :class:`Figures` out. What is to be counted more is
counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from drafter.kinds import MISSING_REASONING, Fault
from drafter.validation.findings import SEPARATOR, Findings

if TYPE_CHECKING:
    import pandas as pd

GROUPS = {
    "sound": "reasoning as it should be",
    "unjudged": "not judged: damaged, duplicate, unknown or no valid row",
    "cut": "cut by the length limit while thinking",
    "unasked": "thinking although off",
    "empty": "thinking opened and closed around nothing",
    "missing": "no end of thinking in a finished answer",
}
"""What can be said of a row's reasoning, best first."""

NO_REASONING = ("empty", "missing")

_GROUP_OF: dict[str, str] = {
    **dict.fromkeys(MISSING_REASONING, "missing"),
    "empty thinking": "empty",
    "truncated in thinking": "cut",
    "thinking although off": "unasked",
}
_UNJUDGED = frozenset(get_args(Fault))

PARTS = ("prompt", "thinking", "answer")

EDGES = tuple(dict.fromkeys(round(2 ** (step / 2)) for step in range(42)))
"""Of the bins of token histograms, two per doubling: [1, 2), [2, 3), [3, 4), [4, 6), ..., up to a
million."""

NUM_EXAMPLES = 3

VERDICTS = ("accepted", "flagged", "rejected")


class Kind(NamedTuple):
    """One class: rows may be in several."""

    name: str
    policy: str
    cap: float | None
    rows: int
    tokens: int
    """Completion tokens of its rows."""

    examples: tuple[str, ...]
    reason: str
    """Of the first example."""


class Spread(NamedTuple):
    """How long one part of the answers is, in tokens."""

    counts: tuple[int, ...]
    """Per bin of EDGES; longer ones are in the last."""

    num_none: int
    """Valid rows without the part."""

    median: int
    p95: int
    longest: int
    total: int


@dataclass(frozen=True)
class Figures:
    dataset: str
    thinking: bool
    refused: tuple[str, ...]
    rows: int
    valid: int
    groups: dict[str, int]
    verdicts: dict[str, int]
    verdict_tokens: dict[str, int]
    kinds: tuple[Kind, ...]
    spreads: dict[str, Spread]
    finish: dict[str, int]
    calls: int
    valid_calls: int
    rows_with_calls: int
    looping: int
    """Rows that go round in a loop."""

    prompts: int | None
    failed: int | None
    generated: int | None
    """Completion tokens that generate counts towards the budget."""

    token_budget: int | None
    stop_reason: str | None
    letters: dict[str, dict[str, int]]
    audited: int

    @property
    def without_reasoning(self) -> int:
        return sum(self.groups[group] for group in NO_REASONING)

    @property
    def tokens(self) -> int:
        """Completion tokens of all valid rows."""
        return sum(self.verdict_tokens.values())

    def num_rows(self, kind: str) -> int:
        return next((entry.rows for entry in self.kinds if entry.name == kind), 0)


def figures(found: Findings) -> Figures:
    frame, about = found
    valid = frame[frame["finish_reason"] != ""]
    tokens = valid.groupby("verdict")["completion_tokens"].sum()
    verdicts = frame["verdict"].value_counts()
    return Figures(
        dataset=about["dataset"],
        thinking=about["thinking"],
        refused=tuple(about["refused"]),
        rows=len(frame),
        valid=len(valid),
        groups=_groups(frame),
        verdicts={name: int(verdicts.get(name, 0)) for name in VERDICTS},
        verdict_tokens={name: int(tokens.get(name, 0)) for name in VERDICTS},
        kinds=tuple(_kinds(found)),
        spreads={part: _spread(valid[f"{part}_tokens"].to_numpy()) for part in PARTS},
        finish={
            name: int(number)
            for name, number in sorted(valid["finish_reason"].value_counts().items())
        },
        calls=int(frame["num_tool_calls"].sum()),
        valid_calls=int(frame["num_valid_tool_calls"].sum()),
        rows_with_calls=int((frame["num_tool_calls"] > 0).sum()),
        looping=int((frame["repetition"] > 0).sum()),
        prompts=about["prompts"],
        failed=about["failed"],
        generated=about["completion_tokens"],
        token_budget=about["token_budget"],
        stop_reason=about["stop_reason"],
        letters=about["letters"],
        audited=int(frame["audited"].sum()),
    )


def group(kinds: tuple[str, ...]) -> str:
    """The worst that the classes of a row say of its reasoning."""
    if _UNJUDGED.issuperset(kinds):
        return "unjudged"
    found = {_GROUP_OF.get(kind, "sound") for kind in kinds}
    return max(found, key=list(GROUPS).index)


def _groups(frame: pd.DataFrame) -> dict[str, int]:
    numbers = dict.fromkeys(GROUPS, 0)
    for kinds, number in frame["kinds"].value_counts().items():
        numbers[group(tuple(str(kinds).split(SEPARATOR)))] += int(number)
    return numbers


def _kinds(found: Findings) -> list[Kind]:
    """Most rows first; examples in the order of the draw, so that the first one is audited."""
    frame, about = found
    drawn = frame.sort_values(["draw", "line"])
    # Rows share few combinations: those are taken apart, not every row's.
    combinations = dict(iter(drawn.groupby("kinds", sort=False)))
    entries = []
    for name in sorted({name for kinds in combinations for name in kinds.split(SEPARATOR)}):
        parts = [rows for kinds, rows in combinations.items() if name in kinds.split(SEPARATOR)]
        first = sorted(
            (row for rows in parts for row in rows.head(NUM_EXAMPLES)[_EXAMPLE].itertuples()),
            key=lambda row: (row.draw, row.line),
        )[:NUM_EXAMPLES]
        entries.append(
            Kind(
                name=name,
                policy=about["policy"].get(name, ""),
                cap=about["cap"].get(name),
                rows=sum(map(len, parts)),
                tokens=sum(int(rows["completion_tokens"].sum()) for rows in parts),
                examples=tuple(_name(row.sample_id, row.line) for row in first),
                reason=first[0].reason,
            )
        )
    return sorted(entries, key=lambda entry: (-entry.rows, entry.name))


_EXAMPLE = ["draw", "line", "sample_id", "reason"]


def _name(sample_id: Any, line: int) -> str:
    return sample_id if isinstance(sample_id, str) else f"line {line}"


def _spread(tokens: Any) -> Spread:
    there = tokens[tokens > 0]
    counts, _ = np.histogram(np.minimum(there, EDGES[-1]), bins=EDGES)
    if not there.size:
        return Spread(tuple(map(int, counts)), len(tokens), 0, 0, 0, 0)
    median, p95 = np.percentile(there, [50, 95], method="nearest")
    return Spread(
        counts=tuple(map(int, counts)),
        num_none=len(tokens) - len(there),
        median=int(median),
        p95=int(p95),
        longest=int(there.max()),
        total=int(there.sum()),
    )
