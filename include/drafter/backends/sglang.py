"""The target's states from an SGLang server. Behaviour of SGLang 0.5.23, measured.

Auxiliary layers come from the server, ``final`` from the target in this process: SGLang gives no
state before the last norm. Rows are JSON text, about 14 bytes a value, so this is for small models
and for holding one engine against another. Flags::

    --enable-return-aux-hidden-states --speculative-algorithm EAGLE3
    --return-aux-hidden-state-layer-ids a b c --disable-radix-cache --chunked-prefill-size -1

* No draft is loaded: the algorithm names the convention of the ids and is then dropped.
* Ids are outputs of layers, one less than here, for most model files. That of DeepSeek (Kimi's too)
  takes them as inputs, as here, unless the first is 1: then it adds one to each.
* Layers lie side by side in a row in ascending order, in whatever order the flag names them.
* With the radix cache a row loses what an earlier one began with, with chunked prefill all but its
  last chunk, both without a word. Hence the questions to /server_info before the first row.

T = tokens of one row, A = auxiliary layers, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from drafter.backends.output_matrix import OutputMatrix
from drafter.backends.servers import Get, Lost, Servers
from drafter.backends.transformers import TransformersBackend
from drafter.engines.api import count
from drafter.errors import RecipeError
from drafter.extraction.gates import Reference
from drafter.extraction.shards import Features
from drafter.files import read_json
from drafter.sections import Extract
from drafter.target_head import TargetHead, text_config

_IN_FLIGHT = 8
"""Rows at one server at once: each is megabytes of text here."""

_IDS_ARE_INPUTS = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "kimi_vl", "glm4_moe_lite",
}  # fmt: skip
"""Values of model_type whose model files leave ids as they are, unless the first is 1."""


def captured_layers(model_type: str, ids: Sequence[int]) -> list[int]:
    """Which ``hidden_states`` SGLang returns for the ids of its flag, in its order."""
    as_given = model_type in _IDS_ARE_INPUTS and list(ids[:1]) != [1]
    return sorted(k if as_given else k + 1 for k in ids)


def spelled_layers(model_type: str, layers: Sequence[int]) -> list[int]:
    """Ids of the flag that return ``layers``. RecipeError when there are none."""
    ascending = sorted(layers)
    if ascending[0] == 0:
        raise RecipeError(
            "SGLang does not return layer 0 (the embeddings): choose other extract.aux_layers, or "
            "extract through vLLM or transformers"
        )
    if model_type in _IDS_ARE_INPUTS:
        # Another first than 1 keeps all as they are.
        return ascending[1:] + ascending[:1] if ascending[0] == 1 else ascending
    return [k - 1 for k in ascending]


class SGLangBackend:
    """States of ``target_dir``, which must fit this machine, and of the servers of ``settings``.

    Raises Busy when no server answers, RecipeError when one is wrong or lacks a flag.
    """

    checked_tokens = 4096
    low_layer = 0
    no_reference = ""

    def __init__(
        self, settings: Extract, target_dir: Path, dtype: torch.dtype, aux_layers: Sequence[int]
    ) -> None:
        self._target_dir = target_dir
        self._dtype = dtype
        self._aux_layers = tuple(aux_layers)
        self._ascending = sorted(aux_layers)
        self._max_length = settings.max_length
        config = text_config(target_dir)
        self._hidden_size: int = config["hidden_size"]
        self._num_layers: int = config["num_hidden_layers"]
        self._model_type = str(read_json(target_dir / "config.json").get("model_type"))
        self._ids = spelled_layers(self._model_type, aux_layers)
        self._requests = itertools.count()
        self._servers = Servers[torch.Tensor](settings, "SGLang", "/generate", self, _IN_FLIGHT)
        self._target = TransformersBackend(target_dir, dtype, aux_layers)
        self._output = OutputMatrix(target_dir)

    def features(self, batch: list[list[int]]) -> list[Features]:
        """States of each row; auxiliary ones on the CPU, of the servers alone."""
        served = self._servers.answers(batch)
        ours = self._target.features(batch)
        return [
            Features(aux_TAD=aux_TAD, final_TD=own.final_TD.cpu())
            for aux_TAD, own in zip(served, ours, strict=True)
        ]

    def prove(self, input_ids: list[int], judge: Callable[[str, Features], None]) -> None:
        (own,) = self._target.features([input_ids])
        self._servers.prove(
            input_ids, lambda url, aux_TAD: judge(url, Features(aux_TAD, own.final_TD.cpu()))
        )

    def reference(self, input_ids: list[int]) -> Reference:
        return self._target.reference(input_ids)

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        return self._output.logits_rows(final_TD)

    def head(self) -> TargetHead:
        return self._output.head

    def body(self, row: list[int]) -> dict[str, Any]:
        return {
            "rid": f"drafter-{os.getpid()}-{next(self._requests)}",
            "input_ids": row,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_hidden_states": True,
        }

    async def take(self, url: str, _: dict[str, Any], answer: dict[str, Any]) -> torch.Tensor:
        """[T, A, D] of the auxiliary layers."""
        meta = answer.get("meta_info")
        meta = meta if isinstance(meta, dict) else {}
        ended = meta.get("finish_reason")
        if isinstance(ended, dict) and ended.get("type") == "abort":
            raise Lost(f"{url} aborts a request: {ended.get('message')}")
        states = meta.get("hidden_states")
        if not (isinstance(states, list) and states and isinstance(states[0], list)):
            raise RecipeError(f"{url} answers without hidden states: {self._flags()}")
        try:
            states_TW = torch.tensor(states[0], dtype=torch.float32)
        except (ValueError, TypeError) as error:
            raise RecipeError(
                f"{url} gives states that are no numbers ({error}): {self._flags()}"
            ) from None
        width = len(self._aux_layers) * self._hidden_size
        if states_TW.dim() != 2 or states_TW.shape[1] != width:
            raise RecipeError(
                f"{url} gives states {list(states_TW.shape)}, needed are "
                f"{len(self._aux_layers)} layers of {self._hidden_size} in a row: {self._flags()}"
            )
        states_TAD = states_TW.view(-1, len(self._aux_layers), self._hidden_size)
        places = [self._ascending.index(k) for k in self._aux_layers]
        return states_TAD[:, places].to(self._dtype)

    def _flags(self) -> str:
        ids = " ".join(map(str, self._ids))
        return (
            "start SGLang with --enable-return-aux-hidden-states --speculative-algorithm EAGLE3 "
            f"--return-aux-hidden-state-layer-ids {ids} --disable-radix-cache "
            "--chunked-prefill-size -1"
        )

    async def check(self, url: str, get: Get) -> None:
        told = await get("/server_info")
        name = str(told.get("model_path"))
        # The two may see one checkpoint under different roots.
        if Path(name).name != self._target_dir.name:
            raise RecipeError(
                f"{url} serves {name}, the recipe's target is {self._target_dir}: start the right "
                "model, or correct target.path or extract.urls"
            )
        if fault := self._fault(told):
            raise RecipeError(f"{url} {fault}: {self._flags()}")
        longest = count(told.get("max_req_input_len")) - 1
        if longest < self._max_length:
            raise RecipeError(
                f"{url} takes rows of {longest} tokens, extract.max_length is {self._max_length}: "
                "start SGLang with a larger --context-length or lower extract.max_length"
            )

    def _fault(self, told: dict[str, Any]) -> str | None:
        """Which flag of the server is missing or wrong."""
        if told.get("enable_return_aux_hidden_states") is not True:
            return "does not return auxiliary states (--enable-return-aux-hidden-states is missing)"
        convention = told.get("aux_hidden_state_capture")
        if convention != "eagle3":
            return f"captures layers for {convention} (--speculative-algorithm), needed is EAGLE3"
        n = self._num_layers
        ids = told.get("return_aux_hidden_state_layer_ids")
        layers = (
            sorted((2, n // 2, n - 3)) if ids is None else captured_layers(self._model_type, ids)
        )
        if layers != self._ascending:
            return (
                f"returns hidden_states {layers} (--return-aux-hidden-state-layer-ids), needed are "
                f"{self._ascending}"
            )
        if told.get("disable_radix_cache") is not True:
            return "has a radix cache, which shortens rows (--disable-radix-cache is missing)"
        chunk = told.get("chunked_prefill_size")
        if isinstance(chunk, int) and chunk > 0:
            return f"prefills in chunks of {chunk} tokens (--chunked-prefill-size), needed is none"
        return None
