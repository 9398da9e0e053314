"""How well a token budget is met: simulated through the classes that decide in production.

Answers have log-normal lengths of 4,000 tokens on average, 150 are in flight, each is decoded at
a rate of its own (a quarter up and down), and the files are those of a real job, only without ids.
``kills`` end the job where they say, as shares of the budget; the next one opens its files.

    budget         overshoot, mean of all seeds, as a share of the budget
    budget-max     the largest one
    budget-kills   mean after three kills, the worse of two ways: anywhere, all in the last tenth
    budget-bias    mean length of the stored answers against that of the distribution, in standard
                   errors: without kills and with both kinds of them, the worst
    budget-time    until the last answer, against a client that knows every length beforehand
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.measure import Result

from drafter.generation.budget import Budget
from drafter.generation.responses import Responses
from drafter.jsonl import Appender
from drafter.layout import Prepared

CAP = 32_768
IN_FLIGHT = 150
BUDGET = 10_000_000
SEEDS = 64
KILLS = {"none": None, "anywhere": (0.0, 1.0), "late": (0.9, 1.0)}
"""Three of them, between these shares of the budget."""

RATE = (16.0, 25.0)
"""Tokens per second of one request."""

TAIL = 0.95
"""Share of the budget from which on the engine is no longer full."""

_MU, _SIGMA = math.log(4000) - 0.5, 1.0


@dataclass(frozen=True)
class Run:
    overshoot: float
    """Stored tokens over the budget, as a share of it."""

    lengths: list[int]
    """Of the stored answers."""

    seconds: float
    tail_in_flight: float
    """Mean from the moment when TAIL of the budget is stored."""


class NoCanary:
    lookback = 0

    def see(self, *_: object) -> None:
        return None


class Simulation:
    """One dataset. A prompt has one length, or with ``redrawn`` a new one each time it is sent;
    ``admits`` stands in for the decision of production; its second argument are the tokens that
    those in flight will have."""

    def __init__(
        self,
        seed: int,
        budget: int = BUDGET,
        *,
        kills: Sequence[float] = (),
        redrawn: bool = False,
        admits: Callable[[Budget, int], bool] | None = None,
    ) -> None:
        self._dice = random.Random(seed)
        num_prompts = 2 * budget // 4000 + 4 * IN_FLIGHT
        self._lengths = [self._length() for _ in range(num_prompts)]
        self._budget = budget
        self._kills = sorted(kills)
        self._redrawn = redrawn
        self._admits = admits
        self._seconds = self._tail_s = self._tail_area = 0.0

    def run(self, home: Path) -> Run:
        prepared = Prepared(home)
        with Appender(prepared.prompt_ids) as prompts:
            for i in range(len(self._lengths)):
                prompts.append({"sample_id": f"prompt {i}", "input_ids": []})
        stored: list[int] = []
        while self._session(prepared, stored):
            self._kills.pop(0)
            if self._redrawn:
                self._lengths = [self._length() for _ in self._lengths]
        overshoot = sum(stored) / self._budget - 1
        return Run(overshoot, stored, self._seconds, self._tail_area / self._tail_s)

    def _session(self, prepared: Prepared, stored: list[int]) -> bool:
        """Until it is over, or killed: True."""
        budget = Budget(self._budget, CAP)
        with (
            Responses(prepared, budget, NoCanary(), None) as responses,  # type: ignore[arg-type]
            Appender(prepared.sessions) as sessions,
        ):
            sessions.append({"time": 0, "offset": responses.end, "start_id": "", "identity": {}})
            now, unfinished = 0.0, 0
            flight: list[tuple[float, int, str]] = []
            while True:
                while len(flight) < IN_FLIGHT and (
                    self._admits(budget, unfinished) if self._admits else budget.admits(now)
                ):
                    prompt = responses.next_prompt()
                    assert prompt, "too few prompts"
                    length = self._lengths[int(prompt[0].split()[1])]
                    budget.start(prompt[0], now)
                    end = now + length / self._dice.uniform(*RATE)
                    heapq.heappush(flight, (end, length, prompt[0]))
                    unfinished += length
                if not flight:
                    return False
                if self._kills and budget.tokens >= self._kills[0] * self._budget:
                    return True
                end, length, sample_id = heapq.heappop(flight)
                self._pass(end - now, len(flight) + 1, budget.tokens)
                now = end
                unfinished -= length
                responses.store({"sample_id": sample_id, "completion_tokens": length}, now)
                stored.append(length)

    def _pass(self, seconds: float, in_flight: int, tokens: int) -> None:
        self._seconds += seconds
        if tokens >= TAIL * self._budget:
            self._tail_s += seconds
            self._tail_area += seconds * in_flight

    def _length(self) -> int:
        return min(CAP, max(1, round(self._dice.lognormvariate(_MU, _SIGMA))))


def knows_lengths(budget: Budget, unfinished: int) -> bool:
    """What no client can do: the best decision there is."""
    return budget.tokens + unfinished < BUDGET


def mean_length() -> float:
    """Of the distribution, cut at CAP."""
    normal = statistics.NormalDist()
    cut = (math.log(CAP) - _MU) / _SIGMA
    return 4000 * normal.cdf(cut - _SIGMA) + CAP * (1 - normal.cdf(cut))


def simulate(seed: int, budget: int = BUDGET, **how: Any) -> Run:
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        return Simulation(seed, budget, **how).run(Path(home))


def three_kills(seed: int, between: tuple[float, float]) -> list[float]:
    dice = random.Random(f"kills {seed}")
    return [dice.uniform(*between) for _ in range(3)]


def bias(runs: list[Run]) -> float:
    """Of the mean length of all stored answers, in standard errors."""
    lengths = [length for run in runs for length in run.lengths]
    error = statistics.stdev(lengths) / math.sqrt(len(lengths))
    return (statistics.fmean(lengths) - mean_length()) / error


def overshoot_mean() -> Result:
    return Result(_overshoot("none"), "share", 0.02, "value", "lower")


def overshoot_max() -> Result:
    worst = max(run.overshoot for run in _runs("none"))
    return Result(worst, "share", 0.06, "value", "lower")


def overshoot_after_kills() -> Result:
    worst = max(_overshoot("anywhere"), _overshoot("late"))
    return Result(worst, "share", 0.04, "value", "lower")


def length_bias() -> Result:
    worst = max(abs(bias(_runs(kills))) for kills in KILLS)
    return Result(worst, "standard errors", 2.0, "value", "lower")


def time_taken() -> Result:
    seconds, best = (statistics.mean(run.seconds for run in _runs(how)) for how in ("none", "best"))
    return Result(seconds, "s", 1.05, "ratio", "lower", reference=best)


def _overshoot(kills: str) -> float:
    return statistics.mean(run.overshoot for run in _runs(kills))


@cache
def _runs(how: str) -> list[Run]:
    """``how``: a key of KILLS, or ``best``."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(_run, range(SEEDS), [how] * SEEDS))


def _run(seed: int, how: str) -> Run:
    if how == "best":
        return simulate(seed, admits=knows_lengths)
    between = KILLS[how]
    return simulate(seed, kills=three_kills(seed, between) if between else ())
