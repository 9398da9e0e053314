"""Deployed copies of this package: ``<workspace>/code/<sha256>/drafter``, named by what is in them.

The name is the check: :func:`is_intact` compares it with the bytes, so that an old or edited script
cannot run under a new name. ``gpu_host.deploy`` sends this file's text to a host that has no copy
yet (``python -c <text> <workspace> <sha256>``), which is why it imports nothing of the package.
Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO

LAUNCHER = """#!/bin/sh
# The newest deployed drafter of this workspace, for people on this host.
export DRAFTER_WORKSPACE={workspace}
export PYTHONPATH={code}
export PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
exec {python} -m drafter "$@"
"""


def code_hash(package_dir: Path) -> str:
    """sha256 over the sorted relative paths and bytes of a package, bytecode left out."""
    total = hashlib.sha256()
    for path in package_files(package_dir):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package_dir).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def package_files(package_dir: Path) -> list[Path]:
    """What is deployed of a package, sorted."""
    return sorted(
        path
        for path in package_dir.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    )


def is_intact(code_dir: Path) -> bool:
    """Does ``code/<sha256>`` hold what its name says?"""
    return code_hash(code_dir / "drafter") == code_dir.name


def install(code_dir: Path, archive: IO[bytes]) -> str:
    """Put the tar stream ``archive`` (holding ``drafter/``) at ``code_dir``, whole or not at all.

    Returns "present" (was there), "missing" (it is not, and the stream is empty), "installed",
    "tampered" (what is there is not what its name says) or "damaged" (the stream is not).
    """
    if code_dir.exists():
        return "present" if is_intact(code_dir) else "tampered"
    first = archive.read(512)
    if not first:
        return "missing"
    code_dir.parent.mkdir(parents=True, exist_ok=True)
    upload = Path(tempfile.mkdtemp(prefix=".upload-", dir=code_dir.parent))
    try:
        with tempfile.TemporaryFile() as whole:
            whole.write(first)
            shutil.copyfileobj(archive, whole)
            whole.seek(0)
            with contextlib.suppress(tarfile.ReadError):
                _unpack(whole, upload)
        if code_hash(upload / "drafter") != code_dir.name:
            return "damaged"
        upload.chmod(0o755)
        try:
            os.rename(upload, code_dir)
        except OSError:
            if not code_dir.exists():
                raise
            return "present"  # a deployment beside this one was faster
        return "installed"
    finally:
        shutil.rmtree(upload, ignore_errors=True)


def _unpack(archive: IO[bytes], directory: Path) -> None:
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                path = directory / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def write_whole(path: Path, text: str, mode: int) -> None:
    """Like files.whole_file, which is not there yet when this runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with open(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(partial, mode)
    os.replace(partial, path)


def main(workspace: Path, sha256: str, python: str, launcher: Path) -> None:
    """First line on stdin: the recipe as JSON; then the tar stream, or nothing. Answers in JSON."""
    recipe = json.loads(sys.stdin.buffer.readline())
    code_dir = workspace / "code" / sha256
    try:
        outcome = install(code_dir, sys.stdin.buffer)
        if outcome in ("present", "installed"):
            text = json.dumps(recipe, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            write_whole(workspace / "recipe.json", text, 0o644)
            quoted = {
                "workspace": shlex.quote(str(workspace)),
                "code": shlex.quote(str(code_dir)),
                "python": shlex.quote(python),
            }
            write_whole(launcher, LAUNCHER.format(**quoted), 0o755)
        answer = {"outcome": outcome}
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        answer = {"outcome": "failed", "reason": f"{where}{error.strerror}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
