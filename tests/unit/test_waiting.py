"""Waiting for a place at an endpoint: what is asked, how often, and when waiting ends."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from unit.fake_engine import FAMILY, TEXT, FakeEngine, Site

from drafter.engines import balance, client
from drafter.engines.endpoints import Endpoints
from drafter.engines.outcomes import Kind
from drafter.errors import Busy
from drafter.sections import Engine


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "PROBE_S", 0.05)


async def held(endpoints: Endpoints, until: asyncio.Event) -> str:
    """A request that ends when ``until`` is set: how."""
    async with endpoints.slot(10, 10) as slot:
        try:
            async with endpoints.limit(slot, 60):
                await until.wait()
        except TimeoutError:
            return "ended"
        endpoints.balancer.answered(slot, 10, time.monotonic())
        return "answered"


async def passes(_url: str) -> None:
    pass


async def fails(url: str) -> None:
    raise Busy(f"{url} says 503")


@pytest.mark.parametrize("answers_meanwhile", [True, False])
def test_answers_that_come_while_it_is_asked_show_that_it_does_not_hang(
    answers_meanwhile: bool,
) -> None:
    async def run() -> tuple[str, str, int]:
        first, never, probes = asyncio.Event(), asyncio.Event(), 0

        async def probe(url: str) -> None:
            nonlocal probes
            probes += 1
            if answers_meanwhile:
                first.set()
                await asyncio.sleep(0.05)
                never.set()
            await fails(url)

        async with Endpoints(["a"], 8, 60, 0.3, probe) as endpoints:
            requests = [asyncio.create_task(held(endpoints, event)) for event in (first, never)]
            one, other = await asyncio.gather(*requests)
            return one, other, probes

    ends = asyncio.run(asyncio.wait_for(run(), 20))
    assert ends == (("answered", "answered", 1) if answers_meanwhile else ("ended", "ended", 2))


@pytest.mark.parametrize("patience_s", [0, 60])
def test_one_of_two_that_is_down_is_not_asked_without_pause(patience_s: float) -> None:
    async def run() -> int:
        probes = 0

        async def probe(url: str) -> None:
            nonlocal probes
            probes += 1
            await fails(url)

        async with Endpoints(["a", "b"], 8, patience_s, 60, probe, down=["a"]) as endpoints:
            await asyncio.sleep(1.5)
            async with endpoints.slot(10, 10) as slot:
                assert slot.endpoint.url == "b"
        return probes

    assert 1 <= asyncio.run(run()) <= 2


@pytest.mark.usefixtures("_quick")
def test_an_open_endpoint_that_still_answers_is_not_given_up() -> None:
    async def run() -> str:
        slow = asyncio.Event()
        async with Endpoints(["a"], 8, 0.3, 60, fails) as endpoints:
            request = asyncio.create_task(held(endpoints, slow))
            await asyncio.sleep(0)
            async with endpoints.slot(10, 10) as slot:
                endpoints.balancer.failed(slot, time.monotonic(), refused=True)
            waiting = asyncio.create_task(held(endpoints, slow))
            await asyncio.sleep(1)
            assert not waiting.done()
            slow.set()
            with pytest.raises(Busy, match="does not answer any more"):
                await waiting
            return await request

    assert asyncio.run(asyncio.wait_for(run(), 20)) == "answered"


@pytest.mark.usefixtures("_quick")
def test_an_engine_that_is_healthy_and_refuses_every_connection_has_an_end() -> None:
    async def run() -> None:
        async with Endpoints(["a"], 8, 0.5, 60, passes) as endpoints:
            while True:
                async with endpoints.slot(10, 10) as slot:
                    endpoints.balancer.failed(slot, time.monotonic(), refused=True)

    with pytest.raises(Busy, match="does not answer any more"):
        asyncio.run(asyncio.wait_for(run(), 20))


def test_a_listener_that_breaks_is_noticed() -> None:
    async def breaks(_url: str) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        async with Endpoints(["a"], 1, 60, 0.2, breaks) as endpoints:
            request = asyncio.create_task(held(endpoints, asyncio.Event()))
            await asyncio.sleep(0)
            try:
                await held(endpoints, asyncio.Event())
            finally:
                request.cancel()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("error", [httpx.ConnectTimeout, httpx.ConnectError])
def test_a_connection_that_never_came_about_costs_no_attempt(
    error: type[httpx.RequestError], tmp_path: Path
) -> None:
    class Unconnected(httpx.AsyncHTTPTransport):
        """The first two connections do not come about."""

        tries = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.tries += 1
            if self.tries <= 2:
                raise error("nobody")
            return await super().handle_async_request(request)

    async def run(engine: Engine) -> tuple[str, Counter[Kind]]:
        answers = Counter[Kind]()
        generate = Site(tmp_path, 0, settings={"attempts": 1}).recipe.generate
        async with Endpoints(engine.urls, 1, 60, 60, passes) as endpoints:
            client_ = client.Client(
                engine, generate, FAMILY, 4096, endpoints, answers, Unconnected()
            )
            outcome = await client_.complete("B1-0001", [TEXT, TEXT + 1])
            await client_.transport.aclose()
        return outcome.kind, answers

    with FakeEngine() as fake:
        recipe = Site(tmp_path, 0, urls=(fake.url,)).recipe
        assert asyncio.run(run(recipe.engine)) == ("ok", {"ok": 1})
