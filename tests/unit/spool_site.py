"""A workspace of validated rows over a small real target, to be trained on with or without a spool.

Every row is run alone (``extract.batch_tokens`` of 1), so its states are the same bits in whatever
shard it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from unit.random_targets import AUX_LAYERS, write_tokenized

from drafter import extract, spool, train
from drafter.errors import DrafterError
from drafter.files import digest, file_record, write_json, write_section
from drafter.job import Job
from drafter.layout import DrafterRun, Spool, Workspace
from drafter.plan import run_name
from drafter.recipe import Recipe, parse_recipe

DATASETS = ("B1", "B2")


@dataclass
class SpoolSite:
    root: Path
    target: Path
    rows: list[dict[str, Any]]
    train: dict[str, Any] = field(default_factory=dict)
    extract: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, dataset in enumerate(DATASETS):
            rows = [
                {**row, "sample_id": f"{dataset}-{i:04d}"}
                for i, row in enumerate(self.rows[number :: len(DATASETS)])
            ]
            write_tokenized(self.workspace.prepared(dataset), rows)

    @property
    def recipe(self) -> Recipe:
        settings = {
            "dtype": "float32", "aux_layers": AUX_LAYERS, "max_length": 36, "batch_tokens": 1,
            "shard_tokens": 200, "min_argmax_share": 0.9,
        }  # fmt: skip
        options = {
            "steps": 40, "batch_tokens": 90, "ttt_steps": 2, "learning_rate": 1e-2,
            "draft_vocab_size": 90, "held_out_share": 0.2, "checkpoint_every_steps": 7,
            "spool_shards": 3, "spool_patience_s": 60,
        }  # fmt: skip
        tree = {
            "name": "test",
            "target": {"path": str(self.target), "revision": "r1"},
            "engine": {"urls": ["http://127.0.0.1:9"]},
            "datasets": [
                {"name": name, "format": "glaive", "path": "/none", "unbounded": True}
                for name in DATASETS
            ],
            "extract": settings | self.extract,
            "train": options | self.train,
            "host": {"workspace": str(self.root)},
        }
        return parse_recipe(tree, "test")

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root)

    @property
    def run(self) -> DrafterRun:
        return self.workspace.drafter(run_name(self.workspace, self.recipe))

    @property
    def spool(self) -> Spool:
        return self.workspace.spool(self.run.root.name)

    def job(self, phase: str, dataset: str = "all") -> Job:
        directory = self.workspace.job(phase, dataset)
        directory.root.mkdir(parents=True, exist_ok=True)
        # Unlike any other site's: by its id, processes of a start are found, and killed.
        start = digest(str(self.root))
        told = {"start_id": start, "code": "c", "run_id": "r", "token_budget": None, "in_flight": 1}
        spec = {"phase": phase, "dataset": dataset, "mode": "resume", **told}
        write_json(directory.job, {**spec, "recipe": self.recipe.as_json()})
        return Job(phase, dataset, self.recipe, directory, start, "c", "r", "resume", None, 1)

    def start(self, phase: str) -> int:
        """The phase in a process of its own; its pid. It ends with the phase's exit code."""
        return forked(lambda: {"spool": spool, "train": train}[phase].run(self.job(phase)))

    def answer_greedily(self) -> None:
        """Leave held-out prompts, and the answers of the target that stand in the rows."""
        for dataset in DATASETS:
            prepared, greedy = self.workspace.prepared(dataset), self.run.greedy(dataset)
            greedy.parent.mkdir(parents=True, exist_ok=True)
            rows = [orjson.loads(line) for line in prepared.tokenized.read_bytes().splitlines()]
            with open(prepared.prompt_ids, "w") as prompts, open(greedy, "w") as answers:
                for row in rows:
                    name, cut = {"sample_id": row["sample_id"]}, row["prompt_tokens"]
                    ids = row["input_ids"]
                    print(json.dumps({**name, "input_ids": ids[:cut]}), file=prompts)
                    answer = {**name, "output_ids": ids[cut:], "finish_reason": "stop"}
                    print(json.dumps({**answer, "max_new_tokens": 1024}), file=answers)
            files = {prepared.prompt_ids.name: file_record(prepared.prompt_ids)}
            write_section(prepared.manifest, "prepare", {"counts": {}, "files": files})

    def store(self) -> None:
        """Extract everything, as a recipe without a spool has it."""
        for dataset in DATASETS:
            extract.run(self.job("extract", dataset))

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl without what depends on the clock, or on which held-out rows have
        states."""
        lines = [orjson.loads(line) for line in self.run.metrics.read_bytes().splitlines()]
        return [
            {k: v for k, v in line.items() if k != "tokens_per_s" and "held_out" not in k}
            for line in lines
        ]

    def weights(self) -> dict[str, bytes]:
        directory = self.run.checkpoint(self.recipe.train.steps)
        return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


def forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work()
        code = 0
    except DrafterError as error:
        code = error.exit_code
        print(error, file=sys.stderr)
    finally:
        os._exit(code)
