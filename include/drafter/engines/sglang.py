"""Client of SGLang's native /generate: token ids out, token ids in, every answer in one class.

What becomes of each class (RULES is the same table for the program):

    class            what it is                                        sends      goes to
    ok               complete, ended by a stop id                      1          raw_responses
    length           complete, ended by max_new_tokens                 1          raw_responses
    empty            no output ids                                     2          failed
    abort            cut off by the engine or a person (HTTP 200!)     attempts   failed
    transient        no connection, timeout, 408, 425, 429, 5xx        attempts   failed
    malformed        HTTP 200 without a row that drafter.rows accepts  attempts   failed
    permanent        any other 4xx: the engine will not have it        1          failed, for good
    prompt too long  leaves no room in the engine's context            0 or 1     failed, for good

"For good" means that nobody asks again. Prompts of the other failures are asked once more at the
end of the run, with as many sends (drafter.workers). What fails then too is written to failed.jsonl
and asked by the next run, for which this one ends as busy; a prompt that failed so in three runs
(MAX_RUNS) has failed for good. Behaviour of the server: SGLang 0.5.23, measured; an id outside the
vocabulary kills its process, so ids are checked before they are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import orjson

from drafter.errors import Busy, RecipeError
from drafter.recipe import Engine, Generate
from drafter.rows import Family, check_row

Kind = Literal[
    "ok", "length", "empty", "abort", "transient", "malformed", "permanent", "prompt too long"
]


class Rule(NamedTuple):
    sends: int | None
    """Of one prompt at most; None for the recipe's ``attempts``."""

    final: bool
    """Nobody asks again."""


RULES: dict[Kind, Rule] = {
    "ok": Rule(sends=1, final=True),
    "length": Rule(sends=1, final=True),
    "empty": Rule(sends=2, final=False),
    "abort": Rule(sends=None, final=False),
    "transient": Rule(sends=None, final=False),
    "malformed": Rule(sends=None, final=False),
    "permanent": Rule(sends=1, final=True),
    "prompt too long": Rule(sends=1, final=True),
}

MAX_RUNS = 3
"""Runs in which a prompt may fail, whatever its classes, before it has failed for good."""

CONNECT_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0
"""/health generates a token and waits up to 20 s for it."""

BACKOFF_S = 0.5
BACKOFF_CAP_S = 30.0
AVOID_S = 5.0
"""A URL that just failed gets no request for so long while another one answers."""

_KEPT_BACK = 6
"""Tokens of the context by which SGLang's max_req_input_len is shorter."""

_TRANSIENT_STATUS = frozenset({408, 425, 429})
_NOT_SGLANG = "correct engine.urls, this is no SGLang server"
_REFUSED_STATUS = {
    401: "set the variable that engine.api_key_env names to the engine's key",
    403: "set the variable that engine.api_key_env names to a key that may use /generate",
    404: _NOT_SGLANG,
    405: _NOT_SGLANG,
}
_TOO_LONG = ("longer than the model's context length", "Requested token count exceeds")


class Outcome(NamedTuple):
    """How one prompt ended, after its retries."""

    kind: Kind
    reason: str
    """Empty for a stored row."""

    row: dict[str, Any] | None
    """The five keys of raw_responses.jsonl, when ``kind`` is ok or length."""


class EngineInfo(NamedTuple):
    """What the engine said about itself."""

    context: int
    """Prompt and answer together, in tokens; the smallest of all URLs."""

    model_info: dict[str, Any]
    """Of the first URL: model_path, weight_version and so on."""


