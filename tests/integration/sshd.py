"""A private sshd on loopback: own port, own keys, host key known to the connection."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SSHD = "/usr/sbin/sshd"


@dataclass
class Sshd:
    """``root`` holds keys, configuration and log; it lives as long as the test."""

    root: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def connection(self, **changes: object) -> str:
        """As AIRFLOW_CONN_...: JSON."""
        extra = {
            "key_file": str(self.root / "user"),
            "host_key": " ".join((self.root / "host.pub").read_text().split()[:2]),
            "look_for_keys": False,
        }
        connection = {
            "conn_type": "ssh",
            "host": "127.0.0.1",
            "port": self.port,
            "login": getpass.getuser(),
            "extra": {k: v for k, v in {**extra, **changes}.items() if v is not None},
        }
        return json.dumps(connection)

    def start(self) -> None:
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [SSHD, "-D", "-f", str(self.root / "config"), "-E", str(self.root / "log")]
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
    root.mkdir(parents=True, exist_ok=True)
    for name in ("host", "user", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)], check=True
        )
    authorized = root / "authorized_keys"
    authorized.write_text((root / "user.pub").read_text())
    authorized.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (root / "config").write_text(
        f"""ListenAddress 127.0.0.1
Port {port}
HostKey "{root / "host"}"
AuthorizedKeysFile "{authorized}"
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""
    )
    sshd = Sshd(root, port)
    sshd.start()
    try:
        yield sshd
    finally:
        sshd.drop()
        sshd.stop()
