"""The doctor says what is wrong with the host and what to do, before anything starts."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.test_plan import make_recipe

from drafter.doctor import Finding, examine, table
from drafter.errors import Busy, DataError, RecipeError


class ModelInfo(http.server.BaseHTTPRequestHandler):
    """Answers every request with the model it serves."""

    model_path = "/models/target"

    def do_GET(self) -> None:
        body = json.dumps({"model_path": self.model_path}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def engine() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ModelInfo) as server:
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


def test_an_engine_that_serves_another_model_is_refused(tmp_path: Path, engine: str) -> None:
    recipe = make_recipe(tmp_path, engine={"urls": [engine]})
    ModelInfo.model_path = "/models/other"
    try:
        (error,) = errors(list(examine(recipe, "generate")))
    finally:
        ModelInfo.model_path = "/models/target"
    assert isinstance(error, RecipeError)
    assert "serves /models/other" in str(error)


def test_a_missing_source_is_named_with_its_path(tmp_path: Path, engine: str) -> None:
    recipe = make_recipe(tmp_path, engine={"urls": [engine]})
    (tmp_path / "B2.jsonl").unlink()
    (error,) = errors(list(examine(recipe, "generate")))
    assert isinstance(error, DataError)
    assert str(error).startswith(f"B2: no file at {tmp_path / 'B2.jsonl'}")


def test_only_generate_needs_the_engine_and_the_sources(tmp_path: Path) -> None:
    (tmp_path / "B1.jsonl").write_text("")
    recipe = make_recipe(tmp_path)
    (tmp_path / "B1.jsonl").unlink()
    assert errors(list(examine(recipe, "extract"))) == []


def test_a_workspace_below_a_file_is_not_writable(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, host={"workspace": "/proc/nowhere"})
    (error,) = errors(list(examine(recipe, "extract")))
    assert "correct host.workspace" in str(error)


def test_the_table_marks_what_failed() -> None:
    lines = table([Finding("python", "3.11"), Finding("engine", "x", Busy("down"))]).splitlines()
    assert lines == ["ok    python  3.11", "FAIL  engine  x"]
