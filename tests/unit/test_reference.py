"""Beside a server, as much of the target runs in this process as fits, or nothing, and says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from unit.random_targets import greedy_rows, one_thread, save_own_code, save_target, validated_job

from drafter.backends import reference
from drafter.backends.reference import PlainForward
from drafter.backends.transformers import TransformersBackend
from drafter.extract import extract
from drafter.extraction.gates import Reference
from drafter.extraction.shards import Features, read_rows
from drafter.files import read_json

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
KINDS = ["qwen3", "llama", "llava", "qwen2.5-vl", "deepseek-v3"]


@pytest.fixture(autouse=True)
def one_thread_each() -> Iterator[None]:
    with one_thread():
        yield


def room_for(monkeypatch: pytest.MonkeyPatch, target: Path, share: float) -> None:
    """As if the machine had this share of what the whole target needs twice over."""
    weights = [w for path in target.glob("*.safetensors") for w in load_file(path).values()]
    needed_gb = 2 * 4 * sum(weight.numel() for weight in weights) / 1e9
    monkeypatch.setattr(reference, "available_gb", lambda: needed_gb * share)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_target_runs_where_its_weights_fit_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = save_target(tmp_path, kind)
    room_for(monkeypatch, tmp_path, 1.01)
    got = PlainForward(tmp_path, 2)(IDS)
    want = model(input_ids=torch.tensor([IDS]), output_hidden_states=True)
    assert got is not None and got.normed_TD is not None and got.logits_LV is not None
    torch.testing.assert_close([*got.layers, got.normed_TD], [h[0] for h in want.hidden_states])
    torch.testing.assert_close(got.logits_LV, want.logits[0])


@pytest.mark.parametrize("num_layers", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_layers_run_where_the_whole_target_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, num_layers: int
) -> None:
    model = save_target(tmp_path, kind)
    room_for(monkeypatch, tmp_path, 0.99)
    got = PlainForward(tmp_path, num_layers)(IDS)
    want = model(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert got is not None and got.normed_TD is None and got.logits_LV is None
    assert len(got.layers) == max(num_layers, 1) + 1
    for k, layer_TD in enumerate(got.layers):
        torch.testing.assert_close(layer_TD, want[k][0])


def test_nothing_runs_where_the_first_layers_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path)
    room_for(monkeypatch, tmp_path, 0.1)
    assert PlainForward(tmp_path, 2)(IDS) is None
    assert "its first 2 layers need" in capsys.readouterr().out


def quantise(target: Path, from_layer: int) -> None:
    """Store the matrices of all layers from there on as integers, as a quantised checkpoint has."""
    weights: dict[str, Any] = load_file(target / "model.safetensors")
    for name in [n for n in weights if ".mlp.up_proj" in n]:
        if int(name.split(".")[2]) >= from_layer:
            weights[name.removesuffix("weight") + "weight_packed"] = weights.pop(name).to(
                torch.int8
            )
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = read_json(target / "config.json")
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (target / "config.json").write_bytes(orjson.dumps(config))


def test_first_layers_that_are_not_quantised_run_though_later_ones_are(tmp_path: Path) -> None:
    model = save_target(tmp_path, "llama")
    quantise(tmp_path, 2)
    got = PlainForward(tmp_path, 2)(IDS)
    want = model(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert got is not None and got.normed_TD is None
    torch.testing.assert_close(got.layers[2], want[2][0])


def test_the_first_layer_alone_runs_where_the_second_is_quantised(tmp_path: Path) -> None:
    model = save_target(tmp_path, "llama")
    quantise(tmp_path, 1)
    got = PlainForward(tmp_path, 3)(IDS)
    want = model(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert got is not None and len(got.layers) == 2
    torch.testing.assert_close(got.layers[1], want[1][0])


def test_nothing_runs_where_the_first_layers_are_quantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path, "llama")
    quantise(tmp_path, 0)
    assert PlainForward(tmp_path, 2)(IDS) is None
    assert "its weights are quantised" in capsys.readouterr().out


def test_a_target_that_only_the_server_knows_runs_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path, "llama")
    config = read_json(tmp_path / "config.json") | {"model_type": "newer"}
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    assert PlainForward(tmp_path, 2)(IDS) is None
    assert f"'newer', which transformers {transformers.__version__}" in capsys.readouterr().out


def test_a_plain_forward_that_stumbles_over_old_code_is_the_reason_why_there_is_none(
    tmp_path: Path,
) -> None:
    save_own_code(tmp_path)
    code = tmp_path / "modeling_homemade.py"
    code.write_text(
        code.read_text().replace(
            "        return self.language_model(\n", "        return input_ids.gone(\n"
        )
    )
    plain = PlainForward(tmp_path, 2)
    assert plain(IDS) is None
    assert "cannot be run, by its own code ('Tensor' object has no attribute" in plain.missing


class Server(TransformersBackend):
    """A backend whose plain forward is not its own."""

    def __init__(self, target_dir: Path, dtype: torch.dtype, aux_layers: Sequence[int]) -> None:
        super().__init__(target_dir, dtype, aux_layers)
        self._plain = PlainForward(target_dir, min(aux_layers))
        self.no_reference = ""

    def reference(self, input_ids: list[int]) -> Reference | None:  # type: ignore[override]
        return self._plain(input_ids)

    def features(self, batch: list[list[int]]) -> list[Features]:
        return [
            Features(got.aux_TAD, got.final_TD, self.head().embed[torch.tensor(ids)], ids)
            for ids, got in zip(batch, super().features(batch), strict=True)
        ]


@pytest.mark.parametrize("share", [1.01, 0.99, 0.01], ids=["whole", "first layers", "nothing"])
def test_extraction_passes_with_as_much_of_the_target_as_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    rows = greedy_rows(save_target(tmp_path / "target"), 4)
    room_for(monkeypatch, tmp_path / "target", share)
    job = validated_job(tmp_path, tmp_path / "target", rows)
    extract(job, Server)
    assert len(list(read_rows(job.workspace.hidden_states("B1")))) == 4
