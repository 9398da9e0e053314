"""Soft cross entropy of every draft step against the target, without keeping a logit.

The target's distribution over the draft vocabulary (renormalised) judges the drafter's. Logits of a
vocabulary of 163,840 do not fit for a whole batch, so they exist for one chunk of rows at a time,
only where supervised, and gradients are taken on the spot: the loss is a sum, so nothing that comes
after it changes them but a factor. A target row judges step i of the start i places before it
(alignment.py); its softmax is computed once for all steps.

Letters: Q = starts, H = hidden size, D = draft vocabulary, K = draft steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 512
"""Target rows at once: 335 MB of float32 logits at 163,840 entries, cache-sized at 1,000."""


@dataclass(frozen=True)
class Judge:
    """What the drafter is compared with: target states and the rows of its output matrix."""

    normed_QH: Tensor
    """Target states after its last norm."""
    weight_DH: Tensor
    """Rows of its output matrix that are in the draft vocabulary."""
    left_Q: Tensor
    """int64: step i is supervised where left > i."""
    count_K: Tensor | None = None
    """float32: supervised starts of each step that the means are over, should these be a part of
    them only; None: of these."""


@dataclass(frozen=True)
class Losses:
    total: Tensor
    """Scalar: sum over steps of decay ** i * mean over the supervised starts of step i. The losses
    of the parts of a batch add up to the loss of the whole."""
    mean: Tensor
    """float32 [K]: that mean per step, 0 where a step has no supervised start."""
    accuracy: Tensor
    """float32 [K]: share of them where both distributions have the same most likely token of the
    draft vocabulary; what the target says outside it no drafter can, so an engine accepts less."""


def soft_cross_entropy(
    states: Sequence[Tensor], weight: Tensor, judge: Judge, decay: float
) -> Losses:
    """``states``: normed drafter states [Q, H], one per step; ``weight`` [D, H]: its lm_head."""
    total, mean, accuracy = _SoftCrossEntropy.apply(judge, decay, weight, *states)
    return Losses(total, mean, accuracy)


class _SoftCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, judge: Judge, decay: float, weight: Tensor, *states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, device = len(states), weight.device
        learns = any(ctx.needs_input_grad)
        # Under autocast each product would convert these anew, and they are the largest there are.
        matrix, wanted_matrix = _for_products(weight), _for_products(judge.weight_DH)
        count = judge.count_K
        if count is None:
            count = torch.stack([(judge.left_Q > i).sum() for i in range(steps)]).float()
        share = 1 / count.clamp(min=1)
        factor = decay ** torch.arange(steps, device=device) * share
        loss, hits = torch.zeros(2, steps, device=device)
        grads = [torch.zeros_like(state) for state in states] if learns else []
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if learns else weight
        for begin in range(0, len(judge.left_Q), _CHUNK):
            end = min(begin + _CHUNK, len(judge.left_Q))
            wanted = (judge.normed_QH[begin:end] @ wanted_matrix.T).float().softmax(-1)
            best = wanted.argmax(-1)
            for i, state in enumerate(states):
                start = slice(max(begin - i, 0), max(end - i, 0))
                row = slice(start.start + i - begin, None)
                drawn = (state[start] @ matrix.T).float().log_softmax(-1)
                kept = (judge.left_Q[start] > i).float()
                hits[i] += ((drawn.argmax(-1) == best[row]) * kept).sum()
                loss[i] -= ((wanted[row] * drawn).sum(-1) * kept).sum()
                if not learns:
                    continue
                slope = drawn.exp_().sub_(wanted[row]).mul_((kept * factor[i])[:, None])
                slope = slope.to(state.dtype)
                grads[i][start] = slope @ matrix
                weight_grad += slope.T @ state[start]
        ctx.save_for_backward(weight_grad.to(weight.dtype), *grads)
        ctx.mark_non_differentiable(mean := loss * share, accuracy := hits * share)
        return (loss * factor).sum(), mean, accuracy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad * saved for saved in ctx.saved_tensors)


def _for_products(matrix: Tensor) -> Tensor:
    """In the dtype that matrix products have here."""
    device = matrix.device.type
    lower = torch.is_autocast_enabled(device)
    return matrix.to(torch.get_autocast_dtype(device)) if lower else matrix
