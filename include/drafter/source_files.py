"""Which files a dataset's ``path`` means, and whether a source is what it was.

A source of gigabytes is not hashed each time somebody asks for a plan: as for make, a file is the
same while its size and its time of change are. At worst prompts are prepared again, to the same
bytes. On the hub a commit is the same for ever. Pydantic and the standard library only.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

from drafter.errors import RecipeError
from drafter.files import digest
from drafter.sections import Dataset

_DATA = re.compile(r"[^.].*\.(jsonl?|ndjson|parquet)(\.(gz|bz2|xz|zst))?", re.IGNORECASE)


def holds_rows(name: str) -> bool:
    """Is a file of this name data? A directory holds cards, licences and scripts beside it."""
    return _DATA.fullmatch(name) is not None


def local_files(source: Dataset) -> list[Path]:
    """The files of ``source.path``, in the order of their names. RecipeError when there are none,
    or one cannot be read."""
    path = Path(source.path or "")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if holds_rows(file.name) and file.is_file())
        fault = "no .jsonl, .json or .parquet file lies in it"
    elif path.exists() or not glob.has_magic(str(path)):
        files, fault = [path], ""
    else:
        found = (Path(name) for name in glob.glob(str(path), recursive=True))
        files = sorted(file for file in found if file.is_file())
        fault = "it matches no file"
    for file in files:
        try:
            os.close(os.open(file, os.O_RDONLY))
        except OSError as error:
            raise _unreadable(source, error.strerror or "") from None
    if not files:
        raise _unreadable(source, fault)
    return files


def identity(source: Dataset) -> dict[str, Any]:
    """What changes when the rows of ``source`` may have. Raises what :func:`local_files` does."""
    if source.hub is not None:
        return {"hub": source.hub, "files": source.files}
    files = local_files(source)
    first = files[0].parent
    states = [(os.path.relpath(file, first), file.stat()) for file in files]
    return {"files": digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in states])}


def _unreadable(source: Dataset, fault: str) -> RecipeError:
    return RecipeError(
        f"{source.name}: source {source.path} cannot be read ({fault}): correct its path in the"
        " recipe, a path on the GPU host"
    )
