"""What a finished demo leaves: ``summary.json`` and a short table, read from the manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter.files import read_json, read_section
from drafter.layout import Workspace
from drafter.plan import run_name
from drafter.recipe import Recipe

DRAFTERS = ("untrained", "ngram", "no_states", "trained")


def summarise(recipe: Recipe, wall_s: float) -> dict[str, Any]:
    """Numbers per dataset, of training, and acceptance length over all held-out prompts."""
    workspace = Workspace(Path(recipe.host.workspace))
    run = workspace.drafter(run_name(workspace, recipe))
    train = (read_section(run.manifest, "train") or {})["counts"]
    evaluations = [read_json(run.evaluation(name)) for name in recipe.dataset_names]
    return {
        "wall_s": round(wall_s, 1),
        "datasets": {name: _dataset(workspace, recipe, name) for name in recipe.dataset_names},
        "train": {key: train[key] for key in ("steps", "first_loss", "last_loss")},
        "acceptance_length": {name: _overall(evaluations, name) for name in DRAFTERS},
        "drafter": str(run.export("sglang")),
    }


def _dataset(workspace: Workspace, recipe: Recipe, name: str) -> dict[str, Any]:
    manifest = workspace.prepared(name).manifest
    generate = read_section(manifest, "generate") or {}
    validate = read_section(manifest, "validate") or {}
    extract = read_section(workspace.hidden_states(name).manifest, "extract") or {}
    return {
        "prompts": generate["counts"]["prompts"],
        "responses": generate["counts"]["responses"],
        "completion_tokens": generate["counts"]["completion_tokens"],
        "token_budget": recipe.dataset(name).token_budget,
        "stop_reason": generate["stop_reason"],
        "accepted": validate["counts"]["accepted"],
        "rejected": validate["counts"]["rejected"],
        "hidden_tokens": extract["counts"]["tokens"],
    }


def _overall(evaluations: list[dict[str, Any]], drafter: str) -> float | None:
    """Generated tokens per verification, summed over datasets; None when it was not measured."""
    sums = [evaluation["sums"].get(drafter) for evaluation in evaluations]
    if not all(sums):
        return None
    verifications = sum(int(entry["verifications"]) for entry in sums)
    generated = sum(int(entry["generated"]) for entry in sums)
    return round(generated / verifications, 3) if verifications else None


def table(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""
    head = ("dataset", "prompts", "responses", "tokens", "budget", "stop", "accepted", "rejected")
    keys = (
        *("prompts", "responses", "completion_tokens", "token_budget"),
        *("stop_reason", "accepted", "rejected"),
    )
    rows = [head]
    for name, numbers in summary["datasets"].items():
        rows.append((name, *(_cell(numbers[key]) for key in keys)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    train = summary["train"]
    lengths = summary["acceptance_length"]
    lines += [
        "",
        f"training: {train['steps']} steps, loss {_cell(train['first_loss'])} ->"
        f" {_cell(train['last_loss'])}",
        "acceptance length: " + ", ".join(f"{k} {_cell(v)}" for k, v in lengths.items()),
        f"drafter: {summary['drafter']}",
        f"wall time: {summary['wall_s']:.0f} s",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
