"""The plan says what a start would do, from files alone, and never writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from unit.plan_site import generate, make_recipe, prepare, validate

from drafter.errors import RecipeError
from drafter.layout import Workspace
from drafter.plan import decide, inputs, joined
from drafter.recipe import Recipe, parse_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.fixture
def workspace(recipe: Recipe) -> Workspace:
    return Workspace(Path(recipe.host.workspace))


def test_an_empty_workspace_waits_for_prepare(workspace: Workspace, recipe: Recipe) -> None:
    assert decide("prepare", "all", workspace, recipe).action == "start"
    plan = decide("generate", "B1", workspace, recipe)
    assert (plan.action, "prepare" in plan.reason) == ("wait", True)


def test_prepare_is_done_for_all_datasets_or_for_none(workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    assert decide("prepare", "all", workspace, recipe).action == "done"
    workspace.prepared("B2").manifest.unlink()
    assert decide("prepare", "all", workspace, recipe).action == "start"


def test_a_changed_source_is_prepared_again(workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    Path(recipe.datasets[0].path).write_text('{"new":1}\n')
    plan = decide("prepare", "all", workspace, recipe)
    assert (plan.action, plan.reason) == ("start", "changed since it was done: sources")


def test_generation_starts_resumes_and_ends(workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    plan = decide("generate", "B1", workspace, recipe)
    assert (plan.action, plan.reason) == ("start", "3 prompts, no responses yet")
    workspace.prepared("B1").responses.write_text('{"row":1}\n')
    plan = decide("generate", "B1", workspace, recipe)
    assert (plan.action, plan.reason) == ("resume", "1 responses stored")
    generate(workspace, recipe, "B1")
    assert decide("generate", "B1", workspace, recipe).action == "done"


@pytest.mark.parametrize(
    ("budget", "stop_reason", "action"),
    [
        pytest.param(None, "budget", "done", id="budget met"),
        pytest.param(50, "budget", "done", id="lowered budget loses nothing"),
        pytest.param(500, "budget", "resume", id="raised budget continues"),
        pytest.param(500, "prompts exhausted", "done", id="no prompts left to spend it on"),
    ],
)
def test_budgets_may_change(
    workspace: Workspace, recipe: Recipe, budget: int | None, stop_reason: str, action: str
) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1", stop_reason=stop_reason)
    assert decide("generate", "B1", workspace, recipe, token_budget=budget).action == action


@pytest.mark.parametrize(
    ("max_samples", "action"),
    [
        pytest.param(2, "done", id="as it was"),
        pytest.param(1, "done", id="lowered"),
        pytest.param(3, "resume", id="raised"),
        pytest.param(9, "resume", id="raised beyond what there is"),
    ],
)
def test_a_raised_quota_continues_with_the_prompts_that_are_there(
    tmp_path: Path, max_samples: int, action: str
) -> None:
    def with_quota(number: int) -> Recipe:
        tree = make_recipe(tmp_path).as_json()
        tree["datasets"][0] |= {"max_samples": number, "token_budget": None}
        return parse_recipe(tree, "test")

    recipe = with_quota(2)
    workspace = Workspace(Path(recipe.host.workspace))
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1", stop_reason="quota", prompts=2)
    assert decide("generate", "B1", workspace, with_quota(max_samples)).action == action


def test_rows_added_after_the_end_are_seen(workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")
    with open(workspace.prepared("B1").responses, "a") as file:
        file.write('{"row":3}\n')
    assert decide("generate", "B1", workspace, recipe).action == "resume"


def test_a_restart_moves_rows_away_once_per_run(workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")

    def action(run_id: str) -> str:
        return decide("generate", "B1", workspace, recipe, mode="restart", run_id=run_id).action

    assert action("run 1") == "restart"
    workspace.prepared("B1").archive("run 1").mkdir(parents=True)
    assert action("run 1") == "done"
    assert action("run 2") == "restart"


def test_another_sampling_is_not_done(tmp_path: Path, workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")
    other = make_recipe(tmp_path, generate={"temperature": 0.1})
    assert decide("generate", "B1", workspace, other).action == "resume"


def test_validation_follows_the_rows(workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    assert decide("validate", "B1", workspace, recipe).action == "wait"
    generate(workspace, recipe, "B1")
    validate(workspace, recipe, "B1")
    assert decide("validate", "B1", workspace, recipe).action == "done"
    with open(workspace.prepared("B1").responses, "a") as file:
        file.write('{"row":3}\n')
    plan = decide("validate", "B1", workspace, recipe)
    assert (plan.action, plan.reason) == ("start", "changed since it was done: responses")


def test_a_join_names_what_is_missing_and_its_digest_follows_the_files(
    workspace: Workspace, recipe: Recipe
) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")
    validate(workspace, recipe, "B1")
    before = joined("validate", workspace, recipe)
    assert before["missing"] == ["B2"]
    generate(workspace, recipe, "B2")
    validate(workspace, recipe, "B2")
    after = joined("validate", workspace, recipe)
    assert after["missing"] == []
    assert after["digest"] != before["digest"]
    assert joined("validate", workspace, recipe) == after


@pytest.mark.parametrize("left", ["section", "failures", "half a row", "nothing"])
def test_a_restart_is_offered_whatever_generate_left(
    left: str, workspace: Workspace, recipe: Recipe
) -> None:
    prepare(workspace, recipe)
    prepared = workspace.prepared("B1")
    if left == "section":
        generate(workspace, recipe, "B1")
        prepared.responses.unlink()
    if left == "failures":
        prepared.failed.write_text("{}\n")
    if left == "half a row":
        prepared.responses.write_text('{"row')
    plan = decide("generate", "B1", workspace, recipe, mode="restart", run_id="r")
    assert plan.action == ("start" if left == "nothing" else "restart")


@pytest.mark.parametrize("size", ["none", "other"])
def test_prompt_ids_that_are_gone_or_cut_are_prepared_again(
    size: str, workspace: Workspace, recipe: Recipe
) -> None:
    prepare(workspace, recipe)
    path = workspace.prepared("B2").prompt_ids
    path.unlink() if size == "none" else path.write_text("")
    plan = decide("prepare", "all", workspace, recipe)
    assert plan.action == "start"
    assert plan.reason == "missing or changed: B2/prompt_ids.jsonl"


def test_planning_writes_nothing(workspace: Workspace, recipe: Recipe) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")

    def state() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in workspace.root.rglob("*")}

    before = state()
    for phase in ("prepare", "generate", "validate", "extract", "train", "evaluate", "export"):
        decide(phase, "all" if phase in ("prepare", "train", "export") else "B1", workspace, recipe)
    assert state() == before


def test_a_missing_source_and_a_missing_target_are_one_sentence_each(
    tmp_path: Path, workspace: Workspace, recipe: Recipe
) -> None:
    source = Path(recipe.datasets[1].path)
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(RecipeError, match=r"B2: source .*B2\.jsonl cannot be read"):
        inputs("prepare", "all", workspace, recipe)
    (tmp_path / "elsewhere").rename(source)
    (tmp_path / "target" / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"no tokenizer in .*target: correct target\.path"):
        decide("prepare", "all", workspace, recipe)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.unlink(), id="missing"),
        pytest.param(lambda path: path.write_text("{}"), id="shorter"),
        pytest.param(lambda path: path.write_text("[]\n"), id="one byte changed"),
    ],
)
def test_what_validation_left_and_is_not_so_any_more_is_validated_again(
    workspace: Workspace, recipe: Recipe, spoil: Callable[[Path], object]
) -> None:
    prepare(workspace, recipe)
    generate(workspace, recipe, "B1")
    validate(workspace, recipe, "B1")
    spoil(workspace.prepared("B1").tokenized)
    plan = decide("validate", "B1", workspace, recipe)
    assert (plan.action, plan.reason) == ("start", "missing or changed: tokenized_data.jsonl")
