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
    open_transport,
    request_headers,
    served_by,
    tls_context,
)
from drafter.engines.endpoints import Endpoints
from drafter.engines.outcomes import RULES, Kind, Outcome
from drafter.errors import DrafterError, RecipeError
from drafter.rows import Family
from drafter.sections import Engine, Generate

_UNTIL_ANSWERED = {"timeout": httpx.Timeout(None, connect=CONNECT_TIMEOUT_S).as_dict()}

BACKOFF_S = 0.5
BACKOFF_CAP_S = 30.0
RETRY_AFTER_CAP_S = 120.0

MAX_LOST = 3
"""Requests lost to endpoints that hang or are wrong that cost a prompt nothing. More do: there may
be prompts that make an engine hang."""

TOKEN_BYTES = 64
"""Of an answer at most per token, in JSON with its text; what is longer has no end."""

_FRAME_BYTES = 1 << 20

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
            Client(engine, generate, family, info.context, endpoints, answers, open_transport(tls))
            for _ in range(number)
        ]
        try:
            yield clients
        finally:
            await asyncio.gather(*(client.transport.aclose() for client in clients))


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
        transport: httpx.AsyncHTTPTransport,
    ) -> None:
        self.transport = transport
        self._engine = engine
        self._api = api_of(engine)
        self._generate = generate
        self._family = family
        self._context = context
        self._endpoints = endpoints
        self._answers = answers
        self._routes: dict[str, tuple[httpx.URL, httpx.Headers]] = {}
        for base in base_urls(engine):
            url = httpx.URL(base + self._api.path)
            self._routes[base] = url, request_headers(engine, url)

    def stop(self, error: DrafterError) -> None:
        """No client of this engine sends anything more, new or again: ``complete`` raises ``error``
        in place of it. What is in flight comes in."""
        self._endpoints.stop(error)

    async def complete(self, sample_id: str, prompt_ids: list[int]) -> Outcome:
        """The answer to one prompt, retried as RULES say.

        Raises RecipeError when every endpoint refuses us or serves something else, Busy when
        nothing answers any more, and what ``stop`` was told.
        """
        room = self._context - 1 - len(prompt_ids)
        if room < 1:
            reason = f"{len(prompt_ids)} tokens, context {self._context}"
            return Outcome("prompt too long", reason, None)
        if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= self._family.vocab_size:
            reason = f"prompt is empty or has ids outside 0..{self._family.vocab_size - 1}"
            return Outcome("permanent", reason, None)
        max_new_tokens = min(self._generate.max_new_tokens, room)
        sends = lost = 0
        avoid = None
        while True:
            async with self._endpoints.slot(len(prompt_ids), max_new_tokens, avoid) as slot:
                outcome = await self._send(slot, sample_id, prompt_ids, max_new_tokens)
            avoid = slot.endpoint.url
            if outcome is None:
                continue
            self._answers[outcome.kind] += 1
            if slot.fault == "full" or (slot.fault == "lost" and lost < MAX_LOST):
                lost += slot.fault == "lost"
                continue
            sends += 1
            limit = RULES[outcome.kind].sends or self._generate.attempts
            if sends >= min(limit, self._generate.attempts):
                return outcome
            # Full jitter: what failed together does not come back together.
            await asyncio.sleep(random.uniform(0, min(BACKOFF_S * 2**sends, BACKOFF_CAP_S)))

    async def _send(
        self, slot: Slot, sample_id: str, prompt_ids: list[int], max_new_tokens: int
    ) -> Outcome | None:
        """One request and its class, None when none was sent; the balancer learns how it went."""
        balancer, url = self._endpoints.balancer, slot.endpoint.url + self._api.path
        body = self._api.body(uuid.uuid4().hex, prompt_ids, max_new_tokens, self._generate)
        limit_s = timeout_s(self._engine, max_new_tokens)
        try:
            async with self._endpoints.limit(slot, limit_s):
                response, content = await self._post(
                    slot.endpoint.url, orjson.dumps(body), TOKEN_BYTES * max_new_tokens
                )
        except TimeoutError:
            if slot.fault != "lost":
                balancer.throttled(slot, time.monotonic(), pause_s=0)
            waited_s = time.monotonic() - slot.sent_at
            return Outcome("transient", f"no whole answer within {waited_s:,.0f} s", None)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            refused = isinstance(error, httpx.ConnectError)
            balancer.failed(slot, time.monotonic(), refused)
            return None
        except httpx.RequestError as error:
            balancer.failed(slot, time.monotonic(), refused=False)
            return Outcome("transient", f"{type(error).__name__}: {error}", None)
        status, now = response.status_code, time.monotonic()
        try:
            raise_if_refused(self._api, url, status)
        except RecipeError as error:
            self._endpoints.refused(slot, error)
            return Outcome("transient", str(error), None)
        if content is None:
            balancer.answered(slot, None, now)
            return Outcome("malformed", f"HTTP {status} with a body that does not end", None)
        outcome = judge(self._api, status, content, sample_id, len(prompt_ids), self._family)
        if status in _FULL_STATUS:
            pause_s = retry_after_s(response.headers.get("Retry-After"), time.time())
            balancer.refused(slot, now, pause_s)
        elif status >= 500:
            balancer.failed(slot, now, refused=False)
        else:
            balancer.answered(slot, outcome.row["completion_tokens"] if outcome.row else None, now)
        return outcome

    async def _post(
        self, base: str, body: bytes, max_bytes: int
    ) -> tuple[httpx.Response, bytes | None]:
        """The answer and its content, as it came; None where that is longer than an answer is."""
        url, headers = self._routes[base]
        request = httpx.Request(
            "POST", url, headers=headers, content=body, extensions=_UNTIL_ANSWERED
        )
        response = await self.transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        content = bytearray()
        try:
            async for part in response.stream:
                content += part
                if len(content) > max_bytes + _FRAME_BYTES:
                    return response, None
        finally:
            await response.aclose()
        return response, bytes(content)


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
