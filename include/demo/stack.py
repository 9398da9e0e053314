"""The demo's processes: a private sshd, an engine and the four parts of Airflow.

Each runs in a session of its own, with its output in ``<home>/logs``; ``<home>/stack.json`` names
them, so that ``down`` in another shell finds them. Every process, and whatever it starts, carries
the variable DEMO_STACK: that is how stragglers are found at the end, and nothing else is touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import httpx

from demo import sshd
from drafter.errors import Busy, RecipeError
from drafter.files import read_json, write_json
from drafter.jobs import stop_all

ROOT = Path(__file__).resolve().parents[2]
SGLANG = ROOT / ".demo" / "engines" / "sglang"
"""The environment that `make sglang` makes."""
EngineKind = Literal["embedded", "sglang"]
ENGINE_KINDS: tuple[EngineKind, ...] = get_args(EngineKind)
PORTS = ("sshd", "engine", "worker_logs", "triggerer_logs")
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Stack:
    """Where one demo lives and which ports it uses."""

    home: Path
    recipe: Path
    host_python: Path
    web_port: int
    ports: dict[str, int]
    """Loopback ports of everything else: PORTS."""
    dags: Path = ROOT / "dags"
    engine: EngineKind = "embedded"

    @property
    def record(self) -> Path:
        return self.home / "stack.json"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.web_port}"

    @property
    def variables(self) -> dict[str, str]:
        """What the recipe's ``${...}`` stand for."""
        return {
            "DEMO_ROOT": str(ROOT),
            "DEMO_HOME": str(self.home),
            "DEMO_PYTHON": str(self.host_python),
            "DEMO_ENGINE_PORT": str(self.ports["engine"]),
        }


def environment(stack: Stack) -> dict[str, str]:
    """The environment of every process of the stack: Airflow is configured by it alone."""
    ports = stack.ports
    home = stack.home / "airflow"
    home.mkdir(parents=True, exist_ok=True)
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "DRAFTER"))},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "include"),
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "DEMO_STACK": str(stack.home),
        **stack.variables,
        "DRAFTER_RECIPE": str(stack.recipe),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW_CONN_GPU_HOST": sshd.connection(stack.home / "ssh", ports["sshd"]),
        "AIRFLOW__CORE__DAGS_FOLDER": str(stack.dags),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "8",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{stack.url}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__API__BASE_URL": stack.url,
        "AIRFLOW__API_AUTH__JWT_SECRET": _secret(home / "jwt_secret"),
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(ports["worker_logs"]),
        "AIRFLOW__TRIGGERER__TRIGGERER_LOG_SERVER_PORT": str(ports["triggerer_logs"]),
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "15",
    }


def begin(stack: Stack, workspace: Path) -> None:
    """Note the recipe's ``workspace``, so that its jobs can be stopped without the recipe."""
    write_json(stack.record, {"workspace": str(workspace), "processes": {}})


def start_host(stack: Stack) -> None:
    """Start the "GPU container": sshd and the engine. On an error, :func:`stop` ends what began."""
    sshd.find_sshd()
    require_free(stack.web_port)
    sshd.make_keys(stack.home / "ssh")
    _launch(
        stack,
        {
            "sshd": sshd.command(stack.home / "ssh", stack.ports["sshd"]),
            "engine": engine_command(stack),
        },
    )
    _wait_healthy(stack, f"http://127.0.0.1:{stack.ports['engine']}/health", "engine")


def start_airflow(stack: Stack) -> None:
    """Start the four parts of Airflow and wait until each reports healthy."""
    airflow = [sys.executable, "-m", "airflow"]
    log = stack.home / "logs" / "db.log"
    with open(log, "w") as output:
        migrate = [*airflow, "db", "migrate"]
        done = subprocess.run(migrate, env=environment(stack), stdout=output, stderr=output)
    if done.returncode:
        raise RecipeError(f"`airflow db migrate` failed: {last_line(log)}")
    serve = ["api-server", "--host", "127.0.0.1", "--port", str(stack.web_port), "--workers", "1"]
    _launch(
        stack,
        {
            "api-server": [*airflow, *serve],
            "scheduler": [*airflow, "scheduler"],
            "dag-processor": [*airflow, "dag-processor"],
            "triggerer": [*airflow, "triggerer"],
        },
    )
    _wait_healthy(stack, f"{stack.url}/api/v2/monitor/health", "api-server")
    _wait_parts(stack)


def engine_command(stack: Stack) -> list[str]:
    """What serves the target on the "GPU container": the embedded engine, in the host's own
    environment, or SGLang on the CPU. Both answer the same requests."""
    model = str(ROOT / "include" / "demo" / "target")
    port = str(stack.ports["engine"])
    if stack.engine == "embedded":
        return [str(stack.host_python), "-m", "drafter", "serve", "--model", model, "--port", port]
    script = str(ROOT / "tests" / "engines" / "sglang_cpu.sh")
    # Idle, its scheduler would keep a core busy that Airflow needs.
    flags = ["--dtype", "float32", "--sleep-on-idle"]
    return [script, "serve", str(SGLANG), model, port, *flags]


