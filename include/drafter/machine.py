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


def available_gb() -> float:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


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
