"""Training beside speculators 0.9.0, in its own environment (tests/engines/peer.py).

``train-ttt3``, ``train-ttt7``: tokens per second of whole steps, ours over theirs: rows in memory,
loss, gradients, clipping, AdamW. Their attention is eager or sdpa, whichever is faster here. Both
processes stay alive and take turns; the median pair counts. ``train-memory``: by how much each
grows from ready to train to its peak. ``train-flat``: what a token costs in a batch of sixteen rows
of 512 tokens, over what it costs in a batch of one; rows are alike, so attention costs a token the
same in both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from bench.measure import Result
from engines.peer import Peer, speculators, write_export, write_rows
from safetensors.torch import save_file

from drafter.extraction.shards import Row
from drafter.sections import Train
from drafter.target_head import TargetHead
from drafter.training.model import Drafter, new_drafter, shape_for
from drafter.training.trainer import Trainer

THREADS = 2
PAIRS = 5
PAIR_TOKENS = 8_000
HIDDEN, VOCAB, DRAFT_VOCAB = 256, 4096, 1024
ROWS, ROW_TOKENS, PROMPT_TOKENS = 3, 169, 20
FLAT_ROWS, FLAT_TOKENS = 16, 512
ATTENTION = ("eager", "sdpa")
RATE = 1e-4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 16_384,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def ttt3() -> Result:
    return _compared(3, 1.5)


def ttt7() -> Result:
    return _compared(7, 1.9)


def memory() -> Result:
    """Each in a process of its own; the middle one of three."""
    ours, theirs = [], []
    for _ in range(3):
        with _site() as home, speculators(THREADS) as peer:
            options = _load(peer, home, 7, "sdpa")
            theirs.append(peer.ask("grown", batches=[0] * 5, rates=[RATE] * 5, **options)["bytes"])
        command = [sys.executable, "-m", "bench.training"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        ours.append(int(done.stdout.split()[-1]))
    return Result(median(ours) / 1e6, "MB grown", 1.0, "ratio", "lower", median(theirs) / 1e6)


def flat() -> Result:
    one, many = Ours(3, _rows(1, FLAT_TOKENS)), Ours(3, _rows(FLAT_ROWS, FLAT_TOKENS))
    one.seconds(2)
    many.seconds(1)
    pairs = []
    for _ in range(PAIRS):
        one_s, many_s = one.seconds(FLAT_ROWS), many.seconds(1)
        pairs.append((many_s, one_s))
    many_s, one_s = sorted(pairs, key=lambda pair: pair[0] / pair[1])[PAIRS // 2]
    microseconds = 1e6 / (FLAT_ROWS * FLAT_TOKENS)
    return Result(many_s * microseconds, "us/token", 1.1, "ratio", "lower", one_s * microseconds)


class Ours:
    """The phase's own step over one batch, again and again."""

    def __init__(self, ttt_steps: int, rows: list[Row]) -> None:
        torch.set_num_threads(THREADS)
        options = Train(ttt_steps=ttt_steps, step_decay=1.0, learning_rate=RATE)
        head, self.drafter = _head(), _drafter()
        self.trainer = Trainer(options, head)
        self.judge_DH = head.lm_head[self.drafter.draft_ids]
        self.batch = rows
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), weight_decay=0.0, fused=True)
        self.step = 0

    def seconds(self, steps: int) -> float:
        """Of so many steps."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step += 1
            self.trainer.step(self.step, self.batch, self.drafter, self.optimizer, self.judge_DH)
        return time.perf_counter() - started


def _compared(ttt_steps: int, bar: float) -> Result:
    tokens = ROWS * ROW_TOKENS
    steps = PAIR_TOKENS // tokens
    pairs = []
    with _site() as home, speculators(THREADS) as peer:
        ours = Ours(ttt_steps, _rows())
        ours.seconds(3)
        slow = {attention: _their_s(peer, home, ttt_steps, attention, 3) for attention in ATTENTION}
        attention = min(slow, key=lambda name: slow[name])
        _their_s(peer, home, ttt_steps, attention, 3)
        command = {"batches": [0] * steps, "rates": [RATE] * steps, **_options(ttt_steps)}
        for _ in range(PAIRS):
            their_s = peer.ask("train", **command)["seconds"]
            pairs.append((steps * tokens / ours.seconds(steps), steps * tokens / their_s))
    mine, theirs = sorted(pairs, key=lambda pair: pair[0] / pair[1])[PAIRS // 2]
    return Result(mine, "tokens/s", bar, "ratio", "higher", theirs)


def _their_s(peer: Peer, home: Path, ttt_steps: int, attention: str, steps: int) -> float:
    options = _load(peer, home, ttt_steps, attention)
    peer.ask("train", batches=[0] * steps, rates=[RATE] * steps, **options)
    seconds: float = peer.ask("train", batches=[0] * steps, rates=[RATE] * steps, **options)[
        "seconds"
    ]
    return seconds


def _load(peer: Peer, home: Path, ttt_steps: int, attention: str) -> dict[str, float]:
    peer.ask("load", directory=str(home / "export"), attention=attention)
    peer.ask("data", path=str(home / "rows.safetensors"), batches=[list(range(ROWS))])
    return _options(ttt_steps)


def _options(ttt_steps: int) -> dict[str, float]:
    return {"ttt_steps": ttt_steps, "decay": 1.0, "clip": Train().clip_norm}


@contextmanager
def _site() -> Iterator[Path]:
    """A target's head, an untrained drafter for it and rows, as files."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        home = Path(name)
        target = home / "target"
        target.mkdir()
        (target / "config.json").write_text(json.dumps(CONFIG))
        head = _head()
        tensors = {
            "model.embed_tokens.weight": head.embed,
            "model.norm.weight": head.norm_weight,
            "lm_head.weight": head.lm_head,
        }
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        write_export(home / "export", _drafter(), target)
        write_rows(home / "rows.safetensors", _rows())
        yield home


def _head() -> TargetHead:
    generator = torch.Generator().manual_seed(0)
    embed, lm_head = torch.randn(2, VOCAB, HIDDEN, generator=generator).unbind(0)
    return TargetHead(embed.clone(), torch.ones(HIDDEN), 1e-6, lm_head / HIDDEN**0.5)


def _drafter() -> Drafter:
    chosen = torch.arange(0, VOCAB, VOCAB // DRAFT_VOCAB)
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    shape = shape_for(CONFIG, (2, 4, 5), DRAFT_VOCAB, None)
    return new_drafter(shape, _head(), chosen - torch.arange(DRAFT_VOCAB), t2d, seed=0)


def _rows(rows: int = ROWS, tokens: int = ROW_TOKENS) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    return [
        Row(
            sample_id=f"B1-{number}",
            input_ids_T=torch.randint(0, VOCAB, (tokens,), generator=generator),
            prompt_tokens=PROMPT_TOKENS,
            aux_TAD=torch.randn(tokens, 3, HIDDEN, generator=generator),
            final_TD=torch.randn(tokens, HIDDEN, generator=generator),
        )
        for number in range(rows)
    ]


def _grow() -> int:
    """Bytes of this process at its peak, beyond what it had before its first step."""
    ours = Ours(7, _rows())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_bytes("VmRSS")
    ours.seconds(5)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) << 10


if __name__ == "__main__":
    print(_grow())