def check_engine(engine: Engine, target: str) -> EngineInfo:
    """Ask every URL whether it is there and serves ``target`` (a path), before the first request.

    Raises Busy when one does not answer, RecipeError when one is not what the recipe says.
    """
    infos: list[tuple[int, dict[str, Any]]] = []
    with httpx.Client(
        headers=_headers(engine),
        timeout=CHECK_TIMEOUT_S,
        trust_env=False,
        verify=tls_context(engine),
    ) as client:
        for url in _urls(engine):
            _get(client, url, "/health")
            model_info = _get_object(client, url, "/model_info")
            served = str(model_info.get("model_path"))
            # The two may see one checkpoint under different roots.
            if Path(served).name != Path(target).name:
                raise RecipeError(
                    f"engine {url} serves {served}, the recipe's target is {target}: start the"
                    " right model, or correct target.path or engine.urls"
                )
            infos.append((_context(client, url), model_info))
    return EngineInfo(min(context for context, _ in infos), infos[0][1])


def tls_context(engine: Engine) -> ssl.SSLContext:
    """One for all connections: loading the certificates takes 40 ms and plain HTTP needs none."""
    return httpx.create_ssl_context(verify=any(url.startswith("https:") for url in engine.urls))


def _urls(engine: Engine) -> list[str]:
    return [url.rstrip("/") for url in engine.urls]


