"""The few calls of Airflow's REST API (v2) that the demo makes, as a person's clicks would."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx

ACTIVE = frozenset({"queued", "running"})


class AirflowApi:
    """A session with one API server; the demo's lets everyone on loopback in as admin."""

    def __init__(self, url: str) -> None:
        token = httpx.get(f"{url}/auth/token", timeout=30).raise_for_status().json()["access_token"]
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=f"{url}/api/v2", headers=headers, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._http.get(path, params=query).raise_for_status().json()

    def import_errors(self) -> list[str]:
        """Last lines of the tracebacks of DAG files that did not parse."""
        errors = self.get("/importErrors")["import_errors"]
        return [error["stack_trace"].strip().splitlines()[-1] for error in errors]

    def dag_ids(self) -> set[str]:
        return {dag["dag_id"] for dag in self.get("/dags")["dags"]}

    def set_pool(self, name: str, slots: int) -> None:
        """Make or resize a pool that counts deferred tasks too: a deferred job holds the GPU."""
        pool = {
            "name": name,
            "slots": slots,
            "description": "jobs on the GPU host",
            "include_deferred": True,
        }
        made = self._http.post("/pools", json=pool)
        if made.status_code == 409:
            made = self._http.patch(f"/pools/{name}", json={"pool": name, **pool})
        made.raise_for_status()

    def unpause(self, dag_id: str) -> None:
        self._http.patch(f"/dags/{dag_id}", json={"is_paused": False}).raise_for_status()

    def trigger(self, dag_id: str, **conf: Any) -> str:
        """Start a run as the trigger form does; returns its run id."""
        body = {"logical_date": None, "conf": conf}
        answer = self._http.post(f"/dags/{dag_id}/dagRuns", json=body).raise_for_status().json()
        return str(answer["dag_run_id"])

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """Runs of a DAG, newest first."""
        found: list[dict[str, Any]] = self.get(
            f"/dags/{dag_id}/dagRuns", order_by="-run_after", limit=20
        )["dag_runs"]
        return found

    def fail_run(self, dag_id: str, run_id: str) -> None:
        """Mark a run failed, as a person does to stop it."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}"
        self._http.patch(path, json={"state": "failed"}).raise_for_status()

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(
            f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", limit=200
        )["task_instances"]
        return found

    def clear(self, dag_id: str, run_id: str, task_ids: list[Any]) -> None:
        """Clear tasks, or mapped instances as (task id, index), with what depends on them."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": task_ids,
            "only_failed": False,
            "include_downstream": True,
            "reset_dag_runs": True,
        }
        self._http.post(f"/dags/{dag_id}/clearTaskInstances", json=body).raise_for_status()

    def log(self, task: dict[str, Any]) -> list[str]:
        """Messages of a task instance's newest try."""
        path = (
            f"/dags/{task['dag_id']}/dagRuns/{task['dag_run_id']}"
            f"/taskInstances/{task['task_id']}/logs/{max(task['try_number'], 1)}"
        )
        content = self.get(path, map_index=task["map_index"], full_content=True)["content"]
        return [str(line.get("event", "")) if isinstance(line, dict) else line for line in content]
