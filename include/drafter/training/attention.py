"""Attention of drafts: causal over what the target has read, one key per step of the draft itself.

Step i of the draft that starts in slot t sees the step-0 keys of slots 0..t and its own keys of
steps 1..i, nothing of other drafts. As a mask that is [L, k * L]; here it is one causal block over
step-0 keys plus one number per later step: memory stays linear in L and no score is masked away.
The parts are joined through their log-sum-exp, as flash attention joins its tiles; backward hands
the kernel the *joint* output and log-sum-exp, which makes its probabilities the whole softmax's.

Rows lie one after another (alignment.Span); their attention is computed one by one, which is what
keeps packed rows apart.

Letters: Q = starts, S = slots, L = one row's starts, K = keys, n = key-value heads, g = query heads
per key-value head, d = head size, J = later steps so far. Source: EAGLE-3, arXiv:2503.01840,
section 3.2; joining and backward from FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafter.training.alignment import Span

_BLOCK = 512
"""Queries at once where there is no fused kernel: bounds the scores to [_BLOCK, K] per head."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    spans: Sequence[Span],
) -> Tensor:
    """query [Q, n, g, d]; key, value [S, n, d] of step 0; own: [Q, n, d] pairs of later steps.

    Returns [Q, n, g, d], scaled by 1 / sqrt(d).
    """
    flat = [tensor for pair in own for tensor in pair]
    output: Tensor = _Attend.apply(spans, query, key, value, *flat)
    return output


class _Attend(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, spans: Sequence[Span], q: Tensor, k: Tensor, v: Tensor, *own: Tensor
    ) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=_wide(q))
        for span in spans:
            rows = slice(span.starts, span.starts + span.end - span.first)
            joined, total = _block(q, k, v, rows, span.first, span.end, causal=True)
            if span.first > span.begin:
                before, log = _block(q, k, v, rows, span.begin, span.first, causal=False)
                both = torch.logaddexp(total, log)
                joined = joined * (total - both).exp().to(q.dtype)[..., None]
                joined += before * (log - both).exp().to(q.dtype)[..., None]
                total = both
            out[rows], lse[rows] = joined.permute(2, 0, 1, 3), total.permute(2, 0, 1)
        if own:
            scores = _own_scores(q, own[::2])
            both = torch.logaddexp(lse, scores.logsumexp(-1))
            out *= (lse - both).exp().to(q.dtype)[..., None]
            shares = (scores - both[..., None]).exp().to(q.dtype)
            for j, value in enumerate(own[1::2]):
                out.addcmul_(shares[..., j, None], value[:, :, None])
            lse = both
        ctx.spans = spans
        ctx.save_for_backward(q, k, v, out, lse, *own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *own = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for span in ctx.spans:
            rows = slice(span.starts, span.starts + span.end - span.first)
            pieces = [(span.first, span.end, True)]
            if span.first > span.begin:
                pieces.append((span.begin, span.first, False))
            total = None
            for begin, end, causal in pieces:
                part, dk[begin:end], dv[begin:end] = _block_backward(
                    grad, q, k, v, out, lse, rows, begin, end, causal
                )
                total = part if total is None else total + part
            dq[rows] = total
        grads: list[Tensor] = []
        if own:
            scale = q.shape[-1] ** -0.5
            shares = (_own_scores(q, own[::2]) - lse[..., None]).exp()
            mean = (grad * out).sum(-1, dtype=_wide(q))
            for j, (key, value) in enumerate(zip(own[::2], own[1::2], strict=True)):
                share = shares[..., j]
                pull = (grad * value[:, :, None]).sum(-1, dtype=_wide(q)) - mean
                slope = (share * pull * scale).to(q.dtype)[..., None]
                dq.addcmul_(slope, key[:, :, None])
                grads.append((slope * q).sum(2))
                grads.append((share.to(q.dtype)[..., None] * grad).sum(2))
        return None, dq, dk, dv, *grads


def _wide(q: Tensor) -> torch.dtype:
    """Of scores and their sums: at least float32."""
    return torch.promote_types(q.dtype, torch.float32)


def _own_scores(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """float32 [Q, n, g, J]"""
    scores = [(q * key[:, :, None]).sum(-1, dtype=_wide(q)) for key in keys]
    return torch.stack(scores, -1) * q.shape[-1] ** -0.5


def _heads(q: Tensor, rows: slice) -> Tensor:
    """[Q, n, g, d] -> view [n, g, L, d]: key-value heads stand where kernels expect the batch."""
    return q[rows].permute(1, 2, 0, 3)


def _shared(k: Tensor, begin: int, end: int, groups: int) -> Tensor:
    """[S, n, d] -> view [n, g, K, d], the same for each of the ``groups`` heads."""
    part = k[begin:end].permute(1, 0, 2)[:, None]
    return part.expand(-1, groups, -1, -1)


def _block(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, begin: int, end: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of ``rows`` over keys begin:end alone: output [n, g, L, d] and lse [n, g, L]."""
    query = _heads(q, rows)
    key, value = (_shared(x, begin, end, q.shape[2]) for x in (k, v))
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, causal
        )
    return plain_block(query, key, value, causal)


def _block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    rows: slice, begin: int, end: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients [L, n, g, d], [K, n, d], [K, n, d] of ``rows`` against keys begin:end."""
    key, value = (_shared(x, begin, end, q.shape[2]) for x in (k, v))
    down, query, joint = (_heads(x, rows) for x in (grad, q, out))
    log = lse[rows].permute(1, 2, 0)
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(down, query, key, value, joint, log, 0.0, causal)
    else:
        dq, dk, dv = plain_block_backward(down, query, key, value, joint, log, causal)
    return dq.permute(2, 0, 1, 3), dk.sum(1).transpose(0, 1), dv.sum(1).transpose(0, 1)


def plain_block(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """What the fused kernel computes, in matrix products: for devices where it is not at hand."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    for begin in range(0, query.shape[2], _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        scores = _scores(query[:, :, rows], key, begin, causal)
        lse[:, :, rows] = scores.logsumexp(-1)
        shares = (scores - lse[:, :, rows, None]).exp().to(value.dtype)
        out[:, :, rows] = shares @ value[:, :, : shares.shape[-1]]
    return out, lse


def plain_block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of :func:`plain_block`; ``out`` and ``lse`` may be those of a larger softmax."""
    dq = torch.empty_like(query)
    dk, dv = (torch.zeros(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
    mean = (grad * out).sum(-1, dtype=torch.float32)
    for begin in range(0, query.shape[2], _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        scores = _scores(query[:, :, rows], key, begin, causal)
        seen = scores.shape[-1]
        shares = (scores - lse[:, :, rows, None]).exp()
        pull = (grad[:, :, rows] @ value[:, :, :seen].transpose(-1, -2)).float()
        slope = (shares * (pull - mean[:, :, rows, None]) * query.shape[-1] ** -0.5).to(query.dtype)
        dq[:, :, rows] = slope @ key[:, :, :seen]
        dk[:, :, :seen] += slope.transpose(-1, -2) @ query[:, :, rows]
        dv[:, :, :seen] += shares.to(grad.dtype).transpose(-1, -2) @ grad[:, :, rows]
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, begin: int, causal: bool) -> Tensor:
    """float32 scores of queries from row ``begin`` on against the keys that they may see."""
    if not causal:
        return (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    rows = query.shape[2]
    seen = key[:, :, : begin + rows]
    scores = (query @ seen.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores[..., begin:].masked_fill_(later, float("-inf"))
    return scores
