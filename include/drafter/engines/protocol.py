"""What one /generate body asks the embedded engine for, checked before anything runs."""

from __future__ import annotations

import random
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafter.engines.batch import Request
from drafter.engines.decoding import Decoder, Row
from drafter.engines.sampling import Sampling

_REFUSED = ("text", "input_embeds", "stream", "return_logprob", "return_hidden_states")


class BadRequest(Exception):
    """Answered with status 400."""


class SamplingParams(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    max_new_tokens: int = Field(default=128, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: Literal[1] = 1


def requests_of(body: dict[str, Any], decoder: Decoder) -> list[Request]:
    """The rows that one /generate body asks for. Raises BadRequest."""
    for name in _REFUSED:
        if body.get(name):
            raise BadRequest(f"{name} is not supported by the embedded engine: leave it out")
    prompts = body.get("input_ids")
    if not isinstance(prompts, list):
        raise BadRequest("input_ids is missing or not a list: send token ids")
    if not prompts:
        raise BadRequest("input_ids cannot be empty.")
    if not isinstance(prompts[0], list):
        return [_request(body.get("rid"), prompts, body.get("sampling_params"), decoder)]
    rids = _per_row("rid", body.get("rid"), len(prompts))
    sampling = _per_row("sampling_params", body.get("sampling_params"), len(prompts))
    rows = zip(rids, prompts, sampling, strict=True)
    return [_request(rid, ids, params, decoder) for rid, ids, params in rows]


def _per_row(name: str, value: Any, num_rows: int) -> list[Any]:
    if value is None or (name == "sampling_params" and isinstance(value, dict)):
        return [value] * num_rows
    if not isinstance(value, list) or len(value) != num_rows:
        raise BadRequest(f"{name} of a batch of {num_rows} is not a list of {num_rows}")
    return value


def _request(rid: Any, ids: Any, params: Any, decoder: Decoder) -> Request:
    if rid is not None and not isinstance(rid, str):
        raise BadRequest(f"rid is {rid!r}: send a string")
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise BadRequest("input_ids holds something that is not an integer: send token ids")
    if not ids:
        raise BadRequest("input_ids cannot be empty.")
    if min(ids) < 0 or max(ids) >= decoder.vocab_size:
        outside = next(token for token in ids if not 0 <= token < decoder.vocab_size)
        raise BadRequest(f"id {outside} is outside the vocabulary of {decoder.vocab_size} ids")
    asked = _sampling_params(params)
    _fit(len(ids), asked.max_new_tokens, decoder.context)
    stop_ids = decoder.eos_ids | frozenset(asked.stop_token_ids or ())
    return Request(
        rid=rid or uuid.uuid4().hex,
        row=Row(list(ids)),
        sampling=Sampling(
            asked.temperature, asked.top_p, asked.top_k, random.Random(asked.sampling_seed)
        ),
        max_new_tokens=asked.max_new_tokens,
        stop_ids=frozenset() if asked.ignore_eos else stop_ids,
        num_prompt=len(ids),
    )


def _sampling_params(params: Any) -> SamplingParams:
    try:
        return SamplingParams.model_validate({} if params is None else params)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "sampling_params"
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(SamplingParams.model_fields)
            raise BadRequest(
                f"sampling_params has {name}, the embedded engine knows: {allowed}"
            ) from None
        raise BadRequest(f"{name} = {first['input']!r}: {first['msg']}") from None


def _fit(num_prompt: int, max_new_tokens: int, context: int) -> None:
    if num_prompt >= context:
        raise BadRequest(
            f"The input ({num_prompt} tokens) is longer than the model's context length"
            f" ({context} tokens)."
        )
    if num_prompt + max_new_tokens > context:
        raise BadRequest(
            f"Requested token count exceeds the model's context length of {context} tokens. You"
            f" requested a total of {num_prompt + max_new_tokens} tokens: {num_prompt} of input and"
            f" {max_new_tokens} of output."
        )
