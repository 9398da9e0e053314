"""The history of a dataset's responses: what they were made with, and how to begin anew.

``sessions.jsonl`` gets one line per job start::

    time, offset (of raw_responses.jsonl), start_id, run_id, code, identity, engine {kind, urls,
    context, model, model_info, down}, tokenizer {files, behaviour, software}

and then a mark ``{time, offset}`` each minute, so that rows can be traced to a session or a time.
Rows that an older run left and this project took over (adoption.py) are a session too, with
``adopted: {responses, completion_tokens}`` in place of the engine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from drafter import plan, rewrite
from drafter.errors import DataError, RecipeError
from drafter.files import (
    drop_sections,
    file_record,
    fsync_dir,
    read_json,
    read_section,
    write_json,
)
from drafter.generation import approval
from drafter.job import Job
from drafter.jsonl import Appender
from drafter.layout import Prepared


class Sessions:
    """Writes ``sessions.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._lines = Appender(path)

    def start(
        self, job: Job, offset: int, identity: dict[str, Any], **made_by: dict[str, Any]
    ) -> None:
        """``made_by``: ``engine`` or ``adopted``."""
        self._lines.append(
            {
                "time": time.time(),
                "offset": offset,
                "start_id": job.start_id,
                "run_id": job.run_id,
                "code": job.code,
                "identity": identity,
                **made_by,
            }
        )

    def mark(self, offset: int) -> None:
        self._lines.append({"time": time.time(), "offset": offset})

    def close(self) -> None:
        self._lines.close()


def refuse_other_prompts(prepared: Prepared, target: dict[str, Any]) -> None:
    """RecipeError when the prompts were rendered for another target, DataError when their ids are
    not as prepare left them."""
    section = read_section(prepared.manifest, "prepare")
    if section is None:
        raise DataError(f"{prepared.root.name}: prepare has not finished, run it first")
    differing = sorted(key for key in target if section["identity"].get(key) != target[key])
    if differing:
        raise RecipeError(
            f"{prepared.prompt_ids} was rendered for another target ({', '.join(differing)}"
            " differ): run prepare again, or use another host.workspace"
        )
    path = prepared.prompt_ids
    if not path.exists() or file_record(path) != section["files"][path.name]:
        raise DataError(
            f"{path} is not as prepare left it: delete it, then trigger generate, which prepares it"
            " again"
        )


def refuse_other_identity(prepared: Prepared, identity: dict[str, Any]) -> None:
    """RecipeError when the stored responses were made with another identity, or with an unknown.

    Only what ``identity`` names is compared.
    """
    if not prepared.responses.exists() or prepared.responses.stat().st_size == 0:
        return
    known = known_identities(prepared)
    ways_out = "use another host.workspace, or trigger generate with mode restart for this dataset"
    if not known:
        raise RecipeError(
            f"{prepared.responses} holds responses, and nothing says what they were made with:"
            f" trigger generate with mode adopt to check and keep them, {ways_out}"
        )
    for stored in known:
        differing = sorted(key for key in identity if identity[key] != stored.get(key))
        if differing:
            differences = ", ".join(
                f"{key} was {stored.get(key)!r} and is now {identity[key]!r}" for key in differing
            )
            raise RecipeError(
                f"{prepared.responses} was made with something else ({differences}): restore the"
                f" recipe, {ways_out}"
            )


def known_identities(prepared: Prepared) -> list[dict[str, Any]]:
    """What the responses were made with, as far as the manifest and the last session say."""
    section = read_section(prepared.manifest, "generate")
    known = [section["identity"]] if section else []
    last = None
    for event in rewrite.events(prepared):
        last = event.row.get("identity", last)
    return known if last is None else [*known, last]


def archive_previous(prepared: Prepared, run_id: str) -> bool:
    """Move everything that was generated to ``archive/<run id>``, once per run.

    A retry of the same run finds that directory and changes nothing. Killed halfway, the next call
    finishes the move: the directory gets its name last. With nothing to move it appears all the
    same, or a retry would move what this run is about to make. True when something was moved.
    """
    archive = prepared.archive(run_id)
    if archive.exists():
        return False
    partial = archive.with_name(f"{archive.name}.partial")
    something = partial.exists() or plan.is_begun(prepared)
    partial.mkdir(parents=True, exist_ok=True)
    # First the manifest, so that no section ever describes files that have left.
    if prepared.manifest.exists() and not (partial / prepared.manifest.name).exists():
        write_json(partial / prepared.manifest.name, read_json(prepared.manifest))
    drop_sections(prepared.manifest, ("generate", "validate", approval.SECTION))
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
    return something
