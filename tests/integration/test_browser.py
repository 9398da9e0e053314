"""What a person does in Airflow's UI, in a real browser, on the demo's eight datasets."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.browser import Ui, browser
from integration.kill_matrix import LIMIT_S, Watcher
from integration.kill_stack import wait

from demo import stack as demo_stack
from demo.airflow_api import AirflowApi
from demo.stack import PORTS, ROOT, Stack, free_ports
from drafter.layout import Workspace

HOST_PYTHON = ROOT / ".demo" / "host-venv" / "bin" / "python"
B1, B3 = "B1_glaive", "B3_magicoder"
BUDGET = 250
"""Tokens of a dataset in the run over all: about ten rows."""

PHASE_S = 240.0
"""One phase over eight datasets on a busy machine."""

QUIET_S = 6.0


@dataclass
class Site:
    api: AirflowApi
    workspace: Workspace
    watcher: Watcher
    ui: Ui
    datasets: list[str]

    def tasks(self, run: str) -> dict[str, dict[str, Any]]:
        """Task instances by name, mapped ones by the dataset's."""
        found = self.api.tasks("generate", run)
        return {task["rendered_map_index"] or task["task_id"]: task for task in found}

    def files(self, names: list[str]) -> dict[Path, tuple[int, bytes]]:
        """Date and content of everything that the datasets hold."""
        return {
            path: (path.stat().st_mtime_ns, path.read_bytes())
            for name in names
            for path in sorted(self.rows(name).parent.iterdir())
        }

    def rows(self, name: str) -> Path:
        return self.workspace.prepared(name).responses

    def has_rows(self, name: str) -> bool:
        return self.rows(name).exists() and len(self.rows(name).read_bytes().splitlines()) >= 4


@contextmanager
def pipeline(home: Path) -> Iterator[tuple[AirflowApi, Workspace, str]]:
    """The demo's stack; each job asks the engine one thing at a time: there is time to click."""
    recipe = home / "browser.toml"
    text = (ROOT / "include/recipes/demo.toml").read_text()
    assert "in_flight = 150" in text
    recipe.write_text(text.replace("in_flight = 150", "in_flight = 4"))
    web, *others = free_ports(1 + len(PORTS))
    stack = Stack(home, recipe, HOST_PYTHON, web, dict(zip(PORTS, others, strict=True)))
    workspace = Workspace(home / "host" / "workspace")
    demo_stack.begin(stack, workspace.root)
    try:
        demo_stack.start_host(stack)
        demo_stack.start_airflow(stack)
        with AirflowApi(stack.url) as api:
            wait(lambda: "generate" in api.dag_ids(), "the DAGs")
            api.set_pool("gpu", 4)
            api.unpause("generate")
            yield api, workspace, stack.url
    finally:
        demo_stack.stop(stack)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("browser")
    datasets = sorted(path.stem for path in (ROOT / "include/demo/prompts").iterdir())
    with pipeline(home) as (api, workspace, url), browser(url) as ui:
        watcher = Watcher(workspace)
        watcher.start()
        yield Site(api, workspace, watcher, ui, datasets)


@pytest.fixture(autouse=True)
def picture(site: Site, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """What the browser shows when a test has failed."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        site.ui.page.screenshot(path=tmp_path / "failure.png")


def test_pausing_in_the_ui_ends_both_trees_and_a_clear_after_unpausing_resumes(site: Site) -> None:
    run = site.ui.trigger("generate", [d for d in site.datasets if d not in (B1, B3)])
    site.ui.open_mapped("generate", run, "generate")
    wait(lambda: site.has_rows(B1) and site.has_rows(B3), "rows of both", PHASE_S)
    begun = {name: site.watcher.live(name) for name in (B1, B3)}
    acted = site.ui.flip_pause()
    for name, start_id in begun.items():
        assert start_id
        row = site.watcher.row("pause", name, start_id, acted)
        assert row.missed == "", name
        assert row.seconds is not None
        assert row.seconds <= LIMIT_S
    wait(lambda: site.ui.mapped() == {B1: "Failed", B3: "Failed"}, "both red")
    (paused,) = site.api.runs("generate")
    assert paused["state"] == "failed"
    assert "Stopped because the DAG was paused" in paused["note"]

    kept = site.rows(B1).read_bytes()
    site.ui.flip_pause()
    time.sleep(QUIET_S)
    assert not site.watcher.look()
    site.ui.clear(B1)
    wait(lambda: site.watcher.live(B1), "B1 live again")
    wait(lambda: len(site.rows(B1).read_bytes()) > len(kept), "more rows", PHASE_S)
    assert site.rows(B1).read_bytes().startswith(kept)
    assert not site.watcher.live(B3)
    site.ui.flip_pause()
    wait(lambda: not site.watcher.look(), "quiet")
    site.ui.flip_pause()


def test_a_failed_dataset_is_cleared_alone_and_the_other_seven_keep_dates_and_files(
    site: Site,
) -> None:
    lines = site.rows(B3).read_bytes().splitlines(keepends=True)
    site.rows(B3).write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[2:]]))
    run = site.ui.trigger("generate", [], token_budget=BUDGET)
    site.ui.open_mapped("generate", run, "generate")
    expected = dict.fromkeys(site.datasets, "Success") | {B3: "Failed"}
    wait(lambda: site.ui.mapped() == expected, "seven green, B3 red", PHASE_S)

    others = [name for name in site.datasets if name != B3]
    tasks, files = site.tasks(run), site.files(others)
    repair = [str(site.workspace.launcher), "repair", B3, "--yes"]
    subprocess.run(repair, check=True, capture_output=True)
    site.ui.clear(B3)
    wait(lambda: site.ui.mapped().get(B3) == "Success", "B3 green", PHASE_S)

    again = site.tasks(run)
    changed = {name for name in again if again[name] != tasks[name]}
    assert changed == {B3}
    assert again[B3]["try_number"] == tasks[B3]["try_number"] + 1
    assert site.files(others) == files
    assert site.rows(B3).read_bytes().startswith(b"".join(lines))
    wait(lambda: site.api.runs("generate")[0]["state"] == "success", "the run's end")
