"""Hidden states: what extraction adds to running the target, and what it writes.

``extract-throughput``: tokens per second from rows on disk to whole shards past every gate, over a
bare forward of the target with its logits, on the same batches; two processes' worth of nothing
else: same model in memory, interleaved, the median pair. ``padding-waste``: share of the tokens of
all passes that is padding, on a log-normal mix. ``shard-write``: bytes per second of a shard, its
hash included, over a plain sequential write of as many. ``extract-memory``: by how much a job grows
per token of its dataset.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import torch
import transformers
from bench.measure import Result
from unit.random_targets import validated_job

from drafter.backends.transformers import TransformersBackend
from drafter.extract import extract
from drafter.extraction.shard_plan import plan_batches
from drafter.extraction.shards import Features, Shard, ShardHeader, write_shard
from drafter.files import whole_file
from drafter.job import Job, load_job

PAIRS = 5
HIDDEN = 1024
LAYERS = 3
VOCAB = 4096
SHARD_TOKENS = 32_768
BATCH_TOKENS = 8192
SEED = 0
WRITTEN_BYTES = 1 << 30
MEMORY_TOKENS = 20_000


def throughput() -> Result:
    ours, bare = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        target = _target(Path(home) / "target", HIDDEN, LAYERS, VOCAB)
        rows = _rows(SHARD_TOKENS)
        for pair in range(PAIRS):
            job = _job(Path(home) / str(pair), target, rows)
            backend = Timed(target, torch.bfloat16, (0, 1, 2))
            extract(job, lambda *_, backend=backend: backend)
            spent = time.perf_counter() - backend.probed
            ours.append(len_of(rows) / spent)
            bare.append(len_of(rows) / _bare_s(backend, rows))
    pairs = sorted(zip(ours, bare, strict=True), key=lambda pair: pair[0] / pair[1])
    best = pairs[len(pairs) // 2]
    return Result(best[0], "tokens/s", 0.93, "ratio", "higher", best[1])


def padding_waste() -> Result:
    dice = random.Random(SEED)
    lengths = [min(8192, 10 + int(dice.lognormvariate(6.8, 0.8))) for _ in range(20_000)]
    padded = used = begin = 0
    while begin < len(lengths):
        shard = lengths[begin : begin + 64]
        begin += len(shard)
        used += sum(shard)
        padded += sum(
            len(batch) * max(shard[row] for row in batch) for batch in plan_batches(shard, 16_384)
        )
    return Result(1 - used / padded, "of the tokens", 0.03, "value", "lower")


def shard_write() -> Result:
    tokens, hidden = WRITTEN_BYTES // (4 * 1024 * 2), 1024
    shard = Shard(
        header=ShardHeader(("a",), (1, 2, 3), "bfloat16", "t", "e", {}),
        input_ids_T=torch.zeros(tokens, dtype=torch.int64),
        offsets_N1=torch.tensor([0, tokens]),
        prompt_tokens_N=torch.tensor([1]),
        aux_TAD=torch.randn(tokens, 3, hidden).bfloat16(),
        final_TD=torch.randn(tokens, hidden).bfloat16(),
    )
    # Not zeros: pages that were never written are all one, and read from a cache.
    plain = memoryview(
        torch.cat([shard.aux_TAD.flatten(), shard.final_TD.flatten()]).view(torch.uint8).numpy()
    )
    pairs = []
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        for _ in range(PAIRS):
            started = time.perf_counter()
            # As whole as a shard: blocks of a file that is written over are cheaper than new ones.
            with whole_file(Path(home) / "plain") as partial, open(partial, "wb") as file:
                file.write(plain)
            written = time.perf_counter()
            num_bytes = write_shard(Path(home) / "shard.safetensors", shard)["bytes"]
            pairs.append(
                (num_bytes / (time.perf_counter() - written), len(plain) / (written - started))
            )
    pairs.sort(key=lambda pair: pair[0] / pair[1])
    ours, theirs = pairs[len(pairs) // 2]
    return Result(ours / 1e6, "MB/s", 0.8, "ratio", "higher", theirs / 1e6)


def memory() -> Result:
    """Of a dataset four times as large, everything else alike."""
    few, many = (median(_peak_bytes(copies) for _ in range(3)) for copies in (1, 4))
    return Result((many - few) / (3 * MEMORY_TOKENS), "bytes/token", 64, "value", "lower")


class Timed(TransformersBackend):
    """Knows when the first shard's first batch began: loading and the probe are once per run."""

    probed = 0.0
    _proven = False

    def features(self, batch: list[list[int]]) -> list[Features]:
        if self._proven and not self.probed:
            self.probed = time.perf_counter()
        return super().features(batch)

    def prove(self, *arguments: Any) -> None:
        super().prove(*arguments)
        self._proven = True


