"""A workspace whose recipe starts an engine, driven through the CLI as Airflow drives it over SSH.

The engine is the recipe's ``[engine] start``, a supervised job of the workspace: whatever happens
to the tests, it ends with its whole tree, at the latest when its lease does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from unit.host import Host

from demo.stack import ROOT, free_ports
from drafter import engine_job, jobs
from drafter.files import read_json, write_json
from drafter.job import Job, load_job
from drafter.layout import ALL, Prepared
from drafter.recipe import parse_recipe

TARGET = ROOT / "include" / "demo" / "target"
PROMPTS = ROOT / "include" / "demo" / "prompts"
HERE = Path(__file__).parent
VENVS = ROOT / ".demo" / "engines"
REAL = ("sglang", "vllm")
IN_FLIGHT = 150
JOBS_AT_ONCE = 4
"""As the demo's pool has it."""

LARGE, HALTED = "B1_glaive", "B6_ultrachat"
"""The dataset that has more prompts than fit in flight, and the one whose job is stopped."""

MAX_SAMPLES = {LARGE: 155, HALTED: 120}
FEW_SAMPLES = 25
LEASE_S = 300.0
READY_S = 180.0
"""Engines start within 15 to 45 s, on a machine that other work keeps busy."""

JOB_S = 180.0
LOOK_S = 0.05
LOG_LINES = 30

RUNNING = {
    "sglang": re.compile(r"Decode batch, #running-req: (\d+)"),
    "vllm": re.compile(r"Running: (\d+) reqs"),
}
"""What each writes into its log about the requests it works on, as often as ``command`` has it."""


def command(kind: str, port: int, scratch: Path) -> tuple[str, ...]:
    """What starts the engine, in the foreground, on the demo's target in float32. ``scratch`` takes
    what it leaves lying: sockets, mostly."""
    if kind == "embedded":
        words = (sys.executable, "-m", "drafter", "serve", "--model", str(TARGET))
        return (*words, "--port", str(port))
    environment = ("env", f"TMPDIR={scratch}", "VLLM_LOG_STATS_INTERVAL=0.05")
    words = (str(HERE / f"{kind}_cpu.sh"), "serve", str(VENVS / kind), str(TARGET), str(port))
    flags = {
        # Its scheduler would keep a core busy while there is nothing to do.
        "sglang": ("--sleep-on-idle", "--decode-log-interval", "1"),
        # On a CPU it works on 128 at once by default.
        "vllm": ("--max-num-seqs", str(2 * IN_FLIGHT)),
    }
    return (*environment, *words, "--dtype", "float32", *flags[kind])