def _context(client: httpx.Client, url: str) -> int:
    """Tokens of prompt and answer together."""
    server_info = _get_object(client, url, "/server_info")
    context = _count(server_info.get("context_length"))
    if context:
        return context
    # Null where the engine took it from the model's config.
    longest_prompt = _count(server_info.get("max_req_input_len"))
    if longest_prompt:
        return longest_prompt + _KEPT_BACK
    models = _get_object(client, url, "/v1/models").get("data")
    model = models[0] if isinstance(models, list) and models else None
    context = _count(model.get("max_model_len")) if isinstance(model, dict) else 0
    if context:
        return context
    raise RecipeError(
        f"{url} says nowhere how long its context is: start the engine with --context-length"
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _get_object(client: httpx.Client, url: str, path: str) -> dict[str, Any]:
    content = _get(client, url, path).content
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise RecipeError(f"{url}{path} gives no JSON object: {_NOT_SGLANG}")
    return value


def _get(client: httpx.Client, url: str, path: str) -> httpx.Response:
    try:
        response = client.get(url + path)
    except httpx.TransportError as error:
        raise Busy(
            f"engine {url} does not answer ({error or type(error).__name__}): start it or correct"
            " engine.urls"
        ) from None
    except (httpx.InvalidURL, ValueError) as error:
        raise RecipeError(f"engine URL {url!r} is none ({error}): correct engine.urls") from None
    _raise_if_refused(url + path, response.status_code)
    if response.status_code != 200:
        raise Busy(f"{url}{path} answers {response.status_code}: wait until the engine is ready")
    return response


def _raise_if_refused(url: str, status: int) -> None:
    if status in _REFUSED_STATUS:
        raise RecipeError(f"{url} answers {status}: {_REFUSED_STATUS[status]}")


def _headers(engine: Engine) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if engine.api_key_env:
        key = os.environ.get(engine.api_key_env)
        if not key:
            raise RecipeError(
                f"{engine.api_key_env} is not set: let it hold the engine's key, visible to"
                " non-interactive SSH sessions on the GPU host, or remove engine.api_key_env"
            )
        headers["Authorization"] = f"Bearer {key}"
    return headers


class Endpoints:
    """The engine's URLs, the least busy one first. One object for all workers."""

    def __init__(self, engine: Engine) -> None:
        self._outstanding = dict.fromkeys(_urls(engine), 0)
        self._avoid_until = dict.fromkeys(_urls(engine), 0.0)

    @contextlib.asynccontextmanager
    async def least_busy(self) -> AsyncIterator[str]:
        now = time.monotonic()
        url = min(
            self._outstanding,
            key=lambda url: (self._avoid_until[url] > now, self._outstanding[url]),
        )
        self._outstanding[url] += 1
        try:
            yield url
        finally:
            self._outstanding[url] -= 1

    def avoid(self, url: str) -> None:
        """``url`` failed: without this a dead server, never busy, would draw every request."""
        self._avoid_until[url] = time.monotonic() + AVOID_S

    async def any_answers(self, client: httpx.AsyncClient) -> bool:
        """Is one of the servers there, whatever it says about its health?"""
        for url in self._outstanding:
            with contextlib.suppress(httpx.RequestError):
                await client.get(url + "/health", timeout=CHECK_TIMEOUT_S)
                return True
        return False


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
        tls: ssl.SSLContext,
    ) -> None:
        self._generate = generate
        self._family = family
        self._context = context
        self._endpoints = endpoints
        self._http = httpx.AsyncClient(
            headers=_headers(engine),
            timeout=httpx.Timeout(generate.request_timeout_s, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            verify=tls,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def engine_answers(self) -> bool:
        return await self._endpoints.any_answers(self._http)

    async def complete(self, sample_id: str, prompt_ids: list[int]) -> Outcome:
        """The answer to one prompt, retried as RULES say. RecipeError if the engine refuses us."""
        room = self._context - 1 - len(prompt_ids)
        if room < 1:
            reason = f"{len(prompt_ids)} tokens, context {self._context}"
            return Outcome("prompt too long", reason, None)
        if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= self._family.vocab_size:
            reason = f"prompt is empty or has ids outside 0..{self._family.vocab_size - 1}"
            return Outcome("permanent", reason, None)
        sends = 0
        while True:
            sends += 1
            outcome = await self._send(sample_id, prompt_ids, room)
            limit = RULES[outcome.kind].sends or self._generate.attempts
            if sends >= min(limit, self._generate.attempts):
                return outcome
            ceiling = min(BACKOFF_S * 2 ** (sends - 1), BACKOFF_CAP_S)
            await asyncio.sleep(random.uniform(ceiling / 2, ceiling))

    async def _send(self, sample_id: str, prompt_ids: list[int], room: int) -> Outcome:
        body = {
            # Fresh each time: a request that timed out here may still be live there.
            "rid": uuid.uuid4().hex,
            "input_ids": prompt_ids,
            "sampling_params": {
                "max_new_tokens": min(self._generate.max_new_tokens, room),
                "temperature": self._generate.temperature,
                "top_p": self._generate.top_p,
            },
        }
        async with self._endpoints.least_busy() as url:
            try:
                async with asyncio.timeout(self._generate.request_timeout_s):
                    response = await self._http.post(url + "/generate", content=orjson.dumps(body))
            except (httpx.RequestError, TimeoutError) as error:
                outcome = Outcome("transient", f"{type(error).__name__}: {error}", None)
            else:
                _raise_if_refused(url + "/generate", response.status_code)
                outcome = judge(
                    response.status_code, response.content, sample_id, len(prompt_ids), self._family
                )
            if outcome.kind == "transient":
                self._endpoints.avoid(url)
            return outcome


def judge(
    status: int, content: bytes, sample_id: str, prompt_tokens: int, family: Family
) -> Outcome:
    """The class of one HTTP answer. Pure."""
    if status != 200:
        text = content[:300].decode(errors="replace")
        if status in _TRANSIENT_STATUS or status >= 500:
            return Outcome("transient", f"HTTP {status}: {text}", None)
        too_long = any(message in text for message in _TOO_LONG)
        return Outcome(
            "prompt too long" if too_long else "permanent", f"HTTP {status}: {text}", None
        )
    try:
        answer = orjson.loads(content)
        meta = answer["meta_info"]
        ended = meta["finish_reason"]["type"]
        row = {
            "sample_id": sample_id,
            "output_ids": answer["output_ids"],
            "prompt_tokens": meta["prompt_tokens"],
            "completion_tokens": meta["completion_tokens"],
            "finish_reason": ended,
        }
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        text = content[:300].decode(errors="replace")
        return Outcome("malformed", f"HTTP 200 without an answer: {text}", None)
    if ended == "abort":
        return Outcome("abort", str(meta["finish_reason"].get("message")), None)
    if row["output_ids"] == []:
        return Outcome("empty", f"no output ids, finish_reason {ended}", None)
    reason = check_row(row, family, prompt_tokens)
    if reason is not None:
        return Outcome("malformed", reason, None)
    return Outcome("ok" if ended == "stop" else "length", "", row)
