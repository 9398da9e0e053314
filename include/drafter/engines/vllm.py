"""vLLM's raw-token route: token_ids out, token_ids in. Behaviour of vLLM 0.32.0, measured.

* The route answers 403 unless the server was started with --enable-scale-out.
* Output ids include the stop id that ended them; stop_reason is null then.
* An aborted request answers HTTP 200 with what it had and finish_reason "abort".
* max_tokens beyond the context is cut to what fits; a prompt that leaves no room is a 400.
* A prompt id outside the vocabulary is a 400. So is a temperature above 2.
* request_id comes back as "generate-tokens-<request_id>", which is what aborts it.
* The server does not say which tokenizer it has.
"""

from __future__ import annotations

from typing import Any

import httpx

from drafter.engines.api import Answer, Served, ask, count, first_model, get, get_object
from drafter.errors import RecipeError
from drafter.sections import Generate


class VLLM:
    name = "vLLM"
    path = "/inference/v1/generate"
    forbidden = "start vLLM with --enable-scale-out"
    too_long: tuple[str, ...] = ("longer than the maximum model length",)

    def body(
        self, request_id: str, prompt_ids: list[int], max_new_tokens: int, generate: Generate
    ) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "token_ids": prompt_ids,
            "sampling_params": {
                "max_tokens": max_new_tokens,
                "temperature": generate.temperature,
                "top_p": generate.top_p,
                # Nobody reads the text.
                "detokenize": False,
            },
        }

    def answer(self, content: Any) -> Answer:
        (choice,) = content["choices"]
        usage = content["usage"]
        return Answer(
            choice["token_ids"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
            choice["finish_reason"],
            "aborted by the engine",
        )

    async def served(self, http: httpx.AsyncClient, url: str) -> Served:
        await get(self, http, url, "/health")
        # Of an empty request an open route says 400.
        await ask(self, http, "POST", url, self.path, expected=400)
        model = first_model(await get_object(self, http, url, "/v1/models"))
        context = count(model.get("max_model_len"))
        if not context:
            raise RecipeError(
                f"{url} says nowhere how long its context is: start vLLM with --max-model-len"
            )
        told = {key: model.get(key) for key in ("id", "root", "max_model_len")}
        return Served(str(told["root"] or told["id"]), None, context, told)
