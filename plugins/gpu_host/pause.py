"""Pausing a DAG stops its jobs: Airflow itself only stops starting tasks.

An ASGI middleware of Airflow's API server. When a request has paused a DAG that carries our tag
(the switch in the UI and the REST API both send ``PATCH /api/v2/dags``), every running or queued
run of it is marked failed, with a note that says why, as the same user and through the same API.
That ends running and deferred tasks, and so the process trees of their jobs; queued runs and asset
events that wait are ended too, or they would start by themselves on unpausing. To go on: unpause,
then clear the run.

``airflow dags pause`` on the command line does not come by here. The recipe can turn this off
(``[schedule] pause_stops``). Routes and answers as read and measured on Airflow 3.3.2.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import httpx

from drafter.errors import DrafterError
from drafter.recipe import deployed_recipe

TAG = "drafter"
"""Of all our DAGs, and of no other."""

NOTE = (
    "Stopped because the DAG was paused at {now}: the jobs of this run and all their processes were"
    " ended, rows already returned are kept. To go on, unpause the DAG and clear this run."
)
NOTE_LIMIT = 1000
"""Characters that Airflow takes."""

TRIES = 5
RETRY_S = 1.0
"""A teardown that runs is given this long to end; so is a run that changes at the same time."""

PAGE = 100
"""Airflow's own limit of a listing."""

UNFINISHED = (
    "scheduled queued running restarting up_for_retry up_for_reschedule deferred awaiting_input"
).split()

TO_COME = ["none", "scheduled", "queued", "up_for_retry"]
"""States of a teardown that has not begun."""

_ROUTE = re.compile(r"/api/v2/dags(/[^/]+)?")
_OF_THE_BODY = (b"content-type", b"content-length", b"accept-encoding")

log = logging.getLogger(__name__)


