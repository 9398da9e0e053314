"""What a phase is told: its directory's ``job.json``, and where it reports progress.

``job.json`` (written by ``drafter start``, read by the supervisor and the phase)::

    phase, dataset   what this is; dataset is "all" for jobs over every dataset
    argv             what the supervisor runs, normally [python, -m, drafter, run, <job dir>]
    start_id         one per start; an exit record with another start_id is somebody else's
    what             sha256 of what is to be done: phase, dataset, recipe section, pilot_rows, run
                     id on restart
    code             sha256 of the deployed package
    run_id, mode     Airflow run and "resume" | "restart" | "adopt"
    token_budget     overrides the dataset's, or null
    pilot_rows       of generate: stop at so many stored rows, for a person to look at; or null
    in_flight        this job's share of the engine
    recipe           the resolved recipe
    timeout_s, lease_s, grace_s      timeout_s is null for what ends by its lease alone
    lock             what the job holds while it runs; layout.Workspace.lock
    request          id of the Airflow try that asks, or null
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.files import read_json, write_json
from drafter.layout import JobDir, Workspace
from drafter.plan import Mode
from drafter.recipe import Recipe, parse_recipe


@dataclass(frozen=True)
class Job:
    """One phase on one dataset, as its process sees it."""

    phase: str
    dataset: str
    recipe: Recipe
    dir: JobDir
    start_id: str
    code: str
    run_id: str
    mode: Mode
    token_budget: int | None
    in_flight: int
    pilot_rows: int | None = None

    @property
    def workspace(self) -> Workspace:
        return Workspace(Path(self.recipe.host.workspace))

    def report(self, **numbers: Any) -> None:
        """Replace ``progress.json``. Sensors and the UI read it; call it every second or so."""
        write_json(self.dir.progress, {"time": time.time(), "start_id": self.start_id, **numbers})


def load_job(directory: Path) -> Job:
    """Read ``directory/job.json``. Raises DataError or RecipeError naming the file."""
    job_dir = JobDir(directory)
    spec = read_json(job_dir.job)
    return Job(
        phase=spec["phase"],
        dataset=spec["dataset"],
        recipe=parse_recipe(spec["recipe"], str(job_dir.job)),
        dir=job_dir,
        start_id=spec["start_id"],
        code=spec["code"],
        run_id=spec["run_id"],
        mode=spec["mode"],
        token_budget=spec["token_budget"],
        in_flight=spec["in_flight"],
        pilot_rows=spec.get("pilot_rows"),
    )
