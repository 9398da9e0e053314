"""Start, watch and stop jobs on this host. A job is its directory: one phase on one dataset.

Whatever asks (Airflow over SSH, a person on the host) and however often, a directory has one live
job at most: starting and stopping take ``.start``, a lock held for as long as either is under way.
The CLI prints what these functions return. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drafter.code import is_intact
from drafter.errors import Busy, DataError, DrafterError, RecipeError, Stopped
from drafter.files import read_json, write_json
from drafter.layout import JobDir, Workspace
from drafter.processes import MARKER, Process, boot_id, end, is_alive, members, send
from drafter.supervisor import ExitRecord

START_WAIT_S = 30.0
"""From spawning the supervisor to its first state: a fraction of a second on an idle host."""

STOP_WAIT_S = 20.0
_REACTION_S = 3.0
"""A supervisor that has not reacted to a stop after the grace and this is killed itself."""

_LOOK_AGAIN_S = 0.02


def start(workspace_root: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Start the job that ``spec`` describes (drafter.job says how), or follow it if it is live.

    ``spec`` lacks ``start_id``, made here; ``spec["request"]`` names who asks, so that a stop by
    the same asker that came first wins. Returns {outcome: "started" | "following", start_id,
    offset}, ``offset`` being where the log of this start begins. Raises Busy when the directory is
    live with another ``what`` or its dataset is locked, Stopped when the asker has been stopped,
    RecipeError when the deployed code is not what its name says.
    """
    workspace = Workspace(Path(workspace_root))
    job = workspace.job(spec["phase"], spec["dataset"])
    name = f"{spec['phase']} {spec['dataset']}"
    with _explained(job.root), _starting(job, START_WAIT_S):
        if spec.get("request") and spec["request"] == _read(job.stopped).get("request"):
            raise Stopped(f"{name} was stopped before it started: clear the task to start it")
        if live(job) and _state(job) == "stopping":
            _wait(lambda: not live(job), STOP_WAIT_S)
        if live(job):
            current = _read(job.job) or _read(job.state)
            if current["what"] != spec["what"]:
                raise Busy(
                    f"{name} is live with other settings (run {current.get('run_id')}): wait for"
                    f" it, or stop it with `drafter stop {spec['dataset']} --phase {spec['phase']}`"
                )
            return _answer("following", current)
        code_dir = workspace.code(spec["code"])
        if not is_intact(code_dir):
            raise RecipeError(
                f"{code_dir} is not the code it is named after: remove it, the next deployment"
                " brings it back"
            )
        _sweep(job)
        spec = {**spec, "start_id": uuid.uuid4().hex, "log_offset": _size(job.log)}
        # Before the last start's records go: on a full disk this fails, and they are still there.
        write_json(job.job, spec)
        for path in (job.exit, job.state, job.progress, job.stop, job.stopped):
            path.unlink(missing_ok=True)
        _renew(job)
        _spawn(job, spec["start_id"], code_dir)
        record = _read(job.exit)
        if record.get("code") == Busy.exit_code and not job.state.exists():
            raise Busy(f"{name}: {record['reason']}: wait for it, or stop it first")
        return _answer("started", spec)


def poll(job_dir: Path, offset: int, renew: bool, max_bytes: int = 262_144) -> dict[str, Any]:
    """One look: {alive, start_id, exit, progress, log, offset, log_bytes, free_bytes}.

    ``log`` is whole lines from byte ``offset`` on (an unfinished last line only once the job is
    dead), ``offset`` where to go on, ``log_bytes`` the log's size. Dead with ``exit`` null means
    that it ended without a record (reboot, out of memory): what is left of it is killed here.
    ``free_bytes``: of the workspace's disk, null when the directory is not there.
    """
    job = JobDir(Path(job_dir))
    start_id = _start_id(job)
    alive = live(job) is not None
    if alive and renew:
        _renew(job)
    record = _own(job.exit, start_id)
    if not alive and record is None and start_id:
        _sweep_dead(job)
    size = _size(job.log)
    log, offset = _lines(job.log, min(offset, size), max_bytes, whole=not alive)
    return {
        "alive": alive,
        "start_id": start_id,
        "exit": record,
        "progress": _own(job.progress, start_id),
        "log": log,
        "offset": offset,
        "log_bytes": size,
        "free_bytes": shutil.disk_usage(job.root).free if job.root.exists() else None,
    }


