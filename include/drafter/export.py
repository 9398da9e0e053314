"""Phase export: the trained drafter as directories that SGLang and vLLM load, and a model card.

    export/sglang    midlayer.*, config of LlamaForCausalLMEagle3, layer ids as OUTPUTS of layers
    export/vllm      layers.0.*, config in speculators' format, layer ids as INPUTS of layers

The two number the same states differently, and neither reads the other's names. Weights are in the
dtype that the target is computed in; the embedding is the target's and is not written. Each
directory is read back by serving.py, which shares no code with training, and logits are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drafter import model_card, plan, serving
from drafter.errors import DrafterError
from drafter.evaluation import replay
from drafter.extraction import layer_ids
from drafter.extraction.shards import DTYPES, Row
from drafter.files import (
    file_record,
    read_json,
    read_section,
    whole_file,
    write_json,
    write_section,
)
from drafter.job import Job
from drafter.recipe import Recipe
from drafter.target_head import text_config
from drafter.training import checkpoint, corpus, vocabulary
from drafter.training.alignment import align
from drafter.training.model import Drafter, Shape

_NORMS = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
"""Said, since readers differ in what they take for granted."""

_CHECKED_ROWS, _CHECKED_STARTS, _CHECKED_STEPS = 4, 16, 3
"""Rows, the first drafts of each, and the steps of each draft: bounds the layer's evaluations, one
position at a time, to minutes for a large drafter."""

_TOLERANCE = 1e-3
"""Largest difference of a logit, in units of the largest one: float32 sums in another order."""


def run(job: Job) -> None:
    """Write and check both directories. DrafterError when one does not compute what was trained."""
    recipe, workspace = job.recipe, job.workspace
    inputs = plan.inputs("export", job.dataset, workspace, recipe)
    run_ = workspace.drafter(plan.run_name(workspace, recipe))
    rows = corpus.collect(workspace, recipe)
    head = corpus.read_head(recipe, rows)
    text = text_config(Path(recipe.target.path))
    target = read_json(Path(recipe.target.path) / "config.json")
    name = dtype_name(target)
    drafter = checkpoint.load_drafter(checkpoint.chosen(run_, recipe.train), head)
    drafter = drafter.to(DTYPES[name]).float()
    sample = sorted(rows.witnesses, key=lambda row: row.prompt_tokens)[:_CHECKED_ROWS]
    evaluations = {d: read_json(run_.evaluation(d)) for d in recipe.dataset_names}
    lengths = replay.overall(list(evaluations.values()))
    configs = {
        "sglang": sglang_config(drafter.shape, name, text),
        "vllm": vllm_config(drafter.shape, name, recipe, target),
    }
    differences: dict[str, float] = {}
    for engine, config in configs.items():
        directory = run_.export(engine)
        write_json(directory / "config.json", config)
        write_weights(directory, engine, drafter, DTYPES[name])
        differences[engine] = difference(directory, engine, text, drafter, sample)
        print(f"{engine}: logits differ by at most {differences[engine]:.1e}", flush=True)
    trained = read_section(run_.manifest, "train") or {}
    for engine in configs:
        card = model_card.render(engine, job, run_, target, trained, evaluations, lengths)
        with whole_file(run_.export(engine) / "README.md") as partial:
            partial.write_text(card)
    section = {
        "inputs": inputs,
        "counts": {"logit_difference": differences},
        "acceptance_length": lengths,
        "directories": {
            engine: str(run_.export(engine).relative_to(run_.root)) for engine in configs
        },
        "files": {
            str(path.relative_to(run_.root)): file_record(path)
            for engine in configs
            for path in sorted(run_.export(engine).iterdir())
            if not path.name.startswith(".")
        },
    }
    changed = write_section(run_.manifest, "export", section)
    length = lengths["trained"]
    line = f"exported for {' and '.join(configs)}, acceptance length {length or 1:.2f}"
    job.report(done=True, changed=changed, line=line, acceptance_length=length)
    print(f"{line}: {run_.root / 'export'}", flush=True)


def dtype_name(target: dict[str, Any]) -> str:
    """float32 or bfloat16: what the target's config says it is computed in, bfloat16 otherwise."""
    text = target.get("text_config", target)
    named = text.get("dtype") or text.get("torch_dtype") or target.get("dtype")
    return named if named in DTYPES else "bfloat16"


