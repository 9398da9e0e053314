"""Train the demo's target model and write ``target/``.

    cd include && python -m demo.make_target

A Qwen3 of four layers, so that transformers, vLLM and SGLang all load it. Seeded, with a fixed
number of steps: the same machine gives the same weights. The weights are trained in float32 and
rounded to bfloat16 for storage; config.json says float32, which is how they are then computed with.

Letters: B = rows of a batch, T = tokens of its longest row.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from demo import language, tokenizer

TARGET = Path(__file__).parent / "target"

MAX_LENGTH = 2048
NUM_TOKENIZER_ROWS = 4_000
BATCH_ROWS = 16
NUM_STEPS = 1_800
NUM_ROWS = NUM_STEPS * BATCH_ROWS
"""Each row is a fresh random loop, seen once."""

WARMUP_STEPS = 100
DECAY_STEPS = 600
LEARNING_RATE = 2e-3
NO_THINKING_SHARE = 0.1
"""Rows that are rendered with thinking=False."""

Row = tuple[list[int], int]
"""Token ids of prompt + response, and where the response begins."""


def train_tokenizer(directory: Path, rng: Random) -> PreTrainedTokenizerBase:
    texts: list[str] = []
    for dataset in itertools.islice(itertools.cycle(language.DATASETS), NUM_TOKENIZER_ROWS):
        dialogue = language.dialogue(dataset, rng)
        texts += [m["content"] for m in dialogue.messages(len(dialogue.exchanges) - 1)]
        texts += [f"{e.thinking}\n{e.answer}" for e in dialogue.exchanges]
        texts += [tokenizer.tools_text(dialogue.tools)] if dialogue.tools else []
        texts += [e.call_id for e in dialogue.exchanges if e.call]
    texts += [*language.WORDS, *tokenizer.HEADERS] * 20
    tokenizer.save(tokenizer.train(texts), directory, MAX_LENGTH)
    tokens: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return tokens


def row(tokens: PreTrainedTokenizerBase, dataset: str, rng: Random) -> Row:
    """One fresh conversation, cut at a random question, exactly as the template renders it."""
    dialogue = language.dialogue(dataset, rng)
    last = rng.randrange(len(dialogue.exchanges))
    thinking = rng.random() >= NO_THINKING_SHARE
    prompt = tokens.apply_chat_template(
        dialogue.messages(last),
        tools=dialogue.tools,
        add_generation_prompt=True,
        thinking=thinking,
        tokenize=False,
    )
    exchange = dialogue.exchanges[last]
    response = f"{exchange.thinking}</think>{exchange.reply()}" if thinking else exchange.reply()
    prompt_ids = tokens.encode(prompt, add_special_tokens=False)
    response_ids = tokens.encode(f"{response}<|im_end|>", add_special_tokens=False)
    return prompt_ids + response_ids, len(prompt_ids)


def batches(rows: list[Row], rng: Random) -> Iterator[list[Row]]:
    """Each row once, in batches of about one length, so that little is padding."""
    alike = sorted(rows, key=lambda row: len(row[0]))
    groups = [alike[i : i + BATCH_ROWS] for i in range(0, len(alike), BATCH_ROWS)]
    rng.shuffle(groups)
    yield from groups


def collate(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, T], and labels [B, T] that are -100 outside the responses."""
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.zeros(len(rows), length, dtype=torch.long)
    labels_BT = torch.full((len(rows), length), -100)
    for i, (ids, begin) in enumerate(rows):
        ids_BT[i, : len(ids)] = torch.tensor(ids)
        labels_BT[i, begin : len(ids)] = ids_BT[i, begin : len(ids)]
    return ids_BT, labels_BT


def new_model(tokens: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokens),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,  # attention kernels on GPUs begin at 64
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=False,
            bos_token_id=tokens.bos_token_id,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
        )
    )


def train(model: Qwen3ForCausalLM, rows: list[Row], rng: Random) -> None:
    """AdamW over responses only; linear warm-up, a plateau, linear decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / WARMUP_STEPS, (NUM_STEPS - step) / DECAY_STEPS),
    )
    began = time.monotonic()
    for step, batch in enumerate(batches(rows, rng)):
        ids_BT, labels_BT = collate(batch)
        hidden_BTH = model.model(ids_BT).last_hidden_state
        answered_BT = labels_BT[:, 1:] != -100
        logits = model.lm_head(hidden_BTH[:, :-1][answered_BT])
        loss = F.cross_entropy(logits, labels_BT[:, 1:][answered_BT])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            print(
                f"step {step} loss {loss.item():.4f} {time.monotonic() - began:.0f} s", flush=True
            )


def save(model: Qwen3ForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(halves, path, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's target model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=TARGET, help="directory to write")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums are then taken in one order on every machine
    torch.manual_seed(args.seed)
    rng = Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        staging = Path(name)
        tokens = train_tokenizer(staging, rng)
        datasets = itertools.islice(itertools.cycle(language.DATASETS), NUM_ROWS)
        rows = [row(tokens, dataset, rng) for dataset in datasets]
        model = new_model(tokens)
        train(model, rows, rng)
        save(model, staging)
        args.out.mkdir(parents=True, exist_ok=True)
        for file in staging.iterdir():  # copied last, so that an old target stays whole till then
            (args.out / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    main()
