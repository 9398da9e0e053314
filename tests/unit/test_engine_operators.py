"""The engine's setup and teardown: what they ask the host and what they make of its answers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from unit.fake_host import FakeHost, refused
from unit.test_dags import KIMI, parse

from drafter.recipe import Recipe, parse_recipe
from gpu_host import engine as engine_tasks
from gpu_host import triggers
from gpu_host.commands import Failed, FailedForGood
from gpu_host.engine import EngineTrigger, StartEngineOperator, StopEngineOperator

RECIPE: Recipe = parse_recipe(
    {
        "name": "tiny",
        "target": {"path": "/model", "revision": "1"},
        "engine": {"urls": ["http://127.0.0.1:1"], "start": ["serve", "--port", "1"]},
        "datasets": [{"name": "B1", "format": "glaive", "path": "/x", "unbounded": True}],
        "host": {"workspace": "/w"},
    },
    "test",
)
CONTEXT = {"ti": SimpleNamespace(id="try 1"), "run_id": "run 1"}
STARTED = {"outcome": "started", "start_id": "s1", "offset": 17}
FOLLOWING = {**STARTED, "outcome": "following"}
READY = {"start_id": "s1", "ready": True, "line": "serving m", "model": "m", "context": 9}
LOADING = {"start_id": "s1", "ready": False, "line": "loading"}
TODO = [{"dataset": "B1", "action": "done"}, {"dataset": "B2", "action": "resume"}]


def look(progress: dict[str, Any], **changes: Any) -> dict[str, Any]:
    seen = {"alive": True, "start_id": "s1", "exit": None, "progress": progress, "log": ""}
    return {**seen, "offset": 0, "log_bytes": 0, **changes}


def engine(host: FakeHost, plan: list[dict[str, Any]] = TODO) -> StartEngineOperator:
    class Engine(StartEngineOperator):
        def hook(self) -> Any:
            return host

    return Engine(task_id="start_engine", recipe=RECIPE, code="c0de", plan=plan)


def event(outcome: str, code: int | None = None, **changes: Any) -> dict[str, Any]:
    end = {"start_id": "s1", "code": code, "reason": f"ended with {code}", "request": None}
    return {
        "outcome": outcome,
        "start_id": "s1",
        "exit": None if code is None else {**end, **changes},
        "progress": {**LOADING, "reason": "the engine is not ready after 5 s"},
        "last_line": "x",
        "message": "no answer",
    }


def test_a_plan_that_sends_no_prompt_now_starts_nothing_and_asks_nobody() -> None:
    host = FakeHost({})
    idle = [{"dataset": "B1", "action": action} for action in ("done", "refuse", "approve")]
    assert engine(host, idle).execute(CONTEXT) == {"outcome": "not needed"}
    assert host.asked == []


def test_it_starts_the_engine_and_waits_where_the_pool_is_not_held() -> None:
    host = FakeHost(STARTED)
    with pytest.raises(TaskDeferred) as deferred:
        engine(host).execute(CONTEXT)
    assert host.asked == [["engine", "start"]]
    asked = json.loads(host.stdin)
    assert parse_recipe(asked.pop("recipe"), "job") == RECIPE
    assert asked == {"code": "c0de", "run_id": "run 1", "request": "try 1"}
    trigger = deferred.value.trigger
    assert isinstance(trigger, EngineTrigger)
    assert (trigger.job_dir, trigger.start_id, trigger.offset) == ("/w/jobs/engine/all", "s1", 17)
    assert trigger.serialize()[0] == "gpu_host.engine.EngineTrigger"
    assert EngineTrigger(**trigger.serialize()[1]).request == "try 1"


def test_a_ready_engine_is_followed_without_deferring() -> None:
    host = FakeHost(FOLLOWING, look(READY))
    assert engine(host).execute(CONTEXT) == {"outcome": "ready", "model": "m", "context": 9}


def test_one_that_still_loads_is_followed_by_a_trigger() -> None:
    with pytest.raises(TaskDeferred):
        engine(FakeHost(FOLLOWING, look(LOADING))).execute(CONTEXT)


def test_somebody_elses_engine_is_enough() -> None:
    serving = {"outcome": "serving", "model": "m", "context": 9}
    assert engine(FakeHost(serving)).execute(CONTEXT) == serving


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (event("ended", 75), Failed, "engine: busy.*exit 75.*not ready after 5 s; log: /w/jobs/"),
        (event("ended", 64), FailedForGood, "engine: recipe or identity wrong"),
        (event("ended", 143), FailedForGood, "engine: stopped by a person"),
        (event("ended", 142), Failed, "engine: lease ran out"),
        (event("lost"), Failed, "the engine ended without a record"),
        (event("unreachable"), Failed, "engine: no answer"),
    ],
)
def test_an_engine_that_never_served_is_one_red_task_with_one_reason(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with refused(kind, message):
        engine(FakeHost({})).execute_complete(CONTEXT, given)


@pytest.mark.parametrize(
    "given",
    [event("replaced"), event("ended", 143, request="teardown of another run"), event("ended", 0)],
    ids=["replaced", "stopped for another run", "ended for want of users"],
)
def test_one_that_was_ended_for_somebody_else_is_started_again(given: dict[str, Any]) -> None:
    host = FakeHost(STARTED)
    with pytest.raises(TaskDeferred):
        engine(host).execute_complete(CONTEXT, given)
    assert host.asked == [["engine", "start"]]


def test_killed_while_it_runs_it_stops_what_it_may_have_started() -> None:
    host = FakeHost(STARTED)
    task = engine(host)
    with pytest.raises(TaskDeferred):
        task.execute(CONTEXT)
    task.on_kill()
    assert host.asked[-1] == ["engine", "stop", "--request", "try 1"]


@pytest.mark.parametrize(
    "answer",
    [
        {"outcome": "stopped", "start_id": "s1", "exit": None},
        {"outcome": "not running"},
        {"outcome": "in use", "used_by": ["evaluate B1"]},
    ],
    ids=lambda answer: answer["outcome"],
)
def test_the_teardown_stops_it_unless_it_is_used(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_tasks, "DYING_S", 0.0)
    host = FakeHost(answer)
    assert stopping(host).execute(CONTEXT) == {"outcome": answer["outcome"]}
    assert host.asked == [["engine", "stop", "--request", "try 1"]]


def test_the_teardown_waits_for_jobs_that_are_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_tasks, "LOOK_S", 0.0)
    in_use = {"outcome": "in use", "used_by": ["generate B1"]}
    host = FakeHost(in_use, in_use, {"outcome": "stopped", "start_id": "s1", "exit": None})
    assert stopping(host).execute(CONTEXT) == {"outcome": "stopped"}
    assert len(host.asked) == 3


def stopping(host: FakeHost) -> StopEngineOperator:
    class Stop(StopEngineOperator):
        def hook(self) -> Any:
            return host

    return Stop(task_id="stop_engine", recipe=RECIPE, code="c0de")


class Trigger(EngineTrigger):
    def __init__(self, host: FakeHost) -> None:
        super().__init__(
            conn_id="gpu_host",
            workspace="/w",
            python="python3",
            code="c0de",
            job_dir="/w/jobs/engine/all",
            start_id="s1",
            offset=0,
            poll_s=0.0,
            patience_s=1.0,
            request="try 1",
        )
        self.host = host

    def hook(self) -> Any:
        return self.host


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "FIRST_EVENT_S", 0.0)


async def test_the_trigger_fires_when_the_engine_is_ready_and_renews_its_lease() -> None:
    host = FakeHost(look(LOADING), look(LOADING), look(READY))
    events = [event.payload async for event in Trigger(host).run()]
    assert [(event["outcome"], event["progress"]) for event in events] == [("reached", READY)]
    poll = ["poll", "--job", "/w/jobs/engine/all", "--offset", "0"]
    assert host.asked == [poll] * 3


async def test_a_dead_engine_is_not_ready_whatever_it_said_last() -> None:
    end = {"start_id": "s1", "code": 75, "reason": "ended", "request": None}
    host = FakeHost(look(READY, alive=False, exit=end))
    (event,) = [event.payload async for event in Trigger(host).run()]
    assert (event["outcome"], event["exit"]) == ("ended", end)


async def test_a_killed_wait_leaves_an_engine_that_jobs_use_alone() -> None:
    host = FakeHost({"outcome": "in use", "used_by": ["generate B1"]})
    await Trigger(host).on_kill()
    assert host.asked == [["engine", "stop", "--request", "try 1"]]


def test_with_a_start_command_the_dags_that_use_an_engine_start_and_stop_it(tmp_path: Any) -> None:
    recipe = tmp_path / "recipe.toml"
    given = KIMI.read_text()
    recipe.write_text(given.replace("[engine]", '[engine]\nstart = "serve"', 1))
    report = parse(tmp_path, recipe)
    assert report["errors"] == []
    both = {"start_engine", "stop_engine"}
    tasks = {dag_id: both & set(dag["tasks"]) for dag_id, dag in report["dags"].items()}
    assert tasks == {"generate": both, "train": both, "validate": set(), "extract": set()}
    pools = report["dags"]["generate"]["pools"]
    assert pools["start_engine"] == pools["stop_engine"] == "default_pool"
