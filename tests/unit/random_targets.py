"""Small real models with random weights and what extraction needs around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
import transformers
from safetensors.torch import save_file

from drafter.files import file_record, write_section
from drafter.job import Job
from drafter.layout import JobDir, Prepared, Workspace
from drafter.recipe import parse_recipe

VOCAB = 97
LAYERS = 6
AUX_LAYERS = (1, 3, 4)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Such small tensors gain nothing from a second thread, and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


OWN_CODE = {
    "configuration_homemade.py": """
from transformers import PretrainedConfig, Qwen3Config


class HomemadeConfig(PretrainedConfig):
    model_type = "homemade"
    sub_configs = {"text_config": Qwen3Config}

    def __init__(self, text_config=None, **kwargs):
        self.text_config = Qwen3Config(**(text_config or {}))
        super().__init__(**kwargs)
""",
    "modeling_homemade.py": """
from transformers import PreTrainedModel, Qwen3ForCausalLM

from .configuration_homemade import HomemadeConfig


class Homemade(PreTrainedModel):
    config_class = HomemadeConfig

    def __init__(self, config):
        super().__init__(config)
        self.language_model = Qwen3ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def forward(self, input_ids, output_hidden_states=False, use_cache=False):
        return self.language_model(
            input_ids, output_hidden_states=output_hidden_states, use_cache=use_cache
        )
""",
}
"""A model that transformers does not know, a causal model inside another as Kimi-K2.5 is."""


def save_own_code(directory: Path) -> Any:
    """A checkpoint with code of its own; returns the causal model that is inside."""
    inner = save_target(directory)
    for path in directory.glob("model*"):
        path.unlink()
    weights = {f"language_model.{name}": w for name, w in inner.state_dict().items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    for name, source in OWN_CODE.items():
        (directory / name).write_text(source)
    config = {
        "model_type": "homemade",
        "architectures": ["Homemade"],
        "auto_map": {
            "AutoConfig": "configuration_homemade.HomemadeConfig",
            "AutoModelForCausalLM": "modeling_homemade.Homemade",
        },
        "text_config": orjson.loads((directory / "config.json").read_bytes()),
    }
    (directory / "config.json").write_bytes(orjson.dumps(config))
    return inner


def save_target(directory: Path, kind: str = "qwen3") -> Any:
    """Make, save and return a model whose greedy text varies and whose norms are not all ones."""
    torch.manual_seed(0)
    model: Any
    if kind == "llava":
        text = transformers.LlamaConfig(**SHAPE)
        vision = transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            image_size=8, patch_size=4,
        )  # fmt: skip
        config = transformers.LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=VOCAB - 1
        )
        model = transformers.LlavaForConditionalGeneration(config)
    elif kind == "qwen2.5-vl":
        shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**shape, "rope_parameters": rope},
            vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                           "out_hidden_size": 32},
            image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93,
        )  # fmt: skip
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    elif kind == "deepseek-v3":
        model = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **{k: v for k, v in SHAPE.items() if k != "head_dim"} | {"num_key_value_heads": 4},
                q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                v_head_dim=8, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
                moe_intermediate_size=16, first_k_dense_replace=1,
            )
        )  # fmt: skip
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True)
        )
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = 1 + 0.7 * torch.randn_like(weight)
        elif weight.dim() == 2:
            weight.data.normal_(std=0.25)
    model.eval().requires_grad_(False)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, max_shard_size="30KB" if kind == "qwen3" else "1GB")
    (directory / "tokenizer.json").write_text("{}")
    return model


def greedy_rows(model: Any, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Tokenized rows of many lengths whose responses are the model's own greedy ones."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        prompt_tokens, total = (
            int(torch.randint(low, high, (1,), generator=generator))
            for low, high in ((2, 9), (12, 40))
        )
        ids = torch.randint(0, 80, (1, prompt_tokens), generator=generator)
        while ids.shape[1] < total:
            following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, following], dim=1)
        rows.append(
            {
                "sample_id": f"B1-{i:04d}",
                "input_ids": ids[0].tolist(),
                "prompt_tokens": prompt_tokens,
            }
        )
    return rows


def validated_job(root: Path, target: Path, rows: Sequence[dict[str, Any]], **extract: Any) -> Job:
    """A job to extract ``rows`` as if validate had left them."""
    settings = {
        "dtype": "float32",
        "aux_layers": AUX_LAYERS,
        "max_length": 64,
        "batch_tokens": 128,
        "shard_tokens": 200,
        "min_argmax_share": 0.9,
    }
    recipe = parse_recipe(
        {
            "name": "test",
            "target": {"path": str(target), "revision": "r1"},
            "engine": {"urls": ["http://127.0.0.1:1"]},
            "datasets": [{"name": "B1", "format": "glaive", "path": "/x", "unbounded": True}],
            "extract": settings | extract,
            "host": {"workspace": str(root)},
        },
        "test",
    )
    write_tokenized(Workspace(root).prepared("B1"), rows)
    directory = JobDir(root / "jobs" / "extract" / "B1")
    directory.root.mkdir(parents=True, exist_ok=True)
    return Job("extract", "B1", recipe, directory, "start", "code", "run", "resume", None, 1)


def write_tokenized(prepared: Prepared, rows: Sequence[dict[str, Any]]) -> None:
    prepared.root.mkdir(parents=True, exist_ok=True)
    prepared.tokenized.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    files = {prepared.tokenized.name: file_record(prepared.tokenized)}
    write_section(prepared.manifest, "validate", {"inputs": {}, "counts": {}, "files": files})
