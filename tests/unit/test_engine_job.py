"""The engine as a job: real processes and ports; small servers play engines that go wrong."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from unit.host import PACKAGE, Host, until
from unit.plan_site import make_recipe

from demo.stack import ROOT, free_ports
from drafter import engine_job, jobs
from drafter.code import code_hash
from drafter.errors import Busy, RecipeError, Stopped
from drafter.files import read_json
from drafter.job import load_job
from drafter.recipe import Recipe

SERVER = """
import http.server, json, os, signal, subprocess, sys, time
port, model, load_s, serve_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print("loading weights", flush=True)
time.sleep(load_s)
ANSWERS = {"/health": {}, "/model_info": {"model_path": model},
           "/server_info": {"context_length": 4096}}
class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(ANSWERS[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Engine)
import threading
threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(serve_s)
print("CUDA error: out of memory", flush=True)
os._exit(3)
"""
"""An engine with a grandchild in a session of its own. It loads, serves, then dies by itself."""

USER = [sys.executable, "-c", "import time; time.sleep(60)"]
FAILS_SOON = ["sh", "-c", "exit 75"]


class EngineHost(Host):
    """A host whose recipe starts an engine."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "w")
        self.root = root
        (self.port,) = free_ports(1)
        self.engine = self.workspace.job(engine_job.PHASE, "all")

    def recipe(self, start: Any = None, **engine: Any) -> Recipe:
        section = {"urls": [f"http://127.0.0.1:{self.port}"], "start": start or self.serve()}
        host = {"workspace": str(self.workspace.root), "python": sys.executable, "grace_s": 0.5}
        return make_recipe(self.root, engine={**section, **engine}, host=host)

    def serve(
        self, model: str | None = None, load_s: float = 0, serve_s: float = 300
    ) -> tuple[str, ...]:
        words = (str(self.port), model or str(self.root / "target"), str(load_s), str(serve_s))
        return (sys.executable, "-c", SERVER, *words)

    def begin(self, recipe: Recipe, request: str | None = None) -> dict[str, Any]:
        return engine_job.start(recipe, self.code, "run", request)

    def progress(self) -> dict[str, Any]:
        path = self.engine.progress
        return read_json(path) if path.exists() else {}

    def await_ready(self) -> None:
        until(lambda: self.progress().get("ready"), 30)

    def end_of_engine(self, within_s: float = 30) -> dict[str, Any]:
        until(lambda: jobs.live(self.engine) is None, within_s)
        # Its guardian notices the supervisor's end, and then ends too.
        until(self.nothing_alive, 2)
        return read_json(self.engine.exit)

    def phase_job(self, recipe: Recipe) -> Any:
        """A generate job as its process sees it, without a process."""
        spec = self.spec(USER, recipe=recipe.as_json(), start_id=f"start in {self.root}")
        self.job.root.mkdir(parents=True, exist_ok=True)
        self.job.job.write_text(json.dumps(spec))
        return load_job(self.job.root)

    def nothing_alive(self) -> bool:
        return not self.processes()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EngineHost]:
    host = EngineHost(tmp_path)
    yield host
    jobs.stop_all(host.workspace.root)
    assert host.nothing_alive()


def test_it_is_ready_when_it_serves_the_recipes_model_and_stops_with_its_whole_tree(
    host: EngineHost,
) -> None:
    assert host.begin(host.recipe())["outcome"] == "started"
    host.await_ready()
    assert host.progress()["context"] == 4096
    assert "serving" in host.progress()["line"]
    assert len(host.processes()) >= 4
    assert engine_job.stop(host.workspace)["outcome"] == "stopped"
    assert host.nothing_alive()


def test_a_shell_line_is_run_by_a_shell(host: EngineHost) -> None:
    line = f"MODEL={shlex.quote(str(host.root / 'target'))}; {sys.executable} -c "
    line += f'{shlex.quote(SERVER)} {host.port} "$MODEL" 0 300'
    host.begin(host.recipe(line))
    host.await_ready()


