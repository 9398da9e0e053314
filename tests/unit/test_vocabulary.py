"""The draft vocabulary: which tokens are chosen, and maps that cannot be wrong unnoticed."""

import json

import pytest
import torch

from drafter import vocabulary
from drafter.errors import DataError


@pytest.mark.parametrize(
    ("counts", "size", "control", "chosen"),
    [
        pytest.param([5, 0, 9, 1, 7], 3, [], [0, 2, 4], id="most frequent"),
        pytest.param([5, 0, 9, 1, 7], 3, [3], [2, 3, 4], id="a seen control token comes first"),
        pytest.param([5, 0, 9, 1, 7], 3, [1], [0, 2, 4], id="an unseen control token does not"),
        pytest.param([5, 0, 9, 1, 7], 3, [99], [0, 2, 4], id="nor one beyond the model"),
        pytest.param([2, 2, 2, 2], 2, [], [0, 1], id="ties go to the lower id"),
        pytest.param([0, 0, 4, 0], 3, [], [0, 1, 2], id="unseen tokens fill the rest"),
        pytest.param([1, 2], 50, [], [0, 1], id="never more than the target has"),
    ],
)
def test_selection(counts, size, control, chosen):
    d2t, t2d = vocabulary.select(torch.tensor(counts), size, control)
    assert (d2t + torch.arange(len(d2t))).tolist() == chosen
    assert t2d.nonzero().flatten().tolist() == chosen
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    vocabulary.check(d2t, t2d, "here")


def test_counting_is_over_what_the_target_wrote():
    counts = vocabulary.token_counts([torch.tensor([1, 1, 4]), torch.tensor([4])], 6)
    assert counts.tolist() == [0, 2, 0, 0, 2, 0]


def test_a_token_outside_the_target_is_refused():
    with pytest.raises(DataError, match="token 6, but the target has 6"):
        vocabulary.token_counts([torch.tensor([6])], 6)


D2T, T2D = torch.tensor([1, 2, 2]), torch.tensor([False, True, False, True, True, False])


@pytest.mark.parametrize(
    ("d2t", "t2d"),
    [
        pytest.param(torch.tensor([1, 3, 4]), T2D, id="ids instead of offsets"),
        pytest.param(torch.tensor([1, 1, 2]), T2D, id="an offset off by one"),
        pytest.param(torch.tensor([1, 0, 2]), T2D, id="two draft ids for one target id"),
        pytest.param(D2T, ~T2D, id="mask inverted"),
        pytest.param(D2T[:2], T2D, id="too few"),
        pytest.param(torch.tensor([3, 2, -1]), T2D, id="not ascending"),
    ],
)
def test_maps_that_are_no_bijection_are_refused_by_name(d2t, t2d):
    vocabulary.check(D2T, T2D, "here")
    with pytest.raises(DataError, match="model-x: d2t"):
        vocabulary.check(d2t, t2d, "model-x")


def test_control_tokens_come_from_either_tokenizer_file(tmp_path):
    assert vocabulary.control_ids(tmp_path) == []
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9}, {"id": 3}]}))
    config = {"added_tokens_decoder": {"3": {}, "12": {}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert vocabulary.control_ids(tmp_path) == [3, 9, 12]
