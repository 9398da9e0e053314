"""What operators and sensors make of the host's answers: defer, succeed, fail, retry or not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import Asset, AssetAlias
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from unit.fake_host import FakeHost

from drafter.recipe import Recipe, parse_recipe
from gpu_host.hooks import Unreachable
from gpu_host.operators import HostCommandOperator, PhaseOperator
from gpu_host.sensors import SchemaSensor, TokenBudgetSensor
from gpu_host.triggers import JobTrigger, StatusTrigger

END = {"start_id": "s1", "code": 0, "reason": "", "ended": 1.0, "request": None}

RECIPE: Recipe = parse_recipe(
    {
        "name": "tiny",
        "target": {"path": "/model", "revision": "1"},
        "engine": {"urls": ["http://127.0.0.1:1"], "in_flight": 10},
        "datasets": [
            {
                "name": "B1",
                "format": "glaive",
                "path": "/b1.jsonl",
                "token_budget": 100,
                "min_tokens": 50,
            }
        ],
        "host": {"workspace": "/w", "slots": 4},
    },
    "test",
)


class Events(dict[AssetAlias, Any]):
    """``outlet_events``: what was added to each alias."""

    def __missing__(self, alias: AssetAlias) -> Any:
        added: list[Any] = []
        self[alias] = SimpleNamespace(
            added=added, add=lambda asset, extra: added.append((asset, extra))
        )
        return self[alias]


def context(request: str = "try 1") -> dict[str, Any]:
    return {"ti": SimpleNamespace(id=request), "run_id": "run 1", "outlet_events": Events()}


def phase(host: FakeHost, **changes: Any) -> PhaseOperator:
    class Phase(PhaseOperator):
        def hook(self) -> Any:
            return host

    arguments = {"phase": "generate", "dataset": "B1", "asset": "drafter://tiny/generated"}
    return Phase(**{"task_id": "t", "recipe": RECIPE, "code": "c0de", **arguments, **changes})


def event(code: int = 0, outcome: str = "ended", **changes: Any) -> dict[str, Any]:
    end = {**END, "code": code, "reason": f"ended with {code}" if code else "", **changes}
    progress = {"start_id": "s1", "time": 1, "done": True, "changed": True, "line": "7 rows"}
    return {
        "outcome": outcome,
        "start_id": "s1",
        "exit": end if outcome == "ended" else None,
        "progress": {**progress, "rows": 7},
        "last_line": "drafter: the last line",
        "message": "no answer",
    }


STARTED = {"outcome": "started", "start_id": "s1", "offset": 17}
DONE = {"outcome": "done", "reason": "its inputs are unchanged", "counts": {"rows": 7}}


def test_a_start_sends_the_whole_job_on_stdin_and_defers() -> None:
    host = FakeHost(STARTED)
    with pytest.raises(TaskDeferred) as deferred:
        phase(host, token_budget="70").execute(context())
    assert host.asked == [["start"]]
    spec = json.loads(host.stdin)
    assert spec | {"recipe": 0, "what": 0} == {
        "phase": "generate",
        "dataset": "B1",
        "argv": ["python3", "-m", "drafter", "run", "/w/jobs/generate/B1"],
        "what": 0,
        "code": "c0de",
        "run_id": "run 1",
        "mode": "resume",
        "token_budget": 70,
        "in_flight": 2,
        "recipe": 0,
        "timeout_s": 7 * 86_400,
        "lease_s": 900,
        "grace_s": 3,
        "lock": "/w/prepared/B1/.lock",
        "request": "try 1",
    }
    assert parse_recipe(spec["recipe"], "job") == RECIPE
    trigger = deferred.value.trigger
    assert isinstance(trigger, JobTrigger)
    assert (trigger.start_id, trigger.offset, trigger.request) == ("s1", 17, "try 1")


def test_a_done_dataset_neither_defers_nor_tells_anybody() -> None:
    here = context()
    assert phase(FakeHost(DONE)).execute(here) == {"outcome": "done", "changed": False, "rows": 7}
    assert here["outlet_events"] == {}


@pytest.mark.parametrize("budget", ["", "None", None])
def test_no_budget_means_the_recipes(budget: str | None) -> None:
    host = FakeHost(STARTED)
    with pytest.raises(TaskDeferred):
        phase(host, token_budget=budget).execute(context())
    assert json.loads(host.stdin)["token_budget"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": "many"}, "token budget is 'many': give a number above 0"),
        ({"token_budget": "0"}, "token budget is '0'"),
        ({"mode": "again"}, "mode is 'again': it is resume or restart"),
        ({"dataset": "B9"}, "no dataset 'B9' in recipe tiny: it has B1"),
    ],
)
def test_a_wrong_argument_is_never_retried(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AirflowFailException, match=message):
        phase(FakeHost(STARTED), **changes).execute(context())


def test_success_returns_counts_and_tells_what_changed() -> None:
    here = context()
    result = phase(FakeHost(DONE)).execute_complete(here, event(), "started")
    assert result == {"outcome": "ran", "changed": True, "rows": 7}
    (told,) = here["outlet_events"].values()
    assert told.added == [(Asset("drafter://tiny/generated/B1"), {"dataset": "B1"})]


def test_a_phase_over_all_datasets_tells_of_its_own_asset() -> None:
    here = context()
    asset = Asset("drafter://tiny/drafter")
    task = phase(FakeHost(DONE), phase="export", dataset="all", asset=asset)
    task.execute_complete(here, event(), "started")
    (told,) = here["outlet_events"].values()
    assert told.added[0][0] == asset


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (event(64), AirflowFailException, "recipe or identity wrong"),
        (event(65), AirflowFailException, "data wrong"),
        (event(143), AirflowFailException, "stopped by a person"),
        (event(1), AirflowException, "failed unexpectedly"),
        (event(75), AirflowException, "busy, or engine unavailable"),
        (event(124), AirflowException, "deadline passed"),
        (event(142), AirflowException, "lease ran out"),
        (event(137), AirflowException, "failed"),
        (event(outcome="lost"), AirflowException, "ended without a record"),
        (event(outcome="unreachable"), AirflowException, "no answer"),
    ],
)
def test_the_exit_code_decides_about_a_retry(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(AirflowException, match=message) as raised:
        phase(FakeHost(DONE)).execute_complete(context(), given, "started")
    assert type(raised.value) is kind
    if given["outcome"] == "ended":
        assert "the last line" in str(raised.value)
        assert "/w/jobs/generate/B1/log" in str(raised.value)


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (event(outcome="replaced"), "started"),
        (event(143, request="try 0"), "following"),
        (event(), "following"),
    ],
    ids=["another start took over", "an earlier try was stopped", "followed with another budget"],
)
def test_after_somebody_elses_job_the_plan_is_looked_at_again(
    given: dict[str, Any], outcome: str
) -> None:
    host = FakeHost(STARTED)
    with pytest.raises(TaskDeferred):
        phase(host).execute_complete(context(), given, outcome)
    assert host.asked == [["start"]]


def test_a_followed_job_that_did_it_all_still_tells_what_changed() -> None:
    here = context()
    assert phase(FakeHost(DONE)).execute_complete(here, event(), "following")["changed"]
    assert len(here["outlet_events"]) == 1


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((64, "", "drafter: recipe is odd\n"), AirflowFailException, r"exit 64\): recipe is odd"),
        ((75, "", "drafter: is live\n"), AirflowException, r"exit 75\): is live"),
        (Unreachable("cannot be reached"), AirflowException, "cannot be reached"),
    ],
)
def test_a_refused_start_says_why(answer: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(AirflowException, match=message) as raised:
        phase(FakeHost(answer)).execute(context())
    assert type(raised.value) is kind


def test_killing_the_task_stops_the_job_also_before_it_has_started() -> None:
    host = FakeHost(Unreachable("the worker was interrupted here"), (0, "{}\n", ""))
    task = phase(host)
    with pytest.raises(AirflowException):
        task.execute(context())
    task.on_kill()
    assert host.asked[-1] == ["stop", "--job", "/w/jobs/generate/B1", "--request", "try 1"]


def test_a_command_returns_its_last_line_as_json() -> None:
    class Command(HostCommandOperator):
        def hook(self) -> Any:
            return FakeHost((0, 'a table\n{"ok":true}\n', ""))

    task = Command(task_id="c", recipe=RECIPE, command=["plan"], json_output=True)
    assert task.execute(context()) == {"ok": True}


def status(
    alive: bool = False,
    code: int | None = 0,
    tokens: int = 100,
    stop_reason: str | None = "budget",
    validated: bool = True,
    verified: str = "ok",
) -> dict[str, Any]:
    end = None if code is None else {"code": code, "reason": f"ended with {code}"}
    job = {
        "alive": alive,
        "state": None,
        "exit": end,
        "progress": {"completion_tokens": tokens},
        "job": {"start_id": "s1"},
    }
    dataset: dict[str, Any] = {"verified": {"prompts.jsonl": "ok", "raw.jsonl": verified}}
    if stop_reason:
        dataset["generate"] = {
            "counts": {"completion_tokens": tokens},
            "stop_reason": stop_reason,
        }
    if validated:
        dataset["validate"] = {"counts": {"accepted": 3}}
    jobs = {"generate": {"B1": job}, "validate": {"B1": {**job}}}
    return {"jobs": jobs, "datasets": {"B1": dataset}}


NOTHING: dict[str, Any] = {"jobs": {}, "datasets": {}}


def sensor(kind: Any, *answers: dict[str, Any]) -> Any:
    class Sensor(kind):  # type: ignore[misc]
        def hook(self) -> Any:
            return host

    host = FakeHost(*answers)
    return Sensor(task_id="sensor", dataset="B1", recipe=RECIPE)


@pytest.mark.parametrize(
    "seen",
    [
        status(),
        status(tokens=60, stop_reason="prompts exhausted"),
        status(tokens=100, stop_reason=None),
    ],
)
def test_enough_tokens_let_validation_begin(seen: dict[str, Any]) -> None:
    assert sensor(TokenBudgetSensor, seen).execute(context())["tokens"] >= 60


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (NOTHING, "0 tokens stored, budget 100, minimum 50; run the generate DAG"),
        (status(tokens=49, stop_reason="prompts exhausted"), "49 tokens stored"),
        (status(tokens=60, stop_reason=None), "60 tokens stored, budget 100"),
        (status(code=65), r"ended with exit 65 \(ended with 65\): 100 tokens"),
        (status(code=None), "it left no exit record"),
    ],
)
def test_too_few_tokens_and_nobody_at_work_fail_at_once(seen: dict[str, Any], message: str) -> None:
    with pytest.raises(AirflowFailException, match=message):
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


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (NOTHING, "B1 is not validated and nothing runs: run the validate DAG"),
        (status(verified="changed"), "raw.jsonl of B1 is changed since it was validated"),
        (status(verified="missing"), "raw.jsonl of B1 is missing"),
    ],
)
def test_what_is_not_as_validated_is_named(seen: dict[str, Any], message: str) -> None:
    with pytest.raises(AirflowFailException, match=message):
        sensor(SchemaSensor, seen).execute(context())
