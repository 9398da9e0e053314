"""SGLang's native /generate: input_ids out, output_ids in. Behaviour of SGLang 0.5.23, measured.

* An aborted request answers HTTP 200 with what it had and finish_reason.type "abort".
* A full queue answers 503, by default there is none: the queue has no end.
* Prompt plus max_new_tokens beyond the context is a 400, so the client fits it.
* A prompt id outside the vocabulary kills the process, so the client checks every id.
* /health generates a token and waits up to 20 s for it.
"""

from __future__ import annotations

from typing import Any

import httpx

from drafter.engines.api import Answer, Served, count, get, get_object, max_model_len
from drafter.errors import RecipeError
from drafter.sections import Generate

_KEPT_BACK = 6
"""Tokens of the context by which max_req_input_len is shorter."""


class SGLang:
    name = "SGLang"
    path = "/generate"
    forbidden = "set the variable that engine.api_key_env names to a key that may use /generate"
    too_long: tuple[str, ...] = (
        "longer than the model's context length",
        "Requested token count exceeds",
    )

    def body(
        self, request_id: str, prompt_ids: list[int], max_new_tokens: int, generate: Generate
    ) -> dict[str, Any]:
        return {
            "rid": request_id,
            "input_ids": prompt_ids,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": generate.temperature,
                "top_p": generate.top_p,
            },
        }

    def answer(self, content: Any) -> Answer:
        meta = content["meta_info"]
        reason = meta["finish_reason"]
        return Answer(
            content["output_ids"],
            meta["prompt_tokens"],
            meta["completion_tokens"],
            reason["type"],
            str(reason.get("message")),
        )

    async def served(self, http: httpx.AsyncClient, url: str) -> Served:
        await get(self, http, url, "/health")
        model_info = await get_object(self, http, url, "/model_info")
        tokenizer = model_info.get("tokenizer_path")
        return Served(
            str(model_info.get("model_path")),
            tokenizer if isinstance(tokenizer, str) and tokenizer else None,
            await self._context(http, url),
            model_info,
        )

    async def _context(self, http: httpx.AsyncClient, url: str) -> int:
        server_info = await get_object(self, http, url, "/server_info")
        context = count(server_info.get("context_length"))
        if context:
            return context
        # Null where the engine took it from the model's config.
        longest_prompt = count(server_info.get("max_req_input_len"))
        if longest_prompt:
            return longest_prompt + _KEPT_BACK
        context = await max_model_len(self, http, url)
        if context:
            return context
        raise RecipeError(
            f"{url} says nowhere how long its context is: start the engine with --context-length"
        )
