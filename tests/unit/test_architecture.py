"""Imports go one way, and the tree says what the README says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRAFTER = ROOT / "include" / "drafter"
LIGHT = {
    "recipe", "sections", "kinds", "layout", "files", "errors", "identity", "plan", "status",
    "code",
}  # fmt: skip
STANDARD_LIBRARY_ONLY = {
    "errors", "layout", "files", "kinds", "status", "supervisor", "processes", "jobs", "code",
    "terminal",
}  # fmt: skip
PHASES = {
    "prepare", "generate", "validate", "extract", "spool", "train", "evaluate", "export", "served",
}  # fmt: skip


_PARTS = ["preparation", "validation", "generation", "extraction", "training", "evaluation"]
"""Validation before generation: what a sound answer is, the canary asks of it."""

LATER = {package: set(_PARTS[i + 1 :]) for i, package in enumerate(_PARTS)}


def imported(path: Path) -> set[str]:
    """Full names of everything that a file imports, at any level."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def drafter_modules(path: Path) -> set[str]:
    """Which modules of drafter a file imports, by their first name below the package."""
    names = {name.split(".")[1] for name in imported(path) if name.startswith("drafter.")}
    return {
        name for name in names if (DRAFTER / f"{name}.py").exists() or (DRAFTER / name).is_dir()
    }


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", python_files("include/drafter"), ids=lambda p: p.stem)
def test_the_host_package_knows_nothing_of_airflow(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"airflow", "gpu_host", "demo"}


@pytest.mark.parametrize("path", python_files("plugins", "dags"), ids=lambda p: p.stem)
def test_the_airflow_side_imports_only_light_modules(path: Path) -> None:
    assert drafter_modules(path) <= LIGHT


@pytest.mark.parametrize("phase", sorted(PHASES))
def test_phases_meet_on_disk_and_never_import_each_other(phase: str) -> None:
    assert not drafter_modules(DRAFTER / f"{phase}.py") & (PHASES - {phase})


@pytest.mark.parametrize("package", LATER)
def test_a_phase_uses_the_parts_of_earlier_phases_only(package: str) -> None:
    used = set().union(*map(drafter_modules, (DRAFTER / package).rglob("*.py")))
    assert used and not used & (LATER[package] | PHASES)


@pytest.mark.parametrize("module", sorted(STANDARD_LIBRARY_ONLY))
def test_what_runs_beside_a_job_needs_only_the_standard_library(module: str) -> None:
    roots = {name.split(".")[0] for name in imported(DRAFTER / f"{module}.py")}
    assert roots <= set(sys.stdlib_module_names) | {"drafter"}
    assert drafter_modules(DRAFTER / f"{module}.py") <= STANDARD_LIBRARY_ONLY


@pytest.mark.parametrize("module", sorted(LIGHT | STANDARD_LIBRARY_ONLY))
def test_light_modules_load_without_torch(module: str) -> None:
    heavy = "{'torch', 'transformers', 'pandas', 'airflow'}"
    code = f"import sys, drafter.{module}; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "include")


@pytest.mark.parametrize("path", python_files("dags", "plugins", "include"), ids=lambda p: p.stem)
def test_no_file_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
