"""The prompts that a drafter is judged by: the first held-out ones of a dataset."""

from __future__ import annotations

from drafter import jsonl
from drafter.errors import DataError
from drafter.layout import Workspace
from drafter.recipe import Recipe
from drafter.training import corpus


def prompts(workspace: Workspace, recipe: Recipe, dataset: str) -> dict[str, list[int]]:
    """Prompt ids by sample id, ``evaluate.max_prompts`` at most. DataError when none is held
    out."""
    path = workspace.prepared(dataset).prompt_ids
    found: dict[str, list[int]] = {}
    for line in jsonl.rows(path):
        if len(found) == recipe.evaluate.max_prompts:
            break
        if corpus.is_held_out(line.value["sample_id"], recipe.train.held_out_share):
            found[line.value["sample_id"]] = line.value["input_ids"]
    if not path.exists():
        raise DataError(
            f"{dataset} has no prompts ({path} is missing), and imported states bring none: run "
            "prepare for it, or take it out of the recipe for evaluate"
        )
    if not found:
        raise DataError(
            f"{dataset}: none of the prompts in {path} is held out: raise "
            f"train.held_out_share ({recipe.train.held_out_share}), or add prompts"
        )
    return found


def replayed(
    prompts: dict[str, list[int]], answers: dict[str, list[int]], longest: int
) -> dict[str, list[int]]:
    """Those that have an answer and are with it not longer than ``longest``: no server of the
    target was started for longer rows, it would refuse to make their states."""
    return {
        sample_id: ids
        for sample_id, ids in prompts.items()
        if sample_id in answers and len(ids) + len(answers[sample_id]) <= longest
    }
