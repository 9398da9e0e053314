"""What an engine counted about its drafts: the text of GET /metrics, before and after. Pure.

A verification is one pass of the target over a draft. Counters never go down while a server lives,
so the difference of two readings is what happened between them. vLLM 0.32 counts (label sets, one
per engine of a data-parallel server, add up)::

    vllm:spec_decode_num_drafts_total                     verifications
    vllm:spec_decode_num_draft_tokens_total               tokens drafted for them
    vllm:spec_decode_num_accepted_tokens_total            of these accepted
    vllm:spec_decode_num_accepted_tokens_per_pos_total    the same by position in the draft
    vllm:generation_tokens_total                          tokens written

It counts a draft before it looks for the end of the answer, so what is accepted behind a stop id
counts as accepted and is written by nobody: 1 + accepted / drafts is above tokens written /
verifications, the more the shorter the answers are. SGLang 0.5.23 counts::

    sglang:spec_verify_calls_total                        verifications, of answers that ended
    sglang:generation_tokens_total                        tokens written, of answers that ended
    sglang:spec_accept_length, sglang:spec_accept_rate    gauges over the last lines of its log

Letters: K = tokens per draft.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from drafter.errors import Busy, RecipeError

Kind = Literal["sglang", "vllm"]

METRICS = "/metrics"

_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

_VLLM = "vllm:spec_decode_num_"
_WRITTEN = {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:generation_tokens_total"}
_REMEDY = {
    "vllm": "start vLLM without --disable-log-stats",
    "sglang": "start SGLang with --enable-metrics",
}


class Sample(NamedTuple):
    """One line of Prometheus' text format."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Counts:
    """What one or several servers counted, since they started or between two readings."""

    written: int = 0
    """Tokens of answers."""

    verifications: int = 0
    drafted: int | None = None
    """Tokens of drafts; None where the engine does not count them. So are the next two."""

    accepted: int | None = None
    accepted_K: tuple[int, ...] | None = None

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.written + other.written,
            self.verifications + other.verifications,
            _sum(self.drafted, other.drafted),
            _sum(self.accepted, other.accepted),
            None
            if self.accepted_K is None or other.accepted_K is None
            else tuple(map(sum, zip(self.accepted_K, other.accepted_K, strict=True))),
        )

    def length(self, num_answers: int) -> float | None:
        """Tokens per verification, as replay.py counts them: the first token of each answer
        comes from prefill, and nothing behind its end counts."""
        return (self.written - num_answers) / self.verifications if self.verifications else None

    @property
    def engine_length(self) -> float | None:
        """As the engine itself says it: 1 + accepted / verifications."""
        if self.accepted is None or not self.verifications:
            return None
        return 1 + self.accepted / self.verifications

    @property
    def accepted_share_K(self) -> list[float] | None:
        """Of the verifications, by position in the draft: those that accepted the token there."""
        if self.accepted_K is None or not self.verifications:
            return None
        return [accepted / self.verifications for accepted in self.accepted_K]


def samples(text: str) -> Iterator[Sample]:
    """Every sample of Prometheus' text format, version 0.0.4; comments are passed over.

    Raises ValueError with the line that is neither.
    """
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        if found is None:
            raise ValueError(f"{line!r:.80} is none")
        labels = dict(_LABEL.findall(found["labels"] or ""))
        yield Sample(found["name"], labels, float(found["value"]))


def read(kind: Kind, text: str, url: str) -> Counts:
    """The counters in the text of ``url``'s /metrics, over all of its engines.

    Raises RecipeError when it has none of that kind; ``text`` is empty where the server has no
    such route. A counter that is not there is zero: SGLang shows one once it counts something.
    """
    try:
        found = list(samples(text))
    except ValueError as error:
        raise RecipeError(
            f"{url}{METRICS} is no text of metrics ({error}): correct the URL, this is no engine"
        ) from None
    if not any(sample.name.startswith(f"{kind}:") for sample in found):
        raise RecipeError(f"{url}{METRICS} has no metric of {kind}: {_REMEDY[kind]}")
    written = _total(found, _WRITTEN[kind])
    if kind == "sglang":
        return Counts(written, _total(found, "sglang:spec_verify_calls_total"))
    positions: dict[int, int] = {}
    for sample in found:
        if sample.name == f"{_VLLM}accepted_tokens_per_pos_total":
            position = int(sample.labels["position"])
            positions[position] = positions.get(position, 0) + int(sample.value)
    return Counts(
        written,
        _total(found, f"{_VLLM}drafts_total"),
        _total(found, f"{_VLLM}draft_tokens_total"),
        _total(found, f"{_VLLM}accepted_tokens_total"),
        tuple(positions[position] for position in sorted(positions)),
    )


def between(before: Counts, after: Counts, url: str) -> Counts:
    """What happened between two readings. Busy when the server was started anew meanwhile."""
    pairs = [(before.written, after.written), (before.verifications, after.verifications)]
    pairs += [
        (before.drafted or 0, after.drafted or 0),
        (before.accepted or 0, after.accepted or 0),
    ]
    if any(then > now for then, now in pairs):
        raise Busy(
            f"the counters of {url} went backwards ({before.written:,} tokens, then"
            f" {after.written:,}): it was started anew meanwhile, measure again"
        )
    ones = [0] * len(after.accepted_K or ())
    ones[: len(before.accepted_K or ())] = before.accepted_K or ()
    return Counts(
        after.written - before.written,
        after.verifications - before.verifications,
        _difference(before.drafted, after.drafted),
        _difference(before.accepted, after.accepted),
        None
        if after.accepted_K is None
        else tuple(now - then for then, now in zip(ones, after.accepted_K, strict=True)),
    )


def sglang_says(text: str, server_info: dict[str, Any]) -> dict[str, float | None]:
    """SGLang's own numbers: {length, rate} of its last decoding steps, {mean_length} since its
    start; None for what it does not say. Ranks that have drafted count the same."""
    found = list(samples(text))
    states = server_info.get("internal_states")
    means = [
        state["avg_spec_accept_length"]
        for state in (states if isinstance(states, list) else [])
        if isinstance(state, dict) and state.get("avg_spec_accept_length")
    ]
    return {
        "length": _mean([s.value for s in found if s.name == "sglang:spec_accept_length"]),
        "rate": _mean([s.value for s in found if s.name == "sglang:spec_accept_rate"]),
        "mean_length": _mean(means),
    }


def _total(found: list[Sample], name: str) -> int:
    return int(sum(sample.value for sample in found if sample.name == name))


def _mean(values: list[float]) -> float | None:
    """Of those above zero, which is what a rank says that has not drafted."""
    positive = [value for value in values if value > 0]
    return sum(positive) / len(positive) if positive else None


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _difference(before: int | None, after: int | None) -> int | None:
    return None if after is None else after - (before or 0)
