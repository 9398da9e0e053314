"""The in-process engine gives the states of a plain forward, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from unit.random_targets import (
    AUX_LAYERS,
    LAYERS,
    one_thread,
    save_target,
)

from drafter.backends.transformers import TransformersBackend
from drafter.errors import RecipeError
from drafter.target_head import load_head


@pytest.mark.parametrize("kind", ["qwen3", "llama", "llava", "qwen2.5-vl", "deepseek-v3"])
def test_every_layer_of_a_padded_batch_equals_a_plain_forward(tmp_path: Path, kind: str) -> None:
    with one_thread():
        model = save_target(tmp_path, kind)
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


def test_a_checkpoint_that_lacks_a_weight_is_refused_before_it_is_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_target(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"lacks 1 weights, first model\.layers\.3\.mlp\.up_proj"):
        TransformersBackend(tmp_path, torch.float32, AUX_LAYERS)


def test_a_directory_without_a_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(RecipeError, match=r"correct target\.path"):
        TransformersBackend(tmp_path, torch.float32, AUX_LAYERS)
    with pytest.raises(RecipeError, match="rms_norm_eps"):
        load_head(tmp_path)
