"""A workspace with extracted states of a made-up target that a drafter can learn within seconds.

The first token of a prompt is a key that is added to each token to make the next one. The target's
states name the tokens to come, so a drafter that sees them learns to say them soon, while one that
does not would have to learn to add.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter.extraction.shards import Features, Row, Shard, ShardHeader, write_shard
from drafter.files import digest, file_record, write_json, write_section
from drafter.job import Job
from drafter.layout import DrafterRun, JobDir, Workspace
from drafter.plan import run_name
from drafter.recipe import Recipe, parse_recipe
from drafter.rows import Family
from drafter.training.corpus import is_held_out

VOCAB, HIDDEN, AUX_LAYERS = 101, 32, (1, 2, 3)
STOP = 0
FAMILY = Family(None, None, False, frozenset(), frozenset(), frozenset({STOP}), VOCAB)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def _draw(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


EMBED, LM_HEAD = _draw(1, VOCAB, HIDDEN), 2 * _draw(2, VOCAB, HIDDEN) / HIDDEN**0.5
MIX = _draw(3, len(AUX_LAYERS), HIDDEN, HIDDEN) / HIDDEN**0.5


def following(ids: Sequence[int]) -> int:
    """The target's greedy token; the end comes up in most rows."""
    return (ids[-1] + ids[0]) % VOCAB


