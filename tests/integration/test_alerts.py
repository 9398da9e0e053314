"""What goes wrong reaches the recipe's notifier, from the workers and triggerer of an Airflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.kill_stack import HERE, Clicks, airflow, settled, wait
from unit.host import NOISY, QUIET

pytestmark = pytest.mark.long

NOTIFIER = '''
import json, os
from airflow.sdk.bases.notifier import BaseNotifier


class FileNotifier(BaseNotifier):
    """A line for each alert; O_APPEND keeps lines of several processes whole."""

    template_fields = ("title",)

    def __init__(self, path, title):
        super().__init__()
        self.path = path
        self.title = title

    def notify(self, context):
        line = json.dumps({"title": self.title, **context["alert"]}, default=str) + "\\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)
'''
ALERTS = """
[alerts]
notifier = "file_notifier.FileNotifier"
stall_s = 15
min_free_gb = 100000
[alerts.kwargs]
path = "{path}"
title = "{{{{ alert.condition }}}} of {{{{ alert.dataset }}}}"
"""
TAINTED = ["sh", "-c", "echo 'drafter: 16 of 32 rows have no reasoning'; exit 65"]
WRONG = ["sh", "-c", "echo 'drafter: no target at /nowhere'; exit 64"]


@dataclass
class Site:
    api: Clicks
    heard: Path

    def alerts(self, dataset: str, run: str) -> list[dict[str, Any]]:
        """Oldest first, the shared disk's left out."""
        lines = self.heard.read_text().splitlines() if self.heard.exists() else []
        told = [json.loads(line) for line in lines]
        mine = [alert for alert in told if (alert["dataset"], alert["run_id"]) == (dataset, run)]
        return [alert for alert in mine if alert["condition"] != "disk"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("alerts")
    heard = home / "heard.jsonl"
    recipe = home / "kill.toml"
    recipe.write_text((HERE / "kill.toml").read_text() + ALERTS.format(path=heard))
    # Airflow puts this folder on the path of all its processes.
    config = home / "stack" / "airflow" / "config"
    config.mkdir(parents=True)
    (config / "file_notifier.py").write_text(NOTIFIER)
    with airflow(home / "stack", recipe) as (_, _, api):
        yield Site(api, heard)


@pytest.mark.parametrize(
    ("program", "condition", "exit_code", "said"),
    [
        (TAINTED, "tainted", 65, "16 of 32 rows have no reasoning"),
        (WRONG, "failed", 64, "no target at /nowhere"),
    ],
    ids=["tainted", "failed"],
)
def test_a_red_dataset_is_told_once_with_its_reason_and_numbers(
    site: Site, program: list[str], condition: str, exit_code: int, said: str
) -> None:
    run = site.api.start("quiet", program)
    assert settled(site.api, "quiet", run) == "failed"
    wait(lambda: site.alerts("quiet", run), "the alert")
    (alert,) = site.alerts("quiet", run)
    assert (alert["condition"], alert["numbers"]) == (condition, {"exit_code": exit_code})
    assert alert["title"] == f"{condition} of quiet"
    assert (alert["dag_id"], alert["phase"]) == ("quiet", "generate")
    assert said in alert["reason"]


def test_a_silent_job_is_told_once_and_one_that_writes_is_not(site: Site) -> None:
    runs = {"quiet": site.api.start("quiet", QUIET), "noisy": site.api.start("noisy", NOISY)}
    wait(lambda: site.alerts("quiet", runs["quiet"]), "the alert")
    assert settled(site.api, "quiet", runs["quiet"]) == "success"
    (alert,) = site.alerts("quiet", runs["quiet"])
    assert alert["condition"] == "stalled"
    assert alert["reason"].startswith("generate quiet has made no progress for 0 min")
    assert alert["numbers"]["still_s"] >= 15
    assert site.alerts("noisy", runs["noisy"]) == []
    site.api.pause("noisy")


def test_a_disk_that_runs_full_is_told_once_for_all_jobs_on_it(site: Site) -> None:
    told = [json.loads(line) for line in site.heard.read_text().splitlines()]
    (disk,) = (alert for alert in told if alert["condition"] == "disk")
    assert "less than the 100000 GB of min_free_gb" in disk["reason"]
    assert disk["numbers"]["free_bytes"] > 0
