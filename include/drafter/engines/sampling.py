"""From logits to the next ids: temperature, top_p, top_k, and each row's own random numbers.

R = rows, V = vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_GREEDY_BELOW = 1e-6
"""Temperatures that SGLang takes as 0."""


@dataclass(eq=False)
class Sampling:
    """How one row is sampled; it holds the row's place in its sequence of random numbers."""

    temperature: float = 1.0
    """0 takes the most likely id."""

    top_p: float = 1.0
    top_k: int = -1
    """-1: all."""

    random: random.Random = field(default_factory=random.Random)
    """One draw per id: a seed gives the same ids again, up to float32 rounding of the logits."""

    @property
    def is_narrow(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


def next_ids(logits_RV: Tensor, samplings: Sequence[Sampling]) -> list[int]:
    """The next id of each row, by its own sampling: no row sees how its neighbours are sampled."""
    chosen: list[int] = logits_RV.argmax(-1).tolist()
    sampled = [i for i, s in enumerate(samplings) if s.temperature >= _GREEDY_BELOW]
    if not sampled:
        return chosen
    temperatures = torch.tensor([[samplings[i].temperature] for i in sampled])
    probabilities_RV = (logits_RV[sampled] / temperatures).double().softmax(-1)
    narrow = [j for j, i in enumerate(sampled) if samplings[i].is_narrow]
    if narrow:
        among = [samplings[sampled[j]] for j in narrow]
        probabilities_RV[narrow] = _likely(probabilities_RV[narrow], among)
    cumulative_RV = probabilities_RV.cumsum(-1)
    draws = torch.tensor([[samplings[i].random.random()] for i in sampled], dtype=torch.double)
    picked = torch.searchsorted(cumulative_RV, draws * cumulative_RV[:, -1:], right=True)
    for i, token in zip(sampled, picked[:, 0].tolist(), strict=True):
        chosen[i] = token
    return chosen


def _likely(probabilities_RV: Tensor, samplings: list[Sampling]) -> Tensor:
    """Zero beyond the top_k likeliest, and beyond those that reach top_p; ties at the edge stay."""
    # numpy, because torch sorts values only together with their places, eight times slower.
    rising = torch.from_numpy(np.sort(probabilities_RV.numpy(), -1))
    falling = rising.flip(-1)
    num_ids = falling.shape[-1]
    top_p = torch.tensor([[s.top_p] for s in samplings], dtype=torch.double)
    top_k = torch.tensor([[min(s.top_k, num_ids) if s.top_k > 0 else num_ids] for s in samplings])
    reach_p = (falling.cumsum(-1) - falling < top_p).sum(-1, keepdim=True)
    least = falling.gather(-1, torch.minimum(reach_p, top_k) - 1)
    return probabilities_RV * (probabilities_RV >= least)
