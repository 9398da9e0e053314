"""Eight jobs that take long hold no worker of Airflow while they run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from integration.kill_stack import HERE, LOOK_S, Clicks, airflow, settled, wait

from drafter.files import read_json
from drafter.layout import Workspace

HOLD_S = 8
"""For so long they are watched, once all eight wait."""

EIGHT = [f"J{number}" for number in range(8)]
DATASET = """
[[datasets]]
name = "{0}"
format = "glaive"
path = "/nowhere/{0}.jsonl"
unbounded = true
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workspace, Clicks]]:
    home = tmp_path_factory.mktemp("long waits")
    sections = (HERE / "kill.toml").read_text().split("\n\n")
    kept = [section for section in sections if not section.startswith("[[datasets]]")]
    recipe = home / "eight.toml"
    recipe.write_text("\n\n".join(kept) + "".join(map(DATASET.format, EIGHT)))
    with airflow(home / "stack", recipe) as (_, workspace, clicks):
        yield workspace, clicks


def slots(api: Clicks) -> dict[str, int]:
    """Over all pools: how many hold a worker or are about to, and how many are deferred."""
    pools = api.get("/pools")["pools"]
    return {
        kind: sum(pool[f"{kind}_slots"] for pool in pools)
        for kind in ("running", "queued", "scheduled", "deferred")
    }


def test_eight_waiting_tasks_hold_no_worker(api: tuple[Workspace, Clicks]) -> None:
    workspace, clicks = api
    go_on = workspace.root / "go on"
    program = ["bash", "-c", 'until test -e "$0"; do sleep 0.2; done; echo done', str(go_on)]
    runs = {dataset: clicks.start(dataset, program) for dataset in EIGHT}
    all_wait = {"running": 0, "queued": 0, "scheduled": 0, "deferred": 8}
    wait(lambda: slots(clicks) == all_wait, "eight deferred tasks at once, and no other")
    give_up = time.monotonic() + HOLD_S
    while time.monotonic() < give_up:
        assert slots(clicks) == all_wait
        time.sleep(LOOK_S)

    go_on.touch()
    for dataset, run in runs.items():
        assert settled(clicks, dataset, run) == "success"
        assert read_json(workspace.job("generate", dataset).exit)["code"] == 0
        assert "done" in clicks.log(clicks.job(dataset, run))
