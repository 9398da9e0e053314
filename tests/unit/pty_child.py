"""A child process whose output is a terminal."""

from __future__ import annotations

import contextlib
import functools
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Self

TESTS = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join([str(TESTS), str(TESTS.parent / "include")])


class PtyChild:
    def __init__(self, argv: Sequence[str], columns: int = 120, **env: str) -> None:
        self.shown = ""
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # Whoever runs the tests in the background ignores Ctrl-C, and so would the child.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            env={**plain, "PYTHONPATH": PYTHONPATH, "TERM": "xterm", **env},
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def read_until(self, text: str, timeout_s: float = 60) -> bool:
        """Did ``text`` come, after what was there before?"""
        seen, give_up = len(self.shown), time.monotonic() + timeout_s
        while text not in self.shown[seen:]:
            if time.monotonic() > give_up or not self._read():
                return False
        return True

    def end(self, timeout_s: float = 60) -> int:
        """Read to the end; the exit code."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and self._read():
            pass
        return self.process.wait(timeout_s)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 0.2)
        if not ready:
            return True
        block = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            block = os.read(self._master, 65536)
        self.shown += block.decode(errors="replace")
        return bool(block)
