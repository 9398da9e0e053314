"""The files of a drafter that training starts from, and whether they are what they were.

A plan asks often and weights have gigabytes, so a file is hashed once per process while its size
and its time of change are the same. Standard library only.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from drafter.errors import RecipeError
from drafter.files import digest, file_record, read_json

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = ("model.safetensors", "pytorch_model.bin")
"""The one with names that cannot run code goes first."""


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, by name. RecipeError when there are none, or one of an index
    is missing."""
    if (directory / _INDEX).exists():
        names = sorted(set(read_json(directory / _INDEX).get("weight_map", {}).values()))
    else:
        names = [name for name in _SINGLE if (directory / name).exists()][:1]
    missing = [name for name in (CONFIG, *names) if not (directory / name).is_file()]
    if missing or not names:
        raise RecipeError(
            f"train.start_from {directory} has no {missing[0] if missing else _SINGLE[0]}: let it "
            "name the directory of a drafter on the GPU host"
        )
    return [directory / name for name in names]


def identity(start_from: str | None) -> dict[str, Any]:
    """``{"start": hash}`` over configuration and weights; nothing for a new drafter."""
    if start_from is None:
        return {}
    directory = Path(start_from)
    files = [directory / CONFIG, *weight_files(directory)]
    return {"start": digest([[path.name, _sha256(path)] for path in files])}


def _sha256(path: Path) -> str:
    stat = path.stat()
    return _hashed(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _hashed(path: Path, _size: int, _mtime_ns: int) -> str:
    sha256: str = file_record(path)["sha256"]
    return sha256
