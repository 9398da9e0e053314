"""The embedded engine's arithmetic: one forward pass over rows of any length.

A compact forward of Qwen3 and Llama decoders over a preallocated cache of keys and values, because
on models of a few million parameters the time goes into Python calls, not into arithmetic. Always
float32. Its greedy ids are those of transformers. Callers hold ``torch.inference_mode()``.

Letters: N = new tokens over all rows, R = rows, V = vocabulary, H = hidden size, Q = query heads,
K = key heads, D = head size, S = slots, C = context.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from drafter.errors import RecipeError

_CACHE_BYTES = 4 << 30
"""Of address space; a page takes memory once a row uses it."""

_MAX_SLOTS = 256
_CALL_COSTS_KEYS = 128
"""Keys that attention reads in the time that one more call takes."""

_ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


@dataclass(eq=False)
class Row:
    """One sequence: ids so far, and how many of them are in the cache."""

    ids: list[int]
    num_cached: int = 0
    slot: int = -1

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.num_cached


@dataclass(eq=False)
class _Span:
    """Rows that attend in one call: one new prompt, or neighbouring slots with one new id each."""

    begin: int
    """First of its new tokens in N."""

    slot: int
    num_new: int
    """Of each row; above 1 there is one row."""

    lengths: list[int]
    mask: Tensor | None = None  # [rows, 1, 1, longest], added to the scores

    @property
    def end(self) -> int:
        return self.begin + self.num_new * len(self.lengths)

    def takes(self, row: Row) -> bool:
        """Whether padding ``row`` to this span costs less than a call of its own."""
        if row.slot != self.slot + len(self.lengths) or self.num_new > 1 or row.num_new > 1:
            return False
        longest, length = max(self.lengths), len(row.ids)
        padded = (len(self.lengths) + 1) * max(longest, length)
        return padded <= len(self.lengths) * longest + length + _CALL_COSTS_KEYS


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Q + 2K) D, H]
    head_norms: Tensor | None  # [Q + K, D]
    output: Tensor  # [H, Q D]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]
    keys: Tensor  # [S, K, C, D]
    values: Tensor  # [S, K, C, D]


@dataclass(frozen=True)
class Decoder:
    """A model with its cache. ``logits`` is not thread-safe: one thread decodes."""

    embed: Tensor  # [V, H]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]
    cos: Tensor  # [C, 1, D]
    sin: Tensor  # [C, 1, D]
    eps: float
    eos_ids: frozenset[int]
    architecture: str
    model_type: str
    num_slots: int
    layers: list[_Layer] = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return len(self.embed)

    @property
    def context(self) -> int:
        return len(self.cos)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """[R, V] after the last id of each row, having cached all of its ids.

        A row is either new (nothing cached) or lacks its last id only.
        """
        spans = _spans(rows)
        ids = [token for row in rows for token in row.ids[row.num_cached :]]
        position_N = torch.tensor([p for row in rows for p in range(row.num_cached, len(row.ids))])
        slot_N = torch.tensor([row.slot for row in rows for _ in range(row.num_new)])
        last_R = torch.tensor([row.num_new for row in rows]).cumsum(0) - 1
        cos, sin = self.cos[position_N], self.sin[position_N]
        hidden = self.embed[torch.tensor(ids)]
        for layer in self.layers:
            query, key, value = self._heads(layer, hidden, cos, sin)
            layer.keys[slot_N, :, position_N] = key
            layer.values[slot_N, :, position_N] = value
            mixed = torch.cat([_attend(layer, span, query) for span in spans])
            hidden += F.linear(mixed, layer.output)
            gate, up = F.linear(self._normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            hidden += F.linear(F.silu(gate, inplace=True).mul_(up), layer.down)
        for row in rows:
            row.num_cached = len(row.ids)
        return F.linear(self._normed(hidden[last_R], self.norm), self.lm_head)

    def _heads(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, Q, D], rotated; keys [N, K, D], rotated; values [N, K, D]."""
        num_keys, size = layer.keys.shape[1], layer.keys.shape[3]
        num_queries = layer.output.shape[1] // size
        qkv = F.linear(self._normed(hidden, layer.input_norm), layer.qkv)
        heads, value = qkv.view(len(hidden), -1, size).split([num_queries + num_keys, num_keys], 1)
        if layer.head_norms is not None:
            heads = F.rms_norm(heads, (size,), eps=self.eps).mul_(layer.head_norms)
        first, second = heads.chunk(2, -1)
        heads = (heads * cos).addcmul_(torch.cat((-second, first), -1), sin)
        query, key = heads.split([num_queries, num_keys], 1)
        return query, key, value

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (len(weight),), weight, self.eps)


