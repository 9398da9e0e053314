"""When to stop sending prompts so that what comes back meets a token budget: pure arithmetic.

Admission goes on while ``stored + expected(in flight) < budget``; what is in flight then drains,
and every stored token counts. The expectation is where other generators go wrong (5.7 to 86 %
overshoot measured for checking stored tokens only, 2.8 to 48 % for reserving the running mean):
requests in flight are the long ones, because the short ones have already come back. So lengths are
treated as survival times: finished answers are deaths, requests in flight are censored at the
tokens they have probably written so far (elapsed time x decode rate of the finished ones), an
actuarial life table over geometric length classes gives the survival curve, and each request in
flight counts with its expected length *given* that it is already so long. Two answers that run to
the cap are assumed beside what is known, so admission is careful until lengths are.

With nothing in flight the expectation is exact, so admission ends only when stored >= budget.

What a killed job had in flight is gone from its files, and it was the long ones again: without them
lengths look short, and being the first prompts that the next job sends they are expected short.
:func:`killed_in_flight` finds them, and how long they had become, in the order of prompts and
answers; they are censored at that length until they are answered, and expected to exceed it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RATIO = 1.15
"""Between two class borders: 75 classes up to 32,768 tokens."""

_RATE_MEMORY = 0.99
"""Weight of the past per finished request: the decode rate follows the engine's load."""

_ASSUMED = 2
"""Answers assumed to run to the cap. 1 M tokens, 150 in flight: overshoot 1 %, without them 7 %."""

_SMOOTHING = 1 / 16
"""Answers that a clock is averaged over, per request in flight: single requests are decoded faster
and slower than the mean. It makes the clock slow by as much."""


class Budget:
    """``budget`` in completion tokens, None for no limit; ``cap`` is max_new_tokens. Times are
    seconds of any steady clock."""

    def __init__(self, budget: int | None, cap: int) -> None:
        self.budget = budget
        self.tokens = 0
        self._cap = cap
        self._borders = np.array(_borders(cap))
        self._widths = np.maximum(np.diff(self._borders, append=cap), 1)
        self._deaths = np.zeros(len(self._borders), dtype=np.int64)
        self._death_tokens = np.zeros(len(self._borders), dtype=np.int64)
        self._outlived = np.zeros(len(self._borders), dtype=np.int64)
        self._started: dict[str, float] = {}
        self._killed: dict[str, float] = {}
        self._rate_tokens = 0.0
        self._rate_seconds = 0.0
        self._full = False

    @property
    def in_flight(self) -> int:
        return len(self._started)

    def found(self, tokens: Sequence[int]) -> None:
        """Answers of ``tokens`` were on disk already."""
        classes = self._classes(np.asarray(tokens))
        np.add.at(self._deaths, classes, 1)
        np.add.at(self._death_tokens, classes, tokens)
        self.tokens += sum(tokens)

    def killed(self, sample_id: str, written: float) -> None:
        """A job was killed while an answer, still missing, had about ``written`` tokens."""
        self._killed[sample_id] = min(written, self._cap)

    def start(self, sample_id: str, now: float) -> None:
        self._started[sample_id] = now

    def finish(self, sample_id: str, tokens: int, now: float) -> None:
        """An answer of ``tokens`` has been stored."""
        seconds = now - self._started.pop(sample_id)
        if (killed_at := self._killed.pop(sample_id, 0)) > tokens:
            # Sampled anew it became shorter: what was killed was another answer, and a longer one.
            self._outlived[self._classes(killed_at)] += 1
        self._rate_tokens = self._rate_tokens * _RATE_MEMORY + tokens
        self._rate_seconds = self._rate_seconds * _RATE_MEMORY + seconds
        # Not the class of ``tokens``: a fast answer would have died at an age that, on the scale of
        # those in flight, nobody alive has reached.
        at = self._classes(seconds * self._rate)
        self._deaths[at] += 1
        self._death_tokens[at] += tokens
        self.tokens += tokens
        self._full = False

    def fail(self, sample_id: str) -> None:
        """The request ended without a row: nothing learnt about lengths."""
        del self._started[sample_id]
        self._full = False

    def admits(self, now: float) -> bool:
        """May another prompt be sent?"""
        if self.budget is None or self.tokens + self.in_flight * self._cap < self.budget:
            return True
        # Expectations grow until a request ends, so every idle worker may ask after each answer.
        self._full = self._full or self.tokens + self.expected(now) >= self.budget
        return not self._full

    def expected(self, now: float) -> float:
        """Tokens that the requests in flight will have written when they finish."""
        killed = self._killed
        begun = np.fromiter(self._started.values(), float, len(self._started))
        written = (now - begun) * self._rate
        if killed:
            written = np.maximum(written, [killed.get(key, 0.0) for key in self._started])
        written = np.minimum(written, self._cap)
        classes = self._classes(written)
        waiting = [length for key, length in killed.items() if key not in self._started]
        censored = np.bincount(
            np.concatenate([classes, self._classes(np.array(waiting))]),
            minlength=len(self._borders),
        )
        means = self._life_table(self._outlived + censored)
        into = (written - self._borders[classes]) / self._widths[classes]
        given = means[classes] + (means[classes + 1] - means[classes]) * into
        return float(np.maximum(given, written).sum())

    def _life_table(self, censored: NDArray[np.int64]) -> NDArray[np.float64]:
        """[class] -> E[length | length reaches the class]; one entry more: the cap."""
        reached = np.cumsum((self._deaths + censored)[::-1])[::-1]
        hazards = self._deaths / (reached - censored / 2 + _ASSUMED)
        means_here = self._death_tokens / np.maximum(self._deaths, 1)
        mean = float(self._cap)
        means = [mean]
        for hazard, mean_here in zip(
            hazards[::-1].tolist(), means_here[::-1].tolist(), strict=True
        ):
            mean = hazard * mean_here + (1 - hazard) * mean
            means.append(mean)
        return np.array(means[::-1])

    @property
    def _rate(self) -> float:
        """Tokens per second of one request."""
        return self._rate_tokens / self._rate_seconds if self._rate_seconds else 0.0

    def _classes(self, lengths: float | NDArray[np.float64]) -> Any:
        return self._borders.searchsorted(lengths, side="right") - 1


