"""Drafters as others publish them: small, random, in each of the public layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from unit.drafter_site import CONFIG, EMBED, HIDDEN, LM_HEAD, VOCAB

from drafter.files import write_json
from drafter.target_head import TargetHead

HEAD = TargetHead(EMBED, torch.ones(HIDDEN), 1e-6, LM_HEAD)
TARGET: dict[str, Any] = {**CONFIG, "model_type": "llama", "num_hidden_layers": 8}
DRAFT, INNER = 40, 56
IDS = "eagle_aux_hidden_state_layer_ids"
CHOSEN = torch.tensor([*range(5), *range(10, 30), *range(60, 75)])
"""Target ids of the draft vocabulary: neighbours among them, as in any real one."""

LAYER: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "vocab_size": VOCAB,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    **LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT,
    "rope_theta": 1e6, "eagle_config": {"use_aux_hidden_state": True, IDS: [0, 1, 2]},
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
    "draft_vocab_size": DRAFT, IDS: [1, 2, 3], "norm_before_residual": False,
    "norm_before_fc": False, "norm_output": False, "fc_norm": False, "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **LAYER, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
}  # fmt: skip


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Under SGLang's names without a prefix."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT, HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (32, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, 32),
        "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    made = {name: torch.randn(*size, generator=generator) for name, size in shapes.items()}
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, CHOSEN, True)
    maps = {"d2t": CHOSEN - torch.arange(DRAFT), "t2d": t2d}
    return {name: tensor.to(dtype) for name, tensor in made.items()} | maps


def renamed(stored: dict[str, Tensor], layer: str, prefix: str = "") -> dict[str, Tensor]:
    """The layer under another name, and everything but the output and the maps under a prefix."""
    outside = ("lm_head.weight", "d2t", "t2d")
    return {
        name if name in outside else prefix + name.replace("midlayer.", layer): tensor
        for name, tensor in stored.items()
    }


Write = Callable[[Path], None]


def write(directory: Path, config: dict[str, Any], stored: dict[str, Tensor]) -> Path:
    write_json(directory / "config.json", config)
    save_file(stored, directory / "model.safetensors")
    return directory


def specforge(directory: Path) -> None:
    write(directory, PLAIN, tensors())


def sglang_with_prefix(directory: Path) -> None:
    write(directory, PLAIN, renamed(tensors(), "midlayer.", "model."))


def plain_as_layers(directory: Path) -> None:
    stored = renamed(tensors(), "layers.0.")
    write(directory, PLAIN, {name: tensor for name, tensor in stored.items() if name != "t2d"})


def safeailab(directory: Path) -> None:
    """A pickled table, half floats, the target's embedding, no ids."""
    config = {k: v for k, v in PLAIN.items() if k != "eagle_config"}
    write_json(directory / "config.json", {**config, "architectures": ["LlamaForCausalLM"]})
    stored = tensors(torch.float16) | {"embed_tokens.weight": EMBED.half()}
    torch.save(stored, directory / "pytorch_model.bin")


def speculators(directory: Path) -> None:
    stored = renamed(tensors(), "layers.0.") | {"embed_tokens.weight": EMBED.bfloat16()}
    write(directory, SPECULATORS, stored)


def in_two_files(directory: Path) -> None:
    write_json(directory / "config.json", PLAIN)
    stored = tensors(torch.float32)
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(stored)}
    for file in set(names.values()):
        save_file({n: t for n, t in stored.items() if names[n] == file}, directory / file)
    write_json(directory / "model.safetensors.index.json", {"weight_map": names})


FORMATS: dict[str, Write] = {
    "SpecForge": specforge,
    "SGLang with a prefix": sglang_with_prefix,
    "plain with layers.0": plain_as_layers,
    "SafeAILab": safeailab,
    "speculators": speculators,
    "in two files": in_two_files,
}
