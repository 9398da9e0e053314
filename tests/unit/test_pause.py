"""What the middleware of pause asks of Airflow, over real ASGI; Airflow itself is a small fake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from gpu_host import pause
from gpu_host.pause import NOTE_LIMIT, PauseStops

ROOT = Path(__file__).resolve().parents[2]
RUN = "scheduled__2026-01-01T00:00:00+00:00"


class FakeAirflow:
    """The routes that pause asks, as 3.3.2 answers them; ``asked`` holds every request."""

    def __init__(self, root_path: str = "") -> None:
        self.root_path = root_path
        self.asked: list[tuple[str, str]] = []
        self.users: set[bytes] = set()
        self.states: set[object] = set()
        self.dags = {"generate": ["drafter"], "train": ["drafter"], "other": ["tea"]}
        self.paused = dict.fromkeys(self.dags, False)
        self.page = 50
        self.runs = {RUN: {"state": "running", "note": "mine"}}
        self.tasks = {("deploy", -1): "success", ("generate", 0): "success"} | {
            ("generate", 1): "deferred",
            ("generate", 2): "scheduled",
        }
        self.notes: dict[tuple[str, int], str] = {}
        self.conflicts = 0
        self.may_edit_runs = True
        self.broken = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = json.loads(message["body"] or b"null")
        path = scope["path"].removeprefix(self.root_path).removeprefix("/api/v2")
        self.asked.append((scope["method"], path))
        self.users.add(dict(scope["headers"]).get(b"authorization", b""))
        self.states.add(scope["state"]["user"])
        status, answer = self.answer(scope["method"], path, parse_qs(scope["query_string"]), body)
        content = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in (content[:7], content[7:]):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def answer(self, method: str, path: str, query: Any, body: Any) -> tuple[int, Any]:
        parts = path.strip("/").split("/")
        if len(parts) <= 2 and method == "PATCH":
            names = parts[1:] or [name for name in self.dags if "tea" not in name]
            self.paused |= dict.fromkeys(names, body["is_paused"])
            shown = [self.dag(name) for name in names[: self.page]]
            return 200, shown[0] if parts[1:] else {"dags": shown}
        if parts == ["dags"]:
            paused = query[b"paused"] == [b"true"]
            tagged = [
                name for name, tags in self.dags.items() if query[b"tags"][0].decode() in tags
            ]
            return 200, {"dags": [self.dag(n) for n in tagged if self.paused[n] == paused]}
        if parts[-1] == "queuedEvents":
            return 404, {"detail": "none"}
        if parts[-1] == "dagRuns":
            active = {run: v for run, v in self.runs.items() if v["state"] in ("running", "queued")}
            named = [{"dag_run_id": run, "dag_id": parts[1], **v} for run, v in active.items()]
            return 200, {"dag_runs": named if parts[1] == "generate" else []}
        if parts[-1] == "taskInstances" and method == "GET":
            wanted = {state.decode() for state in query[b"state"]}
            begun = [key for key, state in self.tasks.items() if state in wanted]
            return 200, {"task_instances": [{"task_id": t, "map_index": i} for t, i in begun]}
        if not self.may_edit_runs:
            return 403, {"detail": "Forbidden"}
        if self.conflicts:
            self.conflicts -= 1
            return 409, {"detail": "changed meanwhile"}
        if self.broken:
            raise RuntimeError("database is locked")
        if parts[-1] == "taskInstances":
            for entity in body["actions"][0]["entities"]:
                self.tasks[entity["task_id"], entity["map_index"]] = entity["new_state"]
                self.notes[entity["task_id"], entity["map_index"]] = entity["note"]
            return 200, {}
        teardown = self.tasks.get(("stop_engine", -1), "failed")
        self.runs[parts[3]] |= body if teardown == "failed" else {"note": body["note"]}
        return 200, self.runs[parts[3]]

    def dag(self, name: str) -> dict[str, Any]:
        tags = [{"name": tag} for tag in self.dags[name]]
        return {"dag_id": name, "is_paused": self.paused[name], "tags": tags}


async def patch(airflow: FakeAirflow, path: str, is_paused: bool = True) -> httpx.Response:
    """As a browser sends it."""
    app = PauseStops(airflow)

    async def with_user(scope: Any, receive: Any, send: Any) -> None:
        known = {"state": {"user": "ada"}, "root_path": airflow.root_path}
        await app({**scope, **known}, receive, send)

    headers = {"authorization": "Bearer ada", "accept-encoding": "gzip"}
    transport = httpx.ASGITransport(with_user)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as http:
        return await http.patch(airflow.root_path + path, json={"is_paused": is_paused})


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text((ROOT / "include/recipes/kimi-k2.5.toml").read_text())
    monkeypatch.setenv("DRAFTER_RECIPE", str(path))
    monkeypatch.setattr(pause, "RETRY_S", 0.01)
    return path


@pytest.mark.parametrize("root_path", ["", "/airflow"])
async def test_what_has_begun_is_marked_failed_with_a_note_as_the_same_user(root_path: str) -> None:
    airflow = FakeAirflow(root_path)
    response = await patch(airflow, "/api/v2/dags/generate")
    assert response.json()["is_paused"] is True
    assert airflow.runs[RUN]["state"] == "failed"
    assert airflow.runs[RUN]["note"].startswith("mine\n\nStopped because the DAG was paused at 20")
    assert airflow.tasks == {
        ("deploy", -1): "success",
        ("generate", 0): "success",
        ("generate", 1): "failed",
        ("generate", 2): "failed",
    }
    assert set(airflow.notes) == {("generate", 1), ("generate", 2)}
    assert (airflow.users, airflow.states) == ({b"Bearer ada"}, {"ada"})


async def test_a_page_of_the_answer_does_not_limit_a_pause_of_several_dags() -> None:
    airflow = FakeAirflow()
    airflow.page = 0
    await patch(airflow, "/api/v2/dags")
    assert airflow.runs[RUN]["state"] == "failed"


LEFT_ALONE: list[Any] = [
    pytest.param("/api/v2/dags/other", True, id="a DAG without our tag"),
    pytest.param("/api/v2/dags/generate", False, id="unpausing"),
    pytest.param("/api/v2/dags/train", True, id="another DAG"),
]


@pytest.mark.parametrize(("path", "is_paused"), LEFT_ALONE)
async def test_nothing_else_is_touched(path: str, is_paused: bool) -> None:
    airflow = FakeAirflow()
    await patch(airflow, path, is_paused)
    assert airflow.runs[RUN] == {"state": "running", "note": "mine"}
    assert airflow.tasks["generate", 1] == "deferred"


async def test_other_requests_pass_without_a_question() -> None:
    airflow = FakeAirflow()
    path = f"/api/v2/dags/generate/dagRuns/{RUN}"
    await patch(airflow, path)
    assert airflow.asked == [("PATCH", path.removeprefix("/api/v2"))]


async def test_the_recipe_turns_it_off(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "\n[schedule]\npause_stops = false\n")
    airflow = FakeAirflow()
    await patch(airflow, "/api/v2/dags/generate")
    assert airflow.runs[RUN]["state"] == "running"


async def test_a_broken_recipe_turns_nothing_off(recipe: Path) -> None:
    recipe.write_text("[")
    airflow = FakeAirflow()
    await patch(airflow, "/api/v2/dags/generate")
    assert airflow.runs[RUN]["state"] == "failed"


async def test_a_run_that_changes_meanwhile_is_tried_again() -> None:
    airflow = FakeAirflow()
    airflow.conflicts = 2
    await patch(airflow, "/api/v2/dags/generate")
    assert airflow.runs[RUN]["state"] == "failed"
    assert airflow.tasks["generate", 1] == "failed"


def forbidden(airflow: FakeAirflow) -> None:
    airflow.may_edit_runs = False


def broken(airflow: FakeAirflow) -> None:
    airflow.broken = True


@pytest.mark.parametrize(("spoil", "reason"), [(forbidden, "HTTP 403"), (broken, "HTTP 500")])
async def test_a_run_that_cannot_be_stopped_is_an_error_in_the_log_and_the_pause_stands(
    spoil: Callable[[FakeAirflow], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    airflow = FakeAirflow()
    spoil(airflow)
    response = await patch(airflow, "/api/v2/dags/generate")
    assert (response.status_code, response.json()["is_paused"]) == (200, True)
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"run generate {RUN} was not stopped ({reason}" in error
    assert "mark it failed by hand" in error


@pytest.mark.parametrize("state", ["none", "running"])
async def test_a_teardown_to_come_or_one_that_does_not_end_does_not_keep_the_run_open(
    state: str, caplog: pytest.LogCaptureFixture
) -> None:
    airflow = FakeAirflow()
    airflow.tasks["stop_engine", -1] = state
    await patch(airflow, "/api/v2/dags/generate")
    assert airflow.runs[RUN]["state"] == "failed"
    assert airflow.tasks["stop_engine", -1] == "failed"
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


async def test_a_note_stays_within_what_airflow_takes() -> None:
    airflow = FakeAirflow()
    airflow.runs[RUN]["note"] = "x" * NOTE_LIMIT
    await patch(airflow, "/api/v2/dags/generate")
    assert len(airflow.runs[RUN]["note"]) == NOTE_LIMIT
    assert airflow.runs[RUN]["note"].endswith("clear this run.")


PLUGINS = """
import operator, sys
from airflow import plugins_manager
_, middlewares = plugins_manager.get_fastapi_plugins()
print([m["name"] for m in middlewares], plugins_manager.get_import_errors())
assert not {"hooks", "operators", "pause"} & set(sys.modules) and operator.add(1, 1) == 2
"""


def test_airflow_loads_the_plugin_and_no_library_module_also_with_a_broken_recipe(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLUGINS],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "AIRFLOW_HOME": str(tmp_path),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
            "PYTHONPATH": str(ROOT / "include"),
            "DRAFTER_RECIPE": "/nowhere",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("['pause stops jobs'] {}"), done.stderr
