"""Files as the phases leave them, without what is in them: enough for a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafter.files import file_record, write_json, write_section
from drafter.layout import Workspace
from drafter.plan import inputs
from drafter.recipe import Recipe, parse_recipe


def make_recipe(tmp_path: Path, **changes: Any) -> Recipe:
    """Two datasets, B1 and B2, whose sources and target lie under ``tmp_path``."""
    target = tmp_path / "target"
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_text("{}")
    datasets = []
    for name in ("B1", "B2"):
        source = tmp_path / f"{name}.jsonl"
        if not source.exists():
            source.write_text("{}\n")
        datasets.append(
            {"name": name, "format": "glaive", "path": str(source), "token_budget": 100}
        )
    tree = {
        "name": "r",
        "target": {"path": str(target), "revision": "1"},
        "engine": {"urls": ["http://127.0.0.1:1"]},
        "host": {"workspace": str(tmp_path / "w")},
        "datasets": datasets,
    }
    return parse_recipe({**tree, **changes}, "test")


def prepare(workspace: Workspace, recipe: Recipe, ids: int = 3) -> None:
    for name in recipe.dataset_names:
        prepared = workspace.prepared(name)
        prepared.root.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"sample_id": f"{name}-{i}", "input_ids": [1]}) for i in range(ids)]
        prepared.prompt_ids.write_text("".join(f"{row}\n" for row in rows))
        section = {
            "inputs": inputs("prepare", "all", workspace, recipe),
            "counts": {"prompts": ids},
            "files": {prepared.prompt_ids.name: file_record(prepared.prompt_ids)},
        }
        write_section(prepared.manifest, "prepare", section)


def generate(
    workspace: Workspace,
    recipe: Recipe,
    name: str,
    *,
    tokens: int = 120,
    stop_reason: str = "budget",
    prompts: int = 2,
) -> None:
    prepared = workspace.prepared(name)
    prepared.responses.write_text('{"row":1}\n{"row":2}\n')
    section = {
        "inputs": inputs("generate", name, workspace, recipe),
        "counts": {"completion_tokens": tokens, "prompts": prompts},
        "stop_reason": stop_reason,
        "files": {prepared.responses.name: file_record(prepared.responses)},
    }
    write_section(prepared.manifest, "generate", section)


def validate(workspace: Workspace, recipe: Recipe, name: str) -> None:
    prepared = workspace.prepared(name)
    prepared.tokenized.write_text("{}\n")
    section = {
        "inputs": inputs("validate", name, workspace, recipe),
        "counts": {},
        "files": {prepared.tokenized.name: file_record(prepared.tokenized)},
    }
    write_section(prepared.manifest, "validate", section)


def extract(workspace: Workspace, name: str, **changes: Any) -> None:
    section = {"inputs": {}, "identity": {}, "files": {}, "counts": {"left_out": {}}, "gates": {}}
    write_json(workspace.hidden_states(name).manifest, {"extract": {**section, **changes}})
