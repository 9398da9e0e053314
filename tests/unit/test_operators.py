"""What operators make of the host's answers: defer, succeed, fail, retry or not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import Asset, AssetAlias
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from structlog.testing import capture_logs
from unit.fake_host import FakeHost, refused

from drafter.recipe import Recipe, parse_recipe
from gpu_host.commands import HostCommandOperator
from gpu_host.hooks import Unreachable
from gpu_host.operators import PhaseOperator
from gpu_host.triggers import JobTrigger

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


GENERATED = Asset("drafter://tiny/generated/B1")


class Announced(dict[Asset, list[Any]]):
    """``inlet_events``: of assets without an event too."""

    def __missing__(self, _asset: Asset) -> list[Any]:
        return []


def context(*extras: Any, asset: Asset = GENERATED) -> dict[str, Any]:
    """``extras``: of the events that ``asset`` has had."""
    return {
        "ti": SimpleNamespace(id="try 1", dag_id="generate", xcom_push=lambda **_: None),
        "run_id": "run 1",
        "inlet_events": Announced({asset: [SimpleNamespace(extra=extra) for extra in extras]}),
        "outlet_events": Events(),
    }


def told(here: dict[str, Any]) -> list[Any]:
    return [event for alias in here["outlet_events"].values() for event in alias.added]


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
DONE = {
    "outcome": "done",
    "reason": "its inputs are unchanged",
    "counts": {"rows": 7},
    "digest": "d1",
}
SHOW = ["show", "B1", "--last", "3"]
LEFT = (0, 'B1  done  its inputs are unchanged\n[{"digest":"d1"}]\n', "")
ANNOUNCEMENT = (GENERATED, {"dataset": "B1", "digest": "d1"})


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
        "pilot_rows": None,
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


@pytest.mark.parametrize(
    ("announced", "announcements"),
    [
        pytest.param([{"digest": "d0"}, {"digest": "d1"}], [], id="announced"),
        pytest.param([], [ANNOUNCEMENT], id="the try that saw its end died"),
        pytest.param([{"digest": "d1"}, {"digest": "d0"}], [ANNOUNCEMENT], id="another content"),
        pytest.param([{}], [ANNOUNCEMENT], id="an event made by hand"),
        pytest.param([None], [ANNOUNCEMENT], id="an event without extra"),
    ],
)
def test_a_done_dataset_never_defers_and_is_announced_once(
    announced: list[Any], announcements: list[Any]
) -> None:
    here = context(*announced)
    assert phase(FakeHost(DONE)).execute(here) == {"outcome": "done", "changed": False, "rows": 7}
    assert told(here) == announcements


def test_a_phase_without_an_asset_asks_for_no_digest() -> None:
    host, here = FakeHost(DONE), context()
    phase(host, phase="validate", asset=None).execute(here)
    phase(host, phase="validate", asset=None).execute_complete(here, event(), "started")
    assert host.asked == [["start"]]
    assert told(here) == []


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
        ({"mode": "again"}, "mode is 'again': it is one of resume, restart, adopt"),
        ({"dataset": "B9"}, "no dataset 'B9' in recipe tiny: it has B1"),
    ],
)
def test_a_wrong_argument_is_never_retried(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AirflowFailException, match=message):
        phase(FakeHost(STARTED), **changes).execute(context())


def test_success_returns_counts_and_tells_what_changed() -> None:
    host, here = FakeHost(LEFT), context()
    result = phase(host).execute_complete(here, event(), "started")
    assert result == {"outcome": "ran", "changed": True, "rows": 7}
    assert host.asked == [SHOW, ["plan", "generate", "B1", "--json"]]
    assert told(here) == [ANNOUNCEMENT]


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ((0, "B1/7\n  prompt\n", ""), [["B1/7", "  prompt"]]),
        ((1, "", "no tokenizer"), []),
        (Unreachable("gone"), []),
        (
            (0, "x" * 30_000, ""),
            [["x" * 20_000 + "... `drafter show B1` has the rest"]],
        ),
    ],
)
def test_what_was_generated_last_is_kept_to_look_at(answer: Any, kept: list[Any]) -> None:
    pushed: list[Any] = []
    here = context()
    here["ti"].xcom_push = lambda key, value: pushed.append((key, value))
    with capture_logs() as entries:
        phase(FakeHost(answer, LEFT)).execute_complete(here, event(), "started")
    assert pushed == [("samples", lines) for lines in kept]
    assert entries[-1]["event"] == "generate B1: 7 rows"


def test_a_task_that_found_all_done_ends_with_the_numbers() -> None:
    with capture_logs() as entries:
        phase(FakeHost(DONE)).execute(context())
    said = "generate B1: nothing to do, its inputs are unchanged; rows 7"
    assert entries[-1]["event"] == said


def test_the_link_leads_to_what_the_task_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "http://airflow/sub/")
    link, _ = phase(FakeHost(DONE)).operator_extra_links
    key = SimpleNamespace(dag_id="generate", run_id="a+b", task_id="generate", map_index=2)
    page = "http://airflow/sub/dags/generate/runs/a%2Bb/tasks/generate"
    assert link.get_link(phase(FakeHost(DONE)), ti_key=key) == f"{page}/mapped/2/xcom"
    key.map_index = -1
    assert link.get_link(phase(FakeHost(DONE)), ti_key=key) == f"{page}/xcom"


def test_an_end_that_changed_nothing_is_announced_if_it_never_was() -> None:
    for announced, announcements in (({"digest": "d1"}, []), ({}, [ANNOUNCEMENT])):
        here = context(announced)
        end = event()
        end["progress"]["changed"] = False
        assert not phase(FakeHost(LEFT)).execute_complete(here, end, "started")["changed"]
        assert told(here) == announcements


def test_a_phase_over_all_datasets_tells_of_its_own_asset() -> None:
    asset = Asset("drafter://tiny/drafter")
    task = phase(FakeHost(LEFT), phase="export", dataset="all", asset=asset)
    here = context({"digest": "d0"}, asset=asset)
    task.execute_complete(here, event(), "started")
    assert told(here) == [(asset, {"dataset": "all", "digest": "d1"})]
    assert task.inlets == [asset]


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
    with refused(kind, message) as raised:
        phase(FakeHost(DONE)).execute_complete(context(), given, "started")
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
    host = FakeHost(DONE, LEFT)
    assert phase(host).execute_complete(here, event(), "following")["changed"]
    assert told(here) == [ANNOUNCEMENT]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((64, "", "drafter: recipe is odd\n"), AirflowFailException, r"exit 64\): recipe is odd"),
        ((75, "", "drafter: is live\n"), AirflowException, r"exit 75\): is live"),
        (Unreachable("cannot be reached"), AirflowException, "cannot be reached"),
    ],
)
def test_a_refused_start_says_why(answer: Any, kind: type[Exception], message: str) -> None:
    with refused(kind, message):
        phase(FakeHost(answer)).execute(context())


def test_killing_the_task_stops_the_job_also_before_it_has_started() -> None:
    host = FakeHost(Unreachable("the worker was interrupted here"), (0, "{}\n", ""))
    task = phase(host)
    with pytest.raises(AirflowException):
        task.execute(context())
    task.on_kill()
    assert host.asked[-1] == ["stop", "--job", "/w/jobs/generate/B1", "--request", "try 1"]


def test_a_command_logs_what_it_prints() -> None:
    class Command(HostCommandOperator):
        def hook(self) -> Any:
            return FakeHost((0, "a table\nof two lines\n", ""))

    with capture_logs() as said:
        Command(task_id="c", recipe=RECIPE, command=["doctor"]).execute(context())
    assert [entry["event"] for entry in said][-2:] == ["a table", "of two lines"]


@pytest.mark.parametrize(
    ("name", "jobs", "slots"),
    [
        ("generate", 1, 1),
        ("extract", 1, 4),
        ("extract", 2, 2),
        ("extract", 4, 1),
        ("extract", 9, 1),
        ("evaluate", 2, 2),
        ("train", 4, 4),
    ],
)
def test_a_phase_that_loads_weights_takes_its_share_of_the_gpus(
    name: str, jobs: int, slots: int
) -> None:
    tree = {**RECIPE.as_json(), "extract": {"jobs": jobs}}
    task = phase(FakeHost(DONE), phase=name, recipe=parse_recipe(tree, "test"))
    assert (task.pool, task.pool_slots) == ("gpu", slots)


@pytest.mark.parametrize(
    ("slots", "jobs", "spool", "train"), [(2, 1, 1, 1), (4, 1, 3, 1), (4, 2, 2, 2), (8, 8, 1, 7)]
)
def test_both_sides_of_a_spool_fit_into_the_pool(
    slots: int, jobs: int, spool: int, train: int
) -> None:
    tree = RECIPE.as_json()
    changes = {
        "host": {**tree["host"], "slots": slots},
        "extract": {"jobs": jobs},
        "train": {"spool_shards": 4},
    }
    recipe = parse_recipe({**tree, **changes}, "test")
    taken = {
        name: phase(FakeHost(DONE), phase=name, dataset="all", recipe=recipe).pool_slots
        for name in ("spool", "train")
    }
    assert taken == {"spool": spool, "train": train}


def test_a_spool_is_told_what_it_makes_and_for_whom() -> None:
    def what(**train: Any) -> str:
        recipe = parse_recipe({**RECIPE.as_json(), "train": {"spool_shards": 4, **train}}, "test")
        host = FakeHost(STARTED)
        with pytest.raises(TaskDeferred):
            phase(host, phase="spool", dataset="all", recipe=recipe, asset=None).execute(context())
        assert json.loads(host.stdin)["lock"] == "/w/jobs/spool/all/.lock"
        return str(json.loads(host.stdin)["what"])

    assert what() == what() != what(seed=1)
