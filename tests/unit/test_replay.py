"""Acceptance length against an engine played by hand, one position and one token at a time."""

from pathlib import Path

import pytest
import torch
from unit.drafter_site import EMBED, VOCAB, DrafterSite, TableBackend, greedy, states

from drafter import export, serving, train
from drafter.evaluation.replay import Tally, overall, replay, tally
from drafter.extraction.shards import Row
from drafter.files import write_json
from drafter.training import checkpoint, corpus

CONFIG = {"model_type": "llama", "num_hidden_layers": 8}
"""Of the target: what decides how SGLang counts its layers."""


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    torch.set_num_threads(1)
    site = DrafterSite(
        tmp_path_factory.mktemp("replay"),
        num_rows=30,
        train={"steps": 60, "checkpoint_every_steps": 60, "no_states_baseline": False},
    )
    train.run(site.job("train"))
    rows = corpus.collect(site.workspace, site.recipe)
    head = corpus.read_head(site.recipe, rows)
    return checkpoint.load_drafter(site.run.checkpoint(60), head)


def greedy_rows(count: int) -> list[Row]:
    rows = []
    for i in range(count):
        prompt = torch.randint(1, VOCAB, (2 + i % 7,), generator=torch.Generator().manual_seed(i))
        ids = prompt.tolist() + greedy(prompt.tolist(), 1 + 5 * i % 23)
        rows.append(Row(f"row-{i}", torch.tensor(ids), len(prompt), *states(ids)))
    return rows


def served_by_hand(directory: Path, rows: list[Row], drafted: int) -> Tally:
    """Draft with the exported files and a growing cache, verify, accept, go on."""
    served = serving.read(directory, "sglang", CONFIG)
    generated = verifications = 0
    for row in rows:
        ids = row.input_ids_T
        newest = row.prompt_tokens  # the target wrote it in prefill
        while newest < len(ids) - 1:
            proposed: list[int] = []
            for _ in range(drafted):
                followed = torch.tensor(proposed, dtype=torch.int64)[None]
                aux_TAH = row.aux_TAD[:newest]
                logits = serving.drafts(served, ids[: newest + 1], aux_TAH, EMBED, followed)
                proposed.append(int(served.draft_ids[logits[0, -1].argmax()]))
            accepted = 0
            while (
                accepted < drafted
                and newest + 1 + accepted < len(ids)
                and proposed[accepted] == ids[newest + 1 + accepted]
            ):
                accepted += 1
            step = min(accepted + 1, len(ids) - 1 - newest)
            newest += step
            generated += step
            verifications += 1
    return Tally(generated, verifications)


@pytest.mark.parametrize("drafted", [1, 3, 5])
def test_replay_counts_what_an_engine_would(drafter, tmp_path, drafted):
    write_json(tmp_path / "config.json", export.sglang_config(drafter.shape, "float32", CONFIG))
    export.write_weights(tmp_path, "sglang", drafter, torch.float32)
    rows = greedy_rows(12)
    expected = served_by_hand(tmp_path, rows, drafted)
    assert replay(drafter, rows, drafted) == expected
    assert 1 < expected.acceptance_length < drafted + 1


def test_without_states_it_accepts_less(drafter):
    rows = greedy_rows(20)
    seen, blind = replay(drafter, rows, 3), replay(drafter, rows, 3, states=False)
    assert seen.generated == blind.generated and seen.verifications < blind.verifications


def test_rows_without_a_draft_count_nothing(drafter):
    ids = torch.tensor([5, 6, 7])
    row = Row("short", ids, 2, *states(ids.tolist()))
    assert replay(drafter, [row], 3) == Tally(0, 0)
    assert Tally().acceptance_length is None


@pytest.mark.parametrize(
    ("drafted", "verifications"),
    [
        pytest.param([[1, 2, 3, 4, 5]] * 1, 3, id="one token each time: 2 + 2 + 1"),
        pytest.param([[9, 9, 9, 9, 9]] * 2, 5, id="never right: one at a time"),
        pytest.param([[1, 9, 3, 4, 5], [2, 9, 4, 5, 9]], 2, id="accepts 2, then the last two"),
        pytest.param([[9, 2, 3, 4, 5], [2, 9, 4, 5, 9]], 3, id="a right second step needs a first"),
    ],
)
def test_the_walk(drafted, verifications):
    following, left = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([5, 4, 3, 2, 1])
    assert tally(torch.tensor(drafted), following, left) == Tally(5, verifications)


def test_a_draft_does_not_run_on_into_the_next_row():
    following, left = torch.tensor([1, 2, 1, 2]), torch.tensor([2, 1, 2, 1])
    everything = torch.tensor([[1, 2, 1, 2], [2, 1, 2, 1], [1, 2, 1, 2]])
    assert tally(everything, following, left) == Tally(4, 2)


def test_overall_weighs_every_verification_the_same():
    one = {"sums": {"trained": {"generated": 30, "verifications": 10}, "no_states": None}}
    two = {"sums": {"trained": {"generated": 10, "verifications": 10}, "no_states": None}}
    assert overall([one, two]) == {"trained": 2.0, "no_states": None}


def test_the_backend_of_these_tests_gives_the_states_of_these_tests():
    [features] = TableBackend(Path(), torch.float32, (1, 2, 3)).features([[3, 4, 5]])
    assert torch.equal(features.aux_TAD, states([3, 4, 5])[0])
