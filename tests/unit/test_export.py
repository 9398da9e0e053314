"""Exports: each engine's names and numbers, and a check that a wrong one does not pass."""

import json
import resource
import shlex
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.drafter_site import AUX_LAYERS, CONFIG, FAMILY, HIDDEN, VOCAB, DrafterSite, TableBackend

from drafter import export, model_card, serving, train
from drafter.errors import DataError, DrafterError, RecipeError
from drafter.evaluate import evaluate
from drafter.extraction.shards import Row
from drafter.files import file_record, read_json, read_section, write_json
from drafter.sections import Train
from drafter.training import checkpoint, corpus, starting_point

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
        assert vllm[name] is False and sglang[name] is False
    assert "target_hidden_size" not in sglang  # SGLang multiplies whatever is there
    for config in (sglang, vllm["transformer_layer_config"]):
        assert (config["hidden_size"], config["num_hidden_layers"]) == (HIDDEN, 1)
        assert config["rope_scaling"] is None
        assert config["rope_parameters"]["rope_type"] == "default"
        assert config["attention_bias"] is False and config["mlp_bias"] is False
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
        assert config["vocab_size"] == VOCAB and config["tie_word_embeddings"] is False
    assert sglang["draft_vocab_size"] == vllm["draft_vocab_size"] == 90


def test_the_manifest_and_the_card_say_what_was_measured(site):
    section = read_section(site.run.manifest, "export")
    assert section["directories"] == {"sglang": "export/sglang", "vllm": "export/vllm"}
    assert all(d < 1e-4 for d in section["counts"]["logit_difference"].values())
    length = section["acceptance_length"]["trained"]
    assert length > 1
    last = json.loads(site.run.metrics.read_text().splitlines()[-1])
    for engine in ENGINES:
        weights = site.run.export(engine) / "model.safetensors"
        record = file_record(weights)
        assert section["files"][f"export/{engine}/model.safetensors"] == record
        card = (site.run.export(engine) / "README.md").read_text()
        assert record["sha256"] in card and f"{length:.2f}" in card
        assert str(site.run.export(engine)) in card
        assert {"sglang": "EAGLE3", "vllm": "vllm serve"}[engine] in card
        assert "From a new drafter: 20 steps" in card and "code `c`" in card
        assert "licence" in card
        for dataset in site.datasets:
            measured = read_json(site.run.evaluation(dataset))["acceptance_length"]
            told = next(line for line in card.splitlines() if line.startswith(f"| {dataset} | "))
            assert told.split(" | ")[1] == f"{measured['trained']:.2f}"
            hidden = site.workspace.hidden_states(dataset).manifest
            assert f"| {dataset} | glaive | local | 40 | " in card
            assert file_record(hidden)["sha256"] in card
        assert "| **overall** |" in card
        assert f"| 2 | {last['loss_2']:.3f} | {last['acc_2']:.3f} |" in card
        recipe = json.loads(card.partition("```json\n")[2].partition("```")[0])
        assert recipe["train"] | {"start_from": None} == site.recipe.as_json()["train"]
        assert "Exported is step 20 of 20, held-out loss" in card
        assert not recipe.keys() & {"engine", "host", "alerts"} and "urls" not in recipe["extract"]
    before = {path: path.read_bytes() for path in site.run.root.rglob("*") if path.is_file()}
    export.run(site.job("export"))
    assert before == {path: path.read_bytes() for path in before}
    assert not read_json(site.job("export").dir.progress)["changed"]