class PauseStops:
    """Wraps the part of the API server in which the request's user is known already."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        route = _route(scope)
        if route is None:
            await self._app(scope, receive, send)
            return
        async with self._client(scope) as client:
            # Of several DAGs the answer lists a page only, however many were paused.
            unpaused = await _listed(client, paused=False) if route[1] is None else set()
            answer = _Answer()
            await self._app({**scope}, receive, answer.keep)
            try:
                stopped = paused_dags(answer.status, answer.body)
                if answer.status == 200 and unpaused:
                    stopped |= unpaused & await _listed(client, paused=True)
                if stopped and _is_wanted():
                    for dag_id in sorted(stopped):
                        await _stop(client, dag_id)
            finally:
                for message in answer.messages:
                    await send(message)

    def _client(self, scope: Any) -> httpx.AsyncClient:
        """Asks the same application as the same user, whom ``scope`` has been given already."""

        async def ask(asked: Any, receive: Any, send: Any) -> None:
            root = scope.get("root_path", "")
            named = {key: asked[key] for key in ("method", "query_string")}
            named["path"] = root + asked["path"]
            named["raw_path"] = root.encode() + asked["raw_path"]
            body = [header for header in asked["headers"] if header[0] in _OF_THE_BODY]
            kept = [header for header in scope["headers"] if header[0] not in _OF_THE_BODY]
            await self._app({**scope, **named, "headers": kept + body}, receive, send)

        transport = httpx.ASGITransport(ask, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://airflow/api/v2")


async def _listed(client: httpx.AsyncClient, paused: bool) -> set[str]:
    """Our DAGs that are paused, or not; none when the user may not see DAGs."""
    found = await client.get("/dags", params={"tags": TAG, "paused": paused, "limit": PAGE})
    return set() if found.is_error else {dag["dag_id"] for dag in found.json()["dags"]}


async def _stop(client: httpx.AsyncClient, dag_id: str) -> None:
    """Mark the DAG's unfinished runs failed. What cannot be done is logged as an error: the pause
    itself stands."""
    dag = f"/dags/{quote(dag_id, safe='')}"
    note = NOTE.format(now=datetime.now(UTC).isoformat(timespec="seconds"))
    # 404 when none waits.
    await client.delete(f"{dag}/assets/queuedEvents")
    query: dict[str, Any] = {"state": ["running", "queued"], "limit": PAGE}
    found = await client.get(f"{dag}/dagRuns", params=query)
    if found.is_error:
        log.error("Paused %s, but its runs cannot be listed: %s", dag_id, _reason(found))
        return
    for run in found.json()["dag_runs"]:
        await _fail(client, dag, run, note)


async def _fail(client: httpx.AsyncClient, dag: str, run: dict[str, Any], note: str) -> None:
    """Until no task of the run is left that has begun: the scheduler may be at work on it too.

    Marking a run failed marks *every* dataset of a mapped task of which one runs, also those that
    have succeeded: so these are marked one by one before. And it leaves a run as it is while a
    teardown is to come or runs, and it would never change as long as the DAG is paused: so that is
    marked after. An engine that is not torn down ends by itself (drafter.engine_job).
    """
    path = f"{dag}/dagRuns/{quote(run['dag_run_id'], safe='')}"
    name = f"{run['dag_id']} {run['dag_run_id']}"
    body = {"state": "failed", "note": "\n\n".join(filter(None, (run["note"], note)))[-NOTE_LIMIT:]}
    for tries_left in reversed(range(TRIES)):
        begun = await _tasks(client, path, UNFINISHED)
        await _fail_tasks(client, path, [task for task in begun if task["map_index"] >= 0], note)
        marked = await client.patch(path, json=body)
        if not marked.is_error and marked.json()["state"] != "failed":
            states = TO_COME if tries_left > 1 else [*TO_COME, "running"]
            if to_come := await _tasks(client, path, states):
                await _fail_tasks(client, path, to_come, note)
                continue
        elif not marked.is_error and not await _tasks(client, path, UNFINISHED):
            log.info("Paused: marked run %s failed", name)
            return
        await asyncio.sleep(RETRY_S)
    why = _reason(marked) if marked.is_error else "some of its tasks still run"
    log.error("Paused, but run %s was not stopped (%s): mark it failed by hand", name, why)


async def _tasks(client: httpx.AsyncClient, run: str, states: list[str]) -> list[dict[str, Any]]:
    query: dict[str, Any] = {"state": states, "limit": PAGE}
    found = await client.get(f"{run}/taskInstances", params=query)
    tasks: list[dict[str, Any]] = [] if found.is_error else found.json()["task_instances"]
    return tasks


async def _fail_tasks(
    client: httpx.AsyncClient, run: str, tasks: list[dict[str, Any]], note: str
) -> None:
    entities = [
        {
            "task_id": ti["task_id"],
            "map_index": ti["map_index"],
            "new_state": "failed",
            "note": note,
        }
        for ti in tasks
    ]
    if entities:
        action = {"action": "update", "entities": entities, "action_on_non_existence": "skip"}
        await client.patch(f"{run}/taskInstances", json={"actions": [action]})


class _Answer:
    """What the application sent, held back until the jobs are being stopped."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def keep(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        starts = [m["status"] for m in self.messages if m["type"] == "http.response.start"]
        return int(starts[0]) if starts else 500

    @property
    def body(self) -> bytes:
        parts = [m.get("body", b"") for m in self.messages if m["type"] == "http.response.body"]
        return b"".join(parts)


def paused_dags(status: int, body: bytes) -> set[str]:
    """Our DAGs that the answer to a PATCH, of one DAG or of several, shows as paused."""
    if status != 200:
        return set()
    answer = json.loads(body)
    return {
        dag["dag_id"]
        for dag in answer.get("dags", [answer])
        if dag["is_paused"] and TAG in {tag["name"] for tag in dag["tags"]}
    }


def _route(scope: Any) -> re.Match[str] | None:
    """A request that may pause DAGs; its group 1 is empty when it may pause several."""
    if scope["type"] != "http" or scope["method"] != "PATCH":
        return None
    return _ROUTE.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))


def _is_wanted() -> bool:
    try:
        return deployed_recipe().schedule.pause_stops
    except DrafterError as error:
        log.error("No recipe says whether pause stops jobs (%s): they are stopped", error)
        return True


def _reason(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {response.text[:300]}"
