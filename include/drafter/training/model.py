"""The EAGLE-3 drafter: one decoder layer over the target's states and the token that follows them.

    h = fc(aux)                                   target's fused states; later steps: the last h
    x = [input_layernorm(embed(token)), hidden_norm(h)]
    h = h + o_proj(attend(q_proj(x), k_proj(x), v_proj(x)))
    h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))                     over the draft vocabulary

The residual carries h before hidden_norm, and the next step gets h before norm: what SafeAILab's
code, SGLang, and vLLM with norm_before_residual = norm_output = false compute. Names of parameters
are SGLang's, so that export renames a prefix at most. Embeddings are the target's, frozen, and are
not part of the checkpoint.

Letters: S = slots, Q = starts, H = hidden size, n = key-value heads, g = query heads per key-value
head, d = head size, D = draft vocabulary. Source: EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafter.errors import RecipeError
from drafter.target_head import TargetHead
from drafter.training.alignment import Batch
from drafter.training.attention import attend

_KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter; written into every checkpoint and export."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    """HF ``hidden_states`` indices, that is inputs of these layers."""


def shape_for(
    config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
    intermediate_size: int | None,
) -> Shape:
    """The drafter's shape for a target with this (text) config.json.

    Heads, head size and rope base are the target's; without rope scaling, since the drafter is
    trained at the positions it is served at. Raises RecipeError naming a field that is missing.
    """
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        rope = config.get("rope_parameters") or config
        return Shape(
            hidden_size=hidden,
            intermediate_size=intermediate_size or config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            # Latent attention (DeepSeek, Kimi) has no head_dim: its values' size stands for it.
            head_dim=config.get("head_dim") or config.get("v_head_dim") or hidden // heads,
            norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            max_positions=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=draft_vocab_size,
            aux_layers=aux_layers,
        )
    except KeyError as field:
        raise RecipeError(
            f"the target's config.json has no {field}, which the drafter's shape is taken from: "
            "complete it"
        ) from None


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = _linear(2 * shape.hidden_size, query)
        self.k_proj = _linear(2 * shape.hidden_size, kv)
        self.v_proj = _linear(2 * shape.hidden_size, kv)
        self.o_proj = _linear(query, shape.hidden_size)


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)


class Drafter(nn.Module):  # type: ignore[misc]
    """Trainable weights, the draft vocabulary (d2t, t2d) and the target's frozen embedding."""

    embed: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Shape, head: TargetHead, d2t: Tensor, t2d: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _linear(len(shape.aux_layers) * shape.hidden_size, shape.hidden_size)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = _linear(shape.hidden_size, shape.draft_vocab_size)
        self.register_buffer("embed", head.embed, persistent=False)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    @property
    def draft_ids(self) -> Tensor:
        """int64 [D]: target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def logits(self, state: Tensor) -> Tensor:
        """[..., H] states as :class:`Unroll` returns them -> [..., D]."""
        out: Tensor = self.lm_head(self.norm(state))
        return out

    def unroll(self, batch: Batch) -> Unroll:
        """Begin a draft at every start of ``batch``."""
        return Unroll(self, batch)

    def train_states(self, batch: Batch, steps: int, recompute: bool = False) -> list[Tensor]:
        """Normed states [Q, H] of each of ``steps`` draft steps, reading what the target wrote.
        ``recompute``: see :class:`Unroll`."""
        unroll = Unroll(self, batch, recompute)
        told = unroll.tell(batch.next_Q)
        # A start reads what follows the token before it, but for the first one of each row.
        first = torch.tensor([span.starts for span in batch.spans], device=told.device)
        read = batch.read_S[batch.start_Q[first]]
        states = [unroll.first(told.roll(1, 0).index_copy(0, first, unroll.tell(read)))]
        states += [unroll.follow(told.roll(1 - step, 0)) for step in range(1, steps)]
        return [self.norm(state) for state in states]


class Unroll:
    """Drafts from every start of a batch at once, a step at a time.

    Step 0 runs over all slots, because later slots see its keys; of slots in which no draft starts,
    nothing but keys and values is computed. Later steps see each other's keys within one draft.
    A token adds the same to queries, keys and values in whichever step it is read, so steps take
    that part apart: in training it is computed once for all of them.

    With ``recompute`` backward keeps of every step what the next ones read (state, key, value) and
    computes the rest of it once more: the same numbers, a step's activations at a time.
    """

    def __init__(self, drafter: Drafter, batch: Batch, recompute: bool = False) -> None:
        self._steps, self._recompute = _Steps.of(drafter, batch), recompute
        self._own: list[_KeyValue] = []

    def first(self, told: Tensor | None = None) -> Tensor:
        """Step 0: states [Q, H] from the target's states and the tokens it has written. ``told``:
        what :meth:`tell` says of those that the starts read, when it is known already."""
        if told is None:
            told = self.tell(self._steps.batch.read_S[self._steps.batch.start_Q])
        self._state, *self._seen = self._computed(self._steps.first, told)
        return self._state

    def next(self, token: Tensor) -> Tensor:
        """A later step: states [Q, H] from those of the step before and ``token`` int64 [Q]."""
        return self.follow(self.tell(token))

    def tell(self, token: Tensor) -> Tensor:
        """What queries, keys and values get of ``token`` int64 [Q] alone, side by side."""
        return self._steps.tell(token)

    def follow(self, told: Tensor) -> Tensor:
        """A later step, of what :meth:`tell` says of its tokens."""
        # A copy: what is computed once more must not see keys of steps after it.
        own = list(self._own)
        self._state, *pair = self._computed(
            self._steps.later, told, self._state, tuple(self._seen), own
        )
        self._own.append((pair[0], pair[1]))
        return self._state

    def _computed(self, step: Callable[..., tuple[Tensor, ...]], *given: Any) -> tuple[Tensor, ...]:
        if not self._recompute:
            return step(*given)
        kept: tuple[Tensor, ...] = checkpoint(
            step, *given, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )
        return kept


@dataclass(frozen=True, eq=False)
class _Steps:
    """A step of every draft as a function of what it reads. Backward holds on to it, so it holds
    none of the states."""

    drafter: Drafter
    batch: Batch
    sizes: tuple[int, ...]
    """Of queries, keys and values."""
    of_token: Tensor
    """Columns of their three matrices, one below another, that read the token ..."""
    of_state: Tensor
    """... and the state."""

    @classmethod
    def of(cls, drafter: Drafter, batch: Batch) -> _Steps:
        attention = drafter.midlayer.self_attn
        matrices = (attention.q_proj, attention.k_proj, attention.v_proj)
        both = torch.cat([matrix.weight for matrix in matrices])
        sizes = tuple(matrix.out_features for matrix in matrices)
        return cls(drafter, batch, sizes, *both.chunk(2, 1))

    def first(self, told: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """State, key and value of step 0."""
        batch, attention = self.batch, self.drafter.midlayer.self_attn
        silent, fused = self._apart(self.drafter.fc(batch.aux_SAH.flatten(1)))
        token = self._embedded(self._apart(batch.read_S)[0])
        read = torch.cat([token, self.drafter.midlayer.hidden_norm(silent)], -1)
        query, *pair = self._read(told, fused)
        key, value = (
            self._together(project(read), of_starts)
            for project, of_starts in zip((attention.k_proj, attention.v_proj), pair, strict=True)
        )
        seen = self._rotated(key, batch.position_S), self._heads(value)
        state = self._layer(query, fused, batch.position_S[batch.start_Q], seen, [])
        return state, *seen

    def tell(self, token: Tensor) -> Tensor:
        return F.linear(self._embedded(token), self.of_token)

    def later(
        self, told: Tensor, before: Tensor, seen: _KeyValue, own: list[_KeyValue]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """State, key and value of the step after those that ``own`` is of."""
        position = self.batch.position_S[self.batch.start_Q] + len(own) + 1
        query, key, value = self._read(told, before)
        pair = self._rotated(key, position), self._heads(value)
        return self._layer(query, before, position, seen, [*own, pair]), *pair

    def _read(self, told: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of starts."""
        normed = self.drafter.midlayer.hidden_norm(state)
        read: tuple[Tensor, ...] = torch.addmm(told, normed, self.of_state.T).split(self.sizes, -1)
        return read

    def _apart(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """[S, ...] -> those in which no draft starts, and the starts [Q, ...]."""
        spans = self.batch.spans
        sizes = [size for s in spans for size in (s.first - s.begin, s.end - s.first)]
        # Slices of their own would each fill all of S with zeros in backward.
        parts = slots.split(sizes)
        return torch.cat(parts[::2]), torch.cat(parts[1::2])

    def _together(self, silent: Tensor, starts: Tensor) -> Tensor:
        """What :meth:`_apart` took apart."""
        spans = self.batch.spans
        parts = silent.split([s.first - s.begin for s in spans])
        own = starts.split([s.end - s.first for s in spans])
        return torch.cat([part for both in zip(parts, own, strict=True) for part in both])

    def _embedded(self, token: Tensor) -> Tensor:
        drafter = self.drafter
        embedded = F.embedding(token, drafter.embed).to(drafter.fc.weight.dtype)
        normed: Tensor = drafter.midlayer.input_layernorm(embedded)
        return normed

    def _layer(
        self,
        query: Tensor,
        residual: Tensor,
        position: Tensor,
        seen: _KeyValue,
        own: list[_KeyValue],
    ) -> Tensor:
        """``seen``: of step 0; ``own``: of every later step so far."""
        layer, groups = self.drafter.midlayer, seen[0].shape[1]
        query = self._rotated(query, position).unflatten(1, (groups, -1))
        attended = attend(query, *seen, own, self.batch.spans)
        state = residual + layer.self_attn.o_proj(attended.flatten(1))
        out: Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
        return out

    def _rotated(self, x: Tensor, position: Tensor) -> Tensor:
        return rotate(self._heads(x), position, self.drafter.shape.rope_theta)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.drafter.shape.head_dim))


def rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [N, heads, d] at ``position`` [N], halves paired as in Llama."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position.float()[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def new_drafter(shape: Shape, head: TargetHead, d2t: Tensor, t2d: Tensor, seed: int) -> Drafter:
    """An untrained drafter in float32 on the CPU: a function of its arguments.

    Matrices are normal with variance 1 / inputs. lm_head and norm are the target's own, so that a
    state which resembles the target's already draws the target's tokens.
    """
    drafter = Drafter(shape, head, d2t, t2d)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    drafter.lm_head.weight.data.copy_(head.lm_head[drafter.draft_ids])
    drafter.norm.weight.data.copy_(head.norm_weight)
    return drafter


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
