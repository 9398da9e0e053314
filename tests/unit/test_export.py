"""Exports: each engine's names and numbers, and a check that a wrong one does not pass."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.drafter_site import AUX_LAYERS, FAMILY, HIDDEN, VOCAB, DrafterSite, TableBackend

from drafter import checkpoint, corpus, export, serving, train
from drafter.errors import DataError, DrafterError
from drafter.evaluate import evaluate
from drafter.files import file_record, read_json, read_section, write_json

ENGINES = ("sglang", "vllm")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> DrafterSite:
    torch.set_num_threads(1)
    site = DrafterSite(
        tmp_path_factory.mktemp("export"),
        train={"steps": 20, "checkpoint_every_steps": 20, "no_states_baseline": False},
    )
    train.run(site.job("train"))
    for dataset in site.datasets:
        site.answer_greedily(dataset)
        evaluate(site.job("evaluate", dataset), FAMILY, TableBackend)
    export.run(site.job("export"))
    return site


@pytest.fixture
def drafter(site):
    head = corpus.read_head(site.recipe, corpus.collect(site.workspace, site.recipe))
    return checkpoint.load_drafter(site.run.checkpoint(20), head)


def test_each_engine_gets_its_own_names(site, drafter):
    sglang, vllm = (load_file(site.run.export(e) / "model.safetensors") for e in ENGINES)
    assert set(sglang) == set(drafter.state_dict())
    assert set(vllm) == {name.replace("midlayer.", "layers.0.") for name in sglang}
    assert not any("embed" in name for name in sglang)
    for name, tensor in sglang.items():
        assert torch.equal(tensor, vllm[name.replace("midlayer.", "layers.0.")])
        assert torch.equal(tensor, drafter.state_dict()[name])
    assert (sglang["d2t"].dtype, sglang["t2d"].dtype) == (torch.int64, torch.bool)
    assert (sglang["d2t"].shape, sglang["t2d"].shape) == ((90,), (VOCAB,))


def test_sglang_counts_outputs_and_vllm_inputs_of_layers(site):
    sglang, vllm = (read_json(site.run.export(engine) / "config.json") for engine in ENGINES)
    assert sglang["architectures"] == ["LlamaForCausalLMEagle3"]
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert vllm["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)
    assert vllm["speculators_model_type"] == "eagle3"
    assert vllm["speculators_config"]["verifier"]["name_or_path"] == site.recipe.target.path
    assert vllm["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    for name in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"):
        assert vllm[name] is False
    for config in (sglang, vllm["transformer_layer_config"]):
        assert (config["hidden_size"], config["num_hidden_layers"]) == (HIDDEN, 1)
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
        assert config["vocab_size"] == VOCAB and config["tie_word_embeddings"] is False
    assert sglang["draft_vocab_size"] == vllm["draft_vocab_size"] == 90


def test_the_manifest_and_the_card_say_what_was_measured(site):
    section = read_section(site.run.manifest, "export")
    assert section["directories"] == {"sglang": "export/sglang", "vllm": "export/vllm"}
    assert all(d < 1e-4 for d in section["counts"]["logit_difference"].values())
    length = section["acceptance_length"]["trained"]
    assert length > 1
    for engine in ENGINES:
        weights = site.run.export(engine) / "model.safetensors"
        record = file_record(weights)
        assert section["files"][f"export/{engine}/model.safetensors"] == record
        card = (site.run.export(engine) / "README.md").read_text()
        assert record["sha256"] in card and f"{length:.2f}" in card
        assert str(site.run.export(engine)) in card
        assert {"sglang": "EAGLE3", "vllm": "vllm serve"}[engine] in card
        assert "B1" in card and "20 steps" in card
    before = {path: path.read_bytes() for path in site.run.root.rglob("*") if path.is_file()}
    export.run(site.job("export"))
    assert before == {path: path.read_bytes() for path in before}
    assert not read_json(site.job("export").dir.progress)["changed"]


def exported(tmp_path, site, drafter, engine):
    target = read_json(site.root / "target" / "config.json")
    config = {
        "sglang": export.sglang_config(drafter.shape, "float32"),
        "vllm": export.vllm_config(drafter.shape, "float32", site.recipe, target),
    }[engine]
    write_json(tmp_path / "config.json", config)
    export.write_weights(tmp_path, engine, drafter, torch.float32)
    return tmp_path


def spoil(directory, change):
    path = directory / "model.safetensors"
    tensors = change(load_file(path))
    save_file(tensors, path)


def renamed(tensors):
    return {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}


def without_norm(tensors):
    return {name: t for name, t in tensors.items() if name != "norm.weight"}


def d2t_as_ids(tensors):
    return {**tensors, "d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(renamed, "sglang would not load", id="names of the other engine"),
        pytest.param(without_norm, r"norm\.weight .*found None", id="a tensor missing"),
        pytest.param(d2t_as_ids, "d2t must hold offsets", id="ids instead of offsets"),
    ],
)
def test_a_directory_that_the_engine_would_misread_is_refused(
    tmp_path, site, drafter, change, said
):
    directory = exported(tmp_path, site, drafter, "sglang")
    spoil(directory, change)
    with pytest.raises(DataError, match=said):
        serving.read(directory, "sglang")


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_are_not_the_trained_ones_do_not_pass(tmp_path, site, drafter, engine):
    directory = exported(tmp_path, site, drafter, engine)
    rows = site.rows("B1")[:3]
    assert export.difference(directory, engine, drafter, rows) < 1e-5
    spoil(directory, lambda tensors: {**tensors, "norm.weight": 1.1 * tensors["norm.weight"]})
    with pytest.raises(DrafterError, match="do not serve it"):
        export.difference(directory, engine, drafter, rows)


@pytest.mark.parametrize("engine", ENGINES)
def test_layer_ids_in_the_other_convention_do_not_pass(tmp_path, site, drafter, engine):
    directory = exported(tmp_path, site, drafter, engine)
    config = read_json(directory / "config.json")
    if engine == "sglang":
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(AUX_LAYERS)
    else:
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    write_json(directory / "config.json", config)
    with pytest.raises(DrafterError, match="names layers"):
        export.difference(directory, engine, drafter, site.rows("B1")[:1])


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "float32"}}, "float32"),
        ({"dtype": "float16"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_weights_are_in_the_targets_dtype(config, dtype):
    assert export.dtype_name(config) == dtype


def test_bfloat16_is_checked_against_rounded_weights(tmp_path, site, drafter):
    rounded = drafter.to(torch.bfloat16).float()
    write_json(tmp_path / "config.json", export.sglang_config(drafter.shape, "bfloat16"))
    export.write_weights(tmp_path, "sglang", rounded, torch.bfloat16)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert export.difference(tmp_path, "sglang", rounded, site.rows("B1")[:2]) < 1e-5