def test_two_that_want_it_at_once_share_one(host: EngineHost) -> None:
    recipe = host.recipe(host.serve(load_s=1))
    ask = json.dumps({"recipe": recipe.as_json(), "code": host.code, "run_id": "r"})
    command = [sys.executable, "-m", "drafter", "engine", "start"]
    asking = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"},
        )
        for _ in range(3)
    ]
    answers = [json.loads(process.communicate(ask, timeout=60)[0]) for process in asking]
    assert sorted(answer["outcome"] for answer in answers) == ["following", "following", "started"]
    assert len({answer["start_id"] for answer in answers}) == 1
    host.await_ready()
    assert host.begin(recipe)["outcome"] == "following"


def test_a_live_one_with_another_command_is_busy(host: EngineHost) -> None:
    host.begin(host.recipe())
    with pytest.raises(Busy, match=r"live with other settings.*drafter stop all --phase engine"):
        host.begin(host.recipe(host.serve(load_s=1)))


def test_an_engine_of_somebody_else_is_used_and_left_alone(host: EngineHost) -> None:
    command = host.serve()
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            url = f"http://127.0.0.1:{host.port}/health"
            until(lambda: _answers(url), 20)
            assert host.begin(host.recipe())["outcome"] == "serving"
            assert engine_job.stop(host.workspace)["outcome"] == "not running"
            with engine_job.used(host.phase_job(host.recipe())):
                assert jobs.live(host.engine) is None
            assert process.poll() is None
        finally:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for pid in [*map(int, children.split()), process.pid]:
                os.kill(pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(
    ("start", "settings", "code", "sentence"),
    [
        pytest.param(
            ["sh", "-c", "echo waiting for a license; sleep 60"],
            {"ready_timeout_s": 2},
            75,
            r"not ready after 2 s \(engine .* does not answer.*its log ends: waiting for a license",
            id="never becomes ready",
        ),
        pytest.param(
            "other model", {}, 64, "serves /models/other, the recipe's target is", id="other model"
        ),
        pytest.param(
            ["sh", "-c", "sleep 60 & echo 'no such flag: --tp'; exit 2"],
            {},
            75,
            r"ended while it was loading \(exit 2\).*it ends: no such flag: --tp",
            id="dies while loading",
        ),
        pytest.param(
            "nonsense --port 1",
            {},
            64,
            r"exit 127\): correct engine.start in the recipe; it said: .*nonsense",
            id="not found by the shell",
        ),
        pytest.param(["/nowhere/sglang"], {}, 64, "cannot run /nowhere/sglang", id="not found"),
        pytest.param(
            "setsid sleep 60 & true", {}, 64, "must stay in the foreground", id="detaches itself"
        ),
    ],
)
def test_what_never_serves_ends_with_a_reason_and_leaves_nothing_alive(
    host: EngineHost, start: Any, settings: dict[str, Any], code: int, sentence: str
) -> None:
    if start == "other model":
        start = host.serve(model="/models/other")
    recipe = host.recipe(start, **settings)
    with (
        pytest.raises((Busy, RecipeError), match=sentence) as raised,
        engine_job.used(host.phase_job(recipe)),
    ):
        pytest.fail("an engine that never served")
    assert raised.value.exit_code == code
    record = host.end_of_engine()
    assert record["code"] == code
    assert host.progress()["reason"] == str(raised.value)
    assert not host.progress()["ready"]
    assert host.nothing_alive()


def test_one_that_dies_in_mid_run_says_so_and_the_next_try_starts_it_again(
    host: EngineHost,
) -> None:
    recipe = host.recipe(host.serve(serve_s=3))
    with engine_job.used(host.phase_job(recipe)):
        first = read_json(host.engine.job)["start_id"]
        record = host.end_of_engine()
    assert record["code"] == Busy.exit_code
    assert "ended while it was serving (exit 3)" in host.progress()["reason"]
    assert "CUDA error: out of memory" in host.progress()["reason"]
    assert host.nothing_alive()
    with engine_job.used(host.phase_job(recipe)):
        assert read_json(host.engine.job)["start_id"] != first
        assert host.progress()["ready"]


def test_the_jobs_that_use_it_renew_its_lease_and_without_them_it_ends(host: EngineHost) -> None:
    recipe = host.recipe(lease_s=5)
    with engine_job.used(host.phase_job(recipe)):
        time.sleep(8)
        assert jobs.live(host.engine)
    record = host.end_of_engine(20)
    assert (record["code"], record["reason"]) == (142, "nobody renewed the lease for 5 s")
    assert host.nothing_alive()


def test_a_phase_that_sends_no_requests_starts_no_engine(host: EngineHost) -> None:
    job = host.phase_job(host.recipe())
    object.__setattr__(job, "phase", "validate")
    with engine_job.used(job):
        assert not host.engine.root.exists()


def test_it_is_kept_while_another_job_uses_it(host: EngineHost) -> None:
    host.begin(host.recipe())
    host.start(USER)
    answer = engine_job.stop(host.workspace, "teardown")
    assert answer == {"outcome": "in use", "used_by": ["generate B1"]}
    assert jobs.live(host.engine)
    host.stop()
    assert engine_job.stop(host.workspace, "teardown")["outcome"] == "stopped"


def test_who_waits_for_one_that_was_stopped_for_another_starts_it_again(host: EngineHost) -> None:
    """A teardown of one run must not end the wait of another."""
    recipe = host.recipe(host.serve(load_s=2))
    first = host.begin(recipe)["start_id"]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITER, str(host.root)],
        stdin=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{PACKAGE.parent}", "PATH": "/usr/bin:/bin"},
    )
    assert process.stdin is not None
    host.phase_job(recipe)
    process.stdin.write(str(host.job.root))
    process.stdin.close()
    time.sleep(1)
    engine_job.stop(host.workspace, "teardown of another run")
    assert process.wait(60) == 0
    assert read_json(host.engine.job)["start_id"] != first