def killed_in_flight(
    positions: array[int], tokens: array[int], session_starts: Sequence[int]
) -> dict[int, float]:
    """{position: tokens written} of the prompts that have no answer and that a job must have had in
    flight when it was killed, because it sends prompts in order and later ones are answered.

    ``positions`` (type "i") and ``tokens`` (type "q") are those of the answers, in the order in
    which they were stored; a position is that of the prompt among all, -1 if it is not there.
    ``session_starts`` are indices of answers, ascending, the first 0.
    """
    answered = np.zeros(max(positions, default=-1) + 1, dtype=bool)
    killed: dict[int, float] = {}
    for begin, end in pairwise([*session_starts, len(positions)]):
        known = np.frombuffer(positions, np.int32)[begin:end]
        lengths = np.frombuffer(tokens, np.int64)[begin:end]
        if (known < 0).any():
            known, lengths = known[known >= 0], lengths[known >= 0]
        if not known.size:
            continue
        rank = np.cumsum(~answered, dtype=np.int32) - 1
        # Prompts are sent as answers come in, so that before answer i at most i + in_flight are.
        in_flight = int((rank[known] - np.arange(known.size, dtype=np.int32)).max()) + 1
        num_before = np.maximum(rank - (in_flight - 1), 0, out=rank)
        answered[known] = True
        holes = np.flatnonzero(~answered[: known.max() + 1])
        # More holes than answers: not sent in order, or killed too early to say anything.
        if not 0 < holes.size <= end:
            continue
        weight = 1 / (1 + _SMOOTHING * in_flight)
        clock = _clock(num_before[known].data, lengths.data, weight)
        for at in holes.tolist():
            killed[at] = max(killed.get(at, 0.0), clock[-1] - clock[num_before[at]])
    return {at: written for at, written in killed.items() if not answered[at]}


def _clock(num_before: Iterable[int], tokens: Iterable[int], weight: float) -> array[float]:
    """[answers stored] -> time since the session's start, in tokens that one request writes.

    An answer that was sent when ``num_before`` were stored took its own length. Each moves the
    clock by ``weight`` of what it is behind.
    """
    now = 0.0
    clock = array("d", [now])
    for before, length in zip(num_before, tokens, strict=True):
        now += max(clock[before] + length - now, 0.0) * weight
        clock.append(now)
    return clock


def _borders(cap: int) -> list[int]:
    """Lower borders of the length classes: 0, 1, 2, ..., then geometric; the last is the cap."""
    borders = [0]
    while borders[-1] < cap:
        borders.append(min(max(borders[-1] + 1, int(borders[-1] * _RATIO)), cap))
    return borders
