"""The target's states from a vLLM server. Behaviour of vLLM 0.32.0, measured.

The server runs speculative decoding by ``extract_hidden_states``, which drafts nothing, and writes
the states of each request to a file of its own (drafter.backends.handover). Flags::

    --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
      "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, *aux, n]}}}'
    --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector",
      "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": DIR}}'

* Ids are inputs of layers, as here; n, the number of layers, is what enters the last norm.
* Layers lie in the file in ascending order, in whatever order the flag names them.
* Id 0 (the embeddings) is optional and serves as a check. DeepSeek's model file, which is Kimi's
  too, cannot give it: the engine dies at the first request. Id 1 serves there: their first layer
  is dense and not quantised.
* Rows cover the prompt, so a row goes out whole as one. Chunked prefill and prefix cache are right.
* Both /v1/completions and /inference/v1/generate name the file; the first needs no flag more.
* A row needs room for one token that is generated: context >= row + 1, else 400.
* No route tells the ids. That they are the right ones, only the states show: all of them where a
  plain forward of the target fits this process. Of a target too large for that, nothing but layer
  0 (or 1), the layers that still fit, and the next tokens that ``final`` predicts is compared: ids
  in the middle that are wrong from the first row on pass.

T = tokens of one row, A = auxiliary layers, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from drafter.backends.handover import Handover
from drafter.backends.output_matrix import OutputMatrix
from drafter.backends.reference import PlainForward
from drafter.backends.servers import Get, Servers
from drafter.engines.api import count, first_model
from drafter.errors import RecipeError
from drafter.extraction.gates import Reference
from drafter.extraction.shards import Features
from drafter.files import read_json
from drafter.sections import Extract
from drafter.target_head import TargetHead, text_config

_IN_FLIGHT = 64
"""Rows at one server at once: more than a batch of long rows has."""

_WITHOUT_FIRST = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "kimi_vl",
}  # fmt: skip
"""Values of model_type whose model file cannot give layer 0."""


class VLLMBackend:
    """States of ``target_dir`` from the servers of ``settings``, in the dtype that they serve.

    Raises Busy when no server answers, RecipeError when one is wrong or lacks a flag.
    """

    checked_tokens = 4096

    def __init__(
        self, settings: Extract, target_dir: Path, _dtype: torch.dtype, aux_layers: Sequence[int]
    ) -> None:
        self._target_dir = target_dir
        self._aux_layers = tuple(aux_layers)
        self._num_layers: int = text_config(target_dir)["num_hidden_layers"]
        model_type = read_json(target_dir / "config.json").get("model_type")
        self.low_layer = 1 if model_type in _WITHOUT_FIRST else 0
        if 0 in self._aux_layers and self.low_layer:
            raise RecipeError(
                f"vLLM does not return layer 0 (the embeddings) of a {model_type}: choose other "
                "extract.aux_layers"
            )
        self._max_length = settings.max_length
        self._handover = Handover(settings.timeout_s)
        self._servers = Servers[Features](settings, "vLLM", "/v1/completions", self, _IN_FLIGHT)
        self._output = OutputMatrix(target_dir)
        self._plain = PlainForward(target_dir, min(self._aux_layers))

    def features(self, batch: list[list[int]]) -> list[Features]:
        """States of each row, on the CPU.

        Raises as the class, and DrafterError when the server wrote no whole file.
        """
        try:
            return self._servers.answers(batch)
        finally:
            self._handover.sweep()

    def prove(self, input_ids: list[int], judge: Callable[[str, Features], None]) -> None:
        try:
            self._servers.prove(input_ids, judge)
        finally:
            self._handover.sweep()

    def reference(self, input_ids: list[int]) -> Reference | None:
        return self._plain(input_ids)

    @property
    def no_reference(self) -> str:
        return self._plain.missing

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        return self._output.logits_rows(final_TD)

    def head(self) -> TargetHead:
        return self._output.head

    def body(self, row: list[int]) -> dict[str, Any]:
        return {
            "request_id": self._handover.request_id(),
            "prompt": row,
            "max_tokens": 1,
            "temperature": 0,
        }

    async def take(self, url: str, body: dict[str, Any], answer: dict[str, Any]) -> Features:
        told = answer.get("kv_transfer_params")
        path = told.get("hidden_states_path") if isinstance(told, dict) else None
        if not isinstance(path, str):
            raise RecipeError(
                f"{url} answers without kv_transfer_params.hidden_states_path: {self._flags()}"
            )
        token_ids, states_TLD = await self._handover.take(Path(path), body["request_id"])
        return self._features(url, token_ids, states_TLD)

    def _features(self, url: str, token_ids: list[int], states_TLD: torch.Tensor) -> Features:
        served = states_TLD.shape[1]
        either = (self._layers(with_low=False), self._layers(with_low=True))
        layers = next((layers for layers in either if len(layers) == served), None)
        if layers is None:
            raise RecipeError(
                f"{url} gives {served} layers, needed are {len(either[0])} or, with "
                f"layer {self.low_layer}, {len(either[1])} (vLLM never tells which they are, only "
                f"how many): {self._flags()}"
            )
        places = [layers.index(k) for k in self._aux_layers]
        return Features(
            aux_TAD=states_TLD[:, places],
            final_TD=states_TLD[:, -1].clone(),
            low_TD=states_TLD[:, 0].clone() if layers[0] == self.low_layer else None,
            returned_ids=token_ids,
        )

    def _layers(self, *, with_low: bool) -> list[int]:
        """Of a file, in its order."""
        low = {self.low_layer} if with_low else set()
        return sorted({*self._aux_layers, self._num_layers} | low)

    def _flags(self) -> str:
        layers = self._layers(with_low=True)
        hf_config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": hf_config,
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": "DIR"},
        }
        return (
            f"start vLLM with --speculative-config '{json.dumps(speculative)}' and "
            f"--kv-transfer-config '{json.dumps(transfer)}', DIR on a disk that the GPU host sees "
            "under the same path"
        )

    async def check(self, url: str, get: Get) -> None:
        model = first_model(await get("/v1/models"))
        name = str(model.get("root") or model.get("id"))
        # The two may see one checkpoint under different roots.
        if Path(name).name != self._target_dir.name:
            raise RecipeError(
                f"{url} serves {name}, the recipe's target is {self._target_dir}: start the right "
                "model, or correct target.path or extract.urls"
            )
        context, needed = count(model.get("max_model_len")), self._max_length + 1
        if context < needed:
            raise RecipeError(
                f"{url} has a context of {context} tokens, needed are extract.max_length and one "
                f"more: start vLLM with --max-model-len {needed} or lower extract.max_length"
            )
