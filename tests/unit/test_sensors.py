"""Sensors wait while the job they need runs, and say at once why it will not do."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from unit.fake_host import FakeHost, refused
from unit.test_operators import RECIPE, context

from drafter.recipe import Recipe
from gpu_host.sensors import SchemaSensor, TokenBudgetSensor
from gpu_host.triggers import StatusTrigger


def status(
    alive: bool = False,
    code: int | None = 0,
    tokens: int = 100,
    stop_reason: str | None = "budget",
    validated: bool = True,
    verified: str = "ok",
    size: int | None = 9,
    pilot_rows: int | None = None,
    stored: int = 0,
) -> dict[str, Any]:
    end = None if code is None else {"code": code, "reason": f"ended with {code}"}
    job = {
        "alive": alive,
        "state": None,
        "exit": end,
        "progress": {"completion_tokens": tokens},
        "job": {"start_id": "s1", "pilot_rows": pilot_rows},
    }
    dataset: dict[str, Any] = {
        "verified": {"prompts.jsonl": "ok", "raw.jsonl": verified},
        "sizes": {} if size is None else {"raw_responses.jsonl": size},
        "stored": {"responses": stored},
    }
    if stop_reason:
        dataset["generate"] = {
            "counts": {"completion_tokens": tokens},
            "stop_reason": stop_reason,
            "files": {"raw_responses.jsonl": {"bytes": 9, "sha256": "0"}},
        }
    if validated:
        dataset["validate"] = {"counts": {"accepted": 3}}
    jobs = {"generate": {"B1": job}, "validate": {"B1": {**job}}}
    return {"jobs": jobs, "datasets": {"B1": dataset}}


NOTHING: dict[str, Any] = {"jobs": {}, "datasets": {}}


def sensor(kind: Any, *answers: dict[str, Any], recipe: Recipe = RECIPE) -> Any:
    class Sensor(kind):  # type: ignore[misc]
        def hook(self) -> Any:
            return host

    host = FakeHost(*answers)
    return Sensor(task_id="sensor", dataset="B1", recipe=recipe)


@pytest.mark.parametrize(
    "seen",
    [
        status(),
        status(tokens=60, stop_reason="prompts exhausted"),
        status(code=1),
        status(code=None),
    ],
    ids=["budget", "prompts exhausted", "killed after the manifest", "no exit record"],
)
def test_enough_tokens_let_validation_begin(seen: dict[str, Any]) -> None:
    assert sensor(TokenBudgetSensor, seen).execute(context())["tokens"] >= 60


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (NOTHING, "0 tokens stored, budget 100, minimum 50; run the generate DAG"),
        (status(tokens=49, stop_reason="prompts exhausted"), "too early: 49 tokens stored"),
        (status(tokens=100, stop_reason=None), "B1 is not generated .* 100 tokens stored"),
        (status(code=65, stop_reason=None), r"ended with exit 65 \(ended with 65\): 100 tokens"),
        (status(code=65, size=12), "ended with exit 65"),
        (status(size=None), "B1 is not generated"),
        (status(code=None, stop_reason=None), "left no exit record"),
        (
            status(stop_reason=None, pilot_rows=32, stored=32),
            r"only a pilot of B1 is generated \(32 rows\): 100 tokens stored, .*; approve it in",
        ),
        (status(stop_reason=None, pilot_rows=32), "B1 is not generated and nothing runs"),
        (status(stop_reason=None, pilot_rows=32, stored=9, code=65), "ended with exit 65"),
    ],
)
def test_too_few_tokens_and_nobody_at_work_fail_at_once(seen: dict[str, Any], message: str) -> None:
    with refused(AirflowFailException, message):
        sensor(TokenBudgetSensor, seen).execute(context())


@pytest.mark.parametrize("kind", [TokenBudgetSensor, SchemaSensor])
def test_a_sensor_waits_deferred_while_the_job_runs(kind: Any) -> None:
    task = sensor(kind, status(alive=True), status())
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context())
    assert isinstance(deferred.value.trigger, StatusTrigger)
    assert task.execute_complete(context(), {})


def test_a_valid_dataset_lets_extraction_begin() -> None:
    assert sensor(SchemaSensor, status()).execute(context()) == {"accepted": 3}


def imported(**dataset: Any) -> dict[str, Any]:
    states = {"imported": "specforge", "counts": {"rows": 7}}
    return {"jobs": {}, "datasets": {"B1": {"extract": states, "sizes": {}, **dataset}}}


@pytest.mark.parametrize("kind", [TokenBudgetSensor, SchemaSensor])
def test_imported_states_need_no_rows(kind: Any) -> None:
    numbers = {"imported": "specforge", "rows": 7}
    assert sensor(kind, imported()).execute(context()) == numbers


def test_rows_beside_imported_states_are_judged_as_any_others() -> None:
    seen = imported(stored={"responses": 5})
    with refused(AirflowFailException, "B1 is not generated"):
        sensor(TokenBudgetSensor, seen).execute(context())


@pytest.mark.parametrize("kind", [TokenBudgetSensor, SchemaSensor])
def test_imported_states_are_nothing_to_a_recipe_that_spools(kind: Any) -> None:
    spools = RECIPE.train.model_copy(update={"spool_shards": 2})
    recipe = RECIPE.model_copy(update={"train": spools})
    with refused(AirflowFailException, "B1 is not"):
        sensor(kind, imported(), recipe=recipe).execute(context())


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (NOTHING, "B1 is not validated and nothing runs: run the validate DAG"),
        (
            status(verified="changed: validate read sha256 a, now b"),
            r"raw.jsonl of B1 is not what was validated \(changed: validate read sha256 a, now b\)",
        ),
        (status(verified="missing"), r"raw.jsonl of B1 is not what was validated \(missing\)"),
    ],
)
def test_what_is_not_as_validated_is_named(seen: dict[str, Any], message: str) -> None:
    with refused(AirflowFailException, message):
        sensor(SchemaSensor, seen).execute(context())
