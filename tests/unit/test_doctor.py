"""The doctor says what is wrong with the host and what to do, before anything starts."""

from __future__ import annotations

import asyncio
import http.server
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from unit.plan_site import make_recipe

import drafter
from drafter import machine
from drafter.doctor import NEEDED, Finding, examine, table
from drafter.engines.connection import check_engine
from drafter.errors import Busy, DataError, RecipeError

READY = {
    "/health": {},
    "/model_info": {"model_path": "/models/target"},
    "/server_info": {"context_length": 4096},
}


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as told, 404 to what it was not told about."""

    answers: ClassVar[dict[str, Any]] = READY
    key: str | None = None

    def do_GET(self) -> None:
        status = 200 if self.path in self.answers else 404
        if self.key and self.headers["Authorization"] != f"Bearer {self.key}":
            status = 401
        body = json.dumps(self.answers.get(self.path)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def engine() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def errors(findings: list[Finding]) -> list[Exception]:
    return [finding.error for finding in findings if finding.error]


def test_a_ready_host_has_no_fault(tmp_path: Path, engine: str) -> None:
    recipe = make_recipe(tmp_path, engine={"urls": [engine]})
    findings = list(examine(recipe, "generate"))
    assert errors(findings) == []
    assert [finding.what for finding in findings] == [
        "python",
        "kernel",
        "memory",
        "GPUs",
        "clock",
        "open files",
        "workspace",
        "target",
        "B1",
        "B2",
        "engine",
    ]


def test_an_engine_that_is_down_is_busy_and_named(tmp_path: Path) -> None:
    (error,) = errors(list(examine(make_recipe(tmp_path), "generate")))
    assert isinstance(error, Busy)
    assert str(error).startswith("engine http://127.0.0.1:1 does not answer")


def test_one_of_several_endpoints_that_is_down_is_named_and_no_fault(
    tmp_path: Path, engine: str
) -> None:
    recipe = make_recipe(tmp_path, engine={"urls": ["http://127.0.0.1:1", engine]})
    findings = list(examine(recipe, "generate"))
    assert errors(findings) == []
    assert "; engine http://127.0.0.1:1 does not answer" in findings[-1].found


def test_an_engine_that_serves_another_model_is_refused(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, engine={"urls": [engine]})
    monkeypatch.setattr(
        Engine, "answers", {**READY, "/model_info": {"model_path": "/models/other/"}}
    )
    (error,) = errors(list(examine(recipe, "generate")))
    assert isinstance(error, RecipeError)
    assert "serves /models/other/, the recipe's target is" in str(error)


def test_training_needs_the_engine_too_for_it_ends_with_an_evaluation(tmp_path: Path) -> None:
    (error,) = errors(list(examine(make_recipe(tmp_path), "train")))
    assert isinstance(error, Busy)


def test_a_slash_behind_the_url_is_tolerated(tmp_path: Path, engine: str) -> None:
    recipe = make_recipe(tmp_path, engine={"urls": [engine + "/"]})
    assert errors(list(examine(recipe, "generate"))) == []


def test_proxies_of_the_host_are_not_for_the_engine(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    recipe = make_recipe(tmp_path, engine={"urls": [engine]})
    assert errors(list(examine(recipe, "generate"))) == []


def test_a_missing_and_a_wrong_key_are_recipe_errors(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "key", "sesame")
    monkeypatch.delenv("SGLANG_KEY", raising=False)
    recipe = make_recipe(tmp_path, engine={"urls": [engine], "api_key_env": "SGLANG_KEY"})
    (error,) = errors(list(examine(recipe, "generate")))
    assert isinstance(error, RecipeError)
    assert "SGLANG_KEY is not set" in str(error)
    assert "visible to non-interactive SSH sessions on the GPU host" in str(error)
    monkeypatch.setenv("SGLANG_KEY", "wrong")
    (error,) = errors(list(examine(recipe, "generate")))
    assert isinstance(error, RecipeError) and "401" in str(error)
    monkeypatch.setenv("SGLANG_KEY", "sesame")
    assert errors(list(examine(recipe, "generate"))) == []


@pytest.mark.parametrize(
    ("server_info", "models", "context"),
    [
        ({"context_length": 100, "max_req_input_len": 7}, [], 100),
        ({"context_length": None, "max_req_input_len": 94}, [], 100),
        ({"context_length": None}, [{"max_model_len": 100}], 100),
        ({"context_length": None}, [{"max_model_len": None}], None),
        ({}, [], None),
    ],
)
def test_the_context_is_found_wherever_the_engine_says_it(
    server_info: dict[str, Any],
    models: list[dict[str, Any]],
    context: int | None,
    tmp_path: Path,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {**READY, "/server_info": server_info, "/v1/models": {"data": models}}
    monkeypatch.setattr(Engine, "answers", answers)
    recipe = make_recipe(tmp_path, engine={"urls": [engine]})
    if context is None:
        with pytest.raises(RecipeError, match="start the engine with --context-length"):
            asyncio.run(check_engine(recipe.engine, recipe.target.path))
    else:
        info = asyncio.run(check_engine(recipe.engine, recipe.target.path))
        assert info.context == context


def test_a_missing_source_is_named_with_its_path(tmp_path: Path, engine: str) -> None:
    recipe = make_recipe(tmp_path, engine={"urls": [engine]})
    (tmp_path / "B2.jsonl").unlink()
    (error,) = errors(list(examine(recipe, "generate")))
    assert isinstance(error, DataError)
    assert str(error).startswith(f"B2: no file at {tmp_path / 'B2.jsonl'}")


def test_extract_needs_neither_engine_nor_sources(tmp_path: Path) -> None:
    (tmp_path / "B1.jsonl").write_text("")
    recipe = make_recipe(tmp_path)
    (tmp_path / "B1.jsonl").unlink()
    assert errors(list(examine(recipe, "extract"))) == []


def test_a_workspace_below_a_file_is_not_writable(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, host={"workspace": "/proc/nowhere"})
    (error,) = errors(list(examine(recipe, "extract")))
    assert "correct host.workspace" in str(error)


@pytest.mark.parametrize(
    ("off_s", "sentence"),
    [
        (0, None),
        (-200, None),
        (-4000, "the host's clock is +4,000 s off Airflow's"),
        (4000, "the host's clock is -4,000 s off Airflow's"),
    ],
)
def test_a_clock_that_is_far_off_is_said(
    tmp_path: Path, off_s: float, sentence: str | None
) -> None:
    found = errors(list(examine(make_recipe(tmp_path), "extract", time.time() + off_s)))
    assert [sentence in str(error) for error in found if sentence] == [True] * bool(sentence)
    assert len(found) == bool(sentence)


def test_too_few_open_files_for_the_requests_in_flight_are_said(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "open_files", lambda: 200)
    recipe = make_recipe(tmp_path, engine={"urls": [engine], "in_flight": 150})
    (error,) = errors(list(examine(recipe, "generate")))
    assert "may open 200 files, 150 requests in flight need 214" in str(error)


def test_a_full_workspace_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5e8))
    (error,) = errors(list(examine(make_recipe(tmp_path), "extract")))
    assert str(error).endswith("has 0.50 GB free: needs 1")


def test_an_old_kernel_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_pidfd", lambda: False)
    (error,) = errors(list(examine(make_recipe(tmp_path), "extract")))
    assert "jobs need Linux 5.3 or newer" in str(error)


def test_the_machine_is_described_whatever_it_has() -> None:
    assert machine.has_pidfd()
    assert machine.available_gb() > 0
    assert machine.open_files() > 0
    assert all(isinstance(line, str) for line in machine.gpus())


def test_every_package_of_the_requirements_is_looked_for() -> None:
    requirements = (Path(drafter.__file__).parents[1] / "requirements.txt").read_text()
    names = [line.partition("==")[0] for line in requirements.splitlines() if "==" in line]
    assert names == list(NEEDED)


def test_the_table_marks_what_failed() -> None:
    lines = table([Finding("python", "3.11"), Finding("engine", "x", Busy("down"))]).splitlines()
    assert lines == ["ok    python  3.11", "FAIL  engine  x"]
