"""Run ``drafter`` commands on the GPU host, over the SSH provider's two hooks.

Every argument is quoted, so a workspace path with spaces, quotes or ``$()`` is just a path; nothing
secret is ever an argument. Host keys are checked unless the connection says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import time
from pathlib import Path
from typing import Any, Self

import asyncssh
import paramiko
from airflow.providers.ssh.hooks.ssh import SSHHook, SSHHookAsync
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from drafter.errors import DrafterError, RecipeError
from drafter.layout import Workspace
from drafter.sections import Host

CONNECT_ATTEMPTS = 3
CONNECT_TIMEOUT_S = 15
_CHUNK_BYTES = 65_536

_IF_DEPLOYED = (
    'test -d "$0" || { echo "drafter: there is no $0 on the host: run the deploy task" >&2;'
    f' exit {RecipeError.exit_code}; }}; exec "$@"'
)
"""Shell program around a command: $0 is the directory of its code."""

Answer = tuple[int, str, str]
"""Exit code, stdout, stderr of one command."""


class Unreachable(DrafterError):
    """The host did not answer, or the connection broke: another try may help."""


class GpuHostHook:
    """One GPU host: an Airflow SSH connection, a workspace and the code deployed there.

    ``code`` is the sha256 of the deployed package to run; None runs the newest one, through the
    workspace's launcher. One instance holds one synchronous and one asynchronous connection, opened
    when needed and again when lost. Used as a context manager it closes the synchronous one;
    :meth:`aclose` closes the other.
    """

    def __init__(
        self, conn_id: str, workspace: str, python: str = "python3", code: str | None = None
    ) -> None:
        self.conn_id = conn_id
        self.workspace = workspace
        self.python = python
        self.code = code
        self._client: paramiko.SSHClient | None = None
        self._connection: asyncssh.SSHClientConnection | None = None

    @classmethod
    def of(cls, host: Host, code: str | None = None) -> Self:
        """From a recipe's [host] section."""
        return cls(host.conn_id, host.workspace, host.python, code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, arguments: list[str], stdin: str | bytes = b"", timeout_s: float = 60) -> Answer:
        """Run ``drafter ARGUMENTS`` on the host. Raises Unreachable or RecipeError."""
        return self.run_line(self._checked(arguments), stdin, timeout_s)

    async def arun(
        self, arguments: list[str], stdin: str | bytes = b"", timeout_s: float = 60
    ) -> Answer:
        """:meth:`run` for triggers."""
        line = self._checked(arguments)
        try:
            if self._connection is None:
                _quieten()
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    self._connection = await SSHHookAsync(self.conn_id).get_conn()
            done = await self._connection.run(
                line, input=_bytes(stdin), encoding=None, timeout=timeout_s, check=False
            )
        except BaseException as error:
            await self.aclose()
            if isinstance(error, _FAILURES):
                raise self._explained(error) from None
            raise
        if done.exit_status is None or done.exit_status < 0:
            await self.aclose()
            raise Unreachable(f"the command on {self._name} ended without an exit code: try again")
        return done.exit_status, _text(done.stdout), _text(done.stderr)

    def run_line(self, line: str, stdin: str | bytes = b"", timeout_s: float = 60) -> Answer:
        """Run one shell line. Connecting is tried again when the host is busy, the line never."""
        for attempt in range(1, CONNECT_ATTEMPTS + 1):
            try:
                client = self._connect()
                break
            except _FAILURES as error:
                explained = self._explained(error)
                if attempt == CONNECT_ATTEMPTS or not isinstance(explained, Unreachable):
                    raise explained from None
                time.sleep(attempt)
        try:
            return _exchange(client, line, _bytes(stdin), timeout_s)
        except _FAILURES as error:
            self.close()
            raise self._explained(error) from None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
            with contextlib.suppress(OSError, asyncssh.Error):
                await connection.wait_closed()

    def _connect(self) -> paramiko.SSHClient:
        transport = self._client.get_transport() if self._client else None
        if self._client is None or transport is None or not transport.is_active():
            _quieten()
            hook = SSHHook(
                self.conn_id,
                cmd_timeout=None,
                conn_timeout=CONNECT_TIMEOUT_S,
                conn_retry_attempts=1,
            )
            self._client = hook.get_conn()
        return self._client

    def line(self, arguments: list[str]) -> str:
        """The shell line of a ``drafter`` command."""
        workspace = Workspace(Path(self.workspace))
        if self.code is None:
            return shlex.join([str(workspace.launcher), *arguments])
        environment = {
            "DRAFTER_WORKSPACE": self.workspace,
            "PYTHONPATH": str(workspace.code(self.code)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONSAFEPATH": "1",
        }
        assignments = [f"{name}={value}" for name, value in environment.items()]
        return shlex.join(["env", *assignments, self.python, "-m", "drafter", *arguments])

    def _checked(self, arguments: list[str]) -> str:
        """:meth:`line`, but RecipeError's exit code when the code it runs is not there."""
        line = self.line(arguments)
        if self.code is None:
            return line
        code_dir = Workspace(Path(self.workspace)).code(self.code)
        return f"{shlex.join(['sh', '-c', _IF_DEPLOYED, str(code_dir)])} {line}"

    @property
    def _name(self) -> str:
        return f"connection {self.conn_id!r}"

    def _explained(self, error: BaseException) -> DrafterError:
        """One sentence about a failure to talk to the host, and whether a retry may help."""
        name, text = self._name, str(error) or type(error).__name__
        if isinstance(error, AirflowNotFoundException):
            return RecipeError(
                f"there is no Airflow {name}: add it (type ssh, with host, login, port, and"
                " key_file and host_key in extra), or correct host.conn_id in the recipe"
            )
        if isinstance(error, paramiko.BadHostKeyException):
            return RecipeError(
                f"the host behind {name} shows another key than the one we know: if it was"
                " reinstalled, put its new key into the connection's host_key, else do not connect"
            )
        if isinstance(error, asyncssh.HostKeyNotVerifiable) or "known_hosts" in text:
            return RecipeError(
                f"the key of the host behind {name} is not the connection's host_key, or there is"
                " none: put it there (ssh-keyscan -t ed25519 HOST prints it) if you trust the host"
            )
        if isinstance(error, paramiko.AuthenticationException | asyncssh.PermissionDenied):
            return RecipeError(
                f"the host behind {name} refuses our key: check login and key_file of the"
                " connection, and authorized_keys on the host"
            )
        if isinstance(error, AirflowException | ValueError | FileNotFoundError | PermissionError):
            return RecipeError(f"{name} is not usable: {text}")
        return Unreachable(f"the host behind {name} cannot be reached ({text}): is sshd up?")


_FAILURES = (OSError, EOFError, ValueError, AirflowException, paramiko.SSHException, asyncssh.Error)
"""OSError includes refused, unreachable and timed out."""


def _exchange(client: paramiko.SSHClient, line: str, stdin: bytes, timeout_s: float) -> Answer:
    """Run ``line``; what it writes is read while ``stdin`` is still being sent."""
    transport = client.get_transport()
    if transport is None:
        raise EOFError("connection lost")
    give_up = time.monotonic() + timeout_s
    channel = transport.open_session(timeout=timeout_s)
    try:
        channel.exec_command(line)
        output, errors, unsent = bytearray(), bytearray(), memoryview(stdin)
        channel.setblocking(False)
        if not stdin:
            channel.shutdown_write()
        while True:
            moved = False
            if unsent and channel.send_ready():
                unsent = unsent[channel.send(unsent[:_CHUNK_BYTES]) :]
                moved = True
                if not unsent:
                    channel.shutdown_write()
            if channel.recv_ready():
                output += channel.recv(_CHUNK_BYTES)
                moved = True
            if channel.recv_stderr_ready():
                errors += channel.recv_stderr(_CHUNK_BYTES)
                moved = True
            if moved:
                continue
            if channel.exit_status_ready() and channel.eof_received:
                break
            if not transport.is_active():
                raise EOFError("connection lost")
            if time.monotonic() > give_up:
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            time.sleep(0.01)
        while channel.recv_ready():
            output += channel.recv(_CHUNK_BYTES)
        while channel.recv_stderr_ready():
            errors += channel.recv_stderr(_CHUNK_BYTES)
        code = channel.recv_exit_status()
    finally:
        channel.close()
    if code < 0:
        raise EOFError("the command ended without an exit code")
    return code, _text(output), _text(errors)


def _quieten() -> None:
    """Both libraries write several lines per command into the task's log."""
    for name in ("asyncssh", "paramiko"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value or b"").decode(errors="replace")
