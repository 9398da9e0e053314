"""The servers of extraction: which of them get rows, and what to do when one is gone.

Rows go out concurrently, in turn over the URLs that answer. A server is asked what it is before its
first row, and again after it was lost: it may come back with other flags. What it says does not
prove what it does, so once a row's states are proven, each server must return these very states
too, and again whenever it comes back. States are made again for free, so a row that got no answer
is simply sent once more, elsewhere where there is another.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import httpx
import orjson

from drafter.engines.connection import CHECK_TIMEOUT_S, CONNECT_TIMEOUT_S, open_transport
from drafter.errors import Busy, RecipeError
from drafter.sections import Extract

PATIENCE_S = 60.0
"""Without any server: one that is being restarted is back by then, or somebody must look."""

BACKOFF_S = 0.5
_BACKOFF_CAP_S = 5.0
_ATTEMPTS = 5
"""Per row: what fails more often is the row, and no server is asked for it for ever."""

_LOOK_AGAIN_S = 60.0
"""From one look at a lost server to the next, while others answer."""

_TRANSIENT_STATUS = frozenset({408, 425, 429})

Get = Callable[[str], Awaitable[dict[str, Any]]]
T = TypeVar("T")
"""What an engine's answer to a row holds."""

T_co = TypeVar("T_co", covariant=True)

Judge = Callable[[str, T], None]
"""(URL, what it gave for the proven row): DataError when these are not the row's states."""


class Asked(Protocol[T_co]):
    """How one kind of engine is asked."""

    async def check(self, url: str, get: Get) -> None:
        """``get`` reads a path of it as JSON. RecipeError when that is not the server to ask."""

    def body(self, row: list[int]) -> dict[str, Any]:
        """Of the request for a row; new for each attempt."""

    async def take(self, url: str, body: dict[str, Any], answer: dict[str, Any]) -> T_co:
        """What the answer to a request holds. May raise Lost."""


class Lost(Exception):
    """No answer, or one that a second try may change."""


