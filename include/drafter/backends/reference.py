"""A plain forward of the target beside a server that runs it: what the server is compared with.

In this process, on the CPU in float32, and loaded only for the row that is asked. The whole target
where its weights fit twice over into what memory is available; else its first layers, up to the
first that is captured, else the first one alone; nothing where not even this fits, is stored
quantised, or is of a model that transformers cannot run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from drafter.backends.target_model import load_target, plain_forward
from drafter.errors import RecipeError
from drafter.extraction.gates import Reference
from drafter.files import read_json
from drafter.machine import available_gb

_SPARE = 2
"""Times the weights must fit: activations, and whatever else runs on the host."""
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}
_LAYER = re.compile(r"^(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
"""Names of the text decoder's tensors, with the layer."""


class PlainForward:
    """A plain forward of ``target_dir``; at least of ``num_layers``, the first captured layer.

    Nothing is loaded before a row is asked, and nothing stays loaded after it. Where there can be
    none, the reason is printed and kept: a server may well run what this process cannot.
    """

    def __init__(self, target_dir: Path, num_layers: int) -> None:
        self._target_dir = target_dir
        self._num_layers = num_layers
        self.missing = ""
        """Why the last row got none, or one of fewer layers."""

    def __call__(self, input_ids: list[int]) -> Reference | None:
        """One row, or its first layers; None where there can be none."""
        self.missing = ""
        # The first layer alone is dense, and not quantised, in large models of experts.
        for first_layers in sorted({max(self._num_layers, 1), 1}, reverse=True):
            try:
                return _forward(self._target_dir, first_layers, input_ids)
            except (_NotHere, RecipeError) as reason:
                self.missing = str(reason)
                print(
                    f"no plain forward of {self._target_dir}, or of its first {first_layers} "
                    f"layers, in this process: {reason}",
                    flush=True,
                )
        return None


def _forward(target_dir: Path, first_layers: int, input_ids: list[int]) -> Reference:
    whole = _fits_whole(target_dir, first_layers)
    model = load_target(target_dir, torch.float32, 0, None if whole else first_layers)
    full = plain_forward(model, input_ids, target_dir)
    if whole:
        return full
    # Without its last norm, a shortened model ends in what enters the layer after it.
    assert full.normed_TD is not None
    return Reference(layers=[*full.layers, full.normed_TD])


class _NotHere(Exception):
    """Why this process runs no layer of the target."""


def _fits_whole(target_dir: Path, first_layers: int) -> bool:
    """Whether all of the target runs here, or its first layers. _NotHere when neither does."""
    config = read_json(target_dir / "config.json")
    inner = [part for part in config.values() if isinstance(part, dict)]
    quantised = any("quantization_config" in part for part in (config, *inner))
    tensors = list(_tensors(target_dir))
    available = available_gb()
    if not quantised and _SPARE * _gb(tensors) <= available:
        return True
    first = [t for t in tensors if t.layer is None or t.layer < first_layers]
    if quantised and any(t.dtype not in _PLAIN_DTYPES for t in first):
        raise _NotHere("its weights are quantised")
    needed = _SPARE * _gb(first)
    if needed > available:
        raise _NotHere(
            f"its first {first_layers} layers need {needed:,.3g} GB, {available:,.3g} GB are free"
        )
    return False


class _Tensor(NamedTuple):
    layer: int | None
    """Of the text decoder; None for all else."""
    dtype: str
    elements: int


def _gb(tensors: list[_Tensor]) -> float:
    """In float32."""
    return 4 * sum(tensor.elements for tensor in tensors) / 1e9


def _tensors(target_dir: Path) -> list[_Tensor]:
    """What the checkpoint holds, from the headers of its files. RecipeError if unreadable."""
    found = []
    for path in sorted(target_dir.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    layer = _LAYER.match(name)
                    elements = torch.Size(part.get_shape()).numel()
                    number = int(layer[1]) if layer else None
                    found.append(_Tensor(number, part.get_dtype(), elements))
        except (SafetensorError, OSError) as error:
            raise RecipeError(f"{path} is not safetensors ({error}): fetch it again") from None
    if not found:
        raise RecipeError(
            f"target {target_dir} holds no *.safetensors: convert its weights to safetensors"
        )
    return found
