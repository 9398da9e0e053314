"""The target's states from a SGLang server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from drafter.gates import Reference
from drafter.sections import Extract
from drafter.shards import Features
from drafter.target_head import TargetHead


class SGLangBackend:
    checked_tokens = 4096

    def __init__(
        self, settings: Extract, target_dir: Path, dtype: torch.dtype, aux_layers: Sequence[int]
    ) -> None:
        raise NotImplementedError

    def features(self, batch: list[list[int]]) -> list[Features]:
        raise NotImplementedError

    def reference(self, input_ids: list[int]) -> Reference | None:
        raise NotImplementedError

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def head(self) -> TargetHead:
        raise NotImplementedError
