"""The target's embedding, last norm and output matrix: all of it that training needs in memory.

``head.logits(final)`` of a stored ``final`` row is the target's next-token distribution. Read from
the checkpoint's safetensors by exact name (a vision tower and MTP layers have an ``embed_tokens``
of their own). V = vocabulary, H = hidden size. Text towers of multimodal checkpoints are found
under ``language_model``; a missing output matrix means tied embeddings. Extraction compares
``logits`` with the model's own before it writes the first shard, so a head of another shape cannot
pass unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from drafter.errors import RecipeError
from drafter.files import read_json

_TOWERS = ("model.", "language_model.model.", "model.language_model.")
_OUTPUTS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
)
_RESCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Configuration fields of heads that do more than one matrix product after the norm."""


@dataclass(frozen=True)
class TargetHead:
    """embed [V, H], norm_weight [H], lm_head [V, H]; tied heads share one tensor."""

    embed: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    lm_head: torch.Tensor
    norm: str = "before"
    """Where the ``final`` rows stand that it is given: before the last norm, or after it."""

    def reading(self, norm: str) -> TargetHead:
        """The same head for rows stored "before" or "after" the last norm (shards.py)."""
        return replace(self, norm=norm)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetHead:
        """The same head elsewhere; tied matrices stay one tensor."""
        embed = self.embed.to(device, dtype)
        tied = self.lm_head is self.embed
        return replace(
            self,
            embed=embed,
            norm_weight=self.norm_weight.to(device, dtype),
            lm_head=embed if tied else self.lm_head.to(device, dtype),
        )

    def normed(self, final: torch.Tensor) -> torch.Tensor:
        """RMS norm of [..., H], computed in float32 and returned in the head's dtype. Rows that
        are after the norm already stay as they are."""
        if self.norm == "after":
            return final.to(self.norm_weight.dtype)
        wide = final.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        return self.norm_weight * (wide * scale).to(self.norm_weight.dtype)

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """[..., H] stored states -> [..., V] in the head's dtype."""
        return self.normed(final) @ self.lm_head.T


def load_head(target_dir: Path) -> TargetHead:
    """Read the head in its stored dtype, on the CPU.

    Raises RecipeError when the directory holds no safetensors checkpoint, lacks one of the tensors,
    or its head does more than RMS norm and one matrix product.
    """
    config = text_config(target_dir)
    rescaled = [name for name in _RESCALED if config.get(name) not in (None, 1, 1.0)]
    if rescaled or "rms_norm_eps" not in config:
        found = f"config.json sets {rescaled[0]}" if rescaled else "config.json has no rms_norm_eps"
        raise RecipeError(
            f"target {target_dir}: {found}, but drafting needs a head of RMS norm and one output "
            "matrix: choose another target"
        )
    files = _weight_files(target_dir)
    tower = next((p for p in _TOWERS if f"{p}embed_tokens.weight" in files), None)
    if tower is None:
        tried = ", ".join(f"{p}embed_tokens.weight" for p in _TOWERS)
        raise RecipeError(f"target {target_dir} has none of {tried}: its family is not supported")
    if f"{tower}norm.bias" in files:
        raise RecipeError(
            f"target {target_dir} ends in a LayerNorm with bias; an RMS norm is needed"
        )
    embed = _tensor(target_dir, files, f"{tower}embed_tokens.weight")
    output = next((name for name in _OUTPUTS if name in files), None)
    if output is None and config.get("tie_word_embeddings") is False:
        raise RecipeError(
            f"target {target_dir} says tie_word_embeddings = false but holds none of "
            f"{', '.join(_OUTPUTS)}: complete the checkpoint"
        )
    return TargetHead(
        embed=embed,
        norm_weight=_tensor(target_dir, files, f"{tower}norm.weight"),
        norm_eps=float(config["rms_norm_eps"]),
        lm_head=embed if output is None else _tensor(target_dir, files, output),
    )


def text_config(target_dir: Path) -> dict[str, Any]:
    """``config.json``, the text tower's where the checkpoint is multimodal, ties included."""
    path = target_dir / "config.json"
    if not path.exists():
        raise RecipeError(
            f"target {target_dir} has no config.json: point target.path at a checkpoint"
        )
    config: dict[str, Any] = read_json(path)
    inner = config.get("text_config") or config.get("language_config")
    if inner is None:
        return config
    ties = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
    return {**ties, **inner}


def _weight_files(target_dir: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded checkpoint or from its only file."""
    index = target_dir / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        return weight_map
    single = target_dir / "model.safetensors"
    if not single.exists():
        raise RecipeError(
            f"target {target_dir} has neither {index.name} nor {single.name}: "
            "convert its weights to safetensors"
        )
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except SafetensorError as error:
        raise RecipeError(f"{single} is not safetensors ({error}): fetch it again") from None


def _tensor(target_dir: Path, files: dict[str, str], name: str) -> torch.Tensor:
    if name not in files:
        raise RecipeError(f"target {target_dir} has no tensor {name}: complete the checkpoint")
    path = target_dir / files[name]
    try:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except (SafetensorError, FileNotFoundError) as error:
        raise RecipeError(f"{name} cannot be read from {path} ({error}): fetch it again") from None
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise RecipeError(f"{name} in {path} is {tensor.dtype}: an unquantised head is needed")
    return tensor
