"""``python -m bench.gpu_training``: the training step at the size of Kimi-K2.5's drafter, on a GPU.

One JSON line per draft vocabulary and number of draft steps: tokens per second of whole steps (rows
in memory, loss, gradients, clipping, AdamW; bfloat16 products, as the phase has them), share of the
GPU's bfloat16 peak that the model's products are (null for a GPU whose peak is not known here), and
peak memory. Each runs in a process of its own and is ended at its time limit, so that all of them
end within ten minutes. Weights and rows are random: nothing is learnt, only measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch

from drafter.extraction.shards import Row
from drafter.sections import Train
from drafter.target_head import TargetHead
from drafter.training.model import Drafter, Shape
from drafter.training.trainer import Trainer

KIMI_VOCAB = 163_840
RUNS = [(32_000, 4), (32_000, 7), (KIMI_VOCAB, 4), (KIMI_VOCAB, 7)]
"""(draft vocabulary, draft steps)"""
LIMIT_S = 140
MEASURED_S = 20
ROWS, ROW_TOKENS, PROMPT_TOKENS = 4, 2048, 1
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312}
"""Of dense bfloat16 products, as the maker states them."""


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print(
            "bench.gpu_training: no GPU that torch can use: run it on a machine that has one",
            file=sys.stderr,
        )
        return 64
    if arguments:
        draft_vocab, ttt_steps = map(int, arguments)
        print(json.dumps(measure(kimi(draft_vocab), ttt_steps)))
        return 0
    failed = 0
    for draft_vocab, ttt_steps in RUNS:
        command = [sys.executable, "-m", "bench.gpu_training", str(draft_vocab), str(ttt_steps)]
        try:
            failed += subprocess.run(command, timeout=LIMIT_S).returncode != 0
        except subprocess.TimeoutExpired:
            failed += 1
            late = {"draft_vocab": draft_vocab, "ttt_steps": ttt_steps, "over_s": LIMIT_S}
            print(json.dumps(late), flush=True)
    return 1 if failed else 0


def kimi(draft_vocab: int) -> Shape:
    return Shape(
        hidden_size=7168, intermediate_size=18_432, num_heads=64, num_kv_heads=64, head_dim=128,
        norm_eps=1e-5, rope_theta=5e4, max_positions=262_144, vocab_size=KIMI_VOCAB,
        draft_vocab_size=draft_vocab, aux_layers=(2, 30, 58),
    )  # fmt: skip


def flops_per_token(shape: Shape, ttt_steps: int, row_tokens: int = 0) -> float:
    """Of the products of one step, per supervised token.

    Six per trained weight and use (two forward, four backward), two per weight of the target's
    output matrix; and, in rows of ``row_tokens``, twelve per key seen, half a row of them on
    average, and query dimension.
    """
    hidden, query = shape.hidden_size, shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    fused = len(shape.aux_layers) * hidden * hidden
    attention = 2 * hidden * (query + 2 * kv) + query * hidden
    layer = attention + 3 * hidden * shape.intermediate_size
    output = shape.draft_vocab_size * hidden
    seen = 12 * query * row_tokens / 2
    return 6 * fused + ttt_steps * (6 * (layer + output) + seen) + 2 * output


def measure(
    shape: Shape, ttt_steps: int, rows: int = ROWS, row_tokens: int = ROW_TOKENS
) -> dict[str, Any]:
    """The median step of a random drafter of ``shape`` over ``rows`` packed rows."""
    options = Train(ttt_steps=ttt_steps)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drafter, head = _random(shape, device)
    batch = _batch(shape, rows, row_tokens)
    trainer = Trainer(options, head)
    optimizer = torch.optim.AdamW(drafter.parameters(), weight_decay=0.0, fused=True)
    judge_DH = head.lm_head[drafter.draft_ids]
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < MEASURED_S and len(seconds) < 12):
        started = time.perf_counter()
        trainer.step(len(seconds) + 1, batch, drafter, optimizer, judge_DH)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    tokens = rows * row_tokens
    step_s = median(seconds[1:])  # the first one also allocates
    done = flops_per_token(shape, ttt_steps, row_tokens) * tokens / step_s
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "draft_vocab": shape.draft_vocab_size,
        "ttt_steps": ttt_steps,
        "tokens": tokens,
        "step_s": round(step_s, 4),
        "tokens_per_s": round(tokens / step_s),
        "tflops": round(done / 1e12, 3),
        "utilisation": _utilisation(done, device),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if device == "cuda" else None,
    }


def _utilisation(done: float, device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else device
    peak = next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
    return None if peak is None else round(done / (peak * 1e12), 3)


def _random(shape: Shape, device: str) -> tuple[Drafter, TargetHead]:
    """Made where they are needed: two billion weights take a CPU longer than the measurement."""
    torch.manual_seed(0)
    size = shape.vocab_size, shape.hidden_size
    with torch.device(device):
        lm_head = torch.randn(size) / shape.hidden_size**0.5
        head = TargetHead(torch.randn(size), torch.ones(shape.hidden_size), shape.norm_eps, lm_head)
        t2d = torch.arange(shape.vocab_size) < shape.draft_vocab_size
        d2t = torch.zeros(shape.draft_vocab_size, dtype=torch.int64)
        return Drafter(shape, head, d2t, t2d), head


def _batch(shape: Shape, rows: int, row_tokens: int) -> list[Row]:
    aux_layers, hidden = len(shape.aux_layers), shape.hidden_size
    return [
        Row(
            sample_id=f"B1-{number}",
            input_ids_T=torch.randint(0, shape.vocab_size, (row_tokens,)),
            prompt_tokens=PROMPT_TOKENS,
            aux_TAD=torch.randn(row_tokens, aux_layers, hidden).bfloat16(),
            final_TD=torch.randn(row_tokens, hidden).bfloat16(),
        )
        for number in range(rows)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
