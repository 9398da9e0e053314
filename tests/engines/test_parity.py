"""The drafter beside speculators 0.9.0: same weights, same rows, same numbers.

Two things differ by default, and both are set equal here.

Loss. Theirs is the divergence KL(target || drafter) over the draft vocabulary, ours the soft cross
entropy, which is the same plus the entropy of the target: a constant, so gradients are equal. Each
step's mean entropy is taken off ours before losses are compared. They divide by the sum of the mask
(plus 1e-5), we by the number of starts.

Supervised slots. Step 0: theirs are ours and one more per row, the slot that reads the last token.
Where that is the stop token, it is trained on a distribution that nothing is ever drafted from.
Step i: we follow the drafts that start in a supervised slot and end before their row does. They
judge every slot whose i-th follower is supervised: also those of drafts that began up to i slots
before the first written token, in the prompt, and, where the next row's prompt is shorter than i,
those of drafts that run over into the next row and are judged by it. The first test counts them,
the others have speculators leave them out.

Their output matrix is frozen, so its gradient is left out. Distances are relative to the largest
number of the tensor that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.peer import Peer, speculators, write_export, write_rows
from safetensors.torch import load_file
from torch import Tensor
from unit.random_targets import AUX_LAYERS, VOCAB, one_thread, save_target

from drafter.extraction.shards import Row
from drafter.target_head import TargetHead, load_head, text_config
from drafter.training import starting_point
from drafter.training.alignment import Batch, align
from drafter.training.loss import Judge, soft_cross_entropy
from drafter.training.model import Drafter, new_drafter, shape_for

DECAY, DRAFT_VOCAB = 0.8, 40
SHAPES = {
    "grouped queries": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "a key per query": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 24, "rope_theta": 5e5},
}
PACKED = {
    "several rows": [(23, 9), (31, 8), (17, 12), (40, 20)],
    "a prompt of one token, one written token to draft": [(12, 1), (7, 5), (19, 1), (8, 1)],
}
"""(tokens, prompt tokens) of each row. None ends in a stop token: all are cut by length."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with speculators(threads=1) as peer:
        yield peer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    save_target(directory)
    return directory


@pytest.fixture(scope="module")
def head(target: Path) -> TargetHead:
    return load_head(target)


@pytest.fixture(params=SHAPES)
def drafter(request: pytest.FixtureRequest, target: Path, head: TargetHead) -> Drafter:
    """Untrained, but no norm is all ones and its output matrix is not the target's."""
    shape = replace(
        shape_for(text_config(target), AUX_LAYERS, DRAFT_VOCAB, 80), **SHAPES[request.param]
    )
    chosen = torch.arange(VOCAB)[-2 * DRAFT_VOCAB :: 2]
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    made = new_drafter(shape, head, chosen - torch.arange(DRAFT_VOCAB), t2d, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += (0.2 if parameter.dim() == 1 else 0.05) * noise
    return made


def rows_of(lengths: list[tuple[int, int]], hidden: int) -> list[Row]:
    generator = torch.Generator().manual_seed(2)
    return [
        Row(
            sample_id=f"B1-{number}",
            input_ids_T=torch.randint(0, VOCAB, (tokens,), generator=generator),
            prompt_tokens=prompt_tokens,
            aux_TAD=torch.randn(tokens, len(AUX_LAYERS), hidden, generator=generator),
            final_TD=torch.randn(tokens, hidden, generator=generator),
        )
        for number, (tokens, prompt_tokens) in enumerate(lengths)
    ]


def begin(peer: Peer, directory: Path, rows: list[Row], attention: str = "eager") -> list[str]:
    """Load ``directory`` and ``rows`` as one batch; names of what would be trained."""
    path = write_rows(directory / "rows.safetensors", rows)
    trained: list[str] = peer.ask("load", directory=str(directory), attention=attention)["trained"]
    peer.ask("data", path=path, batches=[list(range(len(rows)))])
    return trained


def distance(one: Tensor, other: Tensor) -> float:
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max())


def slots(rows: list[Row]) -> Tensor:
    """int64 [Q]: where each of our starts lies among their slots, of which a row has one more."""
    batch = align(rows)
    shift = [torch.full((span.end - span.first,), n) for n, span in enumerate(batch.spans)]
    return batch.start_Q + torch.cat(shift)


