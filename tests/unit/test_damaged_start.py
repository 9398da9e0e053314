"""A drafter to start from that is damaged or nonsense: one sentence, never half a drafter."""

import pickle

import pytest
import torch
from unit.drafter_site import EMBED, HIDDEN
from unit.foreign_drafters import (
    CHOSEN,
    HEAD,
    IDS,
    PLAIN,
    SPECULATORS,
    TARGET,
    renamed,
    tensors,
    write,
)

from drafter.errors import DataError, RecipeError
from drafter.files import write_json
from drafter.training import starting_point


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


JUNK = [None, "x", "7", -1, 0, 1.5, True, [], ["x"], [1, 2, 3], {}, {"rope_type": 5}]


@pytest.mark.parametrize("config", [PLAIN, SPECULATORS], ids=["plain", "speculators"])
def test_a_config_of_nonsense_is_a_sentence(tmp_path, config):
    """Whatever a field holds, the drafter is read as it is or refused: nothing else is raised."""
    layer = {"midlayer.": PLAIN, "layers.0.": SPECULATORS}
    name = next(name for name, each in layer.items() if each is config)
    directory = write(tmp_path, config, renamed(tensors(), name))
    inner = config.get("transformer_layer_config", {})
    fields = [*config, *inner, IDS, "rope_scaling", "rope_parameters", "layer_types", "bias"]
    read = refused = 0
    for field in dict.fromkeys(fields):
        for value in JUNK:
            spoilt = {**config, field: value}
            if inner and field != "transformer_layer_config":
                spoilt["transformer_layer_config"] = {**inner, field: value}
            write_json(directory / "config.json", spoilt)
            try:
                made = starting_point.read(directory, TARGET, HEAD)
            except (RecipeError, DataError) as error:
                assert "\n" not in str(error) and str(directory) in str(error)
                refused += 1
            else:
                assert made.draft_ids.tolist() == CHOSEN.tolist()
                read += 1
    assert read > 20 and refused > 150


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_of_nonsense_is_a_sentence(tmp_path, name):
    for value in (torch.ones(()), torch.ones(0), torch.ones(2, 2, 2), torch.arange(3),
                  torch.ones(1, dtype=torch.complex64)):  # fmt: skip
        directory = write(tmp_path, PLAIN, tensors() | {name: value})
        with pytest.raises((RecipeError, DataError), match=name):
            starting_point.read(directory, TARGET, HEAD)


NOT_A_NUMBER = torch.full((HIDDEN,), float("nan"))
WIDE = {"d2t": CHOSEN}  # ids where offsets belong


@pytest.mark.parametrize(
    ("put", "gone", "kind", "said"),
    [
        pytest.param({"extra.weight": torch.ones(2)}, [], RecipeError,
                     "unknown are extra.weight: start", id="unknown"),
        pytest.param({}, ["norm.weight", "fc.weight"], RecipeError,
                     "missing are fc.weight, norm.weight: start", id="missing"),
        pytest.param({"midlayer.self_attn.q_proj.bias": torch.ones(32)}, ["norm.weight"],
                     RecipeError, "unknown are midlayer.*bias; missing are norm", id="both"),
        pytest.param({}, ["lm_head.weight"], RecipeError, "missing are lm_head", id="no output"),
        pytest.param({}, ["d2t"], RecipeError, "no d2t, and its 40 draft ids", id="no d2t"),
        pytest.param({"embed_tokens.weight": EMBED + 1}, [], RecipeError,
                     "embed_tokens.weight is not the target's", id="another embedding"),
        pytest.param({"norm.weight": torch.ones(HIDDEN).to(torch.float8_e4m3fn)}, [], RecipeError,
                     "norm.weight is torch.float8_e4m3fn", id="quantised"),
        pytest.param({"norm.weight": NOT_A_NUMBER}, [], DataError, "not finite", id="not finite"),
        pytest.param({"model.norm.weight": torch.ones(HIDDEN)}, [], DataError,
                     "norm.weight twice", id="twice"),
        pytest.param(WIDE, [], DataError, "it holds target ids .those that t2d", id="d2t as ids"),
    ],
)  # fmt: skip
def test_every_tensor_is_accounted_for(tmp_path, put, gone, kind, said):
    stored = {name: tensor for name, tensor in (tensors() | put).items() if name not in gone}
    with pytest.raises(kind, match=said):
        starting_point.read(write(tmp_path, PLAIN, stored), TARGET, HEAD)


class Attack:
    def __reduce__(self):
        return print, ("a pickle ran code",)


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        pytest.param("config.json", None, RecipeError, "has no config.json: let it name",
                     id="no config"),
        pytest.param("model.safetensors", None, RecipeError, "has no model.safetensors: let it",
                     id="no weights"),
        pytest.param("config.json", b"{", DataError, "config.json is not JSON", id="half a config"),
        pytest.param("config.json", b"[]", DataError, "config.json is not a JSON object",
                     id="config is a list"),
        pytest.param("model.safetensors", bytes(200), DataError, "safetensors cannot be read",
                     id="weights are zeros"),
        pytest.param("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}',
                     RecipeError, "has no b.safetensors", id="a file of the index is missing"),
        pytest.param("model.safetensors.index.json", b"{}", RecipeError,
                     "has no model.safetensors", id="an empty index"),
        pytest.param("pytorch_model.bin", pickle.dumps(Attack(), 2), DataError,
                     "pytorch_model.bin cannot be read", id="a pickle that runs code"),
        pytest.param("pytorch_model.bin", b"", DataError, "pytorch_model.bin cannot be read",
                     id="an empty pickle"),
    ],
)  # fmt: skip
def test_a_directory_that_is_none_is_named(tmp_path, capsys, name, content, kind, said):
    directory = write(tmp_path, PLAIN, tensors())
    if name == "pytorch_model.bin":
        (directory / "model.safetensors").unlink()
    (directory / name).unlink(missing_ok=True)
    if content is not None:
        (directory / name).write_bytes(content)
    with pytest.raises(kind, match=said):
        starting_point.read(directory, TARGET, HEAD)
    assert "ran code" not in capsys.readouterr().out


def test_weights_cut_short_are_named(tmp_path):
    directory = write(tmp_path, PLAIN, tensors())
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read .*: fetch"):
        starting_point.read(directory, TARGET, HEAD)