def exported(tmp_path, site, drafter, engine):
    target = read_json(site.root / "target" / "config.json")
    config = {
        "sglang": export.sglang_config(drafter.shape, "float32", CONFIG),
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
        serving.read(directory, "sglang", CONFIG)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_are_not_the_trained_ones_do_not_pass(tmp_path, site, drafter, engine):
    directory = exported(tmp_path, site, drafter, engine)
    rows = site.rows("B1")[:3]
    assert export.difference(directory, engine, CONFIG, drafter, rows) < 1e-5
    spoil(directory, lambda tensors: {**tensors, "norm.weight": 1.1 * tensors["norm.weight"]})
    with pytest.raises(DrafterError, match="do not serve it"):
        export.difference(directory, engine, CONFIG, drafter, rows)


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
        export.difference(directory, engine, CONFIG, drafter, site.rows("B1")[:1])


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
    write_json(tmp_path / "config.json", export.sglang_config(drafter.shape, "bfloat16", CONFIG))
    export.write_weights(tmp_path, "sglang", rounded, torch.bfloat16)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert export.difference(tmp_path, "sglang", CONFIG, rounded, site.rows("B1")[:2]) < 1e-5


DEEP = {"model_type": "kimi_k2", "num_hidden_layers": 61}
LLAMA = {"model_type": "llama", "num_hidden_layers": 61}


@pytest.mark.parametrize(
    ("aux_layers", "target", "written"),
    [
        pytest.param((2, 30, 58), LLAMA, [1, 29, 57], id="llama: outputs"),
        pytest.param((2, 30, 58), DEEP, [1, 29, 57], id="kimi: outputs while the first is 1"),
        pytest.param((3, 30, 58), LLAMA, [2, 29, 57], id="llama, other layers: outputs"),
        pytest.param((3, 30, 58), DEEP, [3, 30, 58], id="kimi, other layers: as they are"),
        pytest.param((3, 30, 58), {"model_type": "glm_moe_dsa", "num_hidden_layers": 61},
                     [3, 30, 58], id="glm-5, other layers: as they are"),
        pytest.param((2, 30, 60), {"model_type": "gpt_oss", "num_hidden_layers": 61},
                     [1, 29, 59], id="gpt-oss: outputs"),
    ],
)  # fmt: skip
def test_layer_ids_are_what_sglang_makes_of_them_for_this_target(
    drafter, aux_layers, target, written
):
    config = export.sglang_config(replace(drafter.shape, aux_layers=aux_layers), "float32", target)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written


def test_layers_that_sglang_cannot_be_told_are_refused(drafter):
    shape = replace(drafter.shape, aux_layers=(1, 30, 58))
    with pytest.raises(
        RecipeError, match=r"layers \[1, 30, 58\] of a kimi_k2: .*extract.aux_layers"
    ):
        export.sglang_config(shape, "float32", DEEP)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_before_residual", True),
        ("norm_before_residual", None),
        ("norm_output", True),
        ("fc_norm", True),
        ("rope_theta", 5.0),
        ("rope_scaling", {"rope_type": "yarn", "factor": 64}),
        ("attention_bias", True),
    ],
)
def test_a_configuration_that_means_another_model_is_refused(
    tmp_path, site, drafter, engine, field, value
):
    directory = exported(tmp_path, site, drafter, engine)
    config = read_json(directory / "config.json")
    for place in (config, config.get("transformer_layer_config", {})):
        if field in place:
            place[field] = value
    write_json(directory / "config.json", config)
    with pytest.raises(DataError, match=rf"{field}.*: export again"):
        serving.read(directory, engine, CONFIG)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fault_that_shows_only_later_in_a_row_does_not_pass(tmp_path, site, drafter, engine):
    """A rope of another base is the same at position 0 and nearly so at the next ones."""
    directory = exported(tmp_path, site, drafter, engine)
    config = read_json(directory / "config.json")
    layer = config if engine == "sglang" else config["transformer_layer_config"]
    layer["rope_theta"] = layer["rope_parameters"]["rope_theta"] = 10_010.0
    write_json(directory / "config.json", config)
    row = max(site.rows("B1"), key=lambda row: len(row.input_ids_T))
    begun = export._beginning(row)
    expected, followed = export._drafts(drafter, begun)
    served = serving.read(directory, engine, CONFIG)
    found = serving.drafts(
        served, begun.input_ids_T[:-1], begun.aux_TAD[:-2], drafter.embed, followed
    )
    apart = (found - expected).abs().amax((1, 2))
    assert len(apart) == min(len(row.input_ids_T) - row.prompt_tokens - 1, 16) > 10
    assert apart[len(apart) // 2 :].max() > 1.5 * apart[0]


def test_no_more_of_a_row_is_checked_than_takes_minutes(site):
    row = site.rows("B1")[0]
    long = Row("long", torch.zeros(9000, dtype=torch.int64), 100, torch.zeros(9000, 3, HIDDEN),
               torch.zeros(9000, HIDDEN))  # fmt: skip
    assert len(export._beginning(long).input_ids_T) == 100 + 17
    assert len(export._beginning(row).input_ids_T) == min(
        len(row.input_ids_T), row.prompt_tokens + 17
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_launch_command_survives_a_shell(site, engine):
    recipe = site.recipe.model_copy(
        update={"target": site.recipe.target.model_copy(update={"path": "/models/it's big"})}
    )
    command = model_card.launch(engine, recipe, "/runs/a b", {"auto_map": {}})
    words = shlex.split(command.replace("\\\n", " "))
    assert "/models/it's big" in words and "--trust-remote-code" in words
    if engine == "sglang":
        assert words[:3] == ["python3", "-m", "sglang.launch_server"]
        options = dict(zip(words[6::2], words[7::2], strict=True))
        assert options == {
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": "/runs/a b",
            "--speculative-num-steps": "3",
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": "4",
        }
    else:
        assert words[:2] == ["vllm", "serve"]
        said = json.loads(words[words.index("--speculative-config") + 1])
        assert said == {"method": "eagle3", "model": "/runs/a b", "num_speculative_tokens": 3}
    assert "--trust-remote-code" not in model_card.launch(engine, recipe, "/runs/a", {})


def test_maps_that_are_no_bijection_are_not_written(tmp_path, drafter):
    drafter.d2t[0] += 1
    with pytest.raises(DataError, match="the trained drafter: d2t"):
        export.write_weights(tmp_path / "out", "sglang", drafter, torch.float32)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_sentence_and_leaves_the_export_before(tmp_path, site, drafter):
    directory = exported(tmp_path, site, drafter, "vllm")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(DrafterError, match=r"cannot be written .*: free disk space and export"):
            export.write_weights(directory, "vllm", drafter, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert before == {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_whole_vocabulary_needs_no_map_and_vllm_stops_at_one(tmp_path, site, engine):
    options = {**site.recipe.train.model_dump(), "draft_vocab_size": VOCAB}
    recipe = site.recipe.model_copy(update={"train": Train.model_validate(options)})
    rows = corpus.collect(site.workspace, recipe)
    whole = train.untrained(recipe, rows, corpus.read_head(recipe, rows))
    directory = exported(tmp_path, site, whole, engine)
    names = load_file(directory / "model.safetensors").keys()
    assert ("d2t" in names) == ("t2d" in names) == (engine == "sglang")
    assert export.difference(directory, engine, CONFIG, whole, site.rows("B1")[:1]) < 1e-5
    again = starting_point.read(directory, CONFIG, corpus.read_head(recipe, rows))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    zeros = {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}
    if engine == "vllm":
        spoil(directory, lambda tensors: {**tensors, **zeros})
        with pytest.raises(DataError, match="vllm would not load d2t"):
            serving.read(directory, engine, CONFIG)
