"""What an engine must offer: a raw-token route, and saying what it serves. Two speak it.

drafter.engines.sglang and drafter.engines.vllm hold what differs (paths, names of fields, error
texts); everything else about asking an engine is here and in drafter.engines.client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import httpx
import orjson

from drafter.engines.outcomes import Outcome
from drafter.errors import Busy, RecipeError
from drafter.rows import Family, check_row
from drafter.sections import Generate

_TRANSIENT_STATUS = frozenset({401, 403, 404, 405, 408, 425, 429})
"""Of 4xx: what the server is or does just now, whatever the prompt."""

_SET_KEY = "set the variable that engine.api_key_env names to"


class Answer(NamedTuple):
    """What one HTTP 200 says, types unchecked."""

    output_ids: Any
    prompt_tokens: Any
    completion_tokens: Any
    finish_reason: Any
    """"stop", "length", "abort", or what the engine calls something else."""

    message: str
    """Of an abort."""


class Served(NamedTuple):
    """What an engine says about itself."""

    model: str
    """Directory or name, as it was started with."""

    tokenizer: str | None
    """The same, or None when it does not say."""

    context: int
    """Prompt and answer together, in tokens."""

    model_info: dict[str, Any]


class Api(Protocol):
    name: str
    path: str
    """Of the raw-token route."""

    forbidden: str
    """What to do when it answers 403."""

    too_long: tuple[str, ...]
    """Parts of the message of a 400 to a prompt that leaves no room in the context."""

    def body(
        self, request_id: str, prompt_ids: list[int], max_new_tokens: int, generate: Generate
    ) -> dict[str, Any]:
        """Of the request. ``request_id`` is new for each: the last one may still be live there."""
        ...

    def answer(self, content: Any) -> Answer:
        """Of a decoded 200. Raises ValueError, KeyError, TypeError or IndexError when
        it is none."""
        ...

    async def served(self, http: httpx.AsyncClient, url: str) -> Served:
        """Raises Busy when it does not answer, RecipeError when it is another kind of server."""
        ...


def judge(
    api: Api, status: int, content: bytes, sample_id: str, prompt_tokens: int, family: Family
) -> Outcome:
    """The class of one HTTP answer. Pure."""
    if status != 200:
        text = content[:300].decode(errors="replace")
        reason = f"HTTP {status}: {text}"
        if status in _TRANSIENT_STATUS or status >= 500:
            return Outcome("transient", reason, None)
        if not 400 <= status < 500:
            return Outcome("malformed", reason, None)
        too_long = any(message in text for message in api.too_long)
        return Outcome("prompt too long" if too_long else "permanent", reason, None)
    try:
        answer = api.answer(orjson.loads(content))
    except (ValueError, KeyError, TypeError, IndexError):  # a JSONDecodeError is a ValueError
        text = content[:300].decode(errors="replace")
        return Outcome("malformed", f"HTTP 200 without an answer: {text}", None)
    if answer.finish_reason == "abort":
        return Outcome("abort", answer.message, None)
    if answer.output_ids == []:
        return Outcome("empty", f"no output ids, finish_reason {answer.finish_reason}", None)
    row = {
        "sample_id": sample_id,
        "output_ids": answer.output_ids,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish_reason": answer.finish_reason,
    }
    reason_against = check_row(row, family, prompt_tokens)
    if reason_against is not None:
        return Outcome("malformed", reason_against, None)
    return Outcome("ok" if answer.finish_reason == "stop" else "length", "", row)


def raise_if_refused(api: Api, url: str, status: int) -> None:
    """RecipeError for an answer that every request would get."""
    remedies: Mapping[int, str] = {
        401: f"{_SET_KEY} the engine's key",
        403: api.forbidden,
        404: f"correct engine.urls or engine.kind, this is no {api.name} server",
        405: f"correct engine.urls or engine.kind, this is no {api.name} server",
    }
    if status in remedies:
        raise RecipeError(f"{url} answers {status}: {remedies[status]}")


async def get_object(api: Api, http: httpx.AsyncClient, url: str, path: str) -> dict[str, Any]:
    """A JSON object that the server has for GET. Raises as :meth:`Api.served`."""
    content = (await get(api, http, url, path)).content
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise RecipeError(
            f"{url}{path} gives no JSON object: correct engine.urls or engine.kind, this is no"
            f" {api.name} server"
        )
    return value


async def get(api: Api, http: httpx.AsyncClient, url: str, path: str) -> httpx.Response:
    return await ask(api, http, "GET", url, path, expected=200)


async def ask(
    api: Api, http: httpx.AsyncClient, method: str, url: str, path: str, expected: int
) -> httpx.Response:
    """What the server says to an empty request. Raises as :meth:`Api.served`."""
    try:
        response = await http.request(method, url + path)
    except httpx.RequestError as error:
        raise Busy(
            f"engine {url} does not answer ({error or type(error).__name__}): start it or correct"
            " engine.urls"
        ) from None
    except (httpx.InvalidURL, ValueError) as error:
        raise RecipeError(f"engine URL {url!r} is none ({error}): correct engine.urls") from None
    raise_if_refused(api, url + path, response.status_code)
    if response.status_code != expected:
        raise Busy(f"{url}{path} answers {response.status_code}: wait until the engine is ready")
    return response


async def max_model_len(api: Api, http: httpx.AsyncClient, url: str) -> int:
    """As the OpenAI route of both engines tells it; 0 when it does not."""
    model = first_model(await get_object(api, http, url, "/v1/models"))
    return count(model.get("max_model_len"))


def first_model(models: dict[str, Any]) -> dict[str, Any]:
    listed = models.get("data")
    model = listed[0] if isinstance(listed, list) and listed else None
    return model if isinstance(model, dict) else {}


def count(value: object) -> int:
    """``value`` when it is a positive number of tokens, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
