"""The demo on a smaller recipe, as a person runs it: real Airflow, real sshd, real engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.stack import ROOT, free_ports

SMALL = ROOT / "tests" / "integration" / "small.toml"
HOST_PYTHON = ROOT / ".demo" / "host-venv" / "bin" / "python"


def demo(home: Path, *arguments: str, recipe: Path = SMALL) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "demo", *arguments, "--home", str(home)]
    return subprocess.Popen(
        [*command, "--recipe", str(recipe), "--host-python", str(HOST_PYTHON)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "include")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str], timeout_s: float = 420) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=60)
        pytest.fail(f"the demo took longer than {timeout_s:.0f} s:\n{out}\n{err}")
    return process.returncode, out, err


def left_behind(home: Path) -> list[str]:
    """Command lines of processes that mention ``home``, in arguments or environment, and of
    Airflow's workers that were not there before: they overwrite both."""
    found = []
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit() or int(proc.name) == os.getpid():
            continue
        try:
            command = (proc / "cmdline").read_bytes()
            environ = (proc / "environ").read_bytes()
        except OSError:
            continue
        worker = int(proc.name) in airflow_workers() - WORKERS_BEFORE
        if str(home).encode() in command + environ or worker:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def airflow_workers() -> set[int]:
    """Of any Airflow that was started in this checkout."""
    workers = set()
    for proc in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if proc.name.isdigit() and (proc / "cwd").readlink() == Path.cwd():
                command = (proc / "cmdline").read_bytes()
                workers |= {int(proc.name)} if command.startswith(b"airflow worker") else set()
    return workers


WORKERS_BEFORE = airflow_workers()


def generate_requests(home: Path) -> int:
    """How many the engine of the last run says it answered."""
    told = re.search(r"answered (\d+) /generate requests", (home / "logs/engine.log").read_text())
    assert told
    return int(told[1])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo home")


@pytest.fixture(scope="module")
def first(home: Path) -> tuple[dict[str, Any], str]:
    """Summary and output of the first run."""
    (port,) = free_ports(1)
    code, out, err = finished(demo(home, "run", "--port", str(port)))
    assert code == 0, f"{out}\n{err}"
    assert generate_requests(home) > 60
    return json.loads((home / "summary.json").read_text()), out


def test_prompts_become_a_drafter(first: tuple[dict[str, Any], str]) -> None:
    summary, _ = first
    assert set(summary["datasets"]) == {"B1_glaive", "B6_ultrachat", "B7_sharegpt"}
    for name, numbers in summary["datasets"].items():
        assert numbers["accepted"] + numbers["rejected"] == numbers["responses"] > 10, name
        assert numbers["hidden_tokens"] > numbers["completion_tokens"] * 0.8, name
    assert summary["train"]["steps"] == 12
    assert summary["train"]["last_loss"] < summary["train"]["first_loss"]
    assert all(length >= 1 for length in summary["acceptance_length"].values())
    assert (Path(summary["drafter"]) / "model.safetensors").exists()


def test_a_dataset_stops_by_its_budget_or_its_quota(first: tuple[dict[str, Any], str]) -> None:
    datasets = first[0]["datasets"]
    assert datasets["B1_glaive"]["stop_reason"] == "budget"
    assert datasets["B1_glaive"]["completion_tokens"] >= 1500
    assert datasets["B7_sharegpt"]["responses"] <= 40


def test_it_tells_what_it_does_and_leaves_no_process(
    home: Path, first: tuple[dict[str, Any], str]
) -> None:
    _, out = first
    for dag in ("generate", "validate", "extract", "train"):
        assert f"{dag} done" in out
    assert "B1_glaive" in out
    assert left_behind(home) == []


def test_a_second_run_sends_no_request_and_changes_no_row(
    home: Path, first: tuple[dict[str, Any], str]
) -> None:
    rows = sorted((home / "host").glob("*/prepared/*/raw_responses.jsonl"))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in rows}
    (port,) = free_ports(1)
    code, out, err = finished(demo(home, "run", "--port", str(port)))
    assert code == 0, f"{out}\n{err}"
    assert len(before) == 3
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in rows} == before
    assert generate_requests(home) == 0
    assert json.loads((home / "summary.json").read_text()) | {"wall_s": 0} == first[0] | {
        "wall_s": 0
    }


def has_engine(home: Path) -> bool:
    return len(left_behind(home)) > 3


def has_jobs(home: Path) -> bool:
    return any(home.glob("host/*/jobs/generate/*/state.json"))


@pytest.mark.parametrize(
    ("moment", "sent"), [(has_engine, signal.SIGTERM), (has_jobs, signal.SIGINT)]
)
def test_an_interrupted_demo_leaves_no_process(
    tmp_path: Path, moment: Callable[[Path], bool], sent: signal.Signals
) -> None:
    (port,) = free_ports(1)
    process = demo(tmp_path, "run", "--port", str(port))
    deadline = time.monotonic() + 180
    while not moment(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert moment(tmp_path)
    process.send_signal(sent)
    code, _, err = finished(process, 180)
    assert (code, err.strip()) == (143, "demo: interrupted")
    assert left_behind(tmp_path) == []


WRONG_RECIPES = [
    pytest.param(
        ("[train]", "[train]\nstpes = 1"), "unknown field train.stpes: remove it", id="field"
    ),
    pytest.param(
        ("127.0.0.1:${DEMO_ENGINE_PORT}", "127.0.0.1:9"),
        "engine http://127.0.0.1:9 does not answer",
        id="engine",
    ),
    pytest.param(
        ("prompts/B7_sharegpt.json", "prompts/gone.json"),
        "B7_sharegpt: no file at",
        id="dataset file",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG_RECIPES)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    recipe = tmp_path / "wrong.toml"
    recipe.write_text(SMALL.read_text().replace(*change))
    (port,) = free_ports(1)
    code, _, err = finished(demo(tmp_path / "home", "run", "--port", str(port), recipe=recipe), 180)
    assert code not in (0, 1)
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert left_behind(tmp_path) == []


def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = finished(demo(tmp_path, "run", "--port", str(port)), 180)
    assert code == 64
    assert err.startswith(f"demo: port {port} is taken: stop what listens there")
    assert len(err.strip().splitlines()) == 1


def test_a_missing_sshd_is_said_in_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    from demo import sshd

    monkeypatch.setattr(sshd, "SBIN", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sshd.RecipeError, match="sshd is missing: install the package openssh"):
        sshd.find_sshd()
