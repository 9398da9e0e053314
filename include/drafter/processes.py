"""Which processes belong to a job, and how they are made to end.

A process is its pid *and* its start time, so that a recycled pid is never taken for the one that
was meant. A job's processes are the descendants of its watching processes (which are subreapers: an
orphan stays a descendant whatever it does to its session) together with every process whose
environment holds the job's marker. A process marked by another job belongs to that one, and so do
its children. Linux and the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

MARKER = "DRAFTER_START_ID"
"""Environment variable that every process of a job inherits; its value is the start id."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_AGAIN_S = 0.05
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """``starttime``: clock ticks from boot to fork, field 22 of /proc/<pid>/stat."""

    pid: int
    starttime: int


def boot_id() -> str:
    """Changes with every boot: pids and start times mean nothing across it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def look(pid: int) -> Process | None:
    """The live process with this pid. A zombie is dead: it only waits to be counted."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else Process(pid, stat[2])


def is_alive(process: Process) -> bool:
    return look(process.pid) == process


def members(
    start_id: str, roots: Collection[int] = (), spare: Collection[int] = ()
) -> list[Process]:
    """Live processes of a job: below ``roots`` or marked ``start_id``, those in ``spare`` not."""
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    marks = {pid: _mark(pid) for pid in stats}
    found: set[int] = set()
    todo = [child for root in roots for child in children.get(root, [])]
    todo += [pid for pid, mark in marks.items() if mark == start_id]
    while todo:
        pid = todo.pop()
        if pid in found or marks[pid] not in (None, start_id):
            continue
        found.add(pid)
        todo += children.get(pid, [])
    return [
        Process(pid, stats[pid][2])
        for pid in sorted(found.difference(spare))
        if stats[pid][0] not in "ZX"
    ]


def send(process: Process, number: int) -> bool:
    """Signal exactly this process; False when it is gone, or is not ours to signal."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if look(process.pid) != process:
            return False
        signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)
    return True


def end(find: Callable[[], list[Process]], grace_s: float, give_up_s: float = 10) -> list[Process]:
    """TERM what ``find`` finds, after ``grace_s`` KILL it, until nothing is found.

    Looks again after every round: a tree may grow while it is cut down. Returns what would not die
    within ``give_up_s`` of the first KILL (normally nothing).
    """
    started = time.monotonic()
    told: set[Process] = set()
    while found := find():
        waited = time.monotonic() - started
        if waited >= grace_s + give_up_s:
            return found
        for process in found:
            if waited >= grace_s:
                send(process, signal.SIGKILL)
            elif process not in told:
                told.add(process)
                send(process, signal.SIGTERM)
        time.sleep(_LOOK_AGAIN_S)
    return []


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(parent: int) -> None:
    """KILL this process when ``parent``, which forked it, dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state letter, parent pid, start time); None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def _mark(pid: int) -> str | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    prefix = f"{MARKER}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None
