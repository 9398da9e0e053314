"""``train-quality``: is a drafter of ours as good as one that speculators trains?

The demo's target answers its own prompts greedily; its states train two drafters per seed, from the
same weights, on the same batches in the same order, at the same learning rates: one by the phase's
own step, one by the package's model and loss, supervising as each does by default. Their output
matrix is frozen, ours is not. Acceptance length on rows that neither has seen, by replay, for both.
The bar is what theirs reach less two standard errors of the paired differences.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from statistics import mean, stdev

import orjson
import torch
from bench.measure import Result
from engines import reference
from engines.peer import Peer, speculators, write_export, write_rows

from demo.make_prompts import PROMPTS
from demo.make_target import TARGET
from drafter import template
from drafter.backends.transformers import TransformersBackend
from drafter.evaluation.replay import replay
from drafter.extraction.shards import Row
from drafter.sections import Train
from drafter.sources import magicoder, mixturethoughts, opencodeinstruct, openthoughts, ultrachat
from drafter.target_head import TargetHead, load_head, text_config
from drafter.training import corpus, starting_point, vocabulary
from drafter.training.model import Drafter, new_drafter, shape_for
from drafter.training.trainer import Trainer, learning_rate

THREADS = 2
SEEDS = 3
ASKED, HELD_OUT = 150, 30
"""Of each source."""
SOURCES = {
    "B2_opencodeinstruct": opencodeinstruct.convert,
    "B3_magicoder": magicoder.convert,
    "B4_mixturethoughts": mixturethoughts.convert,
    "B5_openthoughts": openthoughts.convert,
    "B6_ultrachat": ultrachat.convert,
}
AUX_LAYERS = (1, 2, 3)
MAX_NEW_TOKENS, DRAFT_TOKENS, STATES_ROWS = 128, 3, 16


def quality() -> Result:
    torch.set_num_threads(THREADS)
    trained, held_out = _rows()
    head = load_head(TARGET).to("cpu", torch.float32)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as home, speculators(THREADS) as peer:
        path = Path(write_rows(Path(home) / "rows.safetensors", trained))
        for seed in range(SEEDS):
            options = Train(
                steps=200, batch_tokens=1536, ttt_steps=3, step_decay=1.0, learning_rate=4e-3,
                warmup_share=0.05, seed=seed,
            )  # fmt: skip
            drafter = _untrained(trained, head, seed)
            lengths = [len(row.input_ids_T) for row in trained]
            order = corpus.batches(lengths, options.batch_tokens, seed)
            batches = list(islice(order, options.steps))
            directory = write_export(Path(home) / f"{seed}", drafter, TARGET)
            _train_theirs(peer, directory, path, options, batches)
            other = starting_point.read(directory / "trained", text_config(TARGET), head)
            _train_ours(drafter, trained, head, options, batches)
            ours.append(_acceptance_length(drafter, held_out))
            theirs.append(_acceptance_length(other, held_out))
    apart = [one - other for one, other in zip(ours, theirs, strict=True)]
    slack = 2 * stdev(apart) / SEEDS**0.5
    bar = 1 - slack / mean(theirs)
    return Result(mean(ours), "tokens/verification", bar, "ratio", "higher", mean(theirs))


def _train_ours(
    drafter: Drafter, rows: list[Row], head: TargetHead, options: Train, batches: list[list[int]]
) -> None:
    trainer = Trainer(options, head)
    optimizer = torch.optim.AdamW(drafter.parameters(), weight_decay=0.0, fused=True)
    judge_DH = head.lm_head[drafter.draft_ids]
    for step, batch in enumerate(batches, start=1):
        trainer.step(step, [rows[number] for number in batch], drafter, optimizer, judge_DH)


def _train_theirs(
    peer: Peer, directory: Path, rows: Path, options: Train, batches: list[list[int]]
) -> None:
    """From the export in ``directory`` to ``directory/trained``."""
    peer.ask("load", directory=str(directory), attention="sdpa")
    peer.ask("data", path=str(rows), batches=batches)
    peer.ask(
        "train",
        batches=list(range(len(batches))),
        rates=[learning_rate(done, options) for done in range(options.steps)],
        ttt_steps=options.ttt_steps,
        decay=options.step_decay,
        clip=options.clip_norm,
    )
    peer.ask("save", directory=str(directory / "trained"))


def _acceptance_length(drafter: Drafter, rows: list[Row]) -> float:
    length = replay(drafter, rows, DRAFT_TOKENS).acceptance_length
    assert length is not None
    return length


def _untrained(rows: list[Row], head: TargetHead, seed: int) -> Drafter:
    responses = (row.input_ids_T[row.prompt_tokens :] for row in rows)
    counts = vocabulary.token_counts(responses, len(head.lm_head))
    d2t, t2d = vocabulary.select(counts, 512, vocabulary.control_ids(TARGET))
    shape = shape_for(text_config(TARGET), AUX_LAYERS, len(d2t), None)
    return new_drafter(shape, head, d2t, t2d, seed)


def _rows() -> tuple[list[Row], list[Row]]:
    """To train on and to measure on; prompts as the phase prepare renders them."""
    tokenizer = template.load_tokenizer(TARGET)
    prompts: dict[str, list[int]] = {}
    for source, convert in SOURCES.items():
        lines = (PROMPTS / f"{source}.jsonl").read_bytes().splitlines()[:ASKED]
        for number, line in enumerate(lines):
            prompt = convert(orjson.loads(line))
            assert not isinstance(prompt, str), prompt
            prompts[f"{source}-{number:03d}"] = template.render(tokenizer, prompt, True)
    answers = reference.greedy(reference.load(TARGET, torch.float32), prompts, MAX_NEW_TOKENS)
    names = [name for name in prompts if len(answers[name]) > 1]
    rows = _with_states({name: prompts[name] + answers[name] for name in names}, prompts)
    trained = [row for row in rows if int(row.sample_id[-3:]) >= HELD_OUT]
    return trained, [row for row in rows if int(row.sample_id[-3:]) < HELD_OUT]


def _with_states(ids: dict[str, list[int]], prompts: dict[str, list[int]]) -> list[Row]:
    backend = TransformersBackend(TARGET, torch.float32, AUX_LAYERS)
    names = sorted(ids, key=lambda name: len(ids[name]))
    rows = []
    for begin in range(0, len(names), STATES_ROWS):
        batch = names[begin : begin + STATES_ROWS]
        for name, made in zip(batch, backend.features([ids[n] for n in batch]), strict=True):
            tokens = torch.tensor(ids[name])
            rows.append(Row(name, tokens, len(prompts[name]), made.aux_TAD, made.final_TD))
    return rows
