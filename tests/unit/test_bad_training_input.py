"""What training cannot use: one sentence, an exit code, and the last good checkpoint as it was."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from unit.drafter_site import HIDDEN, VOCAB, DrafterSite
from unit.foreign_drafters import PLAIN, tensors, write

from drafter import train
from drafter.errors import DataError, DrafterError, RecipeError
from drafter.files import read_section, write_json
from drafter.layout import DrafterRun
from drafter.training import checkpoint

OPTIONS = {"steps": 20, "checkpoint_every_steps": 10, "no_states_baseline": False}
OPTIMIZER = "optimizer.safetensors"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> DrafterSite:
    site = DrafterSite(tmp_path_factory.mktemp("trained"), train=OPTIONS)
    train.run(site.job("train"))
    return site


@pytest.fixture
def site(trained, tmp_path) -> DrafterSite:
    """A copy of the trained one, to be spoilt."""
    root = shutil.copytree(trained.root, tmp_path / "site")
    copy = DrafterSite(root, train=OPTIONS)
    assert copy.run.root.name == trained.run.root.name
    return copy


def contents(run, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.checkpoint(step).iterdir())}


def refused(site: DrafterSite) -> DrafterError:
    """What training says, which is one line."""
    with pytest.raises(DrafterError) as caught:
        train.run(site.job("train"))
    assert "\n" not in str(caught.value) and ": " in str(caught.value)
    return caught.value


def changed(path: Path, change: Callable, metadata: dict[str, str] | None = None) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() if metadata is None else metadata
    save_file(change(load_file(path)), path, metadata=metadata)


def drop(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[: len(content) // 2])

    return damage


def put(name: str, **new: torch.Tensor) -> Callable[[Path], None]:
    fields = {field.replace("__", "."): tensor for field, tensor in new.items()}
    return lambda directory: changed(directory / name, lambda old: {**old, **fields})


def without(name: str, field: str) -> Callable[[Path], None]:
    return lambda directory: changed(
        directory / name, lambda old: {n: t for n, t in old.items() if n != field}
    )


def said_shape(shape: str) -> Callable[[Path], None]:
    return lambda directory: changed(
        directory / checkpoint.WEIGHTS, lambda old: old, {"shape": shape}
    )


ELSEWHERE = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.arange(90), True)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(drop(checkpoint.WEIGHTS), "drafter.safetensors cannot be read", id="gone"),
        pytest.param(cut(checkpoint.WEIGHTS), "drafter.safetensors cannot be read", id="cut"),
        pytest.param(drop(OPTIMIZER), "optimizer.safetensors cannot be read", id="no optimiser"),
        pytest.param(cut(OPTIMIZER), "optimizer.safetensors cannot be read", id="optimiser cut"),
        pytest.param(without(OPTIMIZER, "norm.weight.exp_avg"),
                     r"\(norm\.weight\.exp_avg is not as AdamW leaves it\)",
                     id="half the optimiser"),
        pytest.param(lambda directory: changed(directory / OPTIMIZER, lambda _: {}),
                     "fc.weight.exp_avg is not as AdamW", id="an empty optimiser"),
        pytest.param(put(OPTIMIZER, other__weight__step=torch.ones(())), "other.weight.step is not",
                     id="an optimiser of other parameters"),
        pytest.param(put(OPTIMIZER, norm__weight__exp_avg=torch.ones(3)), "norm.weight.exp_avg is",
                     id="an optimiser of another size"),
        pytest.param(said_shape("{"), "drafter.safetensors cannot be read", id="no JSON"),
        pytest.param(said_shape("{}"), "drafter.safetensors cannot be read", id="no shape"),
        pytest.param(without(checkpoint.WEIGHTS, "fc.weight"), "fc.weight", id="a tensor gone"),
        pytest.param(without(checkpoint.WEIGHTS, "d2t"), "d2t", id="no d2t"),
        pytest.param(put(checkpoint.WEIGHTS, norm__weight=torch.ones(HIDDEN + 1)), "norm.weight",
                     id="a tensor of another size"),
        pytest.param(put(checkpoint.WEIGHTS, t2d=ELSEWHERE), "d2t must hold offsets",
                     id="maps that are no bijection"),
        pytest.param(put(checkpoint.WEIGHTS, t2d=ELSEWHERE.float()), "t2d", id="a mask of floats"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_kept(site, damage, said):
    before = contents(site.run, 10)
    damage(site.run.checkpoint(20))
    error = refused(site)
    assert isinstance(error, DataError) and error.exit_code == 65
    assert str(site.run.checkpoint(20)) in str(error)
    with pytest.raises(DataError, match=said):
        raise error
    assert checkpoint.steps(site.run) == [10, 20] and contents(site.run, 10) == before


def test_what_the_sentence_advises_ends_in_the_same_bits(site, trained):
    drop(OPTIMIZER)(site.run.checkpoint(20))
    error = refused(site)
    assert f"remove {site.run.checkpoint(20)} and train again" in str(error)
    shutil.rmtree(site.run.checkpoint(20))
    train.run(site.job("train"))
    assert contents(site.run, 20) == contents(trained.run, 20)


def test_metrics_damaged_in_the_middle_are_named_by_line(site):
    lines = site.run.metrics.read_bytes().splitlines(keepends=True)
    site.run.metrics.write_bytes(b"".join([*lines[:6], lines[6][:9] + b"\n", *lines[7:]]))
    before = contents(site.run, 20)
    error = refused(site)
    assert f"{site.run.metrics}:7 is damaged" in str(error) and error.exit_code == 65
    assert contents(site.run, 20) == before


FULL = """
import resource, runpy, sys
from drafter.training import checkpoint

