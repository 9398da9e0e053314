"""What the target says greedily, by transformers alone, and how sure it is of a token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

BATCH = 64


def load(target: Path, dtype: torch.dtype) -> Any:
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()


@torch.inference_mode()
def greedy(
    model: Any, prompts: Mapping[str, list[int]], max_new_tokens: int
) -> dict[str, list[int]]:
    """Output ids by sample id, the stop id included."""
    pad, stop = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    found: dict[str, list[int]] = {}
    shortest_first = sorted(prompts, key=lambda sample_id: len(prompts[sample_id]))
    for i in range(0, len(shortest_first), BATCH):
        batch = shortest_first[i : i + BATCH]
        width = max(len(prompts[sample_id]) for sample_id in batch)
        gaps = [width - len(prompts[sample_id]) for sample_id in batch]
        pairs = list(zip(gaps, batch, strict=True))
        output = model.generate(
            input_ids=torch.tensor([[pad] * gap + prompts[name] for gap, name in pairs]),
            attention_mask=torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps]),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        for sample_id, ids in zip(batch, output[:, width:].tolist(), strict=True):
            found[sample_id] = ids[: ids.index(stop) + 1] if stop in ids else ids
    return found


def first_difference(one: list[int], other: list[int]) -> int:
    """Index from which on two answers that differ are no longer the same."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


@torch.inference_mode()
def margin(model: Any, ids: list[int]) -> float:
    """By how much the likeliest next token's logit is above the second's."""
    first, second = model(torch.tensor([ids])).logits[0, -1].topk(2).values.tolist()
    return float(first - second)
