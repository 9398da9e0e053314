"""One raw request and the engine's raw answer, as the client sends and judges them.

Nothing is checked before, nothing is retried or stored; but an id outside the vocabulary is never
sent, because it kills a real SGLang.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import orjson

from drafter import jsonl
from drafter.engines.api import judge, raise_if_refused
from drafter.engines.client import timeout_s
from drafter.engines.connection import api_of, base_urls, open_http, tls_context
from drafter.engines.outcomes import RULES, Outcome
from drafter.errors import Busy, DataError, RecipeError
from drafter.layout import Prepared
from drafter.recipe import Recipe
from drafter.rows import Family
from drafter.show import Reader, ids_at_ends
from drafter.terminal import Paint, elide, inert, one_line, unmark

MAX_NEW_TOKENS = 1024
"""Asked for at most: a person waits."""

SHOWN_HEADERS = ("server", "date", "content-type", "content-length", "retry-after", "x-request-id")


class Exchange(NamedTuple):
    """What went out and what came back."""

    url: str
    body: dict[str, Any]
    status: int
    headers: dict[str, str]
    content: bytes
    seconds: float
    outcome: Outcome


def find_prompt(prepared: Prepared, sample_id: str | None) -> tuple[str, list[int]]:
    """(sample id, prompt ids) of the sample, or of the first prompt."""
    for line in jsonl.rows(prepared.prompt_ids):
        if sample_id in (None, line.value["sample_id"]):
            return line.value["sample_id"], line.value["input_ids"]
    wanted = "no prompt" if sample_id is None else f"no sample {sample_id!r}"
    raise DataError(f"{wanted} in {prepared.prompt_ids}: look there, or run prepare first")


def send(
    recipe: Recipe, family: Family, sample_id: str, prompt_ids: list[int], url: str | None
) -> Exchange:
    """Ask once; ``url`` instead of the recipe's first. Raises Busy when nothing comes back."""
    outside = [i for i in prompt_ids if not 0 <= i < family.vocab_size]
    if outside or not prompt_ids:
        raise DataError(
            f"{sample_id} cannot be sent, it is empty or has ids outside 0..{family.vocab_size - 1}"
            f" ({outside[:3]}): run prepare again"
        )
    return asyncio.run(_send(recipe, family, sample_id, prompt_ids, url))


async def _send(
    recipe: Recipe, family: Family, sample_id: str, prompt_ids: list[int], url: str | None
) -> Exchange:
    engine, api = recipe.engine, api_of(recipe.engine)
    address = (url.rstrip("/") if url else base_urls(engine)[0]) + api.path
    max_new_tokens = min(recipe.generate.max_new_tokens, MAX_NEW_TOKENS)
    body = api.body(uuid.uuid4().hex, prompt_ids, max_new_tokens, recipe.generate)
    begun = time.monotonic()
    async with open_http(engine, tls_context(engine)) as http:
        try:
            response = await http.post(
                address, content=orjson.dumps(body), timeout=timeout_s(engine, max_new_tokens)
            )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise RecipeError(f"{address} is no URL ({error}): correct it") from None
        except httpx.RequestError as error:
            seconds = time.monotonic() - begun
            raise Busy(
                f"{address} gave no answer, after {seconds:.1f} s"
                f" ({str(error) or type(error).__name__}): the client would call it transient,"
                " look at the engine"
            ) from None
    content, status = response.content, response.status_code
    outcome = judge(api, status, content, sample_id, len(prompt_ids), family)
    headers = {name: response.headers[name] for name in SHOWN_HEADERS if name in response.headers}
    seconds = time.monotonic() - begun
    return Exchange(address, body, status, headers, content, seconds, outcome)


def render(exchange: Exchange, reader: Reader, paint: Paint, limit: int | None) -> Iterator[str]:
    """Lines for a person. The key that was sent is not among them."""
    yield paint(f"POST {one_line(exchange.url)}", "bold")
    yield one_line(json.dumps({key: _short(value) for key, value in exchange.body.items()}))
    yield paint(f"HTTP {exchange.status} after {exchange.seconds:.2f} s", "bold")
    for name, value in exchange.headers.items():
        yield f"{name}: {one_line(value)}"
    yield elide(inert(exchange.content.decode(errors="backslashreplace")), limit)
    outcome = exchange.outcome
    told = f": {one_line(outcome.reason)}" if outcome.reason else ""
    yield (
        f"class: {paint(outcome.kind, 'green' if outcome.row else 'red')}{told},"
        f" goes to {RULES[outcome.kind].goes_to}"
    )
    if outcome.row:
        for title, ids in reader.parts(outcome.row["output_ids"]):
            yield paint(f"--- {title}", "cyan")
            yield unmark(elide(reader.text(ids), limit), lambda token: paint(token, "magenta"))


def refuse(recipe: Recipe, exchange: Exchange) -> None:
    """RecipeError when every request would get this answer."""
    raise_if_refused(api_of(recipe.engine), exchange.url, exchange.status)


def _short(value: Any) -> Any:
    """A list of ids as text, its middle gone."""
    return f"{len(value):,} ids: {ids_at_ends(value)}" if isinstance(value, list) else value
