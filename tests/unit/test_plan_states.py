"""The plan of states and of what is trained on them: stored, spooled or imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.plan_site import extract, generate, make_recipe, prepare, validate

from drafter.errors import DataError, RecipeError
from drafter.files import file_record, read_section, write_section
from drafter.layout import Workspace
from drafter.plan import decide, inputs, joined, run_name
from drafter.recipe import Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.fixture
def workspace(recipe: Recipe) -> Workspace:
    return Workspace(Path(recipe.host.workspace))


def test_another_set_of_states_is_another_training_run(
    workspace: Workspace, recipe: Recipe
) -> None:
    for name in recipe.dataset_names:
        extract(workspace, name)
    first = run_name(workspace, recipe)
    assert run_name(workspace, recipe) == first
    extract(workspace, "B2", files={"a": 1})
    assert run_name(workspace, recipe) != first


@pytest.mark.parametrize(
    ("change", "another"),
    [
        pytest.param({"files": {"a": 1}}, True, id="other states"),
        pytest.param({"identity": {"dtype": "float32"}}, True, id="other precision"),
        pytest.param({"counts": {"left_out": {"long": 1}}}, True, id="more rows left out"),
        pytest.param({"inputs": {"extract": {"min_argmax_share": 0.1}}}, False, id="a bound"),
        pytest.param({"gates": {"argmax_share": 0.7}}, False, id="what the gates measured"),
    ],
)
def test_only_what_training_sees_of_an_extraction_makes_another_run_and_another_set(
    change: dict[str, Any], another: bool, workspace: Workspace, recipe: Recipe
) -> None:
    for name in recipe.dataset_names:
        extract(workspace, name)
    run, joint = run_name(workspace, recipe), joined("extract", workspace, recipe)["digest"]
    extract(workspace, "B2", **change)
    assert (run_name(workspace, recipe) != run) == another
    assert (joined("extract", workspace, recipe)["digest"] != joint) == another


def test_how_often_training_saves_does_not_make_another_run(
    tmp_path: Path, workspace: Workspace, recipe: Recipe
) -> None:
    for name in recipe.dataset_names:
        extract(workspace, name)
    often = make_recipe(tmp_path, train={"checkpoint_every_steps": 7})
    assert run_name(workspace, often) == run_name(workspace, recipe)
    longer = make_recipe(tmp_path, train={"steps": 7})
    assert run_name(workspace, longer) != run_name(workspace, recipe)


def test_a_spooled_training_depends_on_the_tokenized_rows_and_no_shard(
    tmp_path: Path, workspace: Workspace, recipe: Recipe
) -> None:
    def spooling(extract: dict[str, Any] | None = None, **train: Any) -> Recipe:
        return make_recipe(tmp_path, extract=extract or {}, train={"spool_shards": 4, **train})

    prepare(workspace, recipe)
    for name in recipe.dataset_names:
        generate(workspace, recipe, name)
    validate(workspace, recipe, "B1")
    plan = decide("train", "all", workspace, spooling())
    assert (plan.action, "B2: validate has not finished" in plan.reason) == ("wait", True)
    validate(workspace, recipe, "B2")
    first = run_name(workspace, spooling())
    for same in (
        spooling(checkpoint_every_steps=3),
        spooling(spool_shards=9, spool_patience_s=7),
        spooling({"min_argmax_share": 0.2, "jobs": 3}),
    ):
        assert run_name(workspace, same) == first
    for other in (spooling(seed=1), spooling({"max_length": 99})):
        assert run_name(workspace, other) != first
    workspace.prepared("B2").tokenized.write_text('{"other":1}\n')
    files = {"tokenized_data.jsonl": file_record(workspace.prepared("B2").tokenized)}
    write_section(workspace.prepared("B2").manifest, "validate", {"files": files, "counts": {}})
    assert run_name(workspace, spooling()) != first


def test_a_spool_is_done_when_its_training_is(
    tmp_path: Path, workspace: Workspace, recipe: Recipe
) -> None:
    spooled = make_recipe(tmp_path, train={"spool_shards": 4})
    prepare(workspace, recipe)
    for name in recipe.dataset_names:
        generate(workspace, recipe, name)
        validate(workspace, recipe, name)

    def left(phase: str) -> None:
        section = {"inputs": inputs(phase, "all", workspace, spooled), "counts": {}, "files": {}}
        write_section(workspace.drafter(run_name(workspace, spooled)).manifest, phase, section)

    assert decide("spool", "all", workspace, spooled).reason == "not done yet"
    left("spool")
    plan = decide("spool", "all", workspace, spooled)
    assert (plan.action, plan.reason) == ("start", "training needs its states once more")
    left("train")
    for phase in ("spool", "train"):
        assert decide(phase, "all", workspace, spooled).action == "done"
    extraction = decide("extract", "B1", workspace, spooled)
    assert extraction.reason.endswith("the recipe spools: the train DAG makes its states itself")
    with pytest.raises(RecipeError, match=r"does not spool: set train\.spool_shards"):
        decide("spool", "all", workspace, recipe)


def test_a_missing_shard_is_extracted_again(workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")
    validate(workspace, recipe, "B1")
    hidden = workspace.hidden_states("B1")
    hidden.root.mkdir(parents=True)
    hidden.shard(0).write_bytes(b"states")
    section = {
        "inputs": inputs("extract", "B1", workspace, recipe),
        "counts": {},
        "files": {hidden.shard(0).name: file_record(hidden.shard(0))},
    }
    write_section(hidden.manifest, "extract", section)
    assert decide("extract", "B1", workspace, recipe).action == "done"
    hidden.shard(0).unlink()
    plan = decide("extract", "B1", workspace, recipe)
    assert plan.reason == "missing or changed: shard-00000.safetensors"


def imported(workspace: Workspace, recipe: Recipe, name: str) -> None:
    identity = {"target": recipe.target.path, "revision": recipe.target.revision}
    extract(workspace, name, inputs={"imported": "specforge", "source": "0"}, identity=identity)


def test_imported_states_need_no_rows_and_complete_both_sets(
    workspace: Workspace, recipe: Recipe
) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")
    validate(workspace, recipe, "B1")
    assert joined("validate", workspace, recipe)["missing"] == ["B2"]
    imported(workspace, recipe, "B2")
    plan = decide("validate", "B2", workspace, recipe)
    assert (plan.action, plan.reason) == (
        "done",
        "its states are imported, there are no rows to validate",
    )
    assert joined("validate", workspace, recipe)["missing"] == []
    assert joined("extract", workspace, recipe)["missing"] == ["B1"]


def test_rows_beside_imported_states_and_rows_for_a_spool_are_validated(
    tmp_path: Path, workspace: Workspace, recipe: Recipe
) -> None:
    prepare(workspace, recipe)
    imported(workspace, recipe, "B1")
    spooled = make_recipe(tmp_path, train={"spool_shards": 4})
    assert decide("validate", "B1", workspace, spooled).action == "wait"
    unused = "; not needed, the recipe spools: the train DAG makes its states itself"
    assert decide("extract", "B1", workspace, spooled).reason.endswith(unused)
    generate(workspace, recipe, "B1")
    assert decide("validate", "B1", workspace, recipe).action == "start"


def test_an_import_that_is_not_whole_is_refused_as_wrong_data(
    workspace: Workspace, recipe: Recipe
) -> None:
    imported(workspace, recipe, "B1")
    section = read_section(workspace.hidden_states("B1").manifest, "extract") or {}
    extract(workspace, "B1", **{**section, "files": {"shard-00000": {"bytes": 3}}})
    plan = decide("extract", "B1", workspace, recipe)
    assert (plan.action, plan.exit_code) == ("refuse", DataError.exit_code)
    waits = decide("validate", "B1", workspace, recipe)
    assert (waits.action, waits.reason) == ("wait", plan.reason)
    assert "imported from specforge, missing or changed: shard-00000" in plan.reason