def stop(
    job_dir: Path,
    start_id: str | None = None,
    wait_s: float = STOP_WAIT_S,
    request: str | None = None,
) -> dict[str, Any]:
    """End a job and wait until its whole tree is dead: {outcome: "stopped" | "not running", ...}.

    With ``start_id`` only that start is meant. ``request`` names the asker: it is kept, and a start
    by the same asker that arrives later is refused. A supervisor that does not react (SIGSTOP, a
    full disk) is killed with its tree. Raises DrafterError when something would not die.
    """
    job = JobDir(Path(job_dir))
    if not job.root.exists() and request is None:
        return {"outcome": "not running"}
    with _explained(job.root), _starting(job, wait_s):
        if request is not None:
            with contextlib.suppress(OSError):
                write_json(job.stopped, {"request": request})
        current = live(job)
        if current is None:
            return {"outcome": "stopped" if _sweep(job) else "not running"}
        if start_id not in (None, current):
            return {"outcome": "not running"}
        with contextlib.suppress(OSError):  # a full disk: killed below instead
            write_json(job.stop, {"start_id": current, "request": request})
        for process in _watching(job):
            send(process, signal.SIGCONT)
        grace_s = _read(job.job).get("grace_s", 0.0)
        if not _wait(lambda: not live(job), min(wait_s, grace_s + _REACTION_S)):
            _kill(job, current, request)
        _wait(lambda: not any(map(is_alive, _watching(job))), 1.0)
        return {"outcome": "stopped", "start_id": current, "exit": _own(job.exit, current)}


def stop_all(
    workspace_root: Path, dataset: str | None = None, phase: str | None = None
) -> dict[str, dict[str, Any]]:
    """Stop every job of the workspace (of one dataset, of one phase), all at once: by directory.

    One that cannot be stopped has the outcome "failed" and a reason.
    """

    def outcome(path: Path) -> dict[str, Any]:
        try:
            return stop(path)
        except DrafterError as error:
            return {"outcome": "failed", "reason": str(error)}

    jobs = job_dirs(workspace_root, dataset, phase)
    with ThreadPoolExecutor(max_workers=len(jobs) or 1) as pool:
        outcomes = pool.map(outcome, jobs)
        return {str(job): outcome for job, outcome in zip(jobs, outcomes, strict=True)}


def renew(job_dir: Path) -> None:
    """Renew the lease of the job that runs here; nothing when none does."""
    job = JobDir(Path(job_dir))
    if live(job) is not None:
        _renew(job)


def job_dirs(
    workspace_root: Path, dataset: str | None = None, phase: str | None = None
) -> list[Path]:
    """Directories of the jobs that ever were, live or not."""
    top = Workspace(Path(workspace_root)).jobs
    return sorted(
        path
        for path in top.glob("*/*")
        if dataset in (None, path.name) and phase in (None, path.parent.name)
    )


def live(job: JobDir) -> str | None:
    """The start id of the job that runs here now; None when none does."""
    start_id = _start_id(job)
    if start_id is None or _own(job.exit, start_id):
        return None
    if _own(job.state, start_id) is None:
        # Between the spawn and the first state, or never.
        return start_id if members(start_id) else None
    return start_id if any(map(is_alive, _watching(job))) else None


def _watching(job: JobDir) -> list[Process]:
    """Supervisor and guardian as state.json names them; none when it is from before a reboot."""
    state = _read(job.state)
    if state.get("boot_id") != boot_id():
        return []
    return [Process(*state[name]) for name in ("supervisor", "guardian") if state.get(name)]


def _state(job: JobDir) -> str | None:
    state: str | None = _read(job.state).get("state")
    return state


def _answer(outcome: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"outcome": outcome, "start_id": spec["start_id"], "offset": spec.get("log_offset", 0)}