class Servers(Generic[T]):
    """``in_flight`` rows at once at each of the recipe's URLs.

    Raises RecipeError when a server is the wrong one or refuses, Busy when none answers.
    """

    def __init__(
        self, settings: Extract, engine: str, path: str, asked: Asked[T], in_flight: int
    ) -> None:
        self._urls = [url.rstrip("/") for url in settings.urls]
        self._timeout_s = settings.timeout_s
        self._headers = _headers(settings)
        self._tls = httpx.create_ssl_context(verify=any(u.startswith("https:") for u in self._urls))
        self._engine = engine
        self._path = path
        self._asked = asked
        self._in_flight = in_flight
        self._turn = itertools.count()
        self._live: list[str] = []
        self._lost: dict[str, str] = {}
        """Why, for each that does not answer."""

        self._looked_at = float("-inf")
        self._proof: tuple[list[int], Judge[T]] | None = None
        asyncio.run(self._find_servers())

    def answers(self, batch: Sequence[list[int]]) -> list[T]:
        """What the answer to each row holds, in order.

        After a failure no further row is sent; those under way end first, so that nothing is left
        behind. Raises as the class, and what ``judge`` of ``prove`` raises.
        """
        return asyncio.run(self._answers(batch))

    def prove(self, row: list[int], judge: Judge[T]) -> None:
        """``judge`` what each server gives for ``row``: all that answer now, and from now on every
        one that comes back, before it gets another row. Raises what ``judge`` raises."""
        self._proof = row, judge
        # A server may have been started again unseen, between two rows: none is believed.
        self._live.clear()
        asyncio.run(self._find_servers())

    async def _find_servers(self) -> None:
        async with self._open() as http:
            await self._await_server(http)

    async def _answers(self, batch: Sequence[list[int]]) -> list[T]:
        places = asyncio.Semaphore(self._in_flight * len(self._urls))
        search = asyncio.Lock()
        failed = asyncio.Event()

        async def one(row: list[int]) -> list[T]:
            async with places:
                if failed.is_set():
                    return []
                try:
                    return [await self._row(http, search, row)]
                except BaseException:
                    failed.set()
                    raise

        async with self._open() as http:
            if self._lost and time.monotonic() - self._looked_at >= _LOOK_AGAIN_S:
                await self._look(http)
            done = await asyncio.gather(*map(one, batch), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return [answer for result in done if isinstance(result, list) for answer in result]

    async def _row(self, http: httpx.AsyncClient, search: asyncio.Lock, row: list[int]) -> T:
        reason = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(BACKOFF_S * 2 ** (attempt - 1), _BACKOFF_CAP_S))
            async with search:
                if not self._live:
                    await self._await_server(http)
            url = self._live[next(self._turn) % len(self._live)]
            try:
                return await self._answer(http, url, row)
            except Lost as error:
                reason = str(error)
                self._lose(url, reason)
            except TimeoutError:
                reason = self._too_slow(url)
                self._lose(url, reason)
                if not self._live:
                    # It may well say what it is: that is no reason to wait as long again.
                    break
        raise Busy(
            f"{self._engine} does not give states ({reason}): look at its log, then run extract "
            "again; shards already written are kept"
        )

    async def _answer(self, http: httpx.AsyncClient, url: str, row: list[int]) -> T:
        """Raises Lost, or TimeoutError when it does not come in time."""
        body = self._asked.body(row)
        async with asyncio.timeout(self._timeout_s):
            answer = await self._ask(http, "POST", url + self._path, body)
        return await self._asked.take(url, body, answer)

    def _too_slow(self, url: str) -> str:
        return f"{url} gives no states of a row within {self._timeout_s:g} s"

    async def _await_server(self, http: httpx.AsyncClient) -> None:
        """Return when one answers and is the right one."""
        give_up = time.monotonic() + PATIENCE_S
        for attempt in itertools.count():
            await self._look(http)
            if self._live:
                return
            if time.monotonic() >= give_up:
                break
            await asyncio.sleep(min(BACKOFF_S * 2**attempt, _BACKOFF_CAP_S))
        raise Busy(
            f"no {self._engine} answers for {PATIENCE_S:g} s ({'; '.join(self._lost.values())}): "
            "start it or correct extract.urls"
        )

    async def _look(self, http: httpx.AsyncClient) -> None:
        """Ask every URL that is not known to be live."""
        self._looked_at = time.monotonic()
        unknown = [url for url in self._urls if url not in self._live]
        await asyncio.gather(*(self._look_at(http, url) for url in unknown))

    async def _look_at(self, http: httpx.AsyncClient, url: str) -> None:
        async def get(path: str) -> dict[str, Any]:
            return await self._ask(http, "GET", url + path)

        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._asked.check(url, get)
        except Lost as error:
            return self._lose(url, str(error))
        except TimeoutError:
            return self._lose(url, f"{url} does not say in {CHECK_TIMEOUT_S:.0f} s what it serves")
        if self._proof is not None:
            row, judge = self._proof
            try:
                judge(url, await self._answer(http, url, row))
            except Lost as error:
                return self._lose(url, str(error))
            except TimeoutError:
                return self._lose(url, self._too_slow(url))
        self._lost.pop(url, None)
        self._live.append(url)
        return None

    def _lose(self, url: str, reason: str) -> None:
        self._lost[url] = reason
        if url in self._live:
            self._live.remove(url)

    async def _ask(
        self, http: httpx.AsyncClient, method: str, url: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The JSON object of a 200. Raises Lost or RecipeError."""
        content = None if body is None else orjson.dumps(body)
        try:
            response = await http.request(method, url, content=content)
        except httpx.RequestError as error:
            raise Lost(f"{url}: {error or type(error).__name__}") from None
        except (httpx.InvalidURL, ValueError) as error:
            raise RecipeError(f"URL {url!r} is none ({error}): correct extract.urls") from None
        status, text = response.status_code, response.content[:300].decode(errors="replace")
        if status in _TRANSIENT_STATUS or status >= 500:
            raise Lost(f"{url} answers {status}: {text}")
        no_such = f"correct extract.urls or extract.backend, this is no {self._engine} server"
        set_key = "set the variable that extract.api_key_env names to a key that"
        remedies = {
            401: f"{set_key} the server takes",
            403: f"{set_key} may use this route",
            404: no_such,
            405: no_such,
        }
        if status != 200:
            remedy = remedies.get(status, "look at its log and correct its flags")
            raise RecipeError(f"{url} answers {status} ({text}): {remedy}")
        try:
            value = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise RecipeError(f"{url} gives no JSON object: {no_such}")
        return value

    def _open(self) -> httpx.AsyncClient:
        """Connections past any proxy of the host; how long a row may take is not theirs to say."""
        return httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            transport=open_transport(self._tls),
            trust_env=False,
        )


def _headers(settings: Extract) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if settings.api_key_env:
        # A key read from a file often keeps its line feed.
        key = os.environ.get(settings.api_key_env, "").strip()
        if not (key and key.isascii() and key.isprintable()):
            found = "holds characters that no HTTP header may carry" if key else "is not set"
            raise RecipeError(
                f"{settings.api_key_env} {found}: let it hold the servers' key, visible to "
                "non-interactive SSH sessions on the GPU host, or remove extract.api_key_env"
            )
        headers["Authorization"] = f"Bearer {key}"
    return headers
