"""Is this host ready for what the recipe asks? One table, and a remedy for what is not."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drafter.errors import Busy, DataError, RecipeError
from drafter.plan import tokenizer_sha256
from drafter.recipe import Recipe

NEEDED = ("httpx", "orjson", "pandas", "pydantic", "safetensors", "torch", "transformers")

ENGINE_PHASES = ("generate", "train")
"""The training that ``train`` begins ends with an evaluation, for which the engine answers."""


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    error: RecipeError | DataError | Busy | None = None


def examine(recipe: Recipe, phase: str) -> Iterator[Finding]:
    """Look at everything that ``phase`` needs. Yields one finding per thing, in table order."""
    python = _python()
    yield python
    yield _workspace(Path(recipe.host.workspace))
    yield _target(recipe)
    if phase == "generate":
        yield from (_source(dataset.name, Path(dataset.path)) for dataset in recipe.datasets)
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
        return Finding("python", found)
    error = RecipeError(
        f"{sys.executable} lacks {', '.join(missing)}: install include/requirements.txt there or"
        " correct host.python"
    )
    return Finding("python", found, error)


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
    return Finding("workspace", f"{root} ({free_gb:.0f} GB free)")


def _target(recipe: Recipe) -> Finding:
    try:
        tokenizer = tokenizer_sha256(Path(recipe.target.path))
    except RecipeError as error:
        return Finding("target", recipe.target.path, error)
    return Finding("target", f"{recipe.target.path} (tokenizer {tokenizer[:12]})")


def _source(name: str, path: Path) -> Finding:
    if path.is_file():
        return Finding(name, f"{path} ({path.stat().st_size:,} bytes)")
    error = DataError(
        f"{name}: no file at {path}: correct its path in the recipe, a path on the GPU host"
    )
    return Finding(name, str(path), error)


def _engine(recipe: Recipe) -> Finding:
    from drafter.engines.sglang import check_engine

    urls = ", ".join(recipe.engine.urls)
    try:
        engine = check_engine(recipe.engine, recipe.target.path)
    except (RecipeError, Busy) as error:
        return Finding("engine", urls, error)
    served = engine.model_info["model_path"]
    return Finding("engine", f"{urls} serving {served}, context {engine.context:,}")
