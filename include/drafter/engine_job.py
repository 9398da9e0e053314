"""The engine as a job, when the recipe says how to start it (``[engine] start``).

``jobs/engine/all`` is a job like any other: one at most, followed by whoever asks for the same,
with supervisor and guardian, ended with its whole tree. What runs in it is :func:`run`, which
starts the command, waits until it serves the recipe's model and then watches it; its progress.json
holds ``ready`` and, once it failed, ``reason``. A job that sends requests is a user: :func:`used`
asks for the engine before it begins (so that a retry brings a dead one back) and renews the
engine's lease while it runs. It ends by

* :func:`stop`, unless somebody still uses it;
* its lease: nobody used it for ``[engine] lease_s``;
* itself, LINGER_S after a person stopped the last job that used it: a stop that Airflow follows
  with no teardown (a paused DAG) must not keep the GPUs for the length of a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter import jobs
from drafter.errors import NEVER_RETRY, Busy, DataError, DrafterError, RecipeError, Stopped
from drafter.files import digest, read_json
from drafter.job import Job
from drafter.layout import ALL, JobDir, Workspace
from drafter.recipe import Recipe

PHASE = "engine"
USERS = ("generate", "evaluate")
LINGER_S = 60.0
"""Long enough for the next try of a cleared task: loading the weights again takes minutes."""

LOOK_S = 1.0
RENEW_S = 30.0
_NOT_RUNNABLE = (126, 127)
_TAIL_BYTES = 4096
_TAIL_LINES = 3
_TAIL_CHARACTERS = 600


def start(recipe: Recipe, code: str, run_id: str, request: str | None = None) -> dict[str, Any]:
    """Start the recipe's engine, or follow the live one: what ``jobs.start`` returns and raises.

    {outcome: "serving", model, context} when an engine that is no job of ours already serves the
    model: it is used, and left alone. Raises RecipeError when that one serves another.
    """
    from drafter.engines.connection import check_engine

    workspace = Workspace(Path(recipe.host.workspace))
    engine = workspace.job(PHASE, ALL)
    if jobs.live(engine) is None:
        if engine.job.exists():
            jobs.poll(engine.root, 0, renew=False)  # ends what a killed engine left behind
        with contextlib.suppress(Busy):
            info = asyncio.run(check_engine(recipe.engine, recipe.target.path))
            return {"outcome": "serving", "model": info.model, "context": info.context}
    return jobs.start(workspace.root, _spec(recipe, code, run_id, request))


def stop(workspace: Workspace, request: str | None = None) -> dict[str, Any]:
    """End the engine unless jobs use it: what ``jobs.stop`` returns, or {outcome: "in use",
    used_by: [phase dataset, ...]}."""
    if users := used_by(workspace):
        return {"outcome": "in use", "used_by": users}
    return jobs.stop(workspace.job(PHASE, ALL).root, request=request)


def used_by(workspace: Workspace) -> list[str]:
    """Live jobs that send requests, as "phase dataset"."""
    return [
        f"{user.root.parent.name} {user.root.name}"
        for user in _users(workspace)
        if jobs.live(user) is not None
    ]


@contextlib.contextmanager
def used(job: Job) -> Iterator[None]:
    """Around a phase: the engine is ready before it begins and is kept while it runs.

    Nothing for a phase that sends no requests or a recipe that starts no engine. Raises Busy or
    RecipeError when the engine does not become ready, with its reason.
    """
    if job.phase not in USERS or job.recipe.engine.start is None:
        yield
        return
    engine = job.workspace.job(PHASE, ALL)
    _await_ready(job, engine)
    done = threading.Event()
    every_s = min(RENEW_S, job.recipe.engine.lease_s / 5)
    threading.Thread(target=_keep, args=(engine.root, every_s, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def run(job: Job) -> None:
    """Start the command and watch it until it ends or nobody wants it; what is left of it when
    this returns, the supervisor ends.

    Raises RecipeError when the command cannot be run or serves another model, Busy when it ends by
    itself or is not ready in time; ``reason`` in progress.json is the same sentence.
    """
    try:
        asyncio.run(_serve(job))
    except DrafterError as error:
        job.report(ready=False, reason=str(error))
        raise


def _failed(record: dict[str, Any], reason: str) -> DrafterError:
    """What the end of an engine that somebody waited for means to them."""
    kind = RecipeError if record["code"] == RecipeError.exit_code else Busy
    return kind(reason or f"the engine ended: {record['reason']}")


def _spec(recipe: Recipe, code: str, run_id: str, request: str | None) -> dict[str, Any]:
    """job.json without its start id; see drafter.job."""
    host, engine = recipe.host, recipe.engine
    workspace = Workspace(Path(host.workspace))
    run_command = ["engine", "run", "--workspace", host.workspace]
    wanted = {"start": engine.start, "kind": engine.kind, "urls": engine.urls}
    return {
        "phase": PHASE,
        "dataset": ALL,
        "argv": [host.python, "-m", "drafter", *run_command],
        "what": digest({**wanted, "target": recipe.target.path}),
        "code": code,
        "run_id": run_id,
        "mode": "resume",
        "token_budget": None,
        "in_flight": engine.in_flight,
        "recipe": recipe.as_json(),
        # The jobs that use it have deadlines of their own, and the last may begin at any time.
        "timeout_s": None,
        "lease_s": engine.lease_s,
        "grace_s": host.grace_s,
        "lock": str(workspace.lock(PHASE, ALL)),
        "request": request,
    }


def _await_ready(job: Job, engine: JobDir) -> None:
    """Ask for the engine and wait; the engine's own job knows how long that may take."""
    while True:
        answer = start(job.recipe, job.code, job.run_id)
        if answer["outcome"] == "serving":
            return
        print(f"{job.dataset}: engine {answer['outcome']}, waiting until it is ready", flush=True)
        while True:
            look = jobs.poll(engine.root, _size(engine.log), renew=True)
            if look["start_id"] != answer["start_id"]:
                break
            progress, record = look["progress"] or {}, look["exit"]
            if look["alive"] and progress.get("ready"):
                return
            if record and _is_for_others(record):
                break
            if record:
                raise _failed(record, progress.get("reason", ""))
            if not look["alive"]:
                raise Busy("the engine ended without a record: did the host run out of memory?")
            time.sleep(LOOK_S)


