"""When to stop sending prompts so that what comes back meets a token budget: pure arithmetic.

Admission goes on while ``stored + expected(in flight) < budget``; what is in flight then drains,
and every stored token counts. The expectation is where other generators go wrong (5.7 to 86 %
overshoot measured for checking stored tokens only, 2.8 to 48 % for reserving the running mean):
requests in flight are the long ones, because the short ones have already come back. So lengths are
treated as survival times: finished answers are deaths, requests in flight are censored at the
tokens they have probably written so far (elapsed time x decode rate of the finished ones), an
actuarial life table over geometric length classes gives the survival curve, and each request in
flight counts with its expected length *given* that it is already so long. What no finished answer
tells about is assumed to run to the cap, so admission is careful until lengths are known.

With nothing in flight the expectation is exact, so admission ends only when stored >= budget.
"""

from __future__ import annotations

import bisect

_RATIO = 1.15
"""Between two class borders: 75 classes up to 32,768 tokens."""

_RATE_MEMORY = 0.99
"""Weight of the past per finished request: the decode rate follows the engine's load."""


class Budget:
    """``budget`` in completion tokens, None for no limit; ``cap`` is max_new_tokens. Times are
    seconds of any steady clock."""

    def __init__(self, budget: int | None, cap: int) -> None:
        self.budget = budget
        self.tokens = 0
        self._cap = cap
        self._borders = _borders(cap)
        self._deaths = [0] * len(self._borders)
        self._death_tokens = [0] * len(self._borders)
        self._started: dict[str, float] = {}
        self._rate_tokens = 0.0
        self._rate_seconds = 0.0

    @property
    def in_flight(self) -> int:
        return len(self._started)

    def found(self, tokens: int) -> None:
        """An answer of ``tokens`` was on disk already."""
        self._count(tokens, tokens)

    def start(self, sample_id: str, now: float) -> None:
        self._started[sample_id] = now

    def finish(self, sample_id: str, tokens: int, now: float) -> None:
        """An answer of ``tokens`` has been stored."""
        seconds = now - self._started.pop(sample_id)
        self._rate_tokens = self._rate_tokens * _RATE_MEMORY + tokens
        self._rate_seconds = self._rate_seconds * _RATE_MEMORY + seconds
        self._count(tokens, seconds * self._rate)

    def fail(self, sample_id: str) -> None:
        """The request ended without a row: nothing learnt about lengths."""
        del self._started[sample_id]

    def admits(self, now: float) -> bool:
        """May another prompt be sent?"""
        if self.budget is None or self.tokens + self.in_flight * self._cap < self.budget:
            return True
        return self.tokens + self.expected(now) < self.budget

    def expected(self, now: float) -> float:
        """Tokens that the requests in flight will have written when they finish."""
        rate = self._rate
        written = [min((now - begun) * rate, self._cap) for begun in self._started.values()]
        means = self._life_table(written)
        return sum(self._mean_given(length, means) for length in written)

    def _life_table(self, written: list[float]) -> list[float]:
        """[class] -> E[length | length reaches the class]; one entry more: the cap."""
        censored = [0] * len(self._borders)
        for length in written:
            censored[self._class(length)] += 1
        means = [float(self._cap)] * (len(self._borders) + 1)
        reached = 0.0
        for at in reversed(range(len(self._borders))):
            reached += self._deaths[at] + censored[at]
            if self._deaths[at] == 0:
                means[at] = means[at + 1]
                continue
            hazard = min(self._deaths[at] / (reached - censored[at] / 2), 1.0)
            mean_here = self._death_tokens[at] / self._deaths[at]
            means[at] = hazard * mean_here + (1 - hazard) * means[at + 1]
        return means

    def _mean_given(self, written: float, means: list[float]) -> float:
        """E[length | already ``written``], between the class it is in and the next one."""
        at = self._class(written)
        low, high = self._borders[at], self._border(at + 1)
        into = (written - low) / (high - low) if high > low else 0.0
        return max(means[at] + (means[at + 1] - means[at]) * into, written)

    @property
    def _rate(self) -> float:
        """Tokens per second of one request."""
        return self._rate_tokens / self._rate_seconds if self._rate_seconds else 0.0

    def _count(self, tokens: int, age: float) -> None:
        """``age`` is the lifetime on the scale of those in flight: seconds x rate, not ``tokens``.
        Otherwise a fast answer would have died at an age that nobody alive has reached."""
        at = self._class(age)
        self._deaths[at] += 1
        self._death_tokens[at] += tokens
        self.tokens += tokens

    def _class(self, length: float) -> int:
        return max(bisect.bisect_right(self._borders, length) - 1, 0)

    def _border(self, at: int) -> int:
        return self._borders[at] if at < len(self._borders) else self._cap


def _borders(cap: int) -> list[int]:
    """Lower borders of the length classes: 0, 1, 2, ..., then geometric; the last is the cap."""
    borders = [0]
    while borders[-1] < cap:
        borders.append(min(max(borders[-1] + 1, int(borders[-1] * _RATIO)), cap))
    return borders
