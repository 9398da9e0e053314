"""What Airflow adds to a job on an idle stack: before it runs, and after it has ended.

``job-start``: from the task being scheduled to the job running on the host. ``job-end``: from the
job's exit record to the success of its task; the next task may start then. Medians of single jobs,
one after the other, on one stack. There is nothing to compare them with, hence no reference and no
run on it.
"""

from __future__ import annotations

import tempfile
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import median

from bench.measure import Result
from integration.kill_stack import Clicks, airflow, settled, wait

from drafter.files import read_json
from drafter.layout import JobDir

BAR_S = 8.0
IDLE_S = 3.0
"""Before each job, for what the last one left to do."""

LASTS_S = (8.0, 9.1, 10.3, 11.2, 12.4)
"""Longer than the shortest deferral, and not in step with the polls."""


def job_start() -> Result:
    return _median([start_s for start_s, _ in _delays()])


def job_end() -> Result:
    return _median([end_s for _, end_s in _delays()])


def _median(delays_s: list[float]) -> Result:
    return Result(median(delays_s), "s", BAR_S, "value", "lower")


@cache
def _delays() -> list[tuple[float, float]]:
    """(start, end) of each job, in seconds."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as home,
        airflow(Path(home)) as (_, workspace, api),
    ):
        _one(api, workspace.job("generate", "quiet"), 1.0)  # deploys the code
        return [_one(api, workspace.job("generate", "quiet"), lasts_s) for lasts_s in LASTS_S]


def _one(api: Clicks, job: JobDir, lasts_s: float) -> tuple[float, float]:
    time.sleep(IDLE_S)
    run = api.start("quiet", ["sleep", str(lasts_s)])
    wait(lambda: api.job("quiet", run)["state"] in ("deferred", "failed"), "the job's start")
    # When the job has ended its task is scheduled once more: only now this is the first time.
    scheduled = _unix(api.job("quiet", run)["scheduled_when"])
    started = read_json(job.state)["started"]
    if settled(api, "quiet", run) != "success":
        raise RuntimeError(f"the job failed: {api.log(api.job('quiet', run))}")
    end = _unix(api.job("quiet", run)["end_date"])
    return started - scheduled, end - read_json(job.exit)["ended"]


def _unix(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
