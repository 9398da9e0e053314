"""How files are written on the GPU host: whole or not at all, in sections, locked, with hashes.

drafter.layout says where they are. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter.errors import Busy, DataError


def fsync_dir(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it becomes ``path``, whole and synced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        fsync_dir(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def clear_partial(directory: Path, name: str = "*") -> None:
    """Remove what killed writers of ``name`` (a glob) left of :func:`whole_file` in ``directory``.

    The caller holds the lock that writers of these files hold.
    """
    for partial in directory.glob(f".{name}.*.partial"):
        if partial.is_file():
            partial.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that ``path`` is either as before or complete."""
    with whole_file(path) as partial:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Raises DataError naming the file when it is missing or is not a JSON object."""
    remedy = "restore it, or move it away and rerun its phase"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing: run the phase that writes it first") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}): {remedy}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object: {remedy}")
    return value


def read_section(manifest: Path, section: str) -> dict[str, Any] | None:
    """One phase's section of a manifest; None when that phase has not finished. DataError when it
    is no JSON object."""
    if not manifest.exists():
        return None
    value = read_json(manifest).get(section)
    if value is not None and not isinstance(value, dict):
        raise DataError(
            f"section {section} of {manifest} is {value!r:.60}, needs an object: remove it and run"
            " its phase again"
        )
    return value


def write_section(manifest: Path, section: str, value: dict[str, Any]) -> bool:
    """Replace one section, the others untouched. False, nothing written, when it is the same."""
    sections = read_json(manifest) if manifest.exists() else {}
    if sections.get(section) == value:
        return False
    write_json(manifest, {**sections, section: value})
    return True


def drop_sections(manifest: Path, names: tuple[str, ...]) -> None:
    """Take back what phases said about files that are no longer as they left them."""
    if not manifest.exists():
        return
    sections = read_json(manifest)
    if any(name in sections for name in names):
        write_json(manifest, {k: v for k, v in sections.items() if k not in names})


def file_record(path: Path) -> dict[str, Any]:
    """``{bytes, sha256}`` of a file as it is now."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def digest(value: Any) -> str:
    """sha256 of ``value`` as canonical JSON: the same for equal values in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def locked(lock: Path, wait: bool = False) -> Iterator[None]:
    """Hold ``lock`` for the block. Raises Busy at once when somebody else holds it; ``wait`` is for
    locks that nobody holds for more than seconds."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Busy(f"{lock} is held by another job: wait for it, or stop it first") from None
        yield
    finally:
        os.close(fd)


def is_held(lock: Path) -> bool:
    """Is there a process that holds this flock?"""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two who look do not see each other. Who takes the lock waits for both.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def count_lines(path: Path) -> int:
    """Complete lines of a file; 0 when it does not exist."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
