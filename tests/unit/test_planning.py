"""The plan names what is mapped; the join announces each complete set once."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import Asset
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowSkipException,
    DownstreamTasksSkipped,
)
from unit.fake_host import FakeHost

from drafter.plan import MISSING_BYTES
from drafter.recipe import Recipe, parse_recipe
from gpu_host.planning import JoinOperator, PlanOperator

NAMES = ["B1", "B2", "B3"]
RECIPE: Recipe = parse_recipe(
    {
        "name": "tiny",
        "target": {"path": "/model", "revision": "1"},
        "engine": {"urls": ["http://127.0.0.1:1"]},
        "datasets": [
            {"name": name, "format": "glaive", "path": "/x", "unbounded": True} for name in NAMES
        ],
        "host": {"workspace": "/w"},
    },
    "test",
)
ASSET = Asset("drafter://tiny/validated")
PLAN = (0, "B2  done  its inputs are unchanged\n[]\n", "")


class Pushed(dict[str, Any]):
    def xcom_push(self, key: str, value: Any) -> None:
        self[key] = value


def context(params: dict[str, Any], events: dict[Asset, list[dict[str, Any]]] | None = None) -> Any:
    named = {
        asset: [SimpleNamespace(asset=asset, extra=extra) for extra in extras]
        for asset, extras in (events or {}).items()
    }
    return {
        "params": params,
        "run_id": "run 1",
        "ti": Pushed(),
        "triggering_asset_events": named,
    }


def plan(host: FakeHost, phase: str = "generate") -> PlanOperator:
    class Planned(PlanOperator):
        def hook(self) -> Any:
            return host

    return Planned(task_id="plan", recipe=RECIPE, code="c", phase=phase)


def join(host: FakeHost) -> JoinOperator:
    class Joined(JoinOperator):
        def hook(self) -> Any:
            return host

    return Joined(task_id="join", recipe=RECIPE, code="c", phase="validate", asset=ASSET)


def join_context(*digests: str) -> Any:
    events = [SimpleNamespace(extra={"digest": digest}) for digest in digests]
    return {"inlet_events": {ASSET: events}, "outlet_events": {ASSET: SimpleNamespace(extra={})}}


def test_the_form_says_which_datasets_are_mapped() -> None:
    host = FakeHost(PLAN)
    at = context({"datasets": ["B3", "B1"], "plan_only": False})
    assert plan(host).execute(at) == ["B3", "B1"]
    assert host.asked == [["plan", "generate", "B3", "B1", "--json", "--run-id", "run 1"]]
    assert at["ti"] == {"plan": []}


def test_events_of_single_datasets_map_those_alone_in_recipe_order() -> None:
    by_hand: dict[str, Any] = {}
    events = {
        Asset("drafter://tiny/generated/B3"): [{"dataset": "B3"}],
        Asset("drafter://tiny/generated/B2"): [by_hand],
        Asset("drafter://other/generated/B1"): [{"dataset": "B1"}],
    }
    at = context({"datasets": NAMES, "plan_only": False}, events)
    assert plan(FakeHost(PLAN)).execute(at) == ["B2", "B3"]


def test_an_event_over_all_datasets_maps_all() -> None:
    at = context({"datasets": NAMES, "plan_only": False}, {ASSET: [{"digest": "d"}]})
    assert plan(FakeHost(PLAN)).execute(at) == NAMES


def test_plan_only_maps_nothing_and_skips_what_follows() -> None:
    at = context({"datasets": NAMES, "plan_only": True})
    with pytest.raises(DownstreamTasksSkipped):
        plan(FakeHost(PLAN)).execute(at)
    assert at["ti"] == {"plan": [], "return_value": []}


def test_a_phase_over_all_is_planned_and_mapped_once() -> None:
    host = FakeHost(PLAN)
    operator = plan(host)
    operator.phase = "train"
    assert operator.execute(context({"plan_only": False})) == ["all"]
    assert host.asked[0][:3] == ["plan", "train", "all"]


def test_a_form_without_datasets_maps_all() -> None:
    assert plan(FakeHost(PLAN)).execute(context({"plan_only": False})) == NAMES


def test_mode_and_budget_of_the_form_reach_the_plan() -> None:
    host = FakeHost(PLAN)
    form = {"datasets": ["B1"], "plan_only": False, "mode": "restart", "token_budget": 7}
    plan(host).execute(context(form))
    assert host.asked[0][-4:] == ["--mode", "restart", "--token-budget", "7"]


def test_a_join_with_a_missing_dataset_is_skipped_and_names_it() -> None:
    host = FakeHost({"missing": ["B2"], "digest": "d1"})
    with pytest.raises(AirflowSkipException, match="not every dataset is there: B2"):
        join(host).execute(join_context())


@pytest.mark.parametrize(
    "earlier",
    [pytest.param((), id="first set"), pytest.param(("d0", "d9"), id="another set")],
)
def test_a_new_set_is_announced_with_its_digest(earlier: tuple[str, ...]) -> None:
    host = FakeHost({"missing": [], "digest": "d1"})
    at = join_context(*earlier)
    join(host).execute(at)
    assert at["outlet_events"][ASSET].extra == {"digest": "d1"}


def test_the_same_set_is_announced_once() -> None:
    host = FakeHost({"missing": [], "digest": "d1"})
    with pytest.raises(AirflowSkipException, match="announced before"):
        join(host).execute(join_context("d0", "d1"))


def test_what_the_host_says_last_is_the_plan() -> None:
    lines = [{"dataset": "B1", "action": "done"}]
    host = FakeHost((0, f"B1 done\n{json.dumps(lines)}\n", ""))
    at = context({"datasets": ["B1"], "plan_only": False})
    plan(host).execute(at)
    assert at["ti"]["plan"] == lines


def test_states_that_do_not_fit_the_disk_fail_at_the_plan_with_the_ways_out() -> None:
    short = {"reason": "the disk has 2 TiB: do less", "counts": {MISSING_BYTES: 9}}
    lines = [{"action": "done"}, {"action": "refuse", "exit_code": 64, **short}]
    host = FakeHost((0, f"B1 refuse ...\n{json.dumps(lines)}\n", ""))
    at = context({"datasets": NAMES, "plan_only": False})
    with pytest.raises(AirflowFailException, match="the disk has 2 TiB: do less"):
        plan(host, "extract").execute(at)
    assert at["ti"]["plan"] == lines


def refusal(exit_code: int, reason: str) -> dict[str, Any]:
    return {"action": "refuse", "exit_code": exit_code, "reason": reason, "counts": {}}


def test_a_bad_import_is_told_by_its_own_dataset_and_stops_no_other() -> None:
    lines = [refusal(65, "imported from specforge, missing: shard-00001"), {"action": "start"}]
    host = FakeHost((0, f"{json.dumps(lines)}\n", ""))
    at = context({"datasets": ["B1", "B2"], "plan_only": False})
    assert plan(host, "extract").execute(at) == ["B1", "B2"]


@pytest.mark.parametrize("exit_code", [64, 65])
def test_a_training_whose_spool_is_refused_fails_at_the_plan_before_it_holds_a_slot(
    exit_code: int,
) -> None:
    host = FakeHost((0, f"{json.dumps([refusal(exit_code, 'set train.spool_shards to 2')])}\n", ""))
    with pytest.raises(AirflowFailException, match=r"set train\.spool_shards to 2") as failed:
        plan(host, "train").execute(context({"plan_only": False}))
    assert failed.value.exit_code == exit_code  # type: ignore[attr-defined]
