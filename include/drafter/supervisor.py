"""Runs what a ``job.json`` says, detached, and sees to it that all of it dies when it must.

``python -m drafter.supervisor <job dir>`` (started by :mod:`drafter.jobs`) leaves two small
processes in sessions of their own::

    guardian -> supervisor -> the phase and whatever it starts

The supervisor runs the phase, watches its clock, its lease and the ``stop`` file, ends the tree
(TERM, grace, KILL) and writes the exit record as its last act. The guardian waits for the
supervisor; each holds a pidfd of the other. When either is killed, the one left kills the tree at
once, without grace: somebody is using KILL, and may be about to use it again. Both are subreapers,
so a grandchild that called ``setsid`` remains a descendant of one of them.

Files of the job directory, besides those of :mod:`drafter.job`::

    state.json  start_id, what, phase, dataset, state "running" | "stopping", started (Unix time),
                boot_id, supervisor, guardian, child: [pid, start time]
    stop        {start_id, request}: somebody wants this start to end (written by jobs.stop)
    lease       rewritten by whoever watches the job
    exit        start_id, code, reason, ended (Unix time), request (of the stop, else null)

Exit codes: the phase's own; 143 stopped, 142 lease ran out, 124 deadline passed, 75 the dataset is
locked by something else; 128 + n when signal n killed the phase; 1 when a watching process was
killed. A phase that ends with 143 although nobody stopped it counts as failed (1).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drafter.errors import Busy, DataError, DeadlinePassed, LeaseExpired, Stopped
from drafter.files import fsync_dir, read_json, write_json
from drafter.layout import JobDir
from drafter.processes import (
    Process,
    become_subreaper,
    boot_id,
    die_with_parent,
    end,
    look,
    members,
)

TICK_S = 0.1
LOCK_WAIT_S = 2.0
"""A job that just ended may still be closing its lock."""

_RESERVED_BYTES = 4096


class Clock:
    """Seconds that this process saw pass. No jump counts, not even of the monotonic clock: a step
    of more than a second between two ticks (a suspended machine, libfaketime) is one second."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        now = time.monotonic()
        self.seconds += min(max(now - self._last, 0.0), 1.0)
        self._last = now
        return self.seconds


