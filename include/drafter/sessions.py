"""The history of a dataset's responses: what they were made with, and how to begin anew.

``sessions.jsonl`` gets one line per job start::

    time, offset (of raw_responses.jsonl), start_id, run_id, code, identity, engine {urls, context,
    model_info}

and then a mark ``{time, offset}`` each minute, so that rows can be traced to a session or a time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from drafter.errors import RecipeError
from drafter.job import Job
from drafter.jsonl import Appender, rows
from drafter.layout import Prepared, fsync_dir, read_json, read_section, write_json


class Sessions:
    """Writes ``sessions.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._lines = Appender(path)

    def start(
        self, job: Job, offset: int, identity: dict[str, Any], engine: dict[str, Any]
    ) -> None:
        self._lines.append(
            {
                "time": time.time(),
                "offset": offset,
                "start_id": job.start_id,
                "run_id": job.run_id,
                "code": job.code,
                "identity": identity,
                "engine": engine,
            }
        )

    def mark(self, offset: int) -> None:
        self._lines.append({"time": time.time(), "offset": offset})

    def close(self) -> None:
        self._lines.close()


def refuse_other_identity(prepared: Prepared, identity: dict[str, Any]) -> None:
    """RecipeError when the stored responses were made with another identity, or with an unknown."""
    if not prepared.responses.exists() or prepared.responses.stat().st_size == 0:
        return
    known = _known_identities(prepared)
    ways_out = "use another host.workspace, or trigger with mode restart"
    if not known:
        raise RecipeError(
            f"{prepared.responses} holds responses, and nothing says what they were made with:"
            f" {ways_out}"
        )
    for stored in known:
        differing = sorted(k for k in identity.keys() | stored if identity.get(k) != stored.get(k))
        if differing:
            differences = ", ".join(
                f"{key} was {stored.get(key)!r} and is now {identity.get(key)!r}"
                for key in differing
            )
            raise RecipeError(
                f"{prepared.responses} was made with something else ({differences}): restore the"
                f" recipe, {ways_out}"
            )


def _known_identities(prepared: Prepared) -> list[dict[str, Any]]:
    section = read_section(prepared.manifest, "generate")
    known = [section["identity"]] if section else []
    last = None
    for line in rows(prepared.sessions):
        last = line.value.get("identity", last)
    return known if last is None else [*known, last]


def archive_previous(prepared: Prepared, run_id: str) -> bool:
    """Move everything that was generated to ``archive/<run id>``, once per run.

    A retry of the same run finds that directory and changes nothing (False). Killed halfway, the
    next call finishes the move: the directory gets its name last.
    """
    archive = prepared.archive(run_id)
    if archive.exists():
        return False
    partial = archive.with_name(f"{archive.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    # First the manifest, so that no section ever describes files that have left.
    if prepared.manifest.exists() and not (partial / prepared.manifest.name).exists():
        write_json(partial / prepared.manifest.name, read_json(prepared.manifest))
    drop_sections(prepared.manifest, ("generate", "validate"))
    for path in (
        prepared.responses,
        prepared.failed,
        prepared.sessions,
        prepared.tokenized,
        prepared.rejected,
    ):
        if path.exists():
            os.replace(path, partial / path.name)
    fsync_dir(prepared.root)
    fsync_dir(partial)
    os.rename(partial, archive)
    fsync_dir(archive.parent)
    return True


def drop_sections(manifest: Path, names: tuple[str, ...]) -> None:
    """Take back what phases said about files that are no longer as they left them."""
    if not manifest.exists():
        return
    sections = read_json(manifest)
    if any(name in sections for name in names):
        write_json(manifest, {k: v for k, v in sections.items() if k not in names})