def greedy(prompt: list[int], limit: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + limit and (len(ids) == len(prompt) or ids[-1] != STOP):
        ids.append(following(ids))
    return ids[len(prompt) :]


def states(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """aux [T, A, H]: directions of the tokens 2, 3 and 4 ahead; final [T, H]: of the next."""
    step, here = ids[0], torch.tensor(ids)
    ahead = torch.stack([(here + n * step) % VOCAB for n in (2, 3, 4)], 1)
    aux = torch.einsum("tah,ahg->tag", LM_HEAD[ahead], MIX)
    return aux, LM_HEAD[(here + step) % VOCAB] + 0.1 * EMBED[here]


class TableBackend:
    """Makes the made-up target's states, as an engine would."""

    def __init__(self, _: Path, dtype: torch.dtype, aux_layers: Sequence[int]) -> None:
        assert tuple(aux_layers) == AUX_LAYERS
        self.dtype = dtype

    def features(self, batch: list[list[int]]) -> list[Features]:
        made = [states(ids) for ids in batch]
        return [Features(aux.to(self.dtype), final.to(self.dtype)) for aux, final in made]


@dataclass
class DrafterSite:
    root: Path
    datasets: tuple[str, ...] = ("B1", "B2")
    num_rows: int = 40
    train: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)
    urls: tuple[str, ...] = ("http://127.0.0.1:9",)
    revision: str = "r1"

    def __post_init__(self) -> None:
        target = self.root / "target"
        target.mkdir(parents=True, exist_ok=True)
        write_json(target / "config.json", CONFIG)
        (target / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": STOP}]}))
        tensors = {
            "model.embed_tokens.weight": EMBED,
            "model.norm.weight": torch.ones(HIDDEN),
            "lm_head.weight": LM_HEAD,
        }
        save_file(tensors, target / "model.safetensors")
        for dataset in self.datasets:
            self.extract(dataset, self.rows(dataset))

    @property
    def recipe(self) -> Recipe:
        train = {
            "steps": 30, "batch_tokens": 300, "ttt_steps": 3, "learning_rate": 1e-2,
            "draft_vocab_size": 90, "held_out_share": 0.3, "checkpoint_every_steps": 10,
            "no_states_baseline": True, "clip_norm": 1.0,
        }  # fmt: skip
        tree = {
            "name": "test",
            "target": {"path": str(self.root / "target"), "revision": "r1"},
            "engine": {"urls": self.urls},
            "datasets": [
                {"name": name, "format": "glaive", "path": "/none", "unbounded": True}
                for name in self.datasets
            ],
            "extract": {"dtype": "float32", "batch_tokens": 256},
            "train": train | self.train,
            "evaluate": {"max_prompts": 8, "max_new_tokens": 24} | self.evaluate,
            "host": {"workspace": str(self.root / "workspace")},
        }
        return parse_recipe(tree, "test")

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root / "workspace")

    @property
    def run(self) -> DrafterRun:
        return self.workspace.drafter(run_name(self.workspace, self.recipe))

    def prompts(self, dataset: str) -> dict[str, list[int]]:
        dice = Random(dataset)
        return {
            f"{dataset}-{i:04d}": [dice.randrange(1, VOCAB) for _ in range(dice.randrange(2, 9))]
            for i in range(self.num_rows)
        }

    def rows(self, dataset: str) -> list[Row]:
        """Prompts with greedy answers of 24 tokens at most, and their states."""
        rows = []
        for sample_id, prompt in self.prompts(dataset).items():
            ids = prompt + greedy(prompt, 24)
            rows.append(Row(sample_id, torch.tensor(ids), len(prompt), *states(ids)))
        return rows

    def extract(self, dataset: str, rows: Sequence[Row], **identity: Any) -> None:
        """Leave what prepare and extract would: prompt ids, two shards and a manifest."""
        prepared, hidden = self.workspace.prepared(dataset), self.workspace.hidden_states(dataset)
        prepared.root.mkdir(parents=True, exist_ok=True)
        hidden.root.mkdir(parents=True, exist_ok=True)
        prepared.prompt_ids.write_text(
            "".join(
                json.dumps({"sample_id": sample_id, "input_ids": ids}) + "\n"
                for sample_id, ids in self.prompts(dataset).items()
            )
        )
        half = (len(rows) + 1) // 2
        parts = [part for part in (rows[:half], rows[half:]) if part]
        files = {
            hidden.shard(i).name: write_shard(hidden.shard(i), pack(part))
            for i, part in enumerate(parts)
        }
        section = {
            "inputs": {},
            "identity": {
                "target": "t", "revision": self.revision, "aux_layers": list(AUX_LAYERS),
                "dtype": "float32", "norm": "before", "hidden_size": HIDDEN, **identity,
            },
            "counts": {"rows": len(rows), "shards": len(parts), "left_out": {}},
            "gates": {"argmax_share": 1.0, "response_tokens": 1000},
            "files": files,
        }  # fmt: skip
        write_section(hidden.manifest, "extract", section)
        write_section(
            prepared.manifest,
            "prepare",
            {"counts": {}, "files": {prepared.prompt_ids.name: file_record(prepared.prompt_ids)}},
        )

    def held_out(self, dataset: str) -> dict[str, list[int]]:
        share = self.recipe.train.held_out_share
        return {i: ids for i, ids in self.prompts(dataset).items() if is_held_out(i, share)}

    def answer_greedily(self, dataset: str, limit: int = 24) -> None:
        """Leave the answers that an engine would have given."""
        path = self.run.greedy(dataset)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            for sample_id, prompt in self.held_out(dataset).items():
                ids = greedy(prompt, limit)
                ended = "stop" if ids[-1] == STOP else "length"
                row = {"sample_id": sample_id, "output_ids": ids, "finish_reason": ended}
                print(json.dumps({**row, "max_new_tokens": limit}), file=file)

    def job(self, phase: str, dataset: str = "all") -> Job:
        directory = self.workspace.job(phase, dataset)
        directory.root.mkdir(parents=True, exist_ok=True)
        # Unlike any other site's: by its id, processes of a start are found, and killed.
        start = digest(str(self.root))
        told = {"start_id": start, "code": "c", "run_id": "r", "token_budget": None, "in_flight": 4}
        spec = {"phase": phase, "dataset": dataset, "mode": "resume", **told}
        write_json(directory.job, {**spec, "recipe": self.recipe.as_json()})
        return Job(
            phase, dataset, self.recipe, JobDir(directory.root), start, "c", "r", "resume", None, 4
        )


def pack(rows: Sequence[Row]) -> Shard:
    lengths = [len(row.input_ids_T) for row in rows]
    ids = tuple(row.sample_id for row in rows)
    return Shard(
        header=ShardHeader(ids, AUX_LAYERS, "float32", "sha", "sha", {}),
        input_ids_T=torch.cat([row.input_ids_T for row in rows]),
        offsets_N1=torch.tensor([0, *lengths]).cumsum(0),
        prompt_tokens_N=torch.tensor([row.prompt_tokens for row in rows]),
        aux_TAD=torch.cat([row.aux_TAD for row in rows]),
        final_TD=torch.cat([row.final_TD for row in rows]),
    )
