"""The demo's private sshd, with a key that nothing knows, and ways to break its connections."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo import sshd
from demo.stack import free_ports


@dataclass
class Sshd:
    """``root`` holds keys, configuration and log; it lives as long as the test."""

    root: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def strangers_key(self) -> Path:
        return self.root / "stranger" / "user"

    def connection(self, **changes: object) -> str:
        """As AIRFLOW_CONN_...: JSON. ``changes`` are to extra; None takes an entry away."""
        connection = json.loads(sshd.connection(self.root, self.port))
        extra = {**connection["extra"], "look_for_keys": False, **changes}
        connection["extra"] = {k: v for k, v in extra.items() if v is not None}
        return json.dumps(connection)

    def start(self) -> None:
        with open(self.root / "log", "a") as log:
            self.process = subprocess.Popen(
                sshd.command(self.root, self.port), stdin=subprocess.DEVNULL, stderr=log
            )
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError((self.root / "log").read_text())

    def stop(self) -> None:
        """End the listener; open sessions go on, as on a real restart."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None

    def drop(self) -> int:
        """Kill every open session, as a broken network would; how many there were."""
        assert self.process is not None
        sessions = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        for pid in sessions:
            os.kill(int(pid), 9)
        return len(sessions)


@contextmanager
def private_sshd(root: Path) -> Iterator[Sshd]:
    (port,) = free_ports(1)
    server = Sshd(root, port)
    sshd.make_keys(root)
    sshd.make_keys(server.strangers_key.parent)
    server.start()
    try:
        yield server
    finally:
        server.drop()
        server.stop()
