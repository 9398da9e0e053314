"""Which files a dataset's ``path`` means, and whether a source is what it was.

A source of gigabytes is not hashed each time somebody asks for a plan: as for make, a file is the
same while its size and its time of change are. At worst prompts are prepared again, to the same
bytes. On the hub a commit is the same for ever. Pydantic and the standard library only.
"""

from __future__ import annotations

import glob
import os
import re
from fnmatch import fnmatchcase
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
    try:
        files, fault = _found(Path(source.path or ""))
        for file in files:
            os.close(os.open(file, os.O_RDONLY))
    except (OSError, ValueError) as error:
        # ValueError: a NUL in the path, or ** inside of a name.
        raise _unreadable(source, getattr(error, "strerror", None) or str(error)) from None
    if not files:
        raise _unreadable(source, fault)
    return files


def _found(path: Path) -> tuple[list[Path], str]:
    """Files, and why there are none if so. OSError or ValueError when it cannot be."""
    if path.is_dir():
        files = [file for file in path.iterdir() if holds_rows(file.name) and file.is_file()]
        return sorted(files), "no .jsonl, .json or .parquet file lies in it"
    # To open a pipe is to wait for a writer, and a device has no end.
    if path.exists() and not path.is_file():
        return [], "it is neither a file nor a directory"
    if path.exists() or not glob.has_magic(str(path)):
        return [path], ""
    # Path.glob does not follow links with **: two that lead back would keep it busy for ever.
    found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    files = [file for file in found if file.is_file() and _is_meant(file, path)]
    return sorted(files), "it matches no file"


def _is_meant(file: Path, pattern: Path) -> bool:
    """As in a shell, what is hidden is meant only where a dot is written."""
    dotted = [part for part in pattern.parts if part.startswith(".")]
    hidden = [part for part in file.parts if part.startswith(".")]
    return all(any(fnmatchcase(part, wanted) for wanted in dotted) for part in hidden)


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
