"""Has a person approved a dataset's pilot? The section ``pilot`` of its manifest::

    first      rows before this one are not the pilot's: of an earlier approval, which the canary
               took back when it alarmed
    approval   null, or {identity, rows, run_id, by, at}: who approved so many rows, and what they
               were made with

Without a section the pilot begins at row 0. An approval counts for the identity it was given for. A
restart drops the section with the rows. The caller holds the dataset's lock. Standard library only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from drafter.errors import DataError
from drafter.files import count_lines, read_section, write_section
from drafter.layout import Prepared, Workspace

if TYPE_CHECKING:
    from drafter.recipe import Recipe

SECTION = "pilot"

REMEDY = "clear its pilot task and what follows it, then answer approve"
"""What to do when the rest is to be generated before that."""


class Pending(NamedTuple):
    """A pilot that nobody has approved."""

    first: int
    """Row of raw_responses.jsonl that it begins at."""

    num_rows: int
    """Stored from there on."""

    wanted: int
    """Rows it needs before a person is asked."""

    @property
    def is_complete(self) -> bool:
        return self.num_rows >= self.wanted

    @property
    def reason(self) -> str:
        if self.is_complete:
            return f"pilot of {self.num_rows:,} rows waits for approval"
        return f"a pilot first, {self.num_rows:,} of its {self.wanted:,} rows are stored"


def pending(
    prepared: Prepared, identity: dict[str, Any], rows: int, num_stored: int, num_prompts: int
) -> Pending | None:
    """``rows``: as many as the recipe asks for; fewer are enough where there are no more prompts.
    None when they are approved, or there is nothing to ask about."""
    first = begins_at(prepared, num_stored)
    if num_prompts == 0 or given(prepared, identity):
        return None
    return Pending(first, num_stored - first, min(rows, max(num_prompts - first, 0)))


def given(prepared: Prepared, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The approval of rows made with ``identity``."""
    approval: dict[str, Any] | None = _section(prepared).get("approval")
    return approval if approval and approval["identity"] == identity else None


def begins_at(prepared: Prepared, num_stored: int) -> int:
    """First row of the pilot; a person may have discarded rows before it."""
    first: int = _section(prepared).get("first", 0)
    return min(first, num_stored)


def _section(prepared: Prepared) -> dict[str, Any]:
    """DataError when a hand has made it something else."""
    section = read_section(prepared.manifest, SECTION)
    if section is None:
        return {}
    first, approval = section.get("first"), section.get("approval")
    is_given = isinstance(approval, dict) and {"identity", "by"} <= approval.keys()
    if type(first) is not int or first < 0 or not (approval is None or is_given):
        raise DataError(
            f"section {SECTION} of {prepared.manifest} is {section!r:.80}, needs first and"
            " approval: remove it, and its pilot waits for approval again"
        )
    return section


def give(
    prepared: Prepared, pilot: Pending, identity: dict[str, Any], by: str, run_id: str
) -> None:
    approval = {
        "identity": identity,
        "rows": pilot.num_rows,
        "run_id": run_id,
        "by": by,
        "at": time.time(),
    }
    write_section(prepared.manifest, SECTION, {"first": pilot.first, "approval": approval})


def take_back(prepared: Prepared, num_stored: int) -> None:
    """Whatever made the rows is not trusted any more: the next pilot is of rows yet to come."""
    write_section(prepared.manifest, SECTION, {"first": num_stored, "approval": None})


def pending_of(
    dataset: str, workspace: Workspace, recipe: Recipe, identity: dict[str, Any]
) -> Pending | None:
    """The pilot that a person has to approve before the rest is generated; None when the recipe
    asks for none, or it is approved for ``identity``."""
    if recipe.pilot is None:
        return None
    prepared = workspace.prepared(dataset)
    num_prompts = count_lines(prepared.prompt_ids)
    max_samples = recipe.dataset(dataset).max_samples
    return pending(
        prepared,
        identity,
        recipe.pilot.rows,
        num_stored=count_lines(prepared.responses),
        num_prompts=num_prompts if max_samples is None else min(num_prompts, max_samples),
    )
