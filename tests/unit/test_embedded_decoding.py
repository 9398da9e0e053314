"""The embedded engine's arithmetic without HTTP; transformers says what is right."""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from unit.tiny_model import SHAPE, greedy, prompts, saved

from drafter.engines.batch import Batch, Request
from drafter.engines.decoding import Row, load_decoder
from drafter.engines.sampling import Sampling, next_ids
from drafter.errors import RecipeError

DEMO_TARGET = Path(__file__).parents[2] / "include/demo/target"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small, threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()


def decode(model_dir: Path, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Greedy answers of the decoder alone; each prompt joins one step after the one before."""
    decoder = load_decoder(model_dir)
    rows = [Row(list(ids), slot=slot) for slot, ids in enumerate(prompts)]
    with torch.inference_mode():
        for step in range(len(rows) + num_new):
            running = [r for r in rows[: step + 1] if len(r.ids) < len(prompts[r.slot]) + num_new]
            if running:
                for row, token in zip(running, decoder.logits(running).argmax(-1), strict=True):
                    row.ids.append(int(token))
    return [row.ids[len(ids) :] for row, ids in zip(rows, prompts, strict=True)]


ROTATIONS = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda rotation: rotation["rope_type"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_greedy_ids_are_those_of_transformers(
    kind: str, rotation: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    shape = SHAPE | {"rope_parameters": rotation, "tie_word_embeddings": kind == "llama"}
    model: Any = (
        Qwen3ForCausalLM(Qwen3Config(**shape))
        if kind == "qwen3"
        else LlamaForCausalLM(LlamaConfig(**shape))
    ).eval()
    mixed = [*prompts(1, 1), *prompts(2, 40), *prompts(2, 3), *prompts(1, 300), *prompts(3, 7)]
    expected = [greedy(model, [prompt], 12)[0] for prompt in mixed]
    assert decode(saved(model, tmp_path), mixed, 12) == expected


@pytest.mark.skipif(not (DEMO_TARGET / "model.safetensors").exists(), reason="no demo target")
def test_greedy_ids_of_the_demo_target_are_those_of_transformers() -> None:
    model = Qwen3ForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32).eval()
    mixed = [*prompts(2, 20), *prompts(2, 90)]
    expected = greedy(model, mixed[:2], 24) + greedy(model, mixed[2:], 24)
    assert decode(DEMO_TARGET, mixed, 24) == expected


def test_rows_beyond_the_slots_wait_for_one(model: Any, tmp_path: Path) -> None:
    decoder = load_decoder(saved(model, tmp_path))
    asked = prompts(decoder.num_slots + 5, 4)
    batch = Batch(decoder)
    requests = [
        Request(f"{i}", Row(list(ids)), Sampling(0), 3, frozenset(), len(ids))
        for i, ids in enumerate(asked)
    ]
    batch.submit(requests)
    threading.Thread(target=batch.run, daemon=True).start()
    assert all(request.done.wait(20) for request in requests)
    assert [request.output_ids for request in requests] == greedy(model, asked, 3)


def test_ids_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    num = 20_000
    draws = next_ids(logits.repeat(num, 1), [Sampling(0.7)] * num)
    shares = torch.bincount(torch.tensor(draws), minlength=4) / num
    assert torch.allclose(shares, (logits / 0.7).softmax(-1), atol=0.02)


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        ({"top_k": 1}, {0}),
        ({"top_p": 0.01}, {0}),
        ({"top_k": 2}, {0, 2}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.7}, {0, 2}),  # shares are .64 .09 .24 .03
        ({"top_p": 0.95}, {0, 1, 2}),
        ({"top_p": 0.95, "top_k": 2}, {0, 2}),
        ({"temperature": 0}, {0}),
    ],
)
def test_only_what_top_p_and_top_k_leave_is_drawn(
    sampling: dict[str, Any], possible: set[int]
) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0]).repeat(2000, 1)
    one = Sampling(**sampling, random=random.Random(0))
    assert set(next_ids(logits, [one] * 2000)) == possible


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "has architectures .*GPT2LMHeadModel.*SGLang"),
        ({"attention_bias": True}, "has attention_bias True"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "has rope_type dynamic"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks weights"),
    ],
)
def test_a_model_it_does_not_know_is_refused(
    model: Any, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    saved(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(RecipeError, match=sentence):
        load_decoder(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no model at"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(RecipeError, match="cannot read the model"):
        load_decoder(tmp_path)