class FullAfterTheFirst:
    save = staticmethod(checkpoint.save)

    def __call__(self, *arguments):
        path = self.save(*arguments)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        return path

checkpoint.save = FullAfterTheFirst()
sys.argv = ["drafter", "run", sys.argv[1]]
runpy.run_module("drafter", run_name="__main__")
"""


def test_a_disk_that_fills_up_between_two_checkpoints_costs_nothing(tmp_path, trained):
    site = DrafterSite(tmp_path, train=OPTIONS)
    include = str(Path(train.__file__).parents[1])
    command = [sys.executable, "-c", FULL, str(site.job("train").dir.root)]
    env = {"PYTHONPATH": include, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=env, capture_output=True, text=True)
    assert process.returncode == 1, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"drafter: checkpoint {site.run.checkpoint(20)} cannot be written")
    assert "free disk space and start again" in line
    assert checkpoint.steps(site.run) == [10]
    assert contents(site.run, 10) == contents(trained.run, 10)
    assert not list(site.run.root.glob(".step-*"))
    train.run(site.job("train"))
    assert contents(site.run, 20) == contents(trained.run, 20)


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        ({"hidden_size": 64}, "with hidden size 64, the recipe's target is r1 with 32"),
        ({"revision": "older"}, "of revision older with hidden size 32"),
    ],
)
def test_states_of_another_model_are_refused(site, identity, said):
    for dataset in site.datasets:
        site.extract(dataset, site.rows(dataset), **identity)
    error = refused(site)
    assert said in str(error) and error.exit_code == 65


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        ({"aux_layers": [0, 1, 2]}, "aux_layers: [1, 2, 3] and [0, 1, 2]"),
        ({"norm": "after"}, "norm: before and after"),
        ({"dtype": "bfloat16"}, "dtype: float32 and bfloat16"),
    ],
)
def test_datasets_in_two_conventions_are_not_mixed(site, trained, identity, said):
    site.extract("B2", site.rows("B2"), **identity)
    error = refused(site)
    assert said in str(error) and error.exit_code == 65
    run = DrafterRun(site.workspace.root / "drafter" / trained.run.root.name)
    assert contents(run, 20) == contents(trained.run, 20)


def test_a_dataset_without_rows_names_itself_and_the_remedy(site):
    site.extract("B2", [])
    error = refused(site)
    assert "B2 has no extracted rows: " in str(error) and error.exit_code == 65


@pytest.mark.parametrize(
    ("change", "put_in", "kind", "said"),
    [
        pytest.param({}, {"d2t": torch.arange(0, 80, 2)}, DataError, "d2t",
                     id="maps that are no bijection"),
        pytest.param({"hidden_size": 64}, {}, RecipeError, "hidden_size is 64",
                     id="of another target"),
        pytest.param({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, {},
                     RecipeError, "reads layers [2, 3, 4]", id="layers in another convention"),
        pytest.param({}, {"norm.weight": torch.ones(3)}, RecipeError, "norm.weight is [3]",
                     id="a tensor of another size"),
    ],
)  # fmt: skip
def test_a_start_that_does_not_fit_leaves_nothing_behind(tmp_path, change, put_in, kind, said):
    start = write(tmp_path / "start", {**PLAIN, **change}, tensors() | put_in)
    options = {**OPTIONS, "start_from": str(start), "draft_vocab_size": None}
    site = DrafterSite(tmp_path / "site", train=options)
    error = refused(site)
    assert type(error) is kind and said in str(error)
    assert error.exit_code == {RecipeError: 64, DataError: 65}[kind]
    assert not site.run.root.exists()
    write(start, PLAIN, tensors())
    site.train["steps"] = 2
    train.run(site.job("train"))
    assert read_section(site.run.manifest, "train")["counts"]["steps"] == 2


def test_a_manifest_of_states_that_is_damaged_is_named(site):
    manifest = site.workspace.hidden_states("B1").manifest
    manifest.write_text("{")
    assert str(manifest) in str(refused(site))
    write_json(manifest, {"extract": 5})
    assert str(manifest) in str(refused(site))
