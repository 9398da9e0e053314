"""A random model of a few thousand parameters, and what transformers answers with it."""

import random
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96
CONTEXT = 4096
EOS_IDS = [5, 6, 7]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # wide, so that greedy answers do not repeat one id
    "eos_token_id": None,
}


def saved(model: Any, model_dir: Path) -> Path:
    model.generation_config.eos_token_id = EOS_IDS
    model.save_pretrained(model_dir)
    return model_dir


def prompts(num: int, length: int) -> list[list[int]]:
    rng = random.Random(length)
    return [[rng.randrange(8, VOCABULARY) for _ in range(length)] for _ in range(num)]


@torch.inference_mode()
def greedy(model: Any, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """What transformers answers to prompts of one length, recomputed at each step."""
    ids = torch.tensor(prompts)
    for _ in range(num_new):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[:, len(prompts[0]) :].tolist()
