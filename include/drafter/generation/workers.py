"""Workers that send a dataset's prompts to the engine, as many at once as the job may.

Each takes the next prompt when the budget allows it, waits for the answer, and settles it. Prompts
that failed, but not for good, are asked once more when all others are settled. When something is
wrong with the engine, nothing more is sent, no prompt again either, and what is in flight still
comes in.
"""

from __future__ import annotations

import asyncio
import time

from drafter.engines.client import Client
from drafter.engines.outcomes import Outcome
from drafter.errors import Busy, DataError, DrafterError, RecipeError
from drafter.generation.responses import Responses

MIN_STREAK = 16
"""Prompts in a row without an answer, at least, before the engine is held to be broken."""

PAUSE_S = 10.0
"""Before prompts that failed are asked once more: the trouble may have passed by then."""


class Workers:
    """One worker per client; ``run`` returns when nothing is left to send or in flight."""

    def __init__(self, clients: list[Client], responses: Responses) -> None:
        self._clients = clients
        self._responses = responses
        self._changed = asyncio.Condition()
        self._error: DrafterError | None = None
        self._last_failure: Outcome | None = None

    async def run(self) -> None:
        """Raises Busy when the engine is gone or answers nothing, DataError when nothing it answers
        can be stored, RecipeError when it refuses us, Tainted when the canary alarms."""
        responses = self._responses
        await self._send_all()
        if responses.admits(time.monotonic()) and responses.ask_again():
            await asyncio.sleep(PAUSE_S)
            await self._send_all()
        if self._last_failure and responses.num_doubtful >= MIN_STREAK:
            self._error = self._blame(self._last_failure, MIN_STREAK)
        if self._error:
            raise self._error
        responses.settle()

    async def _send_all(self) -> None:
        """Send what ``responses`` gives out, and wait for it."""
        tasks = [asyncio.create_task(self._work(client)) for client in self._clients]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        responses = self._responses
        if self._last_failure and not responses.num_new and not self._error:
            self._error = self._blame(
                self._last_failure, 1 if not responses.num_stored else MIN_STREAK
            )
        if isinstance(self._error, Busy):
            raise Busy(f"{self._error}, {responses.num_new} new rows are stored")
        if self._error:
            raise self._error

    def _stop(self, error: DrafterError) -> None:
        self._error = self._error or error
        self._clients[0].stop(self._error)

    async def _work(self, client: Client) -> None:
        while prompt := await self._next():
            sample_id, prompt_ids = prompt
            try:
                outcome = await client.complete(sample_id, prompt_ids)
            except (Busy, DataError, RecipeError) as error:
                self._stop(error)
                self._responses.budget.fail(sample_id)
            else:
                self._settle(sample_id, outcome)
            async with self._changed:
                self._changed.notify_all()

    async def _next(self) -> tuple[str, list[int]] | None:
        """The next prompt to send, once the budget allows it; None when there is none."""
        budget = self._responses.budget
        async with self._changed:
            while not self._error and not self._responses.admits(time.monotonic()):
                if not budget.in_flight:
                    return None
                await self._changed.wait()
            prompt = None if self._error else self._responses.next_prompt()
            if prompt:
                budget.start(prompt[0], time.monotonic())
            return prompt

    def _settle(self, sample_id: str, outcome: Outcome) -> None:
        if outcome.row is not None:
            self._responses.store(outcome.row, time.monotonic())
            return
        self._responses.fail(sample_id, outcome)
        if outcome.kind != "prompt too long":
            self._last_failure = outcome
            if error := self._blame(outcome, max(MIN_STREAK, len(self._clients))):
                self._stop(error)

    def _blame(self, outcome: Outcome, streak: int) -> DrafterError | None:
        """The error when ``streak`` prompts in a row got no row: they cannot all be at fault."""
        if self._responses.streak < streak:
            return None
        kind = Busy if outcome.kind in ("transient", "abort") else DataError
        return kind(
            f"{self._responses.streak} prompts in a row got no answer that can be stored, the last"
            f" one is {outcome.kind} ({outcome.reason}): look at the engine, then run again"
        )
