"""Writes a dataset's shards as a directory of another system.

The directory is filled under a hidden name beside its own, row by row, and renamed when it is
whole. A killed export goes on where it was: rows already written are kept. Memory holds one row.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import torch

from drafter.errors import DataError, DrafterError, RecipeError
from drafter.extraction.shards import read_rows
from drafter.files import clear_partial, digest, fsync_dir, read_json, read_section, write_json
from drafter.interchange import RECORD, Writer
from drafter.interchange.specforge import SpecForgeWriter
from drafter.interchange.speculators import SpeculatorsWriter
from drafter.layout import HiddenStates, Workspace
from drafter.recipe import Recipe
from drafter.target_head import load_head

_REPORT_SECONDS = 10.0


def run(workspace: Workspace, recipe: Recipe, system: str, dataset: str, directory: Path) -> None:
    """Export ``dataset`` for ``system``. The caller holds the dataset's lock.

    Raises DataError when the dataset is not extracted or ``directory`` holds something else,
    RecipeError when the system cannot take these states, DrafterError when the disk is full.
    """
    hidden = workspace.hidden_states(dataset)
    section = read_section(hidden.manifest, "extract")
    if section is None:
        raise DataError(f"{dataset} is not extracted yet: run extract on it first")
    record = {
        "system": system,
        "dataset": dataset,
        "states": digest({"identity": section["identity"], "files": section["files"]}),
        "rows": section["counts"]["rows"],
        "aux_layers": section["identity"]["aux_layers"],
    }
    directory = directory.absolute()
    if _is_there(directory, record):
        print(f"{dataset}: {record['rows']:,} rows in {directory}, unchanged", flush=True)
        return
    partial = directory.with_name(f".{directory.name}.partial")
    _is_there(partial, record)
    partial.mkdir(parents=True, exist_ok=True)
    write_json(partial / RECORD, record)
    writer = _writer(system, partial, section["identity"], recipe)
    try:
        _fill(dataset, hidden, writer, partial, record["rows"])
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DrafterError(
            f"no room for {directory}: free disk space, then run the same export again; rows "
            "already written are kept"
        ) from None
    os.rename(partial, directory)
    fsync_dir(directory.parent)
    print(f"{dataset}: {record['rows']:,} rows in {directory}", flush=True)


def _is_there(directory: Path, record: dict[str, Any]) -> bool:
    """Whether ``directory`` is what ``record`` says. DataError when it holds something else."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    if (directory / RECORD).exists() and read_json(directory / RECORD) == record:
        return True
    raise DataError(
        f"{directory} is there and is no export of these states for this system: move it away, or "
        "name another directory"
    )


def _writer(system: str, directory: Path, identity: dict[str, Any], recipe: Recipe) -> Writer:
    norm = identity["norm"]
    if system == "speculators":
        if norm == "after":
            raise RecipeError(
                "these states stand after the last norm, which cannot be undone, and speculators "
                "needs them before it: export them for specforge, or extract the dataset here"
            )
        return SpeculatorsWriter(directory)
    found = identity["target"], identity["revision"]
    if found != (recipe.target.path, recipe.target.revision):
        raise RecipeError(
            f"these states are of revision {found[1]} of {found[0]} and specforge needs its last "
            f"norm, the recipe's target is {recipe.target.revision} of {recipe.target.path}: set "
            "the recipe's target to theirs"
        )
    head = load_head(Path(recipe.target.path)).to("cpu", torch.float32)
    return SpecForgeWriter(directory, head.reading(norm))


def _fill(
    dataset: str, hidden: HiddenStates, writer: Writer, directory: Path, num_rows: int
) -> None:
    for folder in [directory, *(path for path in directory.iterdir() if path.is_dir())]:
        clear_partial(folder)
    reported = time.monotonic()
    kept = 0
    for index, row in enumerate(read_rows(hidden)):
        path = writer.path(index)
        if path.exists():
            kept += 1
        else:
            writer.write(path, row)
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{dataset}: {index + 1:,} of {num_rows:,} rows", flush=True)
    if kept:
        print(f"{dataset}: {kept:,} rows were there already", flush=True)
    writer.finish(read_rows(hidden))