def _spans(rows: Sequence[Row]) -> list[_Span]:
    """Rows in slot order make the fewest. Each is padded little: short rows do not pay for long."""
    spans: list[_Span] = []
    for row in rows:
        if spans and spans[-1].takes(row):
            spans[-1].lengths.append(len(row.ids))
        else:
            begin = spans[-1].end if spans else 0
            spans.append(_Span(begin, row.slot, row.num_new, [len(row.ids)]))
    for span in spans:
        if min(span.lengths) < max(span.lengths):
            beyond = torch.arange(max(span.lengths)) >= torch.tensor(span.lengths)[:, None]
            span.mask = torch.zeros(beyond.shape).masked_fill(beyond, -torch.inf)[:, None, None]
    return spans


def _attend(layer: _Layer, span: _Span, query_NQD: Tensor) -> Tensor:
    """[new tokens of the span, Q D]."""
    num_rows, num_keys, size = len(span.lengths), layer.keys.shape[1], layer.keys.shape[3]
    query = query_NQD[span.begin : span.end]
    keys = layer.keys[span.slot : span.slot + num_rows, :, : max(span.lengths)]
    values = layer.values[span.slot : span.slot + num_rows, :, : max(span.lengths)]
    if span.num_new == 1:
        # The queries that share a key head stand where a prompt's positions would.
        grouped = query.view(num_rows, num_keys, -1, size)
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=span.mask)
        return mixed.reshape(num_rows, -1)
    whole = query.transpose(0, 1)[None]
    mixed = F.scaled_dot_product_attention(whole, keys, values, is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


def load_decoder(model_dir: Path) -> Decoder:
    """Read a checkpoint. Raises RecipeError when it is not one that this engine computes."""
    from transformers import AutoModelForCausalLM

    config = _known_config(model_dir)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(
            f"cannot read the model in {model_dir} ({reason}): copy it again"
        ) from None
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise RecipeError(f"{model_dir} lacks weights ({missing} ...): copy the whole checkpoint")
    model.requires_grad_(False)
    attention = model.model.layers[0].self_attn
    context = model.config.max_position_embeddings
    cache = (model.config.num_key_value_heads, context, attention.head_dim)
    slot_bytes = 2 * 4 * len(model.model.layers) * cache[0] * cache[1] * cache[2]
    num_slots = max(1, min(_MAX_SLOTS, _CACHE_BYTES // slot_bytes))
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(context)[None])
    eos = model.generation_config.eos_token_id
    return Decoder(
        embed=model.model.embed_tokens.weight,
        norm=model.model.norm.weight,
        lm_head=model.lm_head.weight,
        cos=cos[0, :, None],
        sin=sin[0, :, None],
        eps=model.config.rms_norm_eps,
        eos_ids=frozenset(eos if isinstance(eos, list) else [eos] if eos is not None else []),
        architecture=config["architectures"][0],
        model_type=model.config.model_type,
        num_slots=num_slots,
        layers=[_layer(layer, num_slots, cache) for layer in model.model.layers],
    )


def _known_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecipeError(f"no model at {model_dir}: it needs a config.json and weights") from None
    except ValueError as error:
        raise RecipeError(f"{path} is not JSON ({error}): correct it") from None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotation = rope.get("rope_type", rope.get("type", "default"))
    found = {
        "architectures": (config.get("architectures") or ["none"])[0] in _ARCHITECTURES,
        "hidden_act": config.get("hidden_act", "silu") == "silu",
        "attention_bias": not config.get("attention_bias"),
        "mlp_bias": not config.get("mlp_bias"),
        "use_sliding_window": not config.get("use_sliding_window"),
        "rope_type": rotation in _FIXED_ROTATIONS,
    }
    for name, known in found.items():
        if not known:
            raise RecipeError(
                f"{model_dir} has {name} {config.get(name, rotation)}: the embedded engine computes"
                f" plain {' and '.join(_ARCHITECTURES)} only, serve this model with SGLang"
            )
    return config


def _layer(layer: Any, num_slots: int, cache: tuple[int, int, int]) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = None
    if hasattr(attention, "q_norm"):
        num_queries = len(attention.q_proj.weight) // cache[2]
        norms = [attention.q_norm.weight] * num_queries + [attention.k_norm.weight] * cache[0]
        head_norms = torch.stack(norms)
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]),
        head_norms=head_norms,
        output=attention.o_proj.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
        keys=_untouched(num_slots, *cache),
        values=_untouched(num_slots, *cache),
    )


def _untouched(*shape: int) -> Tensor:
    """Zeros, because masked padding must be finite, in pages that take memory once a row uses them.

    Small pages: with huge ones every slot would be in memory from its first token.
    """
    pages = mmap.mmap(-1, 4 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)
