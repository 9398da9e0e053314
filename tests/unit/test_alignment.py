"""Which slot reads what and predicts what; values name the positions they come from."""

import pytest
import torch

from drafter.extraction.shards import Row
from drafter.training.alignment import Span, align, num_starts

HOW, FAR, WHAT, TWO, MILES, END = range(6)


def row(tokens: int, prompt: int, first: int = 0) -> Row:
    """Tokens, auxiliary states and final states all say the position they stand at."""
    position = torch.arange(first, first + tokens)
    return Row(
        sample_id=f"row of {tokens}",
        input_ids_T=position,
        prompt_tokens=prompt,
        aux_TAD=position[:, None, None].expand(tokens, 3, 2),
        final_TD=position[:, None].expand(tokens, 2),
    )


def test_the_six_tokens_of_the_docstring():
    batch = align([row(6, prompt=3)])
    assert batch.read_S.tolist() == [FAR, WHAT, TWO, MILES]
    assert batch.aux_SAH[:, 0, 0].tolist() == [HOW, FAR, WHAT, TWO]
    assert batch.position_S.tolist() == [0, 1, 2, 3]
    assert batch.start_Q.tolist() == [2, 3]
    assert batch.read_S[batch.start_Q].tolist() == [TWO, MILES]
    assert batch.next_Q.tolist() == [MILES, END]
    assert batch.final_QH[:, 0].tolist() == [TWO, MILES]
    assert batch.left_Q.tolist() == [2, 1]


def test_a_slot_that_reads_the_prompt_or_the_end_is_not_supervised():
    batch = align([row(6, prompt=3)])
    supervised = set(batch.read_S[batch.start_Q].tolist())
    assert supervised == {TWO, MILES}
    assert not supervised & {HOW, FAR, WHAT, END}


def test_a_later_step_reads_what_the_target_wrote_and_stops_before_the_end():
    batch = align([row(8, prompt=3)])
    starts = [(int(q), int(batch.read_S[batch.start_Q[q]])) for q in range(len(batch.start_Q))]
    assert starts == [(0, 3), (1, 4), (2, 5), (3, 6)]
    for step in (1, 2):
        read = batch.next_Q.roll(1 - step)
        judged = batch.final_QH.roll(-step, 0)[:, 0]
        for q, first in starts:
            if batch.left_Q[q] > step:
                assert read[q] == first + step == judged[q]
                assert first + step < 7


def test_rows_lie_one_after_another_and_positions_begin_anew():
    batch = align([row(6, prompt=3), row(4, prompt=1, first=10)])
    assert batch.spans == (Span(0, 2, 4, 0), Span(4, 4, 6, 2))
    assert batch.read_S.tolist() == [1, 2, 3, 4, 11, 12]
    assert batch.position_S.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.start_Q.tolist() == [2, 3, 4, 5]
    assert batch.next_Q.tolist() == [4, 5, 12, 13]
    assert batch.left_Q.tolist() == [2, 1, 2, 1]


def test_without_states_only_the_states_are_gone():
    batch = align([row(6, prompt=3)])
    blind = batch.without_states()
    assert not blind.aux_SAH.any()
    assert torch.equal(blind.final_QH, batch.final_QH)


@pytest.mark.parametrize(
    ("tokens", "prompt", "starts"), [(6, 3, 2), (5, 3, 1), (4, 3, 0), (3, 3, 0), (2, 1, 0)]
)
def test_a_draft_starts_at_each_written_token_that_another_follows(tokens, prompt, starts):
    assert num_starts(tokens, prompt) == starts


def test_states_of_other_tokens_are_refused_with_their_lengths():
    whole, short = row(6, prompt=3), row(5, prompt=3)
    mixed = Row("mixed", whole.input_ids_T, 3, short.aux_TAD, whole.final_TD)
    with pytest.raises(ValueError, match=r"mixed: .* input_ids 6, aux 5, final 6"):
        align([mixed])


@pytest.mark.parametrize(("tokens", "prompt"), [(4, 3), (6, 0)])
def test_a_row_in_which_no_draft_can_start_is_refused(tokens, prompt):
    with pytest.raises(ValueError, match=f"{tokens} tokens of which {prompt}"):
        align([row(tokens, prompt)])