def stop(stack: Stack) -> None:
    """End Airflow and sshd, then the jobs on the host, then the engine. Safe to repeat.

    In this order, because Airflow would start another job for each that ends. What an SSH session
    was starting meanwhile is caught by the second look.
    """
    running = alive(stack)
    _end([pid for pid, name in running if name != "engine"])
    _stop_jobs(stack)
    _end([pid for pid, name in running if name == "engine"])
    _end(stragglers(stack))
    _stop_jobs(stack)
    stack.record.unlink(missing_ok=True)


def alive(stack: Stack) -> list[tuple[int, str]]:
    """(pid, name) of the recorded processes that still run, newest first."""
    if not stack.record.exists():
        return []
    recorded = read_json(stack.record)["processes"]
    running = [(pid, name) for name, (pid, began) in recorded.items() if start_time(pid) == began]
    return running[::-1]


def require_alive(stack: Stack) -> None:
    """Raises Busy, with its last word, when a process of the stack has ended."""
    for dead in set(read_json(stack.record)["processes"]) - {name for _, name in alive(stack)}:
        raise Busy(f"{dead} has ended: {last_line(stack.home / 'logs' / f'{dead}.log')}")


def _stop_jobs(stack: Stack) -> None:
    workspace = Path(read_json(stack.record)["workspace"]) if stack.record.exists() else None
    if workspace and workspace.exists():
        stop_all(workspace)


def stragglers(stack: Stack) -> list[int]:
    """Processes that carry this stack's mark or are of a session it began, this one excepted.

    Airflow's workers write their title over their environment, and outlive a scheduler that was
    killed; a session's number is not given away while one of its processes lives.
    """
    mark = f"DEMO_STACK={stack.home}".encode()
    recorded = read_json(stack.record)["processes"] if stack.record.exists() else {}
    sessions = {pid for pid, began in recorded.values() if start_time(pid) in (0, began)}
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit() and int(proc.name) != os.getpid():
            with contextlib.suppress(OSError):
                marked = mark in (proc / "environ").read_bytes().split(b"\0")
                if marked or int(_stat(int(proc.name))[3]) in sessions:
                    found.append(int(proc.name))
    return found


def start_time(pid: int) -> int:
    """Clock ticks from boot to the start of ``pid``; 0 when there is no such process."""
    try:
        state, *fields = _stat(pid)
    except OSError:
        return 0
    return 0 if state == "Z" else int(fields[18])


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the third on: state, parent, group, session, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def require_free(port: int) -> None:
    """Raises RecipeError when something listens on ``port`` already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise RecipeError(
                f"port {port} is taken: stop what listens there, or choose another with"
                " `make demo PORT=...`"
            ) from None


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]


def _secret(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
    return path.read_text()


def _launch(stack: Stack, commands: dict[str, list[str]]) -> None:
    """Start each command and note it in the record before the next one starts."""
    record = read_json(stack.record)
    env = environment(stack)
    for name, command in commands.items():
        log = stack.home / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        pid = _spawn(command, env, log)
        record["processes"][name] = [pid, start_time(pid)]
        write_json(stack.record, record)


def _spawn(command: list[str], env: dict[str, str], log: Path) -> int:
    with open(log, "w") as output:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ).pid


def _wait_healthy(stack: Stack, url: str, name: str) -> None:
    for _ in _until_started(stack, name):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return


def _wait_parts(stack: Stack) -> None:
    """Until scheduler, triggerer and dag-processor have each reported a heartbeat."""
    for _ in _until_started(stack, "airflow"):
        with contextlib.suppress(httpx.HTTPError):
            health = httpx.get(f"{stack.url}/api/v2/monitor/health", timeout=5).json()
            parts = ("scheduler", "triggerer", "dag_processor")
            if all(health[part]["status"] == "healthy" for part in parts):
                return


def _until_started(stack: Stack, name: str) -> Iterator[None]:
    """Half-second ticks until the deadline. Raises Busy when a process died or time is up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        require_alive(stack)
        yield
        time.sleep(0.5)
    raise Busy(f"{name} did not answer within {START_TIMEOUT_S:.0f} s: see {stack.home / 'logs'}")


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1]} ({log})" if lines else f"see {log}"


def _end(pids: list[int]) -> None:
    """TERM, wait, KILL: each process and, where it leads one, its group."""
    for sig, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                leads = os.getpgid(pid) == pid
                (os.killpg if leads else os.kill)(pid, sig)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(_reaped_alive(pid) for pid in pids):
            time.sleep(0.1)


def _reaped_alive(pid: int) -> bool:
    """Whether ``pid`` still runs, collecting it first when it is our own finished child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return start_time(pid) != 0
