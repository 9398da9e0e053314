"""Drive the four DAGs from prompts to drafter, as a person would, and say what happens meanwhile.

The generate DAG is triggered; the others follow by assets. One that has something to do and was not
started by an asset (because an earlier demo was interrupted in between) is triggered too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.airflow_api import ACTIVE, AirflowApi
from drafter.errors import DrafterError
from drafter.layout import ALL, Workspace
from drafter.plan import OVER_ALL, decide
from drafter.recipe import Recipe
from drafter.status import read_status

CHAIN = {
    "generate": ("prepare", "generate"),
    "validate": ("validate",),
    "extract": ("extract",),
    "train": ("train", "evaluate", "export"),
}
"""DAG -> the phases that are done when it has done its work."""

QUIET_S = 20.0
"""An asset event starts its run within seconds; after so long without one it will not come."""

POLL_S = 2.0
PARSE_TIMEOUT_S = 120.0


class RunFailed(DrafterError):
    """A DAG run ended red, or did not do its work."""


@dataclass
class Drive:
    """One pass over the chain; remembers what was said, so that each thing is said once."""

    api: AirflowApi
    recipe: Recipe
    check: Callable[[], None]
    """Raises when a process of the stack has died."""

    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    told: set[str] = field(default_factory=set)

    @property
    def workspace(self) -> Workspace:
        return Workspace(Path(self.recipe.host.workspace))

    def run(self) -> None:
        """Bring every phase to done. Raises RunFailed with the failing task's last line."""
        self._wait_for_dags()
        earlier = {dag_id: self._close_runs(dag_id) for dag_id in CHAIN}
        self.get_ready()
        self.api.trigger("generate")
        for dag_id in CHAIN:
            self._follow(dag_id, earlier[dag_id])

    def get_ready(self) -> None:
        """The GPU pool, and DAGs that run when they are triggered."""
        self._wait_for_dags()
        self.api.set_pool(self.recipe.host.pool, self.recipe.host.slots)
        for dag_id in CHAIN:
            self.api.unpause(dag_id)

    def _wait_for_dags(self) -> None:
        deadline = time.monotonic() + PARSE_TIMEOUT_S
        while not set(CHAIN) <= self.api.dag_ids():
            errors = self.api.import_errors()
            if errors or time.monotonic() > deadline:
                raise RunFailed(errors[0] if errors else f"no DAGs within {PARSE_TIMEOUT_S:.0f} s")
            time.sleep(1)

    def _close_runs(self, dag_id: str) -> set[str]:
        """Fail what an interrupted demo left active; the ids of all runs so far."""
        runs = self.api.runs(dag_id)
        for run in runs:
            if run["state"] in ACTIVE:
                self.api.fail_run(dag_id, run["dag_run_id"])
        return {run["dag_run_id"] for run in runs}

    def _follow(self, dag_id: str, earlier: set[str]) -> None:
        """Until ``dag_id`` is idle and its work is done; triggers it when nothing else does."""
        quiet_since = time.monotonic()
        triggered = False
        while True:
            self.check()
            runs = [run for run in self.api.runs(dag_id) if run["dag_run_id"] not in earlier]
            for run in runs:
                if run["state"] == "failed":
                    raise RunFailed(f"{dag_id} failed: {self._failure(run)}")
            active = [run for run in runs if run["state"] in ACTIVE]
            if active:
                quiet_since = time.monotonic()
                self._tell(active[-1])
            elif runs and self._is_done(dag_id):
                self._say(f"{dag_id} done")
                return
            elif self._is_done(dag_id):
                self._say(f"{dag_id} was done before")
                return
            elif time.monotonic() - quiet_since > QUIET_S:
                if triggered:
                    raise RunFailed(f"{dag_id} ran but left work undone: look at its run in the UI")
                self.api.trigger(dag_id)
                triggered = True
            time.sleep(POLL_S)

    def _is_done(self, dag_id: str) -> bool:
        """Whether the plan has nothing left for any phase of the DAG."""
        return all(
            decide(phase, dataset, self.workspace, self.recipe).action == "done"
            for phase in CHAIN[dag_id]
            for dataset in ([ALL] if phase in OVER_ALL else self.recipe.dataset_names)
        )

    def _failure(self, run: dict[str, Any]) -> str:
        """The first failed task of a run and the sentence in which it says why."""
        tasks = self.api.tasks(run["dag_id"], run["dag_run_id"])
        failed = [task for task in tasks if task["state"] == "failed"]
        if not failed:
            return "no task failed; look at the run in the UI"
        task = min(failed, key=lambda t: t["end_date"] or "")
        name = f"{task['task_id']} {task['rendered_map_index'] or ''}".strip()
        return f"{name}: {self._reason(task)}"

    def _reason(self, task: dict[str, Any]) -> str:
        """What the task's log says behind "drafter: ", the mark of our own sentences."""
        lines = [line for line in self.api.log(task) if "drafter: " in line]
        return lines[-1].partition("drafter: ")[2] if lines else "its log in the UI says more"

    def _tell(self, run: dict[str, Any]) -> None:
        tasks = self.api.tasks(run["dag_id"], run["dag_run_id"])
        ended = sum(task["state"] in ("success", "skipped") for task in tasks)
        jobs = read_status(self.workspace.root)["jobs"] if self.workspace.root.exists() else {}
        for task in tasks:
            if task["state"] == "up_for_retry":
                name = f"{task['task_id']} {task['rendered_map_index'] or ''}".strip()
                key = f"{run['dag_run_id']} {name} {task['try_number']}"
                self._say_once(key, f"  {name} is tried again: {self._reason(task)}")
        running = []
        for phase in CHAIN[run["dag_id"]]:
            for dataset, job in jobs.get(phase, {}).items():
                progress = job["progress"] or {}
                if progress.get("time", 0) < self.began_at:
                    continue  # of an earlier demo
                if progress.get("line"):
                    key = f"{phase} {dataset} {progress['start_id']}"
                    self._say_once(key, f"  {phase} {dataset}: {progress['line']}")
                elif job["alive"]:
                    running.append(f"{dataset} {so_far(phase, progress)}")
        detail = " | ".join(running)
        self._say_once(
            f"{run['dag_run_id']} {ended} {detail}",
            f"{run['dag_id']} {ended}/{len(tasks)} tasks  {detail}".rstrip(),
        )

    def _say_once(self, key: str, text: str) -> None:
        if key not in self.told:
            self.told.add(key)
            self._say(text)

    def _say(self, text: str) -> None:
        elapsed = int(time.monotonic() - self.began)
        print(f"{elapsed // 60:02}:{elapsed % 60:02}  {text}", flush=True)


def so_far(phase: str, progress: dict[str, Any]) -> str:
    """A running job in a few words: tokens against budget, steps against steps."""
    if phase == "generate" and "completion_tokens" in progress:
        budget = progress["token_budget"]
        limit = f"/{budget:,}" if budget else ""
        return f"{progress['completion_tokens']:,}{limit} tokens"
    if phase == "train" and "step" in progress:
        return f"step {progress['step']}/{progress['steps']} loss {progress['loss']:.3f}"
    return phase
