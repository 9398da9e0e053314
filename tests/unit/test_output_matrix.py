"""Logits are made on a GPU that has room, and on the CPU where none has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from unit.random_targets import save_target

from drafter.backends.output_matrix import OutputMatrix, roomy_device

GIB = 1 << 30


def full(_gpu: int) -> tuple[int, int]:
    """What a GPU without room for one more context answers."""
    raise torch.AcceleratorError("CUDA error: out of memory")


def free(*gib: float) -> Callable[[int], tuple[int, int]]:
    return lambda gpu: (int(gib[gpu] * GIB), 80 * GIB)


@pytest.mark.parametrize(
    ("gpus", "info", "device"),
    [
        (0, full, "cpu"),
        (1, full, "cpu"),
        (1, free(0.3), "cpu"),
        (1, free(2), "cuda:0"),
        (3, free(0.3, 2, 9), "cuda:2"),
    ],
    ids=["no GPU", "no room for a context", "little room", "room", "the roomiest"],
)
def test_the_device_has_room(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    info: Callable[[int], tuple[int, int]],
    device: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    assert roomy_device() == device


class Filled(OutputMatrix):
    """On a GPU whose room a server takes in the meantime."""

    def _product(self, normed_TD: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cpu":
            raise torch.AcceleratorError("CUDA error: out of memory")
        return super()._product(normed_TD)


def test_a_gpu_that_fills_up_leaves_the_rest_to_the_cpu(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    output = Filled(tmp_path)
    output._device = torch.device("cuda")
    states_TD = torch.randn(3, 32)
    assert torch.equal(output.logits_rows(states_TD), OutputMatrix(tmp_path).logits_rows(states_TD))
    assert output._device.type == "cpu"
