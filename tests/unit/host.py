"""A workspace on this machine with the package deployed, and jobs that are small real programs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafter
from drafter import jobs
from drafter.code import code_hash
from drafter.files import read_json
from drafter.layout import Workspace

PACKAGE = Path(drafter.__file__).parent

QUIET = ["bash", "-c", f"{sys.executable} -c 'import time; time.sleep(60)' & wait"]
NOISY = ["bash", "-c", "while :; do echo line; sleep 0.05; done"]
STUBBORN = [
    "bash",
    "-c",
    f"""setsid {sys.executable} -c '
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
' & sleep 60""",
]
"""A grandchild in a session of its own that ignores TERM."""


class Host:
    def __init__(self, root: Path) -> None:
        self.workspace = Workspace(root)
        self.code = code_hash(PACKAGE)
        shutil.copytree(
            PACKAGE,
            self.workspace.code(self.code) / "drafter",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        self.job = self.workspace.job("generate", "B1")

    def spec(self, argv: list[str], **changes: Any) -> dict[str, Any]:
        spec = {
            "phase": "generate",
            "dataset": "B1",
            "argv": argv,
            "what": "same",
            "code": self.code,
            "run_id": "run",
            "mode": "resume",
            "token_budget": None,
            "in_flight": 1,
            "recipe": {},
            "timeout_s": 60,
            "lease_s": 60,
            "grace_s": 0.5,
            "lock": str(self.workspace.lock("generate", "B1")),
            "request": None,
        }
        return {**spec, **changes}

    def start(self, argv: list[str], **changes: Any) -> dict[str, Any]:
        return jobs.start(self.workspace.root, self.spec(argv, **changes))

    def poll(self, offset: int = 0, renew: bool = True) -> dict[str, Any]:
        return jobs.poll(self.job.root, offset, renew)

    def stop(self, **arguments: Any) -> dict[str, Any]:
        return jobs.stop(self.job.root, **arguments)

    def ended(self, within_s: float = 10, renew: bool = True) -> dict[str, Any]:
        """The exit record, once there is one."""
        until(lambda: not self.poll(renew=renew)["alive"], within_s)
        record: dict[str, Any] = self.poll(renew=False)["exit"]
        return record

    def pids(self, name: str) -> int:
        """Of the "supervisor", the "guardian" or the "child"."""
        return int(read_json(self.job.state)[name][0])

    def processes(self) -> list[str]:
        """Command lines of live processes whose environment or arguments mention the workspace."""
        token = str(self.workspace.root).encode()
        found = []
        for proc in Path("/proc").iterdir():
            if not proc.name.isdigit():
                continue
            try:
                command = (proc / "cmdline").read_bytes()
                if command and token in command + (proc / "environ").read_bytes():
                    found.append(command.replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found

    def starts(self) -> list[str]:
        """The words that jobs wrote into their log."""
        return self.job.log.read_text().split() if self.job.log.exists() else []


def until(condition: Callable[[], object], within_s: float = 10) -> float:
    """Wait for ``condition``; the seconds it took."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < within_s, f"not within {within_s} s"
        time.sleep(0.02)
    return time.monotonic() - started