def _bare_s(backend: TransformersBackend, rows: list[dict[str, Any]]) -> float:
    """The model alone, logits of every token included, over the batches of extraction."""
    ids = [row["input_ids"] for row in rows]
    started = time.perf_counter()
    for batch in plan_batches([len(row) for row in ids], BATCH_TOKENS):
        width = max(len(ids[i]) for i in batch)
        ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
        mask_BT = torch.zeros_like(ids_BT)
        for place, i in enumerate(batch):
            ids_BT[place, : len(ids[i])] = torch.tensor(ids[i])
            mask_BT[place, : len(ids[i])] = 1
        backend._model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
    return time.perf_counter() - started


def len_of(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["input_ids"]) for row in rows)


def _target(directory: Path, hidden: int, layers: int, vocab: int) -> Path:
    torch.manual_seed(SEED)
    config = transformers.Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=1, head_dim=128,
    )  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def _rows(num_tokens: int) -> list[dict[str, Any]]:
    """A log-normal mix of lengths, four fifths response; the ids say nothing."""
    dice = random.Random(SEED)
    rows: list[dict[str, Any]] = []
    while len_of(rows) < num_tokens:
        length = min(2048, 16 + int(dice.lognormvariate(5.5, 0.8)), num_tokens - len_of(rows) + 2)
        rows.append(
            {
                "sample_id": f"B1-{len(rows):05d}",
                "input_ids": [dice.randrange(1000) for _ in range(length)],
                "prompt_tokens": max(1, length // 5),
            }
        )
    return rows[:-1]


def _job(root: Path, target: Path, rows: list[dict[str, Any]]) -> Job:
    return validated_job(
        root,
        target,
        rows,
        aux_layers=(0, 1, 2),
        dtype="bfloat16",
        max_length=4096,
        batch_tokens=BATCH_TOKENS,
        shard_tokens=SHARD_TOKENS,
        min_argmax_share=0.0,
    )


def _peak_bytes(num_copies: int) -> int:
    """Of a process that extracts the same rows so many times."""
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        target = _target(Path(home) / "target", 128, 3, 512)
        few = _rows(MEMORY_TOKENS)
        rows = [
            {
                "sample_id": f"B1-{copy}-{row['sample_id']}",
                "input_ids": [token % 500 for token in row["input_ids"]],
                "prompt_tokens": row["prompt_tokens"],
            }
            for copy in range(num_copies)
            for row in few
        ]
        job = _job(Path(home) / "workspace", target, rows)
        spec = {
            "phase": "extract", "dataset": "B1", "recipe": job.recipe.as_json(),
            "start_id": "s", "code": "c", "run_id": "r", "mode": "resume", "token_budget": None,
            "in_flight": 1,
        }  # fmt: skip
        spec["recipe"]["extract"]["shard_tokens"] = 4096
        job.dir.job.write_bytes(orjson.dumps(spec))
        command = [sys.executable, "-m", "bench.extraction", str(job.dir.root)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        return int(done.stdout.split()[-1])


def _extract_and_measure(job_dir: Path) -> None:
    extract(load_job(job_dir), TransformersBackend)
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) << 10)


if __name__ == "__main__":
    _extract_and_measure(Path(sys.argv[1]))
