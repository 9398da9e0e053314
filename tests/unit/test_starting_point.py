"""Training from a drafter that exists: every public layout read whole, anything else refused."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.drafter_site import AUX_LAYERS, EMBED, FAMILY, HIDDEN, LM_HEAD, DrafterSite, TableBackend
from unit.foreign_drafters import (
    CHOSEN,
    DRAFT,
    FORMATS,
    HEAD,
    IDS,
    INNER,
    LAYER,
    PLAIN,
    SPECULATORS,
    TARGET,
    renamed,
    tensors,
    write,
)

from drafter import export, plan, train
from drafter.errors import RecipeError
from drafter.evaluate import evaluate
from drafter.files import read_json, read_section, write_json
from drafter.sections import Train
from drafter.training import starting_point


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=FORMATS)
def published(request, tmp_path):
    directory = tmp_path / "published"
    directory.mkdir()
    FORMATS[request.param](directory)
    return directory


def test_every_layout_is_read_whole_and_written_back_to_the_bit(published, tmp_path, request):
    # SafeAILab's names no layers, so it reads the default ones.
    named = (2, 4, 5) if "SafeAILab" in request.node.callspec.id else AUX_LAYERS
    made = starting_point.read(published, TARGET, HEAD)
    shape = made.shape
    assert shape.aux_layers == named
    assert (shape.draft_vocab_size, shape.intermediate_size, shape.head_dim) == (DRAFT, INNER, 8)
    assert (shape.norm_eps, shape.rope_theta, shape.max_positions) == (1e-5, 1e6, 512)
    assert made.draft_ids.tolist() == CHOSEN.tolist()
    assert all(parameter.dtype == torch.float32 for parameter in made.parameters())
    dtype = torch.float16 if "SafeAILab" in request.node.callspec.id else torch.bfloat16
    dtype = torch.float32 if "two files" in request.node.callspec.id else dtype
    for engine in ("sglang", "vllm"):
        export.write_weights(tmp_path / engine, engine, made, dtype)
        found = load_file(tmp_path / engine / "model.safetensors")
        layer = {"sglang": "midlayer.", "vllm": "layers.0."}[engine]
        wanted = renamed(tensors(dtype), layer)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def finished(site):
    train.run(site.job("train"))
    for dataset in site.datasets:
        site.answer_greedily(dataset)
        evaluate(site.job("evaluate", dataset), FAMILY, TableBackend)
    export.run(site.job("export"))
    return site


BARE = {"no_states_baseline": False, "checkpoint_every_steps": 40}


def started(root, start, **options):
    options = {"draft_vocab_size": None, "start_from": str(start), **BARE, **options}
    return DrafterSite(root, train=options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return finished(DrafterSite(tmp_path_factory.mktemp("first"), train={"steps": 40, **BARE}))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_our_own_export_is_a_start_and_without_a_step_the_same_export(tmp_path, trained, engine):
    start = shutil.copytree(trained.run.export(engine), tmp_path / "start")
    again = finished(started(tmp_path / "again", start, steps=0))
    for other in ("sglang", "vllm"):
        before, after = trained.run.export(other), again.run.export(other)
        one, two = (load_file(d / "model.safetensors") for d in (before, after))
        assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
        configs = [read_json(directory / "config.json") for directory in (before, after)]
        for config in configs:
            config.get("speculators_config", {}).get("verifier", {}).pop("name_or_path", None)
        assert configs[0] == configs[1]
    section = read_section(again.run.manifest, "train")
    assert section["inputs"]["start"] in (again.run.export("vllm") / "README.md").read_text()


def test_a_start_goes_on_where_it_was(tmp_path, trained):
    def loss(site, which):
        return read_section(site.run.manifest, "train")["counts"][f"{which}_loss"]

    start = trained.run.export("vllm")
    again = started(tmp_path, start, steps=20, learning_rate=2e-3)
    train.run(again.job("train"))
    assert loss(again, "first") < 1.3 * loss(trained, "last") < 0.7 * loss(trained, "first")
    assert loss(again, "last") < loss(trained, "last")
    train.run(again.job("train"))
    assert not read_json(again.job("train").dir.progress)["changed"]


def test_a_start_of_specforge_is_exported_for_both_engines(tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    FORMATS["SpecForge"](start)
    site = finished(started(tmp_path / "site", start, steps=0))
    for engine, layer in (("sglang", "midlayer."), ("vllm", "layers.0.")):
        found = load_file(site.run.export(engine) / "model.safetensors")
        for name, tensor in renamed(tensors(), layer).items():
            assert torch.equal(found[name].to(tensor.dtype), tensor)


@pytest.mark.parametrize(
    ("field", "value", "gone", "output"),
    [
        pytest.param("draft_vocab_size", None, (), LM_HEAD, id="null and its own copy"),
        pytest.param("draft_vocab_size", None, ("lm_head.weight",), LM_HEAD, id="null"),
        pytest.param("tie_word_embeddings", True, ("lm_head.weight",), EMBED, id="tied"),
    ],
)
def test_a_matrix_that_is_the_targets_is_taken_from_it(tmp_path, field, value, gone, output):
    stored = tensors() | {"lm_head.weight": LM_HEAD}
    stored = {n: t for n, t in stored.items() if n not in (*gone, "d2t", "t2d")}
    config = {**PLAIN, "draft_vocab_size": len(LM_HEAD), field: value}
    made = starting_point.read(write(tmp_path, config, stored), TARGET, HEAD)
    assert torch.equal(made.lm_head.weight, output)
    assert torch.equal(made.draft_ids, torch.arange(len(LM_HEAD))) and made.t2d.all()


DEEP = {**TARGET, "model_type": "kimi_k2", "num_hidden_layers": 61}


@pytest.mark.parametrize(
    ("config", "target", "layers"),
    [
        pytest.param({"eagle_config": {IDS: [1, 3, 4]}}, TARGET, (2, 4, 5), id="outputs"),
        pytest.param({"eagle_config": {IDS: [1, 29, 57]}}, DEEP, (2, 30, 58), id="kimi outputs"),
        pytest.param({"eagle_config": {IDS: [2, 30, 58]}}, DEEP, (2, 30, 58), id="kimi inputs"),
        pytest.param({"eagle_config": {IDS: []}}, DEEP, (2, 30, 58), id="an empty list: default"),
        pytest.param({"eagle_config": None}, TARGET, (2, 4, 5), id="nothing: default"),
        pytest.param({"eagle_config": None, IDS: [2, 4, 5]}, TARGET, (2, 4, 5), id="at the top"),
        pytest.param({"eagle_config": {IDS: [1, 3, 4]}, IDS: [2, 4, 5]}, TARGET, (2, 4, 5),
                     id="at both places, each in its own way"),
    ],
)  # fmt: skip
def test_layer_ids_are_read_as_their_reader_counts(tmp_path, config, target, layers):
    directory = write(tmp_path, {**PLAIN, **config}, tensors())
    assert starting_point.read(directory, target, HEAD).shape.aux_layers == layers


def test_layers_that_the_states_are_not_of_are_refused_with_both_lists(tmp_path):
    directory = write(tmp_path, PLAIN, tensors())
    with pytest.raises(
        RecipeError, match=r"reads layers \[1, 2, 3\] .* of \[2, 4, 5\]: set extract.aux_layers"
    ):
        starting_point.drafter(Train(start_from=str(directory)), TARGET, (2, 4, 5), HEAD)


@pytest.mark.parametrize("field", ["draft_vocab_size", "intermediate_size"])
def test_a_size_that_the_recipe_wants_otherwise_is_refused(tmp_path, field):
    directory = write(tmp_path, PLAIN, tensors())
    has = {"draft_vocab_size": DRAFT, "intermediate_size": INNER}[field]
    options = Train.model_validate({"start_from": str(directory), field: has})
    starting_point.drafter(options, TARGET, AUX_LAYERS, HEAD)
    options = Train.model_validate({"start_from": str(directory), field: has + 1})
    with pytest.raises(RecipeError, match=rf"train\.{field} is {has + 1}, .* has {has}: take"):
        starting_point.drafter(options, TARGET, AUX_LAYERS, HEAD)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "latent attention .MLA."),
        ({"kv_lora_rank": 512}, "kv_lora_rank = 512 means latent attention"),
        ({"model_type": "qwen2"}, "model_type 'qwen2' is no Llama layer"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2, needed is 1"),
        ({"norm_before_residual": True}, "norm_before_residual is true, the residual"),
        ({"norm_before_fc": True}, "norm_before_fc is true"),
        ({"fc_norm": True}, "fc_norm is true"),
        ({"norm_output": True}, "norm_output is true.*SpecForge"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"bias": True}, "bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 64}}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters is 'llama3'"),
        ({"rope_parameters": {"rope_theta": 5.0}}, r"rope_theta is 1000000\.0 and 5\.0 at once"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, needed is 1"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, needed is 1",
        ),
        ({"num_aux_hidden_states": 5}, "num_aux_hidden_states is 5, needed is 3"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"use_aux_norm": True}, "use_aux_norm is true"),
        ({"eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc is true"),
        ({"sliding_window": 2048}, "sliding_window = 2048"),
        ({"layer_types": ["sliding_attention"]}, "layer_types .'sliding_attention'."),
        ({"hidden_size": 64}, "hidden_size is 64, the target's is 32"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, the target's is 32"),
        ({"vocab_size": 200}, "vocab_size is 200, the target's is 101"),
        ({"hidden_size": "32"}, "hidden_size in its config.json is '32'"),
        ({"rms_norm_eps": None}, "rms_norm_eps in its config.json is None"),
        ({"num_key_value_heads": 4}, r"k_proj.weight is \[16, 64\], its config.json says \[32, 64"),
        ({"draft_vocab_size": 41}, "d2t has 40 entries, draft_vocab_size is 41"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, .* is another"),
        ({"draft_vocab_size": None}, "d2t has 40 entries, draft_vocab_size is 101"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "no EAGLE-3 drafter"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is true"),
        ({"eagle_config": {IDS: [1, 2]}}, "names 2 layers, needed are 3"),
        ({"eagle_config": {IDS: [1, "2", 3]}}, "1, '2', 3.* are no layer ids"),
        ({IDS: [0, 1, 2]}, r"means \[0, 1, 2\] at the top and \[1, 2, 3\] in eagle_config"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
    ],
)
def test_what_is_not_trained_here_is_refused_by_field_and_reason(tmp_path, change, said):
    directory = write(tmp_path, {**PLAIN, **change}, tensors())
    with pytest.raises(RecipeError, match=f"start_from {directory}: .*{said}.*: start from anoth"):
        starting_point.read(directory, TARGET, HEAD)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm_before_residual": None}, None),
        ({"norm_output": True}, "norm_output is true"),
        ({"transformer_layer_config": {**LAYER, "rope_theta": 1e6, "sliding_window": 2048}},
         "sliding_window"),
        ({"transformer_layer_config": {**LAYER, "rope_theta": 1e6, "model_type": "qwen3"}},
         "model_type 'qwen3'"),
    ],
)  # fmt: skip
def test_a_config_of_speculators_is_held_to_the_same(tmp_path, change, said):
    directory = write(tmp_path, {**SPECULATORS, **change}, renamed(tensors(), "layers.0."))
    if said is None:
        starting_point.read(directory, TARGET, HEAD)
        return
    with pytest.raises(RecipeError, match=said):
        starting_point.read(directory, TARGET, HEAD)


def test_a_config_of_speculators_that_says_nothing_means_their_default(tmp_path):
    config = {k: v for k, v in SPECULATORS.items() if k != "norm_before_residual"}
    directory = write(tmp_path, config, renamed(tensors(), "layers.0."))
    with pytest.raises(RecipeError, match="norm_before_residual is true"):
        starting_point.read(directory, TARGET, HEAD)


def test_a_run_is_named_by_what_the_start_holds_not_by_where_it_lies(tmp_path):
    one = write(tmp_path / "one", PLAIN, tensors())
    site = started(tmp_path / "site", one)
    first = plan.run_name(site.workspace, site.recipe)

    two = shutil.copytree(one, tmp_path / "two")
    site.train["start_from"] = str(two)
    assert plan.run_name(site.workspace, site.recipe) == first

    save_file(tensors() | {"norm.weight": torch.ones(HIDDEN)}, two / "model.safetensors")
    assert plan.run_name(site.workspace, site.recipe) != first
    shutil.copy(one / "model.safetensors", two / "model.safetensors")
    write_json(two / "config.json", {**PLAIN, "rope_theta": 1e5})
    assert plan.run_name(site.workspace, site.recipe) != first

    site.train["start_from"] = str(tmp_path / "nowhere")
    with pytest.raises(RecipeError, match=r"nowhere has no config\.json"):
        plan.run_name(site.workspace, site.recipe)


def test_without_a_start_a_run_is_named_as_ever(tmp_path):
    site = DrafterSite(tmp_path)
    inputs = plan.inputs("train", "all", site.workspace, site.recipe)
    assert inputs.keys() == {"datasets", "train"} and "start_from" not in inputs["train"]
    assert Train().rules()["draft_vocab_size"] == 32_000
