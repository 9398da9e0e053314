"""Connections to the recipe's engine, and whether it is the right one before anything is sent."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from drafter.engines.api import Api, Served
from drafter.engines.sglang import SGLang
from drafter.engines.vllm import VLLM
from drafter.errors import Busy, RecipeError
from drafter.files import file_record
from drafter.sections import Engine

CONNECT_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0
"""/health of SGLang generates a token and waits up to 20 s for it."""

IDLE_CONNECTION_S = 2.0
"""Kept for the next request. The engines close theirs after 5 s, and who sends at that moment gets
a reset."""

_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]
"""An answer may take hours and nothing is said meanwhile: a host that vanished is noticed in two
minutes, and no firewall forgets the connection."""

_VOCABULARY_FILES = ("tokenizer.json", "vocab*", "merges*", "*.model", "*.tiktoken")


class EngineInfo(NamedTuple):
    """What the endpoints said before the first request."""

    context: int
    """Prompt and answer together, in tokens; the smallest of all endpoints."""

    model: str
    """Directory or name that the first was started with."""

    model_info: dict[str, Any]
    """What the first says: weight_version and so on."""

    down: dict[str, str]
    """URLs that did not answer, and why."""


async def check_engine(engine: Engine, target: str) -> EngineInfo:
    """Ask every URL whether it is there and serves ``target`` (a path), before the first request.

    Raises Busy when none answers, RecipeError when one is not what the recipe says.
    """
    served: list[Served] = []
    down: dict[str, str] = {}
    async with open_http(engine, tls_context(engine)) as http:
        for url in base_urls(engine):
            try:
                served.append(await served_by(engine, target, http, url))
            except Busy as error:
                down[url] = str(error)
    if not served:
        raise Busy("; ".join(down.values()))
    first = served[0]
    context = min(one.context for one in served)
    return EngineInfo(context, first.model, first.model_info, down)


async def served_by(engine: Engine, target: str, http: httpx.AsyncClient, url: str) -> Served:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            served = await api_of(engine).served(http, url)
    except TimeoutError:
        raise Busy(
            f"engine {url} does not say in {CHECK_TIMEOUT_S:.0f} s what it serves: wait until it is"
            " ready"
        ) from None
    # The two may see one checkpoint under different roots.
    if Path(served.model).name != Path(target).name:
        raise RecipeError(
            f"engine {url} serves {served.model}, the recipe's target is {target}: start the"
            " right model, or correct target.path or engine.urls"
        )
    tokenizer = Path(served.tokenizer or served.model)
    if tokenizer.name not in (Path(target).name, Path(served.model).name):
        raise RecipeError(
            f"engine {url} has the tokenizer {tokenizer}, the recipe's target is {target}: start"
            " it with the target's own"
        )
    # What the engine's path holds is known only where this host has it too.
    if other := await asyncio.to_thread(_differing_vocabulary, tokenizer, Path(target)):
        raise RecipeError(
            f"engine {url} has another {other} in {tokenizer} than {target} has: start it with the"
            " target's own tokenizer, or correct target.path"
        )
    return served


def _differing_vocabulary(tokenizer: Path, target: Path) -> str | None:
    """The first file that both directories have and that decides which text an id stands for."""
    for pattern in _VOCABULARY_FILES:
        for file in sorted(tokenizer.glob(pattern)):
            ours = target / file.name
            if ours.is_file() and file_record(ours)["sha256"] != file_record(file)["sha256"]:
                return file.name
    return None


def tls_context(engine: Engine) -> ssl.SSLContext:
    """One for all connections: loading the certificates takes 40 ms and plain HTTP needs none."""
    return httpx.create_ssl_context(verify=any(url.startswith("https:") for url in engine.urls))


def api_of(engine: Engine) -> Api:
    return SGLang() if engine.kind == "sglang" else VLLM()


def base_urls(engine: Engine) -> list[str]:
    return [url.rstrip("/") for url in engine.urls]


def open_http(engine: Engine, tls: ssl.SSLContext) -> httpx.AsyncClient:
    """Connections to the engine, past any proxy of the host."""
    return httpx.AsyncClient(
        headers=_headers(engine),
        timeout=CHECK_TIMEOUT_S,
        transport=open_transport(tls),
        trust_env=False,
    )


def open_transport(tls: ssl.SSLContext) -> httpx.AsyncHTTPTransport:
    """What ``open_http`` puts its client around. Half the work of one request is in the client
    (URLs, cookies, redirects, encodings), and answers need none of it."""
    return httpx.AsyncHTTPTransport(
        verify=tls,
        trust_env=False,
        limits=httpx.Limits(keepalive_expiry=IDLE_CONNECTION_S),
        socket_options=_KEEPALIVE,
    )


def request_headers(engine: Engine, url: httpx.URL) -> httpx.Headers:
    """Of every request to ``url``, for a transport: those that a client would add too."""
    request = httpx.Request("GET", url, headers=_headers(engine))
    if url.userinfo:
        request = next(httpx.BasicAuth(url.username, url.password).auth_flow(request))
    return request.headers


def _headers(engine: Engine) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if engine.api_key_env:
        # A key read from a file often keeps its line feed.
        key = os.environ.get(engine.api_key_env, "").strip()
        if not key:
            raise RecipeError(
                f"{engine.api_key_env} is not set: let it hold the engine's key, visible to"
                " non-interactive SSH sessions on the GPU host, or remove engine.api_key_env"
            )
        # The HTTP library would quote the key in its complaint.
        if not (key.isascii() and key.isprintable()):
            raise RecipeError(
                f"{engine.api_key_env} holds characters that no HTTP header may carry, a key is"
                " printable ASCII: set it again"
            )
        headers["Authorization"] = f"Bearer {key}"
    return headers