class ExitRecord:
    """The job's last word. Its bytes are reserved at the start, so that a full disk cannot take
    them; it appears under its name complete."""

    def __init__(self, job: JobDir, start_id: str) -> None:
        self._job = job
        self._start_id = start_id
        self._reserved = job.reserved_exit
        self._reserved.write_bytes(b" " * _RESERVED_BYTES)

    def write(self, code: int, reason: str, request: str | None = None) -> None:
        record = {
            "start_id": self._start_id,
            "code": code,
            "reason": reason[:1000],
            "ended": time.time(),
            "request": request,
        }
        with open(self._reserved, "r+b") as file:
            file.write(json.dumps(record).encode().ljust(_RESERVED_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._reserved, self._job.exit)
        fsync_dir(self._job.root)

    def is_written(self) -> bool:
        return self._job.exit.exists() and read_json(self._job.exit)["start_id"] == self._start_id


def main(arguments: list[str]) -> None:
    """Returns (in the caller's process) once the watching processes are on their own."""
    job = JobDir(Path(arguments[0]))
    spec = read_json(job.job)
    if os.fork():
        return
    os.setsid()
    guard(job, spec)
    os._exit(0)


def guard(job: JobDir, spec: dict[str, Any]) -> None:
    """The guardian: take the lock, start the supervisor, outlive it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A handler, unlike SIG_IGN, is not inherited by what the supervisor executes.
        signal.signal(number, lambda *_: None)
    become_subreaper()
    exit_record = ExitRecord(job, spec["start_id"])
    lock = _take_lock(Path(spec["lock"]))
    if lock is None:
        exit_record.write(Busy.exit_code, f"{spec['lock']} is held by something else")
        return
    guardian = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        os.setsid()
        Supervisor(job, spec, lock, guardian, exit_record).run()
        os._exit(0)
    os.waitpid(supervisor, 0)
    if exit_record.is_written():
        return
    _say("the supervisor was killed: ending its job")
    left = _end_tree(spec["start_id"], grace_s=0)
    exit_record.write(1, "the supervisor was killed" + _survivors(left))


class Supervisor:
    """Runs in its own process; see the module's docstring."""

    def __init__(
        self, job: JobDir, spec: dict[str, Any], lock: int, guardian: int, exit_record: ExitRecord
    ) -> None:
        self._job = job
        self._spec = spec
        self._lock = lock
        self._guardian = guardian
        self._exit_record = exit_record
        self._terminated = False
        self._started = time.time()
        self._child = 0
        self._status: int | None = None

    def run(self) -> None:
        become_subreaper()
        signal.signal(signal.SIGTERM, self._on_term)
        guardian_fd = os.pidfd_open(self._guardian)
        if os.getppid() != self._guardian:
            os._exit(1)
        try:
            self._child = self._spawn()
        except OSError as error:
            self._exit_record.write(127, f"cannot run {self._spec['argv'][0]}: {error.strerror}")
            return
        self._write_state("running")
        code, reason, request, grace_s = self._watch(guardian_fd)
        if code is not None:
            _say(reason)
            with contextlib.suppress(OSError):
                self._write_state("stopping")
        left = _end_tree(self._spec["start_id"], grace_s, reap=self._reap)
        self._reap()
        if code is None:
            code, reason = _verdict(self._status)
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._exit_record.write(code, reason + _survivors(left), request)

    def _on_term(self, *_: object) -> None:
        self._terminated = True

    def _spawn(self) -> int:
        supervisor = os.getpid()
        child = subprocess.Popen(
            self._spec["argv"],
            cwd=self._job.root,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(self._lock,),
            preexec_fn=lambda: die_with_parent(supervisor),
        )
        child.returncode = 0  # _reap waits for it, Popen must not
        return child.pid

    def _watch(self, guardian_fd: int) -> tuple[int | None, str, str | None, float]:
        """Until the phase ends or must end: (code or None, reason, request of the stop, grace)."""
        clock, lease_seen, lease = Clock(), 0.0, self._lease()
        grace_s = self._spec["grace_s"]
        while True:
            ready, _, _ = select.select([guardian_fd], [], [], TICK_S)
            now = clock.tick()
            self._reap()
            if self._status is not None:
                return None, "", None, grace_s
            if ready:
                return 1, "the guardian was killed", None, 0
            if (stop := self._stop()) is not None:
                return Stopped.exit_code, "stopped by a person", stop["request"], grace_s
            if self._terminated:
                return 1, "the supervisor was terminated (shutdown?)", None, grace_s
            if (current := self._lease()) != lease:
                lease, lease_seen = current, now
            if now - lease_seen > self._spec["lease_s"]:
                reason = f"nobody renewed the lease for {self._spec['lease_s']:g} s"
                return LeaseExpired.exit_code, reason, None, grace_s
            deadline_s = self._spec["timeout_s"]
            if deadline_s is not None and now > deadline_s:
                reason = f"took longer than its deadline of {deadline_s:g} s"
                return DeadlinePassed.exit_code, reason, None, grace_s

    def _reap(self) -> None:
        """Collect the dead: the phase's status, and orphans that came to this process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                self._status = status

    def _stop(self) -> dict[str, Any] | None:
        if not self._job.stop.exists():
            return None
        try:
            stop = read_json(self._job.stop)
        except DataError:
            return None  # not one of ours, which appear whole
        return stop if stop.get("start_id") == self._spec["start_id"] else None

    def _lease(self) -> tuple[int, bytes] | None:
        try:
            return self._job.lease.stat().st_mtime_ns, self._job.lease.read_bytes()
        except FileNotFoundError:
            return None

    def _write_state(self, state: str) -> None:
        pids = {"supervisor": os.getpid(), "guardian": self._guardian, "child": self._child}
        write_json(
            self._job.state,
            {
                **{key: self._spec[key] for key in ("start_id", "what", "phase", "dataset")},
                **{name: _identity(pid) for name, pid in pids.items()},
                "state": state,
                "started": self._started,
                "boot_id": boot_id(),
            },
        )


def _identity(pid: int) -> list[int] | None:
    process = look(pid)
    return None if process is None else [process.pid, process.starttime]


def _verdict(status: int | None) -> tuple[int, str]:
    """Exit code and reason of a phase that ended by itself, from its wait status."""
    if status is None:
        return 1, "its end was not seen"
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = _signal_name(-code)
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return 1 if name == "SIGTERM" else 128 - code, f"killed by {name}{hint}"
    if code == Stopped.exit_code:
        return 1, f"ended with {code}, although nobody stopped it"
    return code, "" if code == 0 else f"ended with {code}"


def _signal_name(number: int) -> str:
    """Real-time signals have no name."""
    named = {known.value: known.name for known in signal.Signals}
    return named.get(number, f"signal {number}")


def _end_tree(start_id: str, grace_s: float, reap: Any = None) -> list[Process]:
    """End everything of the job but the two watching processes, and collect it."""
    watching = {os.getpid(), os.getppid()}

    def find() -> list[Process]:
        if reap is not None:
            reap()
        return members(start_id, roots=[os.getpid()], spare=watching)

    return end(find, grace_s)


def _survivors(left: list[Process]) -> str:
    if not left:
        return ""
    return f"; would not die: {', '.join(str(process.pid) for process in left)}"


def _take_lock(path: Path) -> int | None:
    """An open, locked file; None when something else holds it for longer than LOCK_WAIT_S."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > give_up:
                os.close(fd)
                return None
            time.sleep(TICK_S)


def _say(text: str) -> None:
    """One line in the job's log; a full disk must not keep the supervisor from its work."""
    with contextlib.suppress(OSError):
        os.write(1, f"drafter: {text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