WAITER = """
import sys
from pathlib import Path
from drafter import engine_job
from drafter.job import load_job
with engine_job.used(load_job(Path(sys.stdin.read()))):
    print("ready")
"""


@pytest.mark.parametrize(
    ("retried", "ends"), [(False, True), (True, False)], ids=["all stopped", "one is tried again"]
)
def test_after_a_persons_stop_of_the_last_user_it_ends_by_itself(
    host: EngineHost, retried: bool, ends: bool
) -> None:
    """Without teardown: a paused DAG runs none."""
    recipe = host.recipe()
    patch_linger(host, 1.0)
    host.begin(recipe)
    host.await_ready()
    if retried:
        host.start(FAILS_SOON, dataset="B2", lock=str(host.workspace.lock("generate", "B2")))
        until(host.workspace.job("generate", "B2").exit.exists)
    host.start(USER)
    time.sleep(2)
    assert jobs.live(host.engine)
    host.stop()
    if ends:
        assert host.end_of_engine()["code"] == 0
        assert "a person stopped the last job" in host.engine.log.read_text()
        assert host.nothing_alive()
    else:
        time.sleep(4)
        assert jobs.live(host.engine)


def patch_linger(host: EngineHost, seconds: float) -> None:
    """In the deployed copy, and so under another hash."""
    old = host.workspace.code(host.code)
    file = old / "drafter" / "engine_job.py"
    file.write_text(file.read_text().replace("LINGER_S = 60.0", f"LINGER_S = {seconds}"))
    host.code = code_hash(old / "drafter")
    old.rename(host.workspace.code(host.code))


def test_a_start_that_was_stopped_before_it_arrived_is_refused(host: EngineHost) -> None:
    engine_job.stop(host.workspace, "try 1")
    with pytest.raises(Stopped, match="was stopped before it started"):
        host.begin(host.recipe(), request="try 1")
    assert host.begin(host.recipe(), request="try 2")["outcome"] == "started"


def test_the_real_engine_serves_a_job_that_runs_as_the_supervisor_runs_it(host: EngineHost) -> None:
    """``drafter run`` of a phase whose plan has nothing yet: the engine comes first."""
    target = ROOT / "include" / "demo" / "target"
    words = ("serve", "--model", str(target), "--port", str(host.port))
    recipe = host.recipe("exec " + shlex.join([sys.executable, "-m", "drafter", *words]))
    recipe = recipe.model_copy(
        update={"target": recipe.target.model_copy(update={"path": str(target)})}
    )
    argv = [sys.executable, "-m", "drafter", "run", str(host.job.root)]
    host.start(argv, recipe=recipe.as_json(), timeout_s=300)
    record = host.ended(within_s=300)
    # Nothing is prepared here: the phase itself refuses, after the engine was ready.
    assert record["code"] == 65, host.job.log.read_text()
    assert "engine started, waiting until it is ready" in host.job.log.read_text()
    assert jobs.live(host.engine)
    assert engine_job.stop(host.workspace)["outcome"] == "stopped"
