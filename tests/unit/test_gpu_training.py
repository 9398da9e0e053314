"""The measurement that is kept ready for a GPU: its arithmetic, and its path on a CPU."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from bench import gpu_training
from unit.random_targets import one_thread

UNREAD = 2 * 7168 * (163_840 - 32_000)
"""FLOPs that a judge of the whole vocabulary would add."""


@pytest.mark.parametrize(
    ("draft_vocab", "intermediate", "judged", "gflops"),
    [
        pytest.param(163_840, 12_288, 0, [36.6, 47.7, 81.0], id="whole vocabulary"),
        pytest.param(32_000, 12_288, UNREAD, [19.6, 25.0, 41.3], id="32,000 entries"),
        pytest.param(32_000, 18_432, UNREAD, [21.9, 28.2, 46.8], id="a wider layer"),
    ],
)
def test_work_per_token_at_3_4_and_7_steps(draft_vocab, intermediate, judged, gflops):
    shape = replace(gpu_training.kimi(draft_vocab), intermediate_size=intermediate)
    found = [gpu_training.flops_per_token(shape, steps) + judged for steps in (3, 4, 7)]
    assert found == pytest.approx([1e9 * each for each in gflops], rel=3e-3)


def test_work_of_attention_grows_with_the_row():
    shape = gpu_training.kimi(32_000)
    none, some, more = (gpu_training.flops_per_token(shape, 7, n) for n in (0, 1024, 2048))
    assert more - some == some - none == 7 * 12 * 64 * 128 * 512


def test_a_tiny_drafter_takes_the_same_path_on_a_cpu():
    shape = replace(
        gpu_training.kimi(16), hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1,
        head_dim=8, vocab_size=40,
    )  # fmt: skip
    with one_thread():
        line = gpu_training.measure(shape, 2, rows=2, row_tokens=12)
    assert (line["draft_vocab"], line["ttt_steps"], line["tokens"]) == (16, 2, 24)
    assert line["tokens_per_s"] > 0
    if not torch.cuda.is_available():
        assert (line["device"], line["utilisation"], line["peak_gb"]) == ("cpu", None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence():
    command = [sys.executable, "-m", "bench.gpu_training"]
    path = ":".join(sys.path)
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (64, "")
    assert "no GPU" in done.stderr and done.stderr.count("\n") == 1
