"""speculators in a process and an environment of its own, and what both sides read and write."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from drafter.export import vllm_config, write_weights
from drafter.extraction.shards import Row, Shard, ShardHeader, write_shard
from drafter.files import write_json
from drafter.recipe import parse_recipe
from drafter.training.model import Drafter

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".demo" / "engines" / "speculators" / "bin" / "python"
WORKER = Path(__file__).with_name("speculators_worker.py")


class Peer:
    """Does one thing at a time, nothing in between."""

    def __init__(self, threads: int) -> None:
        if not PYTHON.exists():
            raise FileNotFoundError(
                f"{PYTHON} is missing: install speculators 0.9.0 into an environment of its own "
                "(tests/engines/README.md), then start again"
            )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(PYTHON), str(WORKER), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        )

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        """Raises RuntimeError with its last words when it dies of the command."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"do": do, **command}).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"speculators died of {do!r}:\n{said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
        self._log.close()


@contextmanager
def speculators(threads: int) -> Iterator[Peer]:
    peer = Peer(threads)
    try:
        yield peer
    finally:
        peer.close()


def write_export(directory: Path, drafter: Drafter, target: Path) -> Path:
    """``export/vllm`` of a drafter, in float32, as the export phase writes it."""
    recipe = parse_recipe(
        {
            "name": "peer",
            "target": {"path": str(target), "revision": "r1"},
            "engine": {"urls": ["http://127.0.0.1:1"]},
            "datasets": [{"name": "B1", "format": "glaive", "path": "/x", "unbounded": True}],
            "host": {"workspace": str(directory)},
        },
        "peer",
    )
    described = json.loads((target / "config.json").read_text())
    directory.mkdir(parents=True, exist_ok=True)
    config = vllm_config(drafter.shape, "float32", recipe, described)
    write_json(directory / "config.json", config)
    write_weights(directory, "vllm", drafter, torch.float32)
    return directory


def shard_of(rows: Sequence[Row]) -> Shard:
    """Rows side by side in memory."""
    lengths = [0, *(len(row.input_ids_T) for row in rows)]
    return Shard(
        header=ShardHeader(
            tuple(row.sample_id for row in rows), (1, 2, 3), "float32", "t", "e", {}
        ),
        input_ids_T=torch.cat([row.input_ids_T for row in rows]),
        offsets_N1=torch.tensor(lengths).cumsum(0),
        prompt_tokens_N=torch.tensor([row.prompt_tokens for row in rows]),
        aux_TAD=torch.cat([row.aux_TAD for row in rows]),
        final_TD=torch.cat([row.final_TD for row in rows]),
    )


def write_rows(path: Path, rows: Sequence[Row]) -> str:
    write_shard(path, shard_of(rows))
    return str(path)