def entropies(judge: Judge, steps: int) -> list[float]:
    """Mean over the starts of each step of the entropy of what judges them."""
    log = (judge.normed_QH @ judge.weight_DH.T).log_softmax(-1)
    entropy_Q = -(log.exp() * log).sum(-1)
    means = []
    for step in range(steps):
        starts = (judge.left_Q > step).nonzero().flatten()
        means.append(float(entropy_Q[starts + step].mean()) if len(starts) else 0.0)
    return means


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
def test_by_default_more_slots_are_supervised_than_are_drafted_from(
    peer: Peer, target: Path, drafter: Drafter, tmp_path: Path, lengths: list[tuple[int, int]]
) -> None:
    rows = rows_of(lengths, drafter.shape.hidden_size)
    begin(peer, write_export(tmp_path, drafter, target), rows)
    command: dict[str, Any] = {"batch": 0, "ttt_steps": 3, "decay": DECAY}
    command["output"] = str(tmp_path / "judged.safetensors")
    mask = torch.cat([torch.arange(1, tokens) >= prompt for tokens, prompt in lengths])
    theirs = [int(mask[step:].sum()) for step in range(3)]
    assert peer.ask("judge", ours=False, **command)["supervised"] == theirs
    ours = [int((align(rows).left_Q > step).sum()) for step in range(3)]
    assert theirs[0] == ours[0] + len(rows)
    assert all(extra > few for extra, few in zip(theirs[1:], ours[1:], strict=True))


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_logits_losses_and_gradients_are_those_of_speculators(
    peer: Peer,
    target: Path,
    head: TargetHead,
    drafter: Drafter,
    tmp_path: Path,
    lengths: list[tuple[int, int]],
    attention: str,
    steps: int,
    say: Callable[[str], None],
) -> None:
    rows = rows_of(lengths, drafter.shape.hidden_size)
    trained = begin(peer, write_export(tmp_path, drafter, target), rows, attention)
    output = tmp_path / "judged.safetensors"
    answer = peer.ask("judge", batch=0, ttt_steps=steps, decay=DECAY, output=str(output), ours=True)
    theirs = load_file(output)

    batch: Batch = align(rows)
    states = drafter.train_states(batch, steps)
    judge = Judge(head.normed(batch.final_QH), head.lm_head[drafter.draft_ids], batch.left_Q)
    losses = soft_cross_entropy(states, drafter.lm_head.weight, judge, DECAY)
    losses.total.backward()

    worst = {"logits": 0.0, "loss": 0.0, "gradients": 0.0}
    for step, state in enumerate(states):
        judged = batch.left_Q > step
        if judged.any():
            expected = theirs[f"logits.{step}"][slots(rows)][judged]
            apart = distance(drafter.lm_head(state)[judged], expected)
            worst["logits"] = max(worst["logits"], apart)
    divergences = losses.mean - torch.tensor(entropies(judge, steps))
    weighted = DECAY ** torch.arange(steps) * divergences
    # Each step as it counts in the sum, then the sum.
    for found, expected_loss in zip(
        [*weighted.tolist(), float(weighted.sum())],
        [*answer["losses"], answer["loss"]],
        strict=True,
    ):
        worst["loss"] = max(worst["loss"], abs(found - expected_loss))
    names = {
        name.replace("midlayer.", "layers.0."): parameter
        for name, parameter in drafter.named_parameters()
        if name != "lm_head.weight"
    }
    assert sorted(names) == trained
    for name, parameter in names.items():
        apart = distance(parameter.grad, theirs[f"gradient.{name}"])
        worst["gradients"] = max(worst["gradients"], apart)
    say(f"{attention}, {steps} steps: " + ", ".join(f"{n} {x:.1e}" for n, x in worst.items()))
    assert worst["logits"] < 1e-5
    assert worst["loss"] < 1e-4
    assert worst["gradients"] < 1e-4


def test_each_reads_the_others_checkpoint(
    peer: Peer, target: Path, head: TargetHead, drafter: Drafter, tmp_path: Path
) -> None:
    rows = rows_of(PACKED["several rows"], drafter.shape.hidden_size)
    begin(peer, write_export(tmp_path, drafter, target), rows)
    saved = tmp_path / "saved"
    # A step, so that what is read back is neither what we wrote nor what was at hand.
    peer.ask("train", batches=[0], rates=[1e-2], ttt_steps=3, decay=DECAY, clip=0.5)
    peer.ask("save", directory=str(saved))
    output = tmp_path / "judged.safetensors"
    peer.ask("judge", batch=0, ttt_steps=3, decay=DECAY, output=str(output), ours=True)

    read = starting_point.read(saved, text_config(target), head)
    assert read.shape == drafter.shape and torch.equal(read.draft_ids, drafter.draft_ids)
    assert distance(read.fc.weight, drafter.fc.weight) > 1e-3
    batch = align(rows)
    for step, state in enumerate(read.train_states(batch, 3)):
        judged = batch.left_Q > step
        expected = load_file(output)[f"logits.{step}"][slots(rows)][judged]
        assert distance(read.lm_head(state)[judged], expected) < 1e-5
