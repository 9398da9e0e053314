"""An exported drafter read back as an engine reads it: the independent half of export's check.

From config.json and model.safetensors alone, one position at a time with a growing cache, sharing
no line with model.py. Names and shapes must be exactly those that the engine loads: SGLang skips a
name it does not know without a word and serves random weights in its place.

Letters: T = tokens read so far, A = aux layers, H = hidden size, D = draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from drafter.errors import DataError
from drafter.extraction import layer_ids
from drafter.files import read_json
from drafter.training import vocabulary

LAYER = {"sglang": "midlayer.", "vllm": "layers.0."}
"""What each engine calls the drafter's only layer."""

_OFF = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "tie_word_embeddings",
)
"""Other arrangements of norms and matrices than the one computed here."""


@dataclass(frozen=True)
class Served:
    """A drafter as its files describe it."""

    config: dict[str, Any]
    """Of the layer, flat."""
    aux_layers: list[int]
    """HF ``hidden_states`` indices, whichever way the engine counts."""
    weights: dict[str, Tensor]
    """float32; names of the layer without the engine's prefix."""
    draft_ids: Tensor
    """int64 [D]: target id of each draft id."""


def read(directory: Path, engine: str, target: dict[str, Any]) -> Served:
    """Load an export for a target with this (text) config.json.

    Raises DataError when names, shapes, maps or switches are not what ``engine`` must load.
    """
    whole = read_json(directory / "config.json")
    if engine == "sglang":
        config = whole
        ids = whole["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        aux_layers = layer_ids.read_by_sglang(ids, target)
    else:
        config = whole["transformer_layer_config"]
        aux_layers = list(whole["eagle_aux_hidden_state_layer_ids"])
    _check_switches(directory, engine, whole, config)
    tensors = load_file(directory / "model.safetensors")
    expected = _expected(config, whole["draft_vocab_size"], engine)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        raise DataError(
            f"{directory}: {engine} would not load {wrong[0]} as it is (found "
            f"{found.get(wrong[0])}, needs {expected.get(wrong[0])}): export again"
        )
    d2t = torch.zeros(config["vocab_size"], dtype=torch.int64)
    if "d2t" in tensors:
        d2t = tensors.pop("d2t")
        vocabulary.check(d2t, tensors.pop("t2d"), str(directory))
    weights = {name.removeprefix(LAYER[engine]): t.float() for name, t in tensors.items()}
    return Served(config, aux_layers, weights, d2t + torch.arange(len(d2t)))


def drafts(
    served: Served, ids_T: Tensor, aux_TAH: Tensor, embed_VH: Tensor, followed_QK: Tensor
) -> Tensor:
    """Logits [Q, K + 1, D] of the drafts from each of the last Q of ``ids_T``.

    A draft reads the target's states up to its start, its own after it, and follows its K tokens of
    ``followed_QK``. ``aux_TAH`` are the target's states at all tokens but the newest, which it has
    not read yet.
    """
    cache = _Cache(served, embed_VH)
    first = len(aux_TAH) - len(followed_QK)
    drafted = []
    for position, (token, aux_AH) in enumerate(zip(ids_T[1:], aux_TAH, strict=True)):
        state = cache.read(token, aux_AH.flatten() @ served.weights["fc.weight"].T, position)
        if position < first:
            continue
        logits = [cache.logits(state)]
        for step, own in enumerate(followed_QK[position - first], start=1):
            state = cache.read(own, state, position + step)
            logits.append(cache.logits(state))
        cache.forget_after(position)
        drafted.append(torch.stack(logits))
    return torch.stack(drafted)


class _Cache:
    """Keys and values of everything read, in the order of positions."""

    def __init__(self, served: Served, embed_VH: Tensor) -> None:
        self._config, self._weights, self._embed = served.config, served.weights, embed_VH
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def read(self, token: Tensor, state_H: Tensor, position: int) -> Tensor:
        """The layer's output [H] for ``token`` beside ``state_H``, itself joining the cache."""
        w, size = self._weights, self._config["head_dim"]
        both = torch.cat(
            [self._norm(self._embed[token], "input_layernorm"), self._norm(state_H, "hidden_norm")]
        )
        query = _turn((w["self_attn.q_proj.weight"] @ both).view(-1, size), position, self._config)
        key = _turn((w["self_attn.k_proj.weight"] @ both).view(-1, size), position, self._config)
        self._keys.append(key)
        self._values.append((w["self_attn.v_proj.weight"] @ both).view(-1, size))
        groups = len(query) // len(key)
        keys = torch.stack(self._keys).repeat_interleave(groups, 1)
        values = torch.stack(self._values).repeat_interleave(groups, 1)
        shares = (torch.einsum("hd,thd->ht", query, keys) / size**0.5).softmax(-1)
        seen = torch.einsum("ht,thd->hd", shares, values)
        state = state_H + w["self_attn.o_proj.weight"] @ seen.flatten()
        inner = self._norm(state, "post_attention_layernorm")
        gate, up = w["mlp.gate_proj.weight"] @ inner, w["mlp.up_proj.weight"] @ inner
        return state + w["mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def forget_after(self, position: int) -> None:
        """Drop what a draft has added, as an engine does once the target has judged it."""
        del self._keys[position + 1 :], self._values[position + 1 :]

    def logits(self, state_H: Tensor) -> Tensor:
        return self._weights["lm_head.weight"] @ self._norm(state_H, "norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean() + self._config["rms_norm_eps"]).rsqrt()
        return x * scale * self._weights[f"{name}.weight"]


def _turn(x: Tensor, position: int, config: dict[str, Any]) -> Tensor:
    """Rotary embedding as a product of complex numbers: pair i is (x[i], x[i + size / 2])."""
    half = x.shape[-1] // 2
    theta = config["rope_parameters"]["rope_theta"]
    angle = position * theta ** (torch.arange(half) / -half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angle)
    return torch.cat([turned.real, turned.imag], -1)


def _check_switches(
    directory: Path, engine: str, whole: dict[str, Any], config: dict[str, Any]
) -> None:
    """What is computed here must be said: engines and their versions differ in what they assume."""
    said = {name: whole.get(name) for name in _OFF}
    said |= {name: config.get(name) for name in ("attention_bias", "mlp_bias")}
    for name, value in said.items():
        if value is not False:
            raise DataError(
                f"{directory}: {engine} needs {name} = false, found {value}: export again"
            )
    rope = config["rope_parameters"]
    if config.get("rope_theta") != rope["rope_theta"] or config.get("rope_scaling") is not None:
        raise DataError(
            f"{directory}: rope_theta {config.get('rope_theta')} and rope_scaling "
            f"{config.get('rope_scaling')} are not what rope_parameters say: export again"
        )


def _expected(config: dict[str, Any], draft: int, engine: str) -> dict[str, tuple[int, ...]]:
    """Every tensor that the engine loads, with its shape.

    vLLM (0.32.0, models/llama_eagle3.py) has a parameter for d2t only where the draft vocabulary is
    not the target's, and stops at a name without one.
    """
    layer = LAYER[engine]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    maps = {"d2t": (draft,), "t2d": (config["vocab_size"],)}
    return {
        **({} if engine == "vllm" and draft == config["vocab_size"] else maps),
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
        f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (query, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (key, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (key, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, query),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
    }
