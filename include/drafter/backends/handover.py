"""Files of states that a vLLM server hands over: taken under their lock, read, deleted.

The server names a file after the request and never deletes one, so a request id says whose it is::

    drafter-<home>-<boot>-<pid>-<start time>-<n>

``home`` stands for this machine and its pids, the next three for the process that asked. After each
batch, files of this process and of processes that no longer live are removed from the server's
directory; a name without this form, or of another home, is somebody else's and stays. A job that
was killed so loses its files to the first batch of the next one, of whatever dataset.

The server writes a file while it holds ``flock`` on its path + ".lock"; that file is there, held,
before the server names the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import socket
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from drafter.errors import Busy, DrafterError, RecipeError
from drafter.files import is_held
from drafter.processes import Process, boot_id, is_alive, look

MACHINE_ID = Path("/etc/machine-id")

APPEAR_S = 30.0
"""For a lock file that the server says is there: shared disks may show it late."""

_LOOK_S = 0.002
_LOOK_CAP_S = 0.1
_LOCK = ".lock"
_NAME = re.compile(
    r"drafter-(?P<home>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-(?P<starttime>\d+)-\d+\b"
)


class Handover:
    """``timeout_s``: how long the server may hold the lock of a file."""

    def __init__(self, timeout_s: float) -> None:
        this = look(os.getpid())
        assert this is not None
        self._this = this
        self._home = _digest(_machine() + socket.gethostname() + os.readlink("/proc/self/ns/pid"))
        self._boot = _digest(boot_id())
        self._count = itertools.count()
        self._timeout_s = timeout_s
        self._directories: set[Path] = set()

    def request_id(self) -> str:
        """New at each call."""
        process = f"{self._boot}-{self._this.pid}-{self._this.starttime}"
        return f"drafter-{self._home}-{process}-{next(self._count)}"

    async def take(self, path: Path, request_id: str) -> tuple[list[int], torch.Tensor]:
        """token_ids and hidden_states [T, layers, D] of ``path``, which is deleted, whatever it is.

        Raises RecipeError when it is not named after that request, or cannot be seen or deleted
        from here, Busy when it stays locked, DrafterError when it holds no states.
        """
        named = _NAME.search(path.name)
        if named is None or named[0] != request_id:
            raise RecipeError(
                f"the server names {path}, needed is a file named after the request: start vLLM "
                "with the kv_connector ExampleHiddenStatesConnector"
            )
        self._directories.add(path.parent)
        try:
            try:
                lock = await self._locked(path)
                try:
                    return await asyncio.to_thread(_read, path)
                finally:
                    os.close(lock)
            finally:
                _delete(path)
        except PermissionError as error:
            raise RecipeError(
                f"{error.filename} may not be read or deleted from here: run vLLM and the "
                "extraction as the same user"
            ) from None

    def sweep(self) -> None:
        """Remove what nobody will ask for. Between batches: nothing of this process is awaited."""
        for directory in self._directories:
            for path in _states(directory):
                # What another user left is that user's to sweep.
                with contextlib.suppress(PermissionError):
                    if self._is_left_over(path) and not is_held(_lock_of(path)):
                        _delete(path)

    def _is_left_over(self, path: Path) -> bool:
        named = _NAME.search(path.name)
        if named is None or named["home"] != self._home:
            return False
        process = self._process(named)
        return process is None or process == self._this or not is_alive(process)

    def _process(self, named: re.Match[str]) -> Process | None:
        """Who asked for the file; None when it was in another boot."""
        if (named["home"], named["boot"]) != (self._home, self._boot):
            return None
        return Process(int(named["pid"]), int(named["starttime"]))

    async def _locked(self, path: Path) -> int:
        """A descriptor that holds the file's lock, shared."""
        started, wait_s = time.monotonic(), _LOOK_S
        while True:
            waited_s = time.monotonic() - started
            try:
                fd = os.open(_lock_of(path), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                if waited_s >= APPEAR_S or not path.parent.is_dir():
                    raise _not_here(path) from None
            else:
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return fd
                except BlockingIOError:
                    os.close(fd)
                if waited_s >= self._timeout_s:
                    raise Busy(
                        f"{path} is locked by vLLM for more than {self._timeout_s:g} s: restart "
                        "the server, then run extract again; shards already written are kept"
                    )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LOOK_CAP_S)


def _read(path: Path) -> tuple[list[int], torch.Tensor]:
    remedy = (
        "free disk space where vLLM writes and look at its log, then run extract again; shards "
        "already written are kept"
    )
    try:
        with safe_open(path, framework="pt") as file:
            token_ids, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
    except FileNotFoundError:
        raise DrafterError(f"vLLM unlocked {path} without writing it: {remedy}") from None
    except SafetensorError as error:
        raise DrafterError(f"{path} holds no whole states ({error}): {remedy}") from None
    if states.dim() != 3 or token_ids.dim() != 1:
        raise RecipeError(
            f"{path} holds hidden_states {list(states.shape)} and token_ids "
            f"{list(token_ids.shape)}, needed are [T, layers, D] and [T]: use vLLM 0.32"
        )
    # The file is deleted: nothing may still be mapped from it.
    return token_ids.tolist(), states.clone()


def _not_here(path: Path) -> RecipeError:
    if path.exists():
        return RecipeError(
            f"{path} has no lock file, so nobody can tell when it is whole: start vLLM without "
            "use_synchronization_lock = false"
        )
    return RecipeError(
        f"vLLM wrote states to {path}, which is not there on this host: start it with a "
        "shared_storage_path on a disk that server and job share under one path"
    )


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)
    _lock_of(path).unlink(missing_ok=True)


def _states(directory: Path) -> set[Path]:
    """Paths of states in a server's directory, those of which only a lock is left too."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return set()
    return {
        directory / name.removesuffix(_LOCK)
        for name in names
        if name.removesuffix(_LOCK).endswith(".safetensors")
    }


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def _machine() -> str:
    """What no other host of this name has: containers often lack an id, there it is the boot's."""
    try:
        machine = MACHINE_ID.read_text().strip()
    except OSError:
        machine = ""
    return machine or boot_id()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
