"""The few calls of Airflow's REST API (v2) that the demo makes, as a person's clicks would."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx

from drafter.errors import DrafterError

ACTIVE = frozenset({"queued", "running"})


class ApiError(DrafterError):
    """Airflow refused a call."""


class AirflowApi:
    """A session with one API server; the demo's lets everyone on loopback in as admin."""

    def __init__(self, url: str) -> None:
        token = _json(httpx.get(f"{url}/auth/token", timeout=30))["access_token"]
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
        return _json(self._http.get(path, params=query))

    def _send(self, method: str, path: str, body: dict[str, Any]) -> Any:
        return _json(self._http.request(method, path, json=body))

    def import_errors(self) -> list[str]:
        """Last lines of the tracebacks of DAG files that did not parse."""
        errors = self.get("/importErrors")["import_errors"]
        return [error["stack_trace"].strip().splitlines()[-1] for error in errors]

    def dag_ids(self) -> set[str]:
        return {dag["dag_id"] for dag in self.get("/dags")["dags"]}

    def set_pool(self, name: str, slots: int) -> None:
        """Make or resize a pool that counts deferred tasks too: a deferred job holds the GPU."""
        pool = {"slots": slots, "description": "jobs on the GPU host", "include_deferred": True}
        if name in {known["name"] for known in self.get("/pools")["pools"]}:
            self._send("PATCH", f"/pools/{name}", {"pool": name, **pool})
        else:
            self._send("POST", "/pools", {"name": name, **pool})

    def unpause(self, dag_id: str) -> None:
        self._send("PATCH", f"/dags/{dag_id}", {"is_paused": False})

    def trigger(self, dag_id: str, **conf: Any) -> str:
        """Start a run as the trigger form does; returns its run id."""
        body = {"logical_date": None, "conf": conf}
        return str(self._send("POST", f"/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """Runs of a DAG, newest first."""
        found: list[dict[str, Any]] = self.get(
            f"/dags/{dag_id}/dagRuns", order_by="-run_after", limit=20
        )["dag_runs"]
        return found

    def fail_run(self, dag_id: str, run_id: str) -> None:
        """Mark a run failed, as a person does to stop it."""
        self._send("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", {"state": "failed"})

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
        self._send("POST", f"/dags/{dag_id}/clearTaskInstances", body)

    def log(self, task: dict[str, Any]) -> list[str]:
        """Messages of a task instance's newest try."""
        path = (
            f"/dags/{task['dag_id']}/dagRuns/{task['dag_run_id']}"
            f"/taskInstances/{task['task_id']}/logs/{max(task['try_number'], 1)}"
        )
        content = self.get(path, map_index=task["map_index"], full_content=True)["content"]
        return [str(line.get("event", "")) if isinstance(line, dict) else line for line in content]


def _json(response: httpx.Response) -> Any:
    if response.is_error:
        request = response.request
        raise ApiError(f"{request.method} {request.url}: {response.status_code} {response.text}")
    return response.json()
