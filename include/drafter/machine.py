"""What the machine under the jobs is and has: kernel, memory, GPUs, clock, open files.

Pure reading; the doctor judges. Standard library only.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

SMI_TIMEOUT_S = 30
"""A driver that hangs is a finding, not a reason to hang."""


def kernel() -> str:
    return f"{os.uname().sysname} {os.uname().release}"


def has_pidfd() -> bool:
    """Linux 5.3: without it a recycled pid cannot be told from the process that was meant."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def available_gb(root: Path = Path("/")) -> float:
    """Memory that can be had without swapping: of the machine, and of what its limits leave to this
    process (a container's, or any group's that it is in), the least. ``root`` holds proc and sys.

    Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.
    """
    left = [
        int(line.split()[1]) * 1024
        for line in (root / "proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    groups = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            v2 = ("memory.max", "memory.current", "inactive_file")
            left += _left_bytes(groups, path, *v2)
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _left_bytes(groups / "memory", path, *v1)
    return max(min(left, default=0), 0) / 1e9


def _left_bytes(groups: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    """What each limited group leaves, from ``path`` up to the root. A container may see its own
    group as the root, whatever ``path`` says. ``cache``: the line of memory.stat with what the
    kernel drops when memory is wanted."""
    inner = groups / path.strip("/")
    found = []
    for group in dict.fromkeys([inner, *inner.parents]):
        if group.is_relative_to(groups):
            limits, used = _lines(group / limit), _lines(group / usage)
            if limits and used and limits[0].isdecimal() and used[0].isdecimal():
                stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
                found.append(int(limits[0]) - int(used[0]) + int(stat.get(cache, 0)))
    return found


def _lines(path: Path) -> list[str]:
    """Of a file of the kernel; none where it has none."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def gpus() -> list[str]:
    """One line per GPU: name, memory used and total; empty where there is no driver."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = ["--query-gpu=name,memory.used,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [smi, *query], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi does not answer within {SMI_TIMEOUT_S} s"]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def open_files() -> int:
    """Files a process may have open; each request in flight is one."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def utc() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