class RealSite(Host):
    """All eight prompt sets of the demo, small quotas, one engine."""

    def __init__(self, root: Path, kind: str, flags: tuple[str, ...] = ()) -> None:
        """``flags`` of the engine besides those of ``command``."""
        super().__init__(root / "workspace")
        self.kind = kind
        (port,) = free_ports(1)
        self.engine = self.workspace.job(engine_job.PHASE, ALL)
        datasets = [
            {
                "name": path.stem,
                "format": path.stem.partition("_")[2],
                "path": str(path),
                "max_samples": MAX_SAMPLES.get(path.stem, FEW_SAMPLES),
            }
            for path in sorted(PROMPTS.iterdir())
        ]
        tree = {
            "name": "real",
            "target": {"path": str(TARGET), "revision": "demo-1"},
            "engine": {
                "kind": "vllm" if kind == "vllm" else "sglang",
                "urls": [f"http://127.0.0.1:{port}"],
                "in_flight": IN_FLIGHT,
                "start": (*command(kind, port, root), *flags),
                "lease_s": LEASE_S,
                "ready_timeout_s": READY_S,
                "queue_timeout_s": 60,
            },
            "datasets": datasets,
            "generate": {"temperature": 0.7, "max_new_tokens": 256, "max_prompt_tokens": 512},
            "evaluate": {"max_new_tokens": 128},
            "host": {"workspace": str(self.workspace.root), "python": sys.executable},
        }
        self.recipe = parse_recipe(tree, "test")
        write_json(self.workspace.recipe, self.recipe.as_json())

    def start_engine(self) -> None:
        spec = {"recipe": self.recipe.as_json(), "code": self.code, "run_id": "run"}
        self.drafter("engine", "start", stdin=spec)

    def await_engine(self) -> float:
        """Seconds from its start until it served the target, by its own account."""
        deadline = time.monotonic() + READY_S + JOB_S
        while not self._engine_progress().get("ready"):
            assert jobs.live(self.engine), f"{self._engine_progress()}\n{self.engine_log()}"
            assert time.monotonic() < deadline, self.engine_log()
            time.sleep(LOOK_S)
        told = re.search(r"ready after (\d+) s", self._engine_progress()["line"])
        assert told
        return float(told[1])

    def _engine_progress(self) -> dict[str, Any]:
        return read_json(self.engine.progress) if self.engine.progress.exists() else {}

    def engine_log(self) -> str:
        """Its last lines."""
        text = self.engine.log.read_text(errors="replace") if self.engine.log.exists() else ""
        return "\n".join(text.splitlines()[-LOG_LINES:])

    def most_running(self, begin: int) -> int:
        """Requests that the engine worked on at once, at most, as its log from byte ``begin`` on
        has it."""
        log = self.engine.log.read_bytes()[begin:].decode(errors="replace")
        return max(map(int, RUNNING[self.kind].findall(log)), default=0)

    def prepared(self, dataset: str) -> Prepared:
        return self.workspace.prepared(dataset)

    def rows(self, dataset: str) -> list[dict[str, Any]]:
        path = self.prepared(dataset).responses
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def prompt_ids(self, dataset: str) -> dict[str, list[int]]:
        lines = self.prepared(dataset).prompt_ids.read_text().splitlines()
        return {row["sample_id"]: row["input_ids"] for row in map(json.loads, lines)}

    def drafter(self, *arguments: str, stdin: Any = None) -> str:
        """What the deployed package's CLI prints; it must end well."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.workspace.code(self.code)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DRAFTER_WORKSPACE": str(self.workspace.root),
        }
        done = subprocess.run(
            [sys.executable, "-m", "drafter", *arguments],
            input=None if stdin is None else json.dumps(stdin),
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"drafter {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def begin(self, phase: str, dataset: str, in_flight: int = IN_FLIGHT) -> Job:
        """Start a job as the operator does; one that has nothing to do has ended."""
        root = self.workspace.job(phase, dataset).root
        spec = self.spec(
            [sys.executable, "-m", "drafter", "run", str(root)],
            phase=phase,
            dataset=dataset,
            in_flight=in_flight,
            recipe=self.recipe.as_json(),
            timeout_s=600,
            lease_s=LEASE_S,
            lock=str(self.workspace.lock(phase, dataset)),
        )
        assert json.loads(self.drafter("start", stdin=spec))["outcome"] in ("started", "done")
        return load_job(root)

    def finish(self, job: Job) -> dict[str, Any]:
        """The last progress of a job that ended well."""
        deadline = time.monotonic() + JOB_S
        while not job.dir.exit.exists():
            assert time.monotonic() < deadline, f"{job.phase} {job.dataset} does not end"
            time.sleep(LOOK_S)
        code = read_json(job.dir.exit)["code"]
        assert code == 0, f"{job.phase} {job.dataset}: exit {code}\n{job.dir.log.read_text()}"
        return read_json(job.dir.progress)

    def run_all(self, phase: str) -> dict[str, dict[str, Any]]:
        """The last progress of the phase on every dataset."""
        names, found = self.recipe.dataset_names, {}
        for i in range(0, len(names), JOBS_AT_ONCE):
            begun = {name: self.begin(phase, name) for name in names[i : i + JOBS_AT_ONCE]}
            found |= {name: self.finish(job) for name, job in begun.items()}
        return found
