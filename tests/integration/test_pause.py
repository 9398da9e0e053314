"""Pausing a DAG on a real Airflow ends its jobs, and nothing else; unpausing starts nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.kill_matrix import LIMIT_S, Watcher
from integration.kill_stack import HERE, Clicks, airflow, wait
from unit.host import NOISY, QUIET, STUBBORN

from drafter.layout import Workspace

pytestmark = pytest.mark.long

QUIET_S = 6.0
"""Two rounds of the scheduler: what starts by itself has started by then."""


@dataclass
class Site:
    api: Clicks
    watcher: Watcher
    recipe: Path

    def begin(self, dataset: str, program: list[str], wait_s: float = 0) -> tuple[str, str]:
        """A job at work: (run, start id)."""
        state = "running" if wait_s else "deferred"
        run = self.api.start(dataset, program, wait_s)
        wait(lambda: self.api.job(dataset, run)["state"] == state, f"{dataset} {state}")
        wait(lambda: self.watcher.live(dataset), f"{dataset} live")
        return run, self.watcher.live(dataset) or ""

    def run(self, dataset: str, run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/dags/{dataset}/dagRuns/{run}")
        return found

    def dead_within_limit(self, begun: dict[str, tuple[str, str]], acted: float) -> None:
        for dataset, (_, start_id) in begun.items():
            row = self.watcher.row("pause", dataset, start_id, acted)
            assert (row.missed, row.survivors) == ("", 0), dataset
            assert row.seconds is not None
            assert row.seconds <= LIMIT_S


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("pause")
    recipe = home / "kill.toml"
    recipe.write_text((HERE / "kill.toml").read_text())
    with airflow(home / "stack", recipe) as (_, workspace, api):
        watcher = Watcher(Workspace(workspace.root))
        watcher.start()
        yield Site(api, watcher, recipe)


def test_pausing_ends_the_jobs_of_the_paused_dags_only_and_says_why(site: Site) -> None:
    other = site.begin("noisy", NOISY)
    begun = {"quiet": site.begin("quiet", QUIET, 60), "stubborn": site.begin("stubborn", STUBBORN)}
    acted = time.monotonic()
    site.api.pause("quiet", "stubborn")
    site.dead_within_limit(begun, acted)
    for dataset, (run, _) in begun.items():
        ended = site.run(dataset, run)
        assert ended["state"] == "failed"
        assert "Stopped because the DAG was paused" in ended["note"]
        assert "unpause the DAG and clear this run" in ended["note"]
        assert site.api.job(dataset, run)["state"] == "failed"
    assert site.watcher.live("noisy") == other[1]
    assert site.run("noisy", other[0])["state"] == "running"


def test_unpausing_starts_nothing_and_a_clear_resumes(site: Site) -> None:
    before = {dataset: site.api.runs(dataset) for dataset in ("quiet", "stubborn")}
    for dataset in before:
        site.api.unpause(dataset)
    time.sleep(QUIET_S)
    for dataset, runs in before.items():
        assert site.api.runs(dataset) == runs
        assert not site.watcher.look().get(dataset)
    for dataset, runs in before.items():
        site.api.clear(dataset, runs[0]["dag_run_id"], ["job"])
    for dataset in before:
        wait(lambda d=dataset: site.watcher.live(d), f"{dataset} live again")


def test_pausing_again_ends_what_was_queued_meanwhile(site: Site) -> None:
    (run,) = [run for run in site.api.runs("noisy") if run["state"] == "running"]
    site.api.pause("noisy")
    assert site.run("noisy", run["dag_run_id"])["state"] == "failed"
    queued = site.api.start("noisy", NOISY)
    assert site.run("noisy", queued)["state"] == "queued"
    site.api.pause("noisy")
    assert site.run("noisy", queued)["state"] == "failed"
    site.api.unpause("noisy")
    time.sleep(QUIET_S)
    assert site.run("noisy", queued)["state"] == "failed"
    wait(lambda: not site.watcher.look().get("noisy"), "noisy quiet")


def test_with_the_setting_off_pausing_stops_nothing(site: Site) -> None:
    start_id = site.watcher.live("stubborn")
    site.recipe.write_text(site.recipe.read_text() + "\n[schedule]\npause_stops = false\n")
    site.api.pause("stubborn")
    time.sleep(QUIET_S)
    assert site.watcher.live("stubborn") == start_id is not None
    assert site.api.runs("stubborn")[0]["state"] == "running"
