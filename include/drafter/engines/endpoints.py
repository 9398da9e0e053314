"""Waiting for a place at an endpoint, and looking after those that are gone.

The asynchronous shell around drafter.engines.balance; one object for all workers of a job. A worker
waits in turn until an endpoint admits its request. Endpoints whose breaker is open are asked until
they answer and serve the recipe's model again; when none is left for ``patience_s``, none in flight
either, every worker gets Busy. Waiting costs a prompt none of its attempts. An endpoint that holds
requests and has been silent for ``silence_s`` is asked too: one that hangs would hold them for as
long as the longest answer may take, which is hours.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from types import TracebackType
from typing import NamedTuple, Self

from drafter.engines.balance import Balancer, Endpoint, Slot
from drafter.errors import Busy, RecipeError

PROBES_TO_LOSE = 2
"""Failed in a row while an endpoint is silent. One is not enough: under load SGLang's /health waits
20 s for a token and says 503."""


class _Waiter(NamedTuple):
    prompt_tokens: int
    max_new_tokens: int
    avoid: str | None
    slot: asyncio.Future[Slot]


class Endpoints:
    """Use it as an asynchronous context manager: leaving it ends the probes."""

    def __init__(
        self,
        urls: Collection[str],
        max_in_flight: int,
        patience_s: float,
        silence_s: float,
        probe: Callable[[str], Awaitable[None]],
        down: Collection[str] = (),
    ) -> None:
        """``probe(url)`` raises Busy when nothing answers there, RecipeError when the wrong thing
        does; ``down`` are urls that did not answer just now."""
        self.balancer = Balancer(urls, max_in_flight, down, time.monotonic())
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._listener: asyncio.Task[None] | None = None
        self._limits: dict[Slot, asyncio.Timeout] = {}
        self._probe = probe
        self._waiters = deque[_Waiter]()
        self._probes: dict[Endpoint, asyncio.Task[None]] = {}
        self._probe_errors: dict[Endpoint, Busy | RecipeError] = {}
        self._error: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._watch()
        self._listener = asyncio.create_task(self._listen())
        self._listener.add_done_callback(self._note_end)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer:
            self._timer.cancel()
        tasks = [*self._probes.values(), *filter(None, [self._listener])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def slot(
        self, prompt_tokens: int, max_new_tokens: int, avoid: str | None = None
    ) -> AsyncIterator[Slot]:
        """A place for one request, in turn. Tell ``balancer`` how it ended before leaving.

        Raises Busy when all endpoints are gone for good, RecipeError when all are the wrong ones.
        """
        slot = await self._acquire(prompt_tokens, max_new_tokens, avoid)
        try:
            yield slot
        finally:
            self._limits.pop(slot, None)
            self.balancer.release(slot, time.monotonic())
            self._watch()
            self._grant()

    def limit(self, slot: Slot, limit_s: float) -> asyncio.Timeout:
        """A context that ends the request of ``slot`` with TimeoutError, after ``limit_s`` or when
        its endpoint turns out to hang."""
        limit = self._limits[slot] = asyncio.timeout(limit_s)
        return limit

    def refused(self, slot: Slot, error: RecipeError) -> None:
        """The endpoint says what it would say to every request: it is the wrong one from now on."""
        slot.fault = "lost"
        print(f"no more requests to one endpoint for now: {error}", flush=True)
        self._probe_errors[slot.endpoint] = error
        self.balancer.lost(slot.endpoint, time.monotonic())
        self._give_up()

    def stop(self, error: BaseException) -> None:
        """Nobody gets a place any more, but ``error``; what is in flight goes on."""
        if self._error is None:
            self._error = error
        for waiter in self._waiters:
            if not waiter.slot.done():
                waiter.slot.set_exception(self._error)
        self._waiters.clear()

    async def _acquire(self, prompt_tokens: int, max_new_tokens: int, avoid: str | None) -> Slot:
        if self._error:
            raise self._error
        if not self._waiters and (
            slot := self.balancer.pick(prompt_tokens, max_new_tokens, time.monotonic(), avoid)
        ):
            return slot
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(prompt_tokens, max_new_tokens, avoid, future))
        self._grant()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self.balancer.release(future.result(), time.monotonic())
                self._grant()
            raise

    def _grant(self) -> None:
        """Give out places, first come first served."""
        now = time.monotonic()
        while self._waiters:
            first = self._waiters[0]
            if not first.slot.done():
                slot = self.balancer.pick(
                    first.prompt_tokens, first.max_new_tokens, now, first.avoid
                )
                if slot is None:
                    break
                first.slot.set_result(slot)
            self._waiters.popleft()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        wait_s = self.balancer.next_change_s(now) if self._waiters else None
        if wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._grant)

    async def _listen(self) -> None:
        """Ask silent endpoints whether they are still there, and end what they hold if not."""
        while True:
            await asyncio.sleep(self._silence_s / 10)
            silent = self.balancer.silent(time.monotonic(), self._silence_s)
            await asyncio.gather(*map(self._look_into, silent))

    async def _look_into(self, endpoint: Endpoint) -> None:
        for _ in range(PROBES_TO_LOSE):
            try:
                await self._probe(endpoint.url)
            except RecipeError:
                return  # it answers; what comes of its requests will show
            except Busy as error:
                reason = error
            else:
                return
            # A probe takes up to half a minute, in which answers may have come.
            if endpoint not in self.balancer.silent(time.monotonic(), self._silence_s):
                return
            await asyncio.sleep(self._silence_s / 10)
        if endpoint in self.balancer.silent(time.monotonic(), self._silence_s):
            print(f"silent for {self._silence_s:g} s and gone: {reason}", flush=True)
            self._probe_errors[endpoint] = reason
            self.balancer.lost(endpoint, time.monotonic())
            self._end_requests(endpoint)
            self._watch()

    def _end_requests(self, endpoint: Endpoint) -> None:
        now = asyncio.get_running_loop().time()
        for slot, limit in self._limits.items():
            if slot.endpoint is endpoint and not limit.expired():
                slot.fault = "lost"
                limit.reschedule(now)

    def _watch(self) -> None:
        """Probe every endpoint that is open, and notice when waiting has lasted long enough."""
        for endpoint in self.balancer.endpoints:
            if endpoint.state == "open" and endpoint not in self._probes:
                task = asyncio.create_task(self._revive(endpoint))
                self._probes[endpoint] = task
                task.add_done_callback(self._note_end)
        self._give_up()

    async def _revive(self, endpoint: Endpoint) -> None:
        while endpoint.state == "open":
            wait_s = endpoint.probe_wait_s
            left_s = self._patience_left_s()
            await asyncio.sleep(
                min(wait_s, left_s) if left_s is not None and left_s > 0 else wait_s
            )
            try:
                await self._probe(endpoint.url)
            except (Busy, RecipeError) as error:
                if str(self._probe_errors.get(endpoint)) != str(error):
                    print(f"asking again and again: {error}", flush=True)
                self._probe_errors[endpoint] = error
                self.balancer.probed(endpoint, up=False)
                self._give_up()
                if self._error:
                    return
            else:
                if self._probe_errors.pop(endpoint, None):
                    print(f"engine {endpoint.url} answers again", flush=True)
                self.balancer.probed(endpoint, up=True)
        del self._probes[endpoint]
        self._grant()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """A probe that broke must not leave workers waiting for it."""
        if not task.cancelled() and (error := task.exception()):
            self.stop(error)

    def _patience_left_s(self) -> float | None:
        """None while an endpoint answers."""
        since = self.balancer.down_since
        return None if since is None else since + self._patience_s - time.monotonic()

    def _give_up(self) -> None:
        """Nobody waits for engines that are all wrong, or all gone for ``patience_s``."""
        left_s = self._patience_left_s()
        if left_s is None or self._error:
            return
        endpoints = self.balancer.endpoints
        errors = [self._probe_errors.get(endpoint) for endpoint in endpoints]
        wrong = [error for error in errors if isinstance(error, RecipeError)]
        if len(wrong) == len(errors):
            self.stop(wrong[0])
        elif left_s <= 0 and not any(endpoint.in_flight for endpoint in endpoints):
            reasons = "; ".join(
                str(error or f"{endpoint.url} answers no request")
                for endpoint, error in zip(endpoints, errors, strict=True)
            )
            self.stop(Busy(f"the engine does not answer any more ({reasons}): start it again"))