def _is_for_others(record: dict[str, Any]) -> bool:
    """An end that somebody else asked for, or that came for want of users: start it again."""
    asked = record["code"] == Stopped.exit_code and record["request"] is not None
    return record["code"] == 0 or asked


def _keep(engine: Path, every_s: float, done: threading.Event) -> None:
    while not done.wait(every_s):
        with contextlib.suppress(OSError):
            jobs.renew(engine)


async def _serve(job: Job) -> None:
    engine, begun, started = job.recipe.engine, time.monotonic(), time.time()
    job.report(ready=False, line="loading")
    argv = ["sh", "-c", engine.start] if isinstance(engine.start, str) else list(engine.start or ())
    try:
        command = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
    except OSError as error:
        raise RecipeError(
            f"engine.start: cannot run {argv[0]} ({error.strerror}): correct it in the recipe, a"
            " command on the GPU host"
        ) from None
    ended = asyncio.create_task(command.wait())
    waiting: list[str] = []
    ready = asyncio.create_task(_ready(job, waiting))
    await asyncio.wait(
        {ended, ready}, timeout=engine.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED
    )
    if ended.done():
        raise _died(job, ended.result(), "while it was loading")
    if not ready.done():
        raise Busy(
            f"the engine is not ready after {engine.ready_timeout_s:g} s"
            f" ({'; '.join(waiting) or 'no answer yet'}): mend engine.start or raise"
            f" engine.ready_timeout_s; its log ends: {_tail(job)}"
        )
    info = ready.result()
    numbers = {"model": info.model, "context": info.context, "urls": engine.urls}
    line = f"serving {info.model}, ready after {time.monotonic() - begun:.0f} s"
    job.report(ready=True, line=line, **numbers)
    print(f"engine: {line}", flush=True)
    unwanted_since: float | None = None
    while not ended.done():
        await asyncio.wait({ended}, timeout=LOOK_S)
        if not _is_unwanted(job.workspace, started):
            unwanted_since = None
        elif unwanted_since is None:
            unwanted_since = time.monotonic()
        elif time.monotonic() - unwanted_since > LINGER_S:
            line = "a person stopped the last job that used the engine: ended"
            job.report(ready=False, line=line)
            print(f"engine: {line}", flush=True)
            return
    raise _died(job, ended.result(), "while it was serving")


async def _ready(job: Job, waiting: list[str]) -> Any:
    """The engine's EngineInfo, once it serves the recipe's model; ``waiting`` holds why not yet."""
    from drafter.engines.connection import check_engine

    while True:
        try:
            return await check_engine(job.recipe.engine, job.recipe.target.path)
        except Busy as error:
            waiting[:] = [str(error)]
        await asyncio.sleep(LOOK_S)


def _died(job: Job, code: int, when: str) -> DrafterError:
    how = f"exit {code}" if code >= 0 else f"signal {-code}"
    found = f"the engine ended {when} ({how})"
    if code in _NOT_RUNNABLE:
        return RecipeError(f"{found}: correct engine.start in the recipe; it said: {_tail(job)}")
    if code == 0:
        return RecipeError(
            f"{found}: engine.start must stay in the foreground (no &, no nohup, no detached"
            f" container), or nobody could end it; it said: {_tail(job)}"
        )
    return Busy(f"{found}: see {job.dir.log}; it ends: {_tail(job)}")


def _tail(job: Job) -> str:
    """The last lines of this start's log, as one."""
    begin = int(read_json(job.dir.job).get("log_offset", 0))
    with open(job.dir.log, "rb") as file:
        file.seek(max(begin, _size(job.dir.log) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:] or "nothing"


def _is_unwanted(workspace: Workspace, since: float) -> bool:
    """No user is alive, a person stopped one that ended after ``since`` (Unix time), and none will
    be tried again by itself."""
    codes = set()
    for user in _users(workspace):
        if jobs.live(user) is not None:
            return False
        with contextlib.suppress(DataError):
            record = read_json(user.exit)
            if record["ended"] >= since:
                codes.add(record["code"])
    return Stopped.exit_code in codes and codes <= {0, *NEVER_RETRY}


def _users(workspace: Workspace) -> list[JobDir]:
    return [JobDir(path) for phase in USERS for path in jobs.job_dirs(workspace.root, phase=phase)]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
