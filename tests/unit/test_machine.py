"""Memory is what the machine has and what the limits of a container leave of it, the least."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.machine import available_gb

GB = 10**9
MEMINFO = f"MemTotal: {99 * GB // 1024} kB\nMemAvailable: {64 * GB // 1024} kB\n"
V1_UNLIMITED = 9223372036854771712
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


def v2(limit: int | str, current: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{current}\n",
        "memory.stat": f"anon 1\ninactive_file {cache}\nactive_file 7\n",
    }


def v1(limit: int, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.stat": f"inactive_file 3\ntotal_inactive_file {cache}\n",
    }


Groups = dict[str, dict[str, str]]
CASES: dict[str, tuple[str, Groups, float]] = {
    "no groups": ("", {}, 64),
    "v2, no limit": ("0::/a\n", {f"{V2}/a": v2("max", 3 * GB)}, 64),
    "v2, a limit": ("0::/a\n", {f"{V2}/a": v2(16 * GB, 3 * GB)}, 13),
    "v2, a limit above the machine": ("0::/a\n", {f"{V2}/a": v2(900 * GB, 3 * GB)}, 64),
    "v2, the limit of an outer group": (
        "0::/a/b\n", {f"{V2}/a": v2(9 * GB, 5 * GB), f"{V2}/a/b": v2(16 * GB, 3 * GB)}, 4,
    ),
    "v2, the root is the container's own": (
        "0::/docker/1f2e\n", {V2: v2(16 * GB, 3 * GB)}, 13,
    ),
    "v2, files that the kernel drops": ("0::/\n", {V2: v2(16 * GB, 15 * GB, 10 * GB)}, 11),
    "v2, above its limit": ("0::/\n", {V2: v2(16 * GB, 17 * GB)}, 0),
    "v1, no limit": ("4:memory:/a\n", {f"{V1}/a": v1(V1_UNLIMITED, 3 * GB)}, 64),
    "v1, a limit": (
        "5:cpu,cpuacct:/b\n4:memory,hugetlb:/a\n0::/a\n",
        {f"{V1}/a": v1(16 * GB, 15 * GB, 2 * GB)}, 3,
    ),
    "v1, the root is the container's own": ("4:memory:/docker/1\n", {V1: v1(16 * GB, GB)}, 15),
}  # fmt: skip


@pytest.mark.parametrize(("own", "groups", "gb"), CASES.values(), ids=CASES)
def test_the_least_of_machine_and_limits_is_available(
    tmp_path: Path, own: str, groups: Groups, gb: float
) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": own}
    for group, content in groups.items():
        files |= {f"{group}/{name}": text for name, text in content.items()}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_gb(tmp_path) == pytest.approx(gb, abs=1e-5)


def test_this_machine_has_some() -> None:
    assert available_gb() > 0
