"""Logits from states that another process made: the target's head, in pieces that fit anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from drafter.target_head import TargetHead, load_head

_WEIGHTS_AT_ONCE = 1 << 26
"""Elements of the output matrix that are in float32 at one time: 256 MiB."""
_ROOM_BYTES = 1 << 30
"""Free on a GPU that is used: such a piece in both dtypes, states, their logits, a workspace."""


class OutputMatrix:
    """``lm_head(norm(final))`` in float32, on a GPU when there is one with room beside a server.

    The checkpoint's matrix stays on the CPU in its own dtype. V = vocabulary, D = hidden size.
    """

    def __init__(self, target_dir: Path) -> None:
        self.head: TargetHead = load_head(target_dir)
        self._norm = replace(self.head, norm_weight=self.head.norm_weight.float())
        self._device = torch.device(roomy_device())

    def logits_rows(self, final_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, V], on the CPU."""
        normed_TD = self._norm.normed(final_TD.cpu())
        try:
            return self._product(normed_TD)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            # The server took what was free when this process began.
            self._device = torch.device("cpu")
            return self._product(normed_TD)

    def _product(self, normed_TD: torch.Tensor) -> torch.Tensor:
        lm_head_VD = self.head.lm_head
        normed_TD = normed_TD.to(self._device)
        logits_TV = torch.empty(len(normed_TD), len(lm_head_VD))
        step = max(1, _WEIGHTS_AT_ONCE // lm_head_VD.shape[1])
        for start in range(0, len(lm_head_VD), step):
            part_VD = lm_head_VD[start : start + step].to(self._device, torch.float32)
            logits_TV[:, start : start + step] = normed_TD @ part_VD.T
        return logits_TV


def roomy_device() -> str:
    """The GPU with the most free memory where that is enough, else the CPU.

    On a GPU that a server fills, even asking fails: there is no room for a context.
    """
    try:
        free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    except RuntimeError:
        return "cpu"
    most = max(free, default=0)
    return f"cuda:{free.index(most)}" if most >= _ROOM_BYTES else "cpu"
