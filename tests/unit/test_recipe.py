"""A wrong recipe is one sentence that names file, field and remedy."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from drafter.errors import RecipeError
from drafter.recipe import load_recipe, parse_recipe

RECIPES = Path(__file__).resolve().parents[2] / "include" / "recipes"

GOOD = """
[target]
path = "/models/t"
revision = "r1"
[engine]
urls = ["http://127.0.0.1:30000"]
[host]
workspace = "/data/w"
[[datasets]]
name = "B1"
format = "glaive"
path = "/data/b1.json"
token_budget = 10
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    return path


@pytest.fixture(autouse=True)
def demo_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEMO_ROOT", "DEMO_HOME", "DEMO_PYTHON", "DEMO_ENGINE_PORT"):
        monkeypatch.setenv(name, "/x")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_has_eight_datasets_and_survives_the_trip_to_the_host(
    path: Path,
) -> None:
    recipe = load_recipe(path)
    assert len(recipe.datasets) == 8
    assert parse_recipe(recipe.as_json(), "host") == recipe


def test_a_source_may_lie_on_the_hub_at_a_commit(recipe_file: Path) -> None:
    hub = f'hub = "owner/name"\nfiles = "data/*.parquet"\nrevision = "{"0a" * 20}"'
    recipe_file.write_text(GOOD.replace('path = "/data/b1.json"', hub))
    recipe = load_recipe(recipe_file)
    assert recipe.datasets[0].path is None
    assert parse_recipe(recipe.as_json(), "host") == recipe


def test_a_recipe_is_named_after_its_file(recipe_file: Path) -> None:
    assert load_recipe(recipe_file).name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        pytest.param('revision = "r1"', "", "target.revision is missing: add it", id="missing"),
        pytest.param(
            'revision = "r1"',
            'revision = "r1"\nrevison = "r2"',
            "unknown field target.revison: remove it or correct its spelling",
            id="unknown",
        ),
        pytest.param(
            'format = "glaive"', 'format = "glave"', "datasets.0.format = 'glave'", id="choice"
        ),
        pytest.param(
            "token_budget = 10", "", "set token_budget, max_samples or both", id="no limit"
        ),
        pytest.param(
            "token_budget = 10",
            "token_budget = 10\nunbounded = true",
            "set token_budget, max_samples or both",
            id="two limits",
        ),
        pytest.param("token_budget = 10", "token_budget = 0", "greater than", id="bound"),
        pytest.param(
            'workspace = "/data/w"', 'workspace = "data/w"', "host.workspace", id="relative"
        ),
        pytest.param(
            'path = "/data/b1.json"', "", "set path (on the GPU host) or hub", id="no source"
        ),
        pytest.param(
            'path = "/data/b1.json"',
            'path = "/data/b1.json"\nhub = "owner/name"',
            "one of the two",
            id="two sources",
        ),
        pytest.param(
            'path = "/data/b1.json"',
            'hub = "https://huggingface.co/datasets/owner/name"',
            "datasets.0.hub = 'https://",
            id="hub as a link",
        ),
        pytest.param(
            'path = "/data/b1.json"',
            'path = "/data/b1.json"\nfiles = "*.jsonl"',
            "for path write the glob there",
            id="files of a path",
        ),
        pytest.param(
            'path = "/data/b1.json"',
            'hub = "owner/name"',
            "revision 'local' is no commit, and what a branch means changes: take the 40 digits"
            " that `git ls-remote https://huggingface.co/datasets/owner/name main` prints",
            id="hub unpinned",
        ),
        pytest.param(
            'path = "/data/b1.json"',
            'hub = "owner/name"\nrevision = "main"',
            "revision 'main' is no commit",
            id="hub at a branch",
        ),
        pytest.param(
            'path = "/data/b1.json"',
            'path = "/data/b1.json"\nmax_prompt_tokens = 0',
            "datasets.0.max_prompt_tokens = 0",
            id="cap of a dataset",
        ),
        pytest.param(
            "[host]",
            "[train]\nspool_shards = 4\n[host]\nslots = 1",
            "train.spool_shards needs host.slots of 2 at least, got 1",
            id="spool on one slot",
        ),
        pytest.param(
            "[host]",
            "[train]\nspool_shards = 4\nno_states_baseline = true\n[host]",
            "switch one of the two off",
            id="spool and baseline",
        ),
        pytest.param(
            "[host]", "[train]\nspool_shards = 1\n[host]", "train.spool_shards = 1", id="spool of 1"
        ),
        pytest.param('name = "B1"', 'name = "all"', "call the dataset something else", id="all"),
        pytest.param('name = "B1"', 'name = "a/b"', "datasets.0.name = 'a/b'", id="path in name"),
        pytest.param('path = "/models/t"', "path = ", "is not TOML", id="not toml"),
        pytest.param(
            'path = "/models/t"', 'path = "${NOWHERE}"', "${NOWHERE}: set that", id="variable"
        ),
    ],
)
def test_a_wrong_recipe_is_one_sentence(
    recipe_file: Path, old: str, new: str, sentence: str
) -> None:
    recipe_file.write_text(GOOD.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file)
    message = str(caught.value)
    assert sentence in message
    assert str(recipe_file) in message
    assert "\n" not in message


def test_two_datasets_of_one_name_are_refused(recipe_file: Path) -> None:
    again = GOOD[GOOD.index("[[datasets]]") :]
    recipe_file.write_text(GOOD + again)
    with pytest.raises(RecipeError, match="datasets share the name B1"):
        load_recipe(recipe_file)


def test_a_missing_recipe_names_the_variable_to_set(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="set DRAFTER_RECIPE"):
        load_recipe(tmp_path / "absent.toml")


def test_an_unknown_dataset_is_answered_with_the_known_ones(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"no dataset 'B9' in recipe mine: it has B1"):
        load_recipe(recipe_file).dataset("B9")


def test_no_recipe_holds_a_secret() -> None:
    for path in RECIPES.glob("*.toml"):
        engine = tomllib.loads(path.read_text())["engine"]
        limits = {"in_flight", "queue_timeout_s", "slowest_tokens_per_s", "patience_s"}
        assert set(engine) <= {"kind", "urls", "api_key_env"} | limits
