"""Client of the recipe's engine: token ids out, token ids in, every answer in one class.

What each class means and how often a prompt may be sent is drafter.engines.outcomes; which endpoint
gets it and when, drafter.engines.balance; what the two kinds of engine speak, drafter.engines.api.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import orjson

from drafter.engines.api import judge, raise_if_refused
from drafter.engines.balance import Slot
from drafter.engines.connection import (
    CONNECT_TIMEOUT_S,
    EngineInfo,
    api_of,
    base_urls,
    open_http,
    served_by,
    tls_context,
)
from drafter.engines.endpoints import Endpoints
from drafter.engines.outcomes import RULES, Kind, Outcome
from drafter.errors import RecipeError
from drafter.recipe import Engine, Generate
from drafter.rows import Family

_UNTIL_ANSWERED = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)

BACKOFF_S = 0.5
BACKOFF_CAP_S = 30.0
RETRY_AFTER_CAP_S = 120.0

_FULL_STATUS = frozenset({429, 503})


@contextlib.asynccontextmanager
async def connected(
    engine: Engine,
    target: str,
    info: EngineInfo,
    generate: Generate,
    family: Family,
    number: int,
    answers: Counter[Kind],
) -> AsyncIterator[list[Client]]:
    """``number`` clients of a checked engine, one per worker, who share its endpoints.

    Every request that ended is counted in ``answers`` by class; the sum is the requests sent.
    """
    tls = tls_context(engine)

    async def probe(url: str) -> None:
        async with open_http(engine, tls) as http:
            served = await served_by(engine, target, http, url)
        if served.context < info.context:
            raise RecipeError(
                f"engine {url} came back with a context of {served.context} tokens, it had"
                f" {info.context}: start it as before"
            )

    for reason in info.down.values():
        print(f"going on without one endpoint until it answers: {reason}", flush=True)
    async with Endpoints(
        base_urls(engine), number, engine.patience_s, engine.queue_timeout_s, probe, info.down
    ) as endpoints:
        clients = [
            Client(
                engine, generate, family, info.context, endpoints, answers, open_http(engine, tls)
            )
            for _ in range(number)
        ]
        try:
            yield clients
        finally:
            await asyncio.gather(*(client.http.aclose() for client in clients))


class Client:
    """Sends one prompt at a time and knows when to send it again.

    One client, with its own connections, per worker: measured at 150 in flight, 7 times the rate of
    one ``httpx.AsyncClient`` for all, whose pool looks through every connection for every request.
    """

    def __init__(
        self,
        engine: Engine,
        generate: Generate,
        family: Family,
        context: int,
        endpoints: Endpoints,
        answers: Counter[Kind],
        http: httpx.AsyncClient,
    ) -> None:
        self.http = http
        self._engine = engine
        self._api = api_of(engine)
        self._generate = generate
        self._family = family
        self._context = context
        self._endpoints = endpoints
        self._answers = answers

    async def complete(self, sample_id: str, prompt_ids: list[int]) -> Outcome:
        """The answer to one prompt, retried as RULES say.

        Raises RecipeError when the engine refuses us or serves something else, Busy when nothing
        answers any more.
        """
        room = self._context - 1 - len(prompt_ids)
        if room < 1:
            reason = f"{len(prompt_ids)} tokens, context {self._context}"
            return Outcome("prompt too long", reason, None)
        if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= self._family.vocab_size:
            reason = f"prompt is empty or has ids outside 0..{self._family.vocab_size - 1}"
            return Outcome("permanent", reason, None)
        max_new_tokens = min(self._generate.max_new_tokens, room)
        sends = 0
        avoid = None
        while True:
            async with self._endpoints.slot(len(prompt_ids), max_new_tokens, avoid) as slot:
                try:
                    outcome = await self._send(slot, sample_id, prompt_ids, max_new_tokens)
                except httpx.ConnectError:
                    # Nothing was sent: it waits for a place again, at no cost.
                    self._endpoints.balancer.failed(slot, time.monotonic(), refused=True)
                    continue
            self._answers[outcome.kind] += 1
            avoid = slot.endpoint.url
            sends += 1
            limit = RULES[outcome.kind].sends or self._generate.attempts
            if sends >= min(limit, self._generate.attempts):
                return outcome
            # Full jitter: what failed together does not come back together.
            await asyncio.sleep(random.uniform(0, min(BACKOFF_S * 2**sends, BACKOFF_CAP_S)))

    async def _send(
        self, slot: Slot, sample_id: str, prompt_ids: list[int], max_new_tokens: int
    ) -> Outcome:
        """One request and its class; the balancer learns how it went. ConnectError: not sent."""
        balancer, url = self._endpoints.balancer, slot.endpoint.url + self._api.path
        body = self._api.body(uuid.uuid4().hex, prompt_ids, max_new_tokens, self._generate)
        limit_s = timeout_s(self._engine, max_new_tokens)
        try:
            async with self._endpoints.limit(slot, limit_s):
                response = await self.http.post(
                    url, content=orjson.dumps(body), timeout=_UNTIL_ANSWERED
                )
        except TimeoutError:
            balancer.throttled(slot, time.monotonic(), pause_s=0)
            waited_s = time.monotonic() - slot.sent_at
            return Outcome("transient", f"no whole answer within {waited_s:,.0f} s", None)
        except httpx.ConnectError:
            raise
        except httpx.RequestError as error:
            balancer.failed(slot, time.monotonic(), refused=False)
            return Outcome("transient", f"{type(error).__name__}: {error}", None)
        status = response.status_code
        raise_if_refused(self._api, url, status)
        outcome = judge(
            self._api, status, response.content, sample_id, len(prompt_ids), self._family
        )
        if status in _FULL_STATUS:
            pause_s = retry_after_s(response.headers.get("Retry-After"), time.time())
            balancer.throttled(slot, time.monotonic(), pause_s)
        elif status >= 500:
            balancer.failed(slot, time.monotonic(), refused=False)
        else:
            balancer.answered(slot, outcome.row["completion_tokens"] if outcome.row else None)
        return outcome


def timeout_s(engine: Engine, max_new_tokens: int) -> float:
    """Of one request, from sending to the last byte: in the queue, then at the slowest rate."""
    return engine.queue_timeout_s + max_new_tokens / engine.slowest_tokens_per_s


def retry_after_s(header: str | None, now: float) -> float | None:
    """Seconds from ``now`` (Unix seconds) that a Retry-After asks for, seconds or an HTTP date.

    None when it says nothing that can be read (RFC 9110, 10.2.3).
    """
    if header is None:
        return None
    if header.strip().isdecimal():
        wait_s = float(header)
    else:
        try:
            wait_s = email.utils.parsedate_to_datetime(header).timestamp() - now
        except ValueError:
            return None
    return min(max(wait_s, 0.0), RETRY_AFTER_CAP_S)
