"""States that another system made, as the plan sees them. Standard library and pydantic only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeGuard

from drafter.layout import HiddenStates
from drafter.recipe import Recipe

Verdict = Literal["done", "refuse"]
NO_ROWS = "its states are imported, there are no rows to validate"


def is_so(section: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Is a manifest's section ``extract`` that of an import? See drafter.interchange.importing."""
    return section is not None and "imported" in section["inputs"]


def judge(
    section: dict[str, Any], spoilt: Sequence[str], hidden: HiddenStates, recipe: Recipe
) -> tuple[Verdict, str]:
    """Imported states are done as long as they are whole and of the recipe's target: extraction
    could not make them again, so it never replaces them. ``spoilt`` are its files that are missing
    or changed."""
    origin = f"imported from {section['inputs']['imported']}"
    identity = section["identity"]
    found = [identity["target"], identity["revision"]]
    wanted = [recipe.target.path, recipe.target.revision]
    if found == wanted and not spoilt:
        return "done", f"{origin}, not extracted"
    fault = (
        f"missing or changed: {', '.join(spoilt)}"
        if spoilt
        else f"of revision {found[1]} of {found[0]}, the recipe says {wanted[1]} of {wanted[0]}"
    )
    return "refuse", f"{origin}, {fault}: import it again, or move {hidden.root} away and extract"
