"""Follow jobs and data on the GPU host from the triggerer.

:class:`JobTrigger` renews the lease of one job directory, brings its log over by byte offset and
fires once, when the job has ended; meanwhile it sends the recipe's alerts. :class:`StatusTrigger`
waits until no job of a phase runs on a dataset; all of them in one triggerer share one connection
and one answer per workspace. Both survive dropped connections; a restarted triggerer begins them
again from their arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

from airflow.triggers.base import BaseTrigger, TriggerEvent

from drafter.errors import DrafterError
from drafter.layout import JobDir
from drafter.sections import Host
from gpu_host import alerts
from gpu_host.hooks import GpuHostHook, Unreachable

FIRST_EVENT_S = 6.0
"""No event earlier than this after the deferral. The scheduler must have seen the deferring process
end before the task is queued again, or it takes that end for the death of the resumed task
(measured on 3.3.2: "finished with state success, but the task instance's state attribute is
running")."""

LOG_LIMIT_BYTES = 1_000_000
"""Shown in Airflow per job; beyond it the log is on the host, and its end is shown again."""

LOG_TAIL_BYTES = 8_192
ALERT_PATIENCE_S = 10.0
"""At the end of a job an alert that is still being sent holds up its task for so long at most."""

STOP_TIMEOUT_S = 25.0
"""Airflow gives ``on_kill`` 30 s."""

BACKOFF_S = (1.0, 2.0, 5.0, 10.0)


class JobTrigger(BaseTrigger):
    """One event when the job ``start_id`` in ``job_dir`` has ended.

    The event is {outcome, start_id, exit, progress, last_line, message}: outcome "ended" (``exit``
    is its record), "lost" (dead twice in a row without a record), "replaced" (another start lives
    in the directory) or "unreachable" (no answer for ``patience_s``, by when its lease ran out).
    """

    def __init__(
        self,
        conn_id: str,
        workspace: str,
        python: str,
        code: str,
        job_dir: str,
        start_id: str,
        offset: int,
        poll_s: float,
        patience_s: float,
        request: str,
        alerts: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self.workspace = workspace
        self.python = python
        self.code = code
        self.job_dir = job_dir
        self.start_id = start_id
        self.offset = offset
        self.poll_s = poll_s
        self.patience_s = patience_s
        self.request = request
        self.alerts = alerts

    @classmethod
    def of(
        cls,
        host: Host,
        code: str,
        job_dir: JobDir,
        answer: dict[str, Any],
        request: str,
        alerts: dict[str, Any] | None = None,
    ) -> Self:
        """What follows the job that ``drafter start`` gave as ``answer``."""
        return cls(
            conn_id=host.conn_id,
            workspace=host.workspace,
            python=host.python,
            code=code,
            job_dir=str(job_dir.root),
            start_id=answer["start_id"],
            offset=answer["offset"],
            poll_s=host.poll_s,
            patience_s=host.lease_s,
            request=request,
            alerts=alerts,
        )

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = (
            "conn_id",
            "workspace",
            "python",
            "code",
            "job_dir",
            "start_id",
            "offset",
            "poll_s",
            "patience_s",
            "request",
            "alerts",
        )
        return "gpu_host.triggers.JobTrigger", {name: getattr(self, name) for name in names}

    def hook(self) -> GpuHostHook:
        return GpuHostHook(self.conn_id, self.workspace, self.python, self.code)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        started = time.monotonic()
        event = await self._follow()
        await asyncio.sleep(max(0.0, FIRST_EVENT_S - (time.monotonic() - started)))
        yield TriggerEvent(event)

    async def on_kill(self) -> None:
        """A user marked or cleared the task: stop the job, and wait until its tree is dead."""
        hook = self.hook()
        arguments = self.stop_command()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                for pause_s in BACKOFF_S:
                    try:
                        self.log.info("Stopped: %s", json.dumps(await ask(hook, arguments)))
                        return
                    except DrafterError as error:
                        self.log.warning("Cannot stop the job yet: %s", error)
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            pass
        finally:
            await hook.aclose()
        self.log.error("Could not stop %s: its lease will, or `drafter stop`", self.job_dir)

    def stop_command(self) -> list[str]:
        stop = ["stop", "--job", self.job_dir, "--start-id", self.start_id]
        return [*stop, "--request", self.request]

    def is_reached(self, look: dict[str, Any]) -> bool:  # noqa: ARG002
        """Has the job come to where following it ends, other than by its own end?"""
        return False

    async def _follow(self) -> dict[str, Any]:
        hook = self.hook()
        log = _Log(self.log.info, str(JobDir(Path(self.job_dir)).log), self.offset)
        heard = time.monotonic()
        watch = self._watch(heard)
        failures = unseen = 0
        try:
            while True:
                try:
                    look = await self._poll(hook, log.offset)
                except DrafterError as error:
                    silent_s = time.monotonic() - heard
                    if silent_s > self.patience_s:
                        return self._event("unreachable", log, {}, str(error))
                    self.log.warning("%s (for %.0f s)", error, silent_s)
                    await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                    failures += 1
                    continue
                heard, failures = time.monotonic(), 0
                if look["start_id"] != self.start_id:
                    return self._event("replaced", log, look)
                if watch:
                    watch.look(look, heard)
                if await log.take(look):
                    continue
                if look["exit"]:
                    return self._event("ended", log, look)
                if look["alive"] and self.is_reached(look):
                    return self._event("reached", log, look)
                unseen = 0 if look["alive"] else unseen + 1
                if unseen == 2:
                    return self._event("lost", log, look)
                await asyncio.sleep(self.poll_s)
        except asyncio.CancelledError:
            watch = None  # the job is to be stopped now, whatever is being sent
            raise
        finally:
            await hook.aclose()
            if watch:
                await watch.aclose(ALERT_PATIENCE_S)

    def _watch(self, now: float) -> alerts.Watch | None:
        if self.alerts is None:
            return None
        disk = (self.conn_id, self.workspace)
        settings, about = self.alerts["settings"], self.alerts["about"]
        return alerts.Watch(settings, about, disk, self.log.error, since=now)

    async def _poll(self, hook: GpuHostHook, offset: int) -> dict[str, Any]:
        arguments = ["poll", "--job", self.job_dir, "--offset", str(offset)]
        return await ask(hook, arguments)

    def _event(
        self, outcome: str, log: _Log, look: dict[str, Any], message: str = ""
    ) -> dict[str, Any]:
        return {
            "outcome": outcome,
            "start_id": self.start_id,
            "exit": look.get("exit"),
            "progress": look.get("progress"),
            "last_line": log.last_line,
            "message": message,
        }


class StatusTrigger(BaseTrigger):
    """One event, with nothing in it, once no job of ``phase`` on ``dataset`` is alive any more, or
    after ``patience_s`` without an answer: the sensor then looks for itself."""

    def __init__(
        self,
        conn_id: str,
        workspace: str,
        python: str,
        code: str | None,
        phase: str,
        dataset: str,
        poll_s: float,
        patience_s: float,
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self.workspace = workspace
        self.python = python
        self.code = code
        self.phase = phase
        self.dataset = dataset
        self.poll_s = poll_s
        self.patience_s = patience_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = (
            "conn_id",
            "workspace",
            "python",
            "code",
            "phase",
            "dataset",
            "poll_s",
            "patience_s",
        )
        return "gpu_host.triggers.StatusTrigger", {name: getattr(self, name) for name in names}

    def hook(self) -> GpuHostHook:
        return GpuHostHook(self.conn_id, self.workspace, self.python, self.code)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        key = (self.conn_id, self.workspace, self.python, self.code)
        heard = time.monotonic()
        await asyncio.sleep(FIRST_EVENT_S)
        async with _shared_status(key, self.hook) as shared:
            while time.monotonic() - heard <= self.patience_s:
                try:
                    status = await shared.read(self.poll_s)
                except DrafterError as error:
                    self.log.warning("%s", error)
                else:
                    heard = time.monotonic()
                    if not is_alive(status, self.phase, self.dataset):
                        break
                await asyncio.sleep(self.poll_s)
        yield TriggerEvent({})


class _SharedStatus:
    """One connection's newest ``status --json``, asked for again only once it is too old."""

    def __init__(self, hook: GpuHostHook) -> None:
        self.hook = hook
        self.num_readers = 0
        self._lock = asyncio.Lock()
        self._read_at = -math.inf
        self._status: dict[str, Any] = {}

    async def read(self, max_age_s: float) -> dict[str, Any]:
        """Raises DrafterError when the host does not answer."""
        async with self._lock:
            if time.monotonic() - self._read_at >= max_age_s:
                self._status = await ask(self.hook, ["status", "--json"])
                self._read_at = time.monotonic()
            return self._status


_statuses: dict[tuple[str | None, ...], _SharedStatus] = {}
"""Of the workspaces that a sensor is waiting for now."""


@contextlib.asynccontextmanager
async def _shared_status(
    key: tuple[str | None, ...], hook: Callable[[], GpuHostHook]
) -> AsyncIterator[_SharedStatus]:
    """The first reader connects, the last one to leave disconnects."""
    shared = _statuses.get(key) or _statuses.setdefault(key, _SharedStatus(hook()))
    shared.num_readers += 1
    try:
        yield shared
    finally:
        shared.num_readers -= 1
        if not shared.num_readers:
            del _statuses[key]
            await shared.hook.aclose()


async def ask(hook: GpuHostHook, arguments: list[str]) -> dict[str, Any]:
    """The JSON answer of a short command. Raises DrafterError when there is none."""
    code, output, errors = await hook.arun(arguments)
    if code:
        raise Unreachable(f"`drafter {arguments[0]}` ended with {code} ({errors.strip()[-300:]})")
    try:
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        raise Unreachable(f"`drafter {arguments[0]}` answered no JSON: {output[-300:]!r}") from None
    return answer


def is_alive(status: dict[str, Any], phase: str, dataset: str) -> bool:
    return bool(status["jobs"].get(phase, {}).get(dataset, {}).get("alive"))


def stored_tokens(status: dict[str, Any], dataset: str) -> int:
    """Completion tokens stored for a dataset: as generation reports now, else as it left them."""
    job = status["jobs"].get("generate", {}).get(dataset) or {}
    section = status["datasets"].get(dataset, {}).get("generate") or {}
    seen = (job.get("progress") or {}, section.get("counts") or {})
    return max(int(numbers.get("completion_tokens") or 0) for numbers in seen)


class _Log:
    """What of a job's log has been shown, and what to read next."""

    def __init__(self, show: Callable[[str, str], None], path: str, offset: int) -> None:
        self.offset = offset
        self.last_line = ""
        self._show = show
        self._path = path
        self._limit: int | None = offset + LOG_LIMIT_BYTES
        self._shown_to = offset

    async def take(self, look: dict[str, Any]) -> bool:
        """Show the new lines of a poll; True when the next one should follow at once.

        Past the limit only the end is shown, once the job has ended.
        """
        before, self.offset = self.offset, look["offset"]
        if self._limit is not None and before >= self._limit:
            if look["alive"]:
                self.offset = look["log_bytes"]
                return False
            self._limit = None
            self.offset = max(self._shown_to, look["log_bytes"] - LOG_TAIL_BYTES)
            if self.offset > self._shown_to:
                self._show(
                    "... %s", f"{self.offset - self._shown_to} bytes are only there; the end:"
                )
            return bool(self.offset < look["log_bytes"])
        for number, line in enumerate(look["log"].splitlines()):
            self.last_line = line
            self._show("%s", line)
            if number % 100 == 99:
                await asyncio.sleep(0)  # every trigger of this triggerer shares its event loop
        self._shown_to = self.offset
        more = look["alive"] or self.offset < look["log_bytes"]
        if more and self._limit is not None and self.offset >= self._limit:
            self._show("%s", f"The log is long: from here on read {self._path} on the host.")
        return bool(before < self.offset < look["log_bytes"])
