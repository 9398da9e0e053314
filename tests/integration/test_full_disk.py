"""A host whose disk is full: starting says so in a sentence, stopping works, nothing is lost."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.sshd import Sshd, private_sshd
from unit.host import Host, until
from unit.test_deploy import recipe

from drafter import jobs
from drafter.code import code_hash
from drafter.errors import DrafterError
from drafter.layout import Workspace
from gpu_host.deploy import PACKAGE, deploy
from gpu_host.hooks import Answer, GpuHostHook

START = """
import json, sys
from drafter import jobs
from drafter.errors import DrafterError
try:
    print(json.dumps(jobs.start(*json.load(sys.stdin))))
except DrafterError as error:
    sys.exit(f"drafter: {error}")
"""
"""`drafter start` without its look at the plan."""

COUNTS = ["bash", "-c", "for i in $(seq 600); do echo $i; sleep 0.1; done"]


class SmallDisk:
    """A file system of 2 MB. Needs root."""

    error = "No space left on device"
    remedy = "free space on the host"
    limit = ""

    def __init__(self, root: Path) -> None:
        self.root = root
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(root)],
            capture_output=True,
            check=True,
        )

    def fill(self) -> None:
        with open(self.root / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                return

    def free(self) -> None:
        (self.root / "filler").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.root)], check=True)


class NoRoom:
    """What anybody can do: commands on the host that may not write a byte to a file."""

    error = "File too large"
    remedy = "see to it on the host"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.limit = ""

    def fill(self) -> None:
        self.limit = "ulimit -f 0; "

    def free(self) -> None:
        self.limit = ""

    def close(self) -> None: ...


Disk = SmallDisk | NoRoom


class Hook(GpuHostHook):
    disk: Disk

    def run_line(self, line: str, stdin: str | bytes = b"", timeout_s: float = 60) -> Answer:
        return super().run_line(self.disk.limit + line, stdin, timeout_s)


@pytest.fixture(params=[SmallDisk, NoRoom])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """Where mounting is not allowed, the second kind serves twice."""
    root = tmp_path / "disk"
    root.mkdir()
    try:
        disk: Disk = request.param(root)
    except (OSError, subprocess.CalledProcessError):
        disk = NoRoom(root)
    try:
        yield disk
        jobs.stop_all(workspace_root(disk))
    finally:
        disk.close()


def workspace_root(disk: Disk) -> Path:
    return disk.root / 'it\'s a $(touch x) "dir"'


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with private_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def hook(disk: Disk, sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("AIRFLOW_CONN_GPU_HOST", sshd.connection())
    with Hook.of(recipe(workspace_root(disk)).host, code_hash(PACKAGE)) as hook:
        hook.disk = disk
        yield hook


def start(hook: Hook, spec: dict[str, Any]) -> Answer:
    python = shlex.split(hook.line(["start"]))[: -len(["-m", "drafter", "start"])]
    return hook.run_line(
        shlex.join([*python, "-c", START]), json.dumps([str(hook.workspace), spec])
    )


def answer(done: Answer) -> dict[str, Any]:
    code, output, errors = done
    assert code == 0, errors
    parsed: dict[str, Any] = json.loads(output)
    return parsed


def test_a_job_on_a_full_disk_still_stops_and_loses_nothing(disk: Disk, hook: Hook) -> None:
    host = Host(workspace_root(disk))
    job = ["--job", str(host.job.root)]
    begun = answer(start(hook, host.spec(COUNTS)))
    until(lambda: "5" in host.starts())
    disk.fill()
    logged = host.job.log.read_text()

    other = host.spec(COUNTS, dataset="B2", lock=str(host.workspace.lock("generate", "B2")))
    code, output, errors = start(hook, other)
    assert (code, output) == (1, "")
    assert re.fullmatch(rf"drafter: cannot write /.* \({disk.error}\): {disk.remedy}\n", errors)

    look = answer(hook.run(["poll", *job]))
    assert (look["alive"], look["start_id"]) == (True, begun["start_id"])
    assert look["log"].startswith(logged)

    (stopped,) = answer(hook.run(["stop", *job])).values()
    assert stopped["outcome"] == "stopped"
    assert host.processes() == []
    assert host.job.log.read_text().startswith(logged)
    if isinstance(disk, SmallDisk):
        assert stopped["exit"]["code"] == 143

    disk.free()
    assert answer(start(hook, host.spec(COUNTS)))["outcome"] == "started"


def test_a_job_that_ends_on_a_full_disk_leaves_its_exit_code(disk: Disk, hook: Hook) -> None:
    host = Host(workspace_root(disk))
    answer(start(hook, host.spec(["bash", "-c", "sleep 1.5; exit 65"])))
    disk.fill()
    until(lambda: not host.poll()["alive"])
    assert answer(hook.run(["poll", "--job", str(host.job.root)]))["exit"]["code"] == 65


def test_a_deployment_to_a_full_disk_is_one_sentence(disk: Disk, hook: Hook) -> None:
    deploy(hook, recipe(workspace_root(disk)))
    launcher = Workspace(workspace_root(disk)).launcher
    before = launcher.read_text()
    disk.fill()
    with pytest.raises(DrafterError, match=f'"dir": {disk.error}; make the') as said:
        deploy(hook, recipe(workspace_root(disk)))
    assert "\n" not in str(said.value)
    assert launcher.read_text() == before
    disk.free()
    deploy(hook, recipe(workspace_root(disk)))
