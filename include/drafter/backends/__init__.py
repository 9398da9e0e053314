"""Ways to get the target's hidden states: in this process, or from a server that runs it.

    transformers    this process; any causal model that fits the machine
    vllm            a vLLM server that extracts; tensor files, any size of model
    sglang          an SGLang server's auxiliary layers; JSON, small models and cross-checks

Layer ids are HF ``hidden_states`` indices everywhere (k is the input of decoder layer k, 0 the
embeddings); a backend converts them to what its engine counts. None is believed: gates.py
and drafter.extraction.batch_gates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from drafter.extraction.shards import Features
from drafter.sections import Extract
from drafter.target_head import TargetHead

if TYPE_CHECKING:
    from drafter.extraction.gates import Reference


class Backend(Protocol):
    """What extraction needs of an engine that runs the target. T tokens, D hidden size."""

    checked_tokens: int
    """Response tokens of a shard whose logits are made for the gate on next tokens, at most: where
    the output matrix is not on the engine's own device, all of them would take longer than their
    states."""

    low_layer: int
    """A layer below the auxiliary ones that ``features`` may give beside them, as ``low_TD``: what
    a target too large for this process is still compared in."""

    @property
    def no_reference(self) -> str:
        """Why ``reference`` gave less than the whole target; empty where it gave that."""

    def features(self, batch: list[list[int]]) -> list[Features]:
        """States of each row, in order, in the stored dtype.

        Raises Busy when a server is gone, RecipeError when it is the wrong one or lacks a flag.
        """

    def reference(self, input_ids: list[int]) -> Reference | None:
        """One row, or its first layers, computed without anything that ``features`` uses; None
        when even these are too large, or quantised, for this process."""

    def prove(self, input_ids: list[int], judge: Callable[[str, Features], None]) -> None:
        """``judge`` (who made them, states) is shown what each server makes of one row: now, and
        whenever a server comes back, before anything else of it is believed. Raises what ``judge``
        raises."""

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, V]: lm_head(norm(final))."""

    def head(self) -> TargetHead:
        """The head as training will read it."""


OpenBackend = Callable[[Path, torch.dtype, Sequence[int]], Backend]
"""(target directory, stored dtype, auxiliary layers) -> engine, ready."""


def opener(settings: Extract) -> OpenBackend:
    """What opens the recipe's backend."""
    if settings.backend == "vllm":
        from drafter.backends.vllm import VLLMBackend

        return functools.partial(VLLMBackend, settings)
    if settings.backend == "sglang":
        from drafter.backends.sglang import SGLangBackend

        return functools.partial(SGLangBackend, settings)
    from drafter.backends.transformers import TransformersBackend

    return TransformersBackend
