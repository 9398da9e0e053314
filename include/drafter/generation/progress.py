"""How generation goes: numbers for sensors, a line for the log, a bar for a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, deque
from typing import IO, Any, NamedTuple

from drafter.engines.outcomes import Kind
from drafter.generation.responses import Responses
from drafter.generation.sessions import Sessions
from drafter.job import Job
from drafter.terminal import duration

REPORT_S = 1.0
LOG_S = 10.0
MARK_S = 60.0
RATE_WINDOW = 30
"""Reports that tokens/s is taken over."""

BAR_CELLS = 30
_CLEAR_LINE = "\r\x1b[K"


class Progress(NamedTuple):
    """Where a dataset stands."""

    prompts: int | None
    responses: int
    tokens: int
    token_budget: int | None
    tokens_per_s: float
    rows_per_s: float
    in_flight: int

    @property
    def share(self) -> float | None:
        """Of the budget or of the prompts, whichever is nearer to its end; None without either."""
        shares = [
            done / total
            for done, total in ((self.tokens, self.token_budget), (self.responses, self.prompts))
            if total
        ]
        return min(max(shares), 1.0) if shares else None

    @property
    def eta_s(self) -> int | None:
        """Until the budget is met or the prompts run out, whichever comes first."""
        left = []
        if self.token_budget is not None and self.tokens_per_s > 0:
            left.append((self.token_budget - self.tokens) / self.tokens_per_s)
        if self.prompts is not None and self.rows_per_s > 0:
            left.append((self.prompts - self.responses) / self.rows_per_s)
        return max(round(min(left)), 0) if left else None

    def numbers(self) -> dict[str, Any]:
        """As in progress.json."""
        return {
            "prompts": self.prompts,
            "responses": self.responses,
            "completion_tokens": self.tokens,
            "token_budget": self.token_budget,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "in_flight": self.in_flight,
            "eta_s": self.eta_s,
        }

    def story(self) -> str:
        of = "" if self.token_budget is None else f" of {self.token_budget:,}"
        return (
            f"{self.responses:,} responses, {self.tokens:,}{of} tokens,"
            f" {self.tokens_per_s:,.0f} tokens/s"
        )


class Meter:
    """Reads the counts of a dataset, and how fast they grew over the last RATE_WINDOW readings."""

    def __init__(self, responses: Responses, now: float) -> None:
        self._responses = responses
        self._recent = deque([self._counts(now)], maxlen=RATE_WINDOW)

    def read(self, now: float) -> Progress:
        responses = self._responses
        then, tokens, stored = self._recent[0]
        self._recent.append(self._counts(now))
        seconds = max(now - then, 1e-9)
        return Progress(
            prompts=responses.num_wanted,
            responses=responses.num_stored,
            tokens=responses.budget.tokens,
            token_budget=responses.budget.budget,
            tokens_per_s=(responses.budget.tokens - tokens) / seconds,
            rows_per_s=(responses.num_stored - stored) / seconds,
            in_flight=responses.budget.in_flight,
        )

    def _counts(self, now: float) -> tuple[float, int, int]:
        return now, self._responses.budget.tokens, self._responses.num_stored


def at_end(responses: Responses, seconds: float) -> Progress:
    """Once nothing is in flight any more; rates are those of this run's own rows."""
    return Progress(
        prompts=responses.num_wanted,
        responses=responses.num_stored,
        tokens=responses.budget.tokens,
        token_budget=responses.budget.budget,
        tokens_per_s=responses.num_new_tokens / seconds,
        rows_per_s=responses.num_new / seconds,
        in_flight=0,
    )


def bar(name: str, progress: Progress, width: int) -> str:
    """One line of less than ``width`` characters; what is needed least goes first."""
    share, eta_s = progress.share, progress.eta_s
    of = "" if progress.token_budget is None else f"/{progress.token_budget:,}"
    percent = "  ? %" if share is None else f"{share:4.0%}"
    filled = 0 if share is None else int(share * BAR_CELLS)
    parts = [
        f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}]",
        percent,
        f"{progress.tokens:,}{of} tokens",
        f"{progress.tokens_per_s:,.0f} tokens/s",
        f"ETA {'?' if eta_s is None else duration(eta_s)}",
        f"{progress.responses:,} responses",
        f"{progress.in_flight} in flight",
    ]
    for dropped in ((), (6,), (5, 6), (0, 5, 6), (0, 2, 5, 6)):
        line = "  ".join([name, *(part for i, part in enumerate(parts) if i not in dropped)])
        if len(line) < width:
            return line
    return line[: max(width - 1, 0)]


async def tell(job: Job, responses: Responses, sessions: Sessions, answers: Counter[Kind]) -> None:
    """Until cancelled: each second to the sensors and to a terminal, less often to a log and to
    sessions.jsonl. ``answers`` are the engine's so far, by class."""
    begun = logged = marked = time.monotonic()
    meter = Meter(responses, begun)
    terminal = sys.stdout if sys.stdout.isatty() else None
    try:
        while True:
            await asyncio.sleep(REPORT_S)
            now = time.monotonic()
            progress = meter.read(now)
            job.report(**progress.numbers(), answers=dict(answers))
            if terminal:
                width = os.get_terminal_size(terminal.fileno()).columns or 80
                _redraw(terminal, bar(job.dataset, progress, width))
            elif now - logged >= LOG_S:
                logged = now
                left = "" if (eta_s := progress.eta_s) is None else f", ETA {duration(eta_s)}"
                print(
                    f"{job.dataset}: {progress.story()}, {progress.in_flight} in flight{left}",
                    flush=True,
                )
            if now - marked >= MARK_S:
                marked = now
                responses.sync()
                sessions.mark(responses.end)
    finally:
        if terminal:
            _redraw(terminal, "")


def _redraw(terminal: IO[str], line: str) -> None:
    terminal.write(_CLEAR_LINE + line)
    terminal.flush()