def _sweep(job: JobDir) -> bool:
    """Kill what outlived both watching processes of the last start; False when nothing did."""
    last = _start_id(job)
    if not last or not members(last):
        return False
    if left := end(lambda: members(last), grace_s=0):
        pids = ", ".join(str(process.pid) for process in left)
        raise Busy(f"processes {pids} of the last start would not die: see to them on the host")
    return True


def _sweep_dead(job: JobDir) -> None:
    """Sweep unless a start or stop is under way: a job that is just starting looks dead."""
    with contextlib.suppress(Busy), _starting(job, 0):
        if live(job) is None:
            _sweep(job)


def _spawn(job: JobDir, start_id: str, code_dir: Path) -> None:
    """Run the supervisor detached; back when it says that the job runs, or that it ended."""
    environment = {
        # OpenMP threads that spin while they wait make training 20 times slower on a busy machine.
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        MARKER: start_id,
        "PYTHONPATH": str(code_dir),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with open(job.log, "ab") as log:
        code = subprocess.call(
            [sys.executable, "-m", "drafter.supervisor", str(job.root)],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def settled() -> bool:
        if _own(job.state, start_id) or _own(job.exit, start_id):
            return True
        return not members(start_id)

    running = code == 0 and _wait(settled, START_WAIT_S)
    if not running or not (_own(job.state, start_id) or _own(job.exit, start_id)):
        end(lambda: members(start_id), grace_s=0)
        raise DrafterError(f"the supervisor did not start: see the end of {job.log}")


def _kill(job: JobDir, start_id: str, request: str | None) -> None:
    roots = [process.pid for process in _watching(job)]
    left = end(lambda: members(start_id, roots), grace_s=0)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise DrafterError(f"processes {pids} of {job.root} would not die: see to them on the host")
    if not _own(job.exit, start_id):
        with contextlib.suppress(OSError):
            record = ExitRecord(job, start_id)
            record.write(Stopped.exit_code, "killed: its supervisor did not react", request)


def _renew(job: JobDir) -> None:
    """Rewrite the lease; on a full disk at least touch it."""
    try:
        job.lease.write_text(f"{os.getpid()} {time.monotonic_ns()}\n")
    except OSError:
        os.utime(job.lease)


def _lines(path: Path, offset: int, max_bytes: int, whole: bool) -> tuple[str, int]:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            block = file.read(max_bytes)
    except FileNotFoundError:
        return "", offset
    at_end = whole and len(block) < max_bytes
    if not at_end and (cut := block.rfind(b"\n") + 1):
        block = block[:cut]
    elif not at_end and len(block) < max_bytes:
        block = b""
    return block.decode("utf-8", errors="replace"), offset + len(block)


def _start_id(job: JobDir) -> str | None:
    """Of the last start; state.json says it too, should somebody have spoilt job.json."""
    start_id: str | None = _read(job.job).get("start_id") or _read(job.state).get("start_id")
    return start_id


def _read(path: Path) -> dict[str, Any]:
    """A record; an unreadable one tells as little as none, and must not keep a job alive."""
    try:
        return read_json(path)
    except DataError:
        return {}


def _own(path: Path, start_id: str | None) -> dict[str, Any] | None:
    """The record at ``path`` when it is about this start."""
    value = _read(path)
    return value if value and value.get("start_id") == start_id else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _wait(condition: Callable[[], object], wait_s: float) -> bool:
    give_up = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


@contextlib.contextmanager
def _starting(job: JobDir, wait_s: float) -> Iterator[None]:
    """One start or stop at a time per directory."""
    job.root.mkdir(parents=True, exist_ok=True)
    fd = os.open(job.starting, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    give_up = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise Busy(f"{job.root} is being started or stopped: try again") from None
                time.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _explained(where: Path) -> Iterator[None]:
    """What the operating system refuses, as one sentence."""
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: "free space on the host",
            errno.EDQUOT: "free space or raise the quota on the host",
            errno.EACCES: "make the workspace writable for the SSH user",
            errno.EPERM: "make the workspace writable for the SSH user",
            errno.EROFS: "mount the workspace writable",
        }
        remedy = remedies.get(error.errno or 0, "see to it on the host")
        raise DrafterError(
            f"cannot write {error.filename or where} ({error.strerror}): {remedy}"
        ) from None