def layer_config(shape: Shape, dtype: str) -> dict[str, Any]:
    """The drafter's layer as a Llama configuration, rope in both spellings of transformers."""
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def sglang_config(shape: Shape, dtype: str, target: dict[str, Any]) -> dict[str, Any]:
    """A flat configuration, whose layer ids mean what SGLang makes of them for this target.

    ``target`` is its text config. Raises RecipeError when no ids mean the trained layers.
    """
    return {
        **layer_config(shape, dtype),
        **_NORMS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layer_ids.for_sglang(shape.aux_layers, target),
        },
    }


def vllm_config(shape: Shape, dtype: str, recipe: Recipe, target: dict[str, Any]) -> dict[str, Any]:
    """As speculators 0.9.0 writes it."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "embed_requires_grad": False,
        **_NORMS,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": recipe.evaluate.draft_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": target.get("architectures", []),
                "name_or_path": recipe.target.path,
            },
        },
        "transformer_layer_config": layer_config(shape, dtype),
    }


def write_weights(directory: Path, engine: str, drafter: Drafter, dtype: torch.dtype) -> None:
    """model.safetensors under the engine's names; d2t as int64 offsets, t2d as bool.

    Raises DataError, nothing written, unless the two are one bijection: engines read one of them
    and believe it. DrafterError when the disk is full.
    """
    vocabulary.check(drafter.d2t, drafter.t2d, "the trained drafter")
    state = drafter.state_dict()
    if engine == "vllm" and drafter.t2d.all():
        # With the target's whole vocabulary vLLM has no parameter for a map, and stops at one.
        del state["d2t"], state["t2d"]
    tensors = {
        name.replace("midlayer.", serving.LAYER[engine]): tensor.to(
            dtype if tensor.is_floating_point() else tensor.dtype
        ).contiguous()
        for name, tensor in state.items()
    }
    try:
        with whole_file(directory / "model.safetensors") as partial:
            save_file(tensors, partial, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise DrafterError(
            f"{directory} cannot be written ({error}): free disk space and export again"
        ) from None


def difference(
    directory: Path, engine: str, target: dict[str, Any], drafter: Drafter, rows: Sequence[Row]
) -> float:
    """Largest difference of drafts' logits between the directory and ``drafter``, relative.

    Raises DrafterError when it is more than rounding, or when layers or vocabulary came back as
    others.
    """
    served = serving.read(directory, engine, target)
    if tuple(served.aux_layers) != drafter.shape.aux_layers:
        raise DrafterError(
            f"{directory} names layers {served.aux_layers}, trained were "
            f"{list(drafter.shape.aux_layers)}: export again"
        )
    if not torch.equal(served.draft_ids, drafter.draft_ids.cpu()):
        raise DrafterError(f"{directory} drafts other tokens than were trained: export again")
    worst = 0.0
    for row in rows:
        begun = _beginning(row)
        expected, followed = _drafts(drafter, begun)
        found = serving.drafts(
            served, begun.input_ids_T[:-1], begun.aux_TAD[:-2].float(), drafter.embed, followed
        )
        scale = expected.abs().amax((1, 2))
        worst = max(worst, float(((found - expected).abs().amax((1, 2)) / scale).max()))
    if not worst <= _TOLERANCE:
        raise DrafterError(
            f"{directory}: logits differ from the trained drafter's by {worst:.1e} of the largest, "
            f"at most {_TOLERANCE:.0e} is rounding: do not serve it, export again"
        )
    return worst


def _beginning(row: Row) -> Row:
    """``row`` up to the token that ends the last draft to be checked."""
    end = row.prompt_tokens + _CHECKED_STARTS + 1
    return replace(
        row,
        input_ids_T=row.input_ids_T[:end],
        aux_TAD=row.aux_TAD[:end],
        final_TD=row.final_TD[:end],
    )


def _drafts(drafter: Drafter, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [Q, K, D] of the draft from each start, and the tokens [Q, K - 1] that it follows: its
    own, so that both sides of the comparison follow the same ones where two logits are equal."""
    batch = align([row]).to(drafter.d2t.device, torch.float32)
    with torch.inference_mode():
        unroll = drafter.unroll(batch)
        logits, followed = [drafter.logits(unroll.first())], []
        for _ in range(1, _CHECKED_STEPS):
            followed.append(drafter.draft_ids[logits[-1].argmax(-1)])
            logits.append(drafter.logits(unroll.next(followed[-1])))
    return torch.stack(logits, 1), torch.stack(followed, 1)
