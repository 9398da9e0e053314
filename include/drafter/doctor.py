"""Is this host ready for what the recipe asks? One table, and a remedy for what is not."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drafter import machine
from drafter.errors import Busy, DataError, RecipeError
from drafter.identity import tokenizer_sha256
from drafter.recipe import Recipe
from drafter.sections import Dataset
from drafter.source_files import local_files

NEEDED = (
    "accelerate",
    "httpx",
    "orjson",
    "pandas",
    "pyarrow",
    "pydantic",
    "safetensors",
    "tensorboard",
    "torch",
    "transformers",
)

SHOWN = ("torch", "transformers", "safetensors")

ENGINE_PHASES = ("generate", "train")
"""The training that ``train`` begins ends with an evaluation, for which the engine answers."""


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    error: RecipeError | DataError | Busy | None = None


MIN_FREE_GB = 1.0
"""Below it the next shard or checkpoint may not fit; extraction forecasts its own need."""

MAX_CLOCK_OFF_S = 300.0
"""Jobs do not care (they count their own seconds), but logs and retries could not be read."""

SPARE_FILES = 64
"""Besides one per request in flight: libraries, logs, the rows themselves."""


def examine(recipe: Recipe, phase: str, now: float | None = None) -> Iterator[Finding]:
    """Look at everything that ``phase`` needs. Yields one finding per thing, in table order.

    ``now`` is the asker's time (Unix seconds), to compare the host's clock with.
    """
    python = _python()
    yield python
    yield _kernel()
    yield Finding("memory", f"{machine.available_gb():.0f} GB available")
    yield Finding("GPUs", "; ".join(machine.gpus()) or "none")
    yield _clock(time.time(), now)
    if phase == "generate":
        yield _open_files(recipe.engine.in_flight, machine.open_files())
    yield _workspace(Path(recipe.host.workspace))
    yield _target(recipe)
    if phase == "generate":
        yield from map(_source, recipe.datasets)
    # Without its packages there is no client to look at the engine with.
    if phase in ENGINE_PHASES and python.error is None:
        yield _engine(recipe)


def table(findings: list[Finding]) -> str:
    width = max(len(finding.what) for finding in findings)
    return "\n".join(
        f"{'FAIL' if finding.error else 'ok':4}  {finding.what:{width}}  {finding.found}"
        for finding in findings
    )


def _python() -> Finding:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if not missing:
        versions = (f"{name} {importlib.metadata.version(name)}" for name in SHOWN)
        return Finding("python", f"{found}, {', '.join(versions)}")
    error = RecipeError(
        f"{sys.executable} lacks {', '.join(missing)}: install include/requirements.txt there or"
        " correct host.python"
    )
    return Finding("python", found, error)


def _kernel() -> Finding:
    if machine.has_pidfd():
        return Finding("kernel", machine.kernel())
    error = RecipeError(f"{machine.kernel()} has no pidfd: jobs need Linux 5.3 or newer")
    return Finding("kernel", machine.kernel(), error)


def _clock(here: float, now: float | None) -> Finding:
    if now is None or abs(here - now) <= MAX_CLOCK_OFF_S:
        return Finding("clock", machine.utc())
    error = RecipeError(
        f"the host's clock is {here - now:+,.0f} s off Airflow's: set one of them right (NTP)"
    )
    return Finding("clock", machine.utc(), error)


def _open_files(in_flight: int, limit: int) -> Finding:
    needed = in_flight + SPARE_FILES
    if limit >= needed:
        return Finding("open files", f"{limit:,}")
    error = RecipeError(
        f"the SSH user may open {limit} files, {in_flight} requests in flight need {needed}: raise"
        " nofile in limits.conf on the host, or lower engine.in_flight"
    )
    return Finding("open files", f"{limit:,}", error)


def _workspace(root: Path) -> Finding:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            free_gb = shutil.disk_usage(root).free / 1e9
    except OSError as error:
        refused = RecipeError(
            f"workspace {root} is not writable ({error.strerror}): correct host.workspace, or the"
            " rights of the SSH user"
        )
        return Finding("workspace", str(root), refused)
    if free_gb < MIN_FREE_GB:
        full = RecipeError(f"workspace {root} has {free_gb:.2f} GB free: needs {MIN_FREE_GB:.0f}")
        return Finding("workspace", f"{root} ({free_gb:.2f} GB free)", full)
    return Finding("workspace", f"{root} ({free_gb:.0f} GB free)")


def _target(recipe: Recipe) -> Finding:
    try:
        tokenizer = tokenizer_sha256(Path(recipe.target.path))
    except RecipeError as error:
        return Finding("target", recipe.target.path, error)
    return Finding("target", f"{recipe.target.path} (tokenizer {tokenizer[:12]})")


def _source(source: Dataset) -> Finding:
    """What lies on the hub, prepare asks it, and only when it has to."""
    if source.hub is not None:
        return Finding(source.name, f"{source.hub} of the hub at {source.revision[:12]}")
    try:
        files = local_files(source)
    except RecipeError:
        error = DataError(
            f"{source.name}: no file at {source.path}: correct its path in the recipe, a path on"
            " the GPU host"
        )
        return Finding(source.name, str(source.path), error)
    num_bytes = sum(file.stat().st_size for file in files)
    num_files = f"{len(files)} files, " if len(files) > 1 else ""
    return Finding(source.name, f"{source.path} ({num_files}{num_bytes:,} bytes)")


def _engine(recipe: Recipe) -> Finding:
    from drafter.engines.connection import check_engine

    urls = ", ".join(recipe.engine.urls)
    try:
        engine = asyncio.run(check_engine(recipe.engine, recipe.target.path))
    except Busy as error:
        if recipe.engine.start is not None:
            return Finding("engine", f"{urls}, started when a job needs it")
        return Finding("engine", urls, error)
    except RecipeError as error:
        return Finding("engine", urls, error)
    found = f"{urls} serving {engine.model}, context {engine.context:,}"
    return Finding("engine", "; ".join([found, *engine.down.values()]))
