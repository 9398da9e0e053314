"""The target in this process, through transformers: any causal model that fits the machine.

Decoder layers are watched through hooks on what enters them, so layer ids are HF ``hidden_states``
indices by construction, only the wanted layers stay in memory, and ``final`` is what enters the
last norm. ``output_hidden_states`` serves only as the independent witness of ``reference``. The
decoder is called without the model around it: no logits are made that nobody asked for. On a GPU
the forward pass runs in the stored dtype; on a CPU in float32, because bfloat16 is slower there.

B = rows of a batch, T = tokens of one row, A = auxiliary layers, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drafter.backends.target_model import (
    STUMBLED,
    load_target,
    plain_forward,
    stumbled,
    text_decoder,
)
from drafter.errors import RecipeError
from drafter.extraction.gates import Reference
from drafter.extraction.shards import Features
from drafter.target_head import TargetHead, load_head


class TransformersBackend:
    """``target_dir`` loaded and ready; ``aux_layers`` are HF ``hidden_states`` indices.

    Raises RecipeError when the checkpoint cannot be loaded whole or is no decoder of layers and a
    last norm, or when a layer id is not one of its layers.
    """

    checked_tokens = sys.maxsize
    low_layer = 0
    no_reference = ""

    def __init__(self, target_dir: Path, dtype: torch.dtype, aux_layers: Sequence[int]) -> None:
        gpus = torch.cuda.device_count()
        self._target_dir = target_dir
        self._dtype = dtype
        self._model = load_target(target_dir, dtype if gpus else torch.float32, gpus)
        self._decoder = text_decoder(self._model, target_dir)
        self._input_device = self._model.get_input_embeddings().weight.device
        self._output = self._model.get_output_embeddings()
        if self._output is None:
            raise RecipeError(
                f"target {target_dir} is a {type(self._model).__name__} without an output matrix: "
                "extract through a server of the target"
            )
        self._layers: nn.ModuleList = self._decoder.layers
        wrong = [k for k in aux_layers if not 0 <= k < len(self._layers)]
        if wrong:
            raise RecipeError(
                f"auxiliary layers {wrong} are not in 0..{len(self._layers) - 1} of {target_dir}: "
                "correct extract.aux_layers"
            )
        self.aux_layers = tuple(aux_layers)

    def features(self, batch: list[list[int]]) -> list[Features]:
        """States of each row, without padding, on the device that made them.

        Raises RecipeError when the batch does not fit the GPU, or the checkpoint's code stumbles.
        """
        width = max(map(len, batch))
        ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
        mask_BT = torch.zeros_like(ids_BT)
        for i, row in enumerate(batch):
            ids_BT[i, : len(row)] = torch.tensor(row)
            mask_BT[i, : len(row)] = 1
        try:
            entering = self._watch(ids_BT, mask_BT)
        except torch.OutOfMemoryError:
            raise RecipeError(
                f"{len(batch)} rows of {width} tokens do not fit the GPU: lower "
                "extract.batch_tokens, or extract.max_length where it is one row"
            ) from None
        except STUMBLED as error:
            raise stumbled(error, self._target_dir, "run") from None
        final_BTD = entering[-1]
        aux_BTAD = torch.stack([states.to(final_BTD.device) for states in entering[:-1]], dim=2)
        return [
            Features(
                aux_TAD=aux_BTAD[i, : len(row)].to(self._dtype),
                final_TD=final_BTD[i, : len(row)].to(self._dtype),
            )
            for i, row in enumerate(batch)
        ]

    def reference(self, input_ids: list[int]) -> Reference:
        """One row through the whole model as transformers itself runs it."""
        return plain_forward(self._model, input_ids, self._target_dir)

    def prove(self, input_ids: list[int], judge: Callable[[str, Features], None]) -> None:
        """The model is loaded once and stays: one row shows that it still computes the same."""
        judge("this process", self.features([input_ids])[0])

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        """lm_head(norm(final)) with the model's own modules: [T, D] -> [T, V]."""
        weight = self._output.weight
        normed = self._decoder.norm(final_TD.to(weight.device, weight.dtype))
        logits: torch.Tensor = self._output(normed)
        return logits

    def head(self) -> TargetHead:
        """Embedding, last norm and output matrix as the checkpoint stores them, on the CPU."""
        return load_head(self._target_dir)

    def _watch(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> list[torch.Tensor]:
        """[B, T, D] that enters each auxiliary layer, then what enters the last norm."""
        entering: dict[nn.Module, torch.Tensor] = {}

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            entering[module] = args[0] if args else kwargs["hidden_states"]

        watched = [*(self._layers[k] for k in self.aux_layers), self._decoder.norm]
        with ExitStack() as hooks:
            for module in watched:
                hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
            self._decoder(
                input_ids=ids_BT.to(self._input_device),
                attention_mask=mask_BT.to(self._input_device),
                use_cache=False,
            )
        return [entering[module] for module in watched]
