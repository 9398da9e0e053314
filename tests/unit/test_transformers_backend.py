"""The in-process engine gives the states of a plain forward, or says why it cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from unit.random_targets import (
    AUX_LAYERS,
    LAYERS,
    greedy_rows,
    one_thread,
    save_own_code,
    save_target,
    validated_job,
)

from drafter.backends.target_model import load_target
from drafter.backends.transformers import TransformersBackend
from drafter.errors import RecipeError
from drafter.extract import run
from drafter.files import read_json, read_section
from drafter.target_head import load_head

KINDS = ["qwen3", "llama", "llava", "qwen2.5-vl", "deepseek-v3", "own code"]


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers copies a checkpoint's own code: nowhere outside these tests."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def saved(directory: Path, kind: str) -> Any:
    return save_own_code(directory) if kind == "own code" else save_target(directory, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_a_padded_batch_equals_a_plain_forward(tmp_path: Path, kind: str) -> None:
    with one_thread():
        model = saved(tmp_path, kind)
        layers = tuple(range(LAYERS))
        backend = TransformersBackend(tmp_path, torch.float32, layers)
        head = backend.head()
        batch = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [35, 8], [9, 7, 9, 3, 2]]
        for ids, got in zip(batch, backend.features(batch), strict=True):
            plain = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
            want = [states[0] for states in plain.hidden_states]
            for k in layers:
                torch.testing.assert_close(got.aux_TAD[:, k], want[k], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(head.normed(got.final_TD), want[-1], rtol=1e-4, atol=1e-4)
            for logits in (head.logits(got.final_TD), backend.logits_rows(got.final_TD)):
                torch.testing.assert_close(logits, plain.logits[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_goes_through_the_whole_phase_with_all_gates(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    with one_thread():
        rows = greedy_rows(saved(tmp_path / "target", kind), 6)
        # SGLang cannot be told to read layer 1 of a DeepSeek, and a drafter is to be served.
        layers = (2, 3, 4) if kind == "deepseek-v3" else AUX_LAYERS
        job = validated_job(
            tmp_path, tmp_path / "target", rows, dtype=dtype, min_argmax_share=0.95,
            shard_tokens=90, aux_layers=layers,
        )  # fmt: skip
        run(job)
    section = read_section(job.workspace.hidden_states("B1").manifest, "extract")
    assert section is not None
    assert section["counts"]["rows"] == 6
    assert section["counts"]["shards"] > 1
    assert section["gates"]["argmax_share"] > 0.98
    assert section["gates"]["reference_error"] < (1e-5 if dtype == "float32" else 1e-2)
    assert section["gates"]["alone_error"] < (1e-5 if dtype == "float32" else 1e-2)


def edited(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = read_json(directory / "config.json")
    change(config)
    (directory / "config.json").write_bytes(orjson.dumps(config))


def no_code(directory: Path) -> None:
    edited(directory, lambda config: config.pop("auto_map"))


def no_causal_model(directory: Path) -> None:
    edited(directory, lambda config: config["auto_map"].pop("AutoModelForCausalLM"))


def code_elsewhere(directory: Path) -> None:
    name = "someone/else--modeling_homemade.Homemade"
    edited(directory, lambda config: config["auto_map"].update(AutoModelForCausalLM=name))


def no_code_but_names(directory: Path) -> None:
    edited(directory, lambda config: config.update(auto_map=dict.fromkeys(config["auto_map"])))


def no_code_for_one(directory: Path) -> None:
    edited(directory, lambda config: config["auto_map"].update(AutoModelForCausalLM=None))


def code_for_another_transformers(directory: Path) -> None:
    path = directory / "modeling_homemade.py"
    path.write_text(path.read_text().replace("Qwen3ForCausalLM\n", "Qwen3ForCausalLM, Gone\n"))


def code_that_stumbles(directory: Path) -> None:
    path = directory / "modeling_homemade.py"
    path.write_text(path.read_text().replace("config.text_config", "config.nonesuch"))


def no_output_matrix(directory: Path) -> None:
    path = directory / "modeling_homemade.py"
    embeddings = "self.language_model.get_output_embeddings()"
    path.write_text(path.read_text().replace(embeddings, "None"))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (no_code, r"is a 'homemade', which transformers .* does not know"),
        (no_causal_model, r"auto_map in its config\.json has none of AutoModelForCausalLM"),
        (no_code_but_names, r"names no code of its own in auto_map"),
        (no_code_for_one, r"auto_map in its config\.json has none of AutoModelForCausalLM"),
        (code_elsewhere, r"names code outside its directory, someone/else--modeling"),
        (code_for_another_transformers, r"cannot be loaded, by its own code \(cannot import name"),
        (code_that_stumbles, r"cannot be loaded, by its own code \(.*nonesuch"),
        (no_output_matrix, r"is a Homemade without an output matrix"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_checkpoint_whose_own_code_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    save_own_code(tmp_path)
    spoil(tmp_path)
    with pytest.raises(RecipeError, match=sentence) as refused:
        TransformersBackend(tmp_path, torch.float32, AUX_LAYERS)
    assert "\n" not in str(refused.value)


def test_a_forward_pass_that_stumbles_is_one_sentence(tmp_path: Path) -> None:
    save_own_code(tmp_path)
    code = tmp_path / "modeling_homemade.py"
    code.write_text(
        code.read_text().replace("return self.language_model(\n", "return input_ids.gone(\n")
    )
    backend = TransformersBackend(tmp_path, torch.float32, AUX_LAYERS)
    with pytest.raises(RecipeError, match=r"cannot be run, by its own code \('Tensor' object"):
        backend.reference([1, 2, 3])


def test_a_model_that_transformers_knows_is_not_run_by_the_checkpoints_code(
    tmp_path: Path,
) -> None:
    save_target(tmp_path)
    (tmp_path / "modeling_own.py").write_text("raise AssertionError('was run')\n")
    own = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.OwnConfig"}
    edited(tmp_path, lambda config: config.update(auto_map=own))
    TransformersBackend(tmp_path, torch.float32, AUX_LAYERS)


def test_several_gpus_without_accelerate_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target(tmp_path)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(RecipeError, match=r"2 GPUs share .* pip install accelerate"):
        load_target(tmp_path, torch.float32, gpus=2)


def test_a_checkpoint_that_lacks_a_weight_is_refused_before_it_is_random(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"lacks 1 weights, first model\.layers\.3\.mlp\.up_proj"):
        TransformersBackend(tmp_path, torch.float32, AUX_LAYERS)


def test_a_directory_without_a_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"has no config\.json"):
        TransformersBackend(tmp_path, torch.float32, AUX_LAYERS)
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(RecipeError, match=r"correct target\.path"):
        TransformersBackend(tmp_path, torch.float32, AUX_LAYERS)
    with pytest.raises(RecipeError, match="rms_norm_eps"):
        load_head(tmp_path)
