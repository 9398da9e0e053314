"""The draft vocabulary: which tokens are chosen, and maps that cannot be wrong unnoticed."""

import json

import pytest
import torch

from drafter.errors import DataError
from drafter.training import vocabulary


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
        pytest.param(torch.tensor([-1, 2, 2]), T2D, id="an id below the first"),
        pytest.param(D2T.float(), T2D, id="offsets as floats"),
        pytest.param(D2T[:, None], T2D, id="offsets as a column"),
        pytest.param(D2T[:0], T2D[:0], id="nothing"),
    ],
)
def test_maps_that_are_no_bijection_are_refused_by_name(d2t, t2d):
    vocabulary.check(D2T, T2D, "here")
    with pytest.raises(DataError, match=r"model-x: .*d2t"):
        vocabulary.check(d2t, t2d, "model-x")


@pytest.mark.parametrize("t2d", [T2D, T2D.int(), T2D[None]])
def test_a_mask_that_is_no_mask_is_refused(t2d):
    if t2d is T2D:
        vocabulary.check(D2T, t2d, "here")
        return
    with pytest.raises(DataError, match=r"here: t2d is .* needed is one row of bool: restore it"):
        vocabulary.check(D2T, t2d, "here")


IDS = torch.tensor([1, 3, 4])
"""Target ids, as TorchSpec's pruning took them for offsets."""


@pytest.mark.parametrize("t2d", [T2D, None], ids=["with t2d", "without"])
def test_maps_of_others_are_completed(t2d):
    d2t, derived = vocabulary.from_others(D2T, t2d, 6, "here")
    assert torch.equal(d2t, D2T) and torch.equal(derived, T2D)


@pytest.mark.parametrize(
    ("d2t", "t2d", "said"),
    [
        pytest.param(IDS, T2D, "holds target ids .those that t2d marks", id="ids"),
        pytest.param(IDS, None, "holds target ids .without t2d to tell", id="ids without a mask"),
        pytest.param(torch.tensor([0, 2, 4]), None, "subtract each one's draft id",
                     id="ids that would do as offsets"),
        pytest.param(IDS + 2, T2D, "from 3 to 8, not each once", id="beyond the target"),
        pytest.param(D2T - 2, None, "from -1 to 2", id="below it"),
        pytest.param(torch.tensor([1, 0, 2]), None, "not each once, ascending", id="one twice"),
        pytest.param(torch.tensor([3, 2, -1]), None, "not each once, ascending", id="descending"),
        pytest.param(D2T, ~T2D, "d2t names 3 target ids and t2d marks 3", id="another mask"),
        pytest.param(D2T, T2D[:5], "t2d covers 5 target ids, the target has 6", id="short mask"),
        pytest.param(D2T.int(), T2D, "d2t is .3. of torch.int32", id="narrow offsets"),
        pytest.param(D2T, T2D.int(), "t2d is .6. of torch.int32", id="a mask of numbers"),
        pytest.param(D2T[:0], None, "d2t is .0.", id="nothing"),
    ],
)  # fmt: skip
def test_maps_of_others_that_mean_something_else_are_refused(d2t, t2d, said):
    with pytest.raises(DataError, match=f"elsewhere: .*{said}"):
        vocabulary.from_others(d2t, t2d, 6, "elsewhere")


def test_offsets_of_a_vocabulary_without_neighbours_need_the_mask():
    d2t = torch.tensor([0, 1, 2])
    t2d = torch.tensor([True, False, True, False, True, False])
    assert torch.equal(vocabulary.from_others(d2t, t2d, 6, "here")[0], d2t)
    with pytest.raises(DataError, match="without t2d"):
        vocabulary.from_others(d2t, None, 6, "here")


def test_control_tokens_come_from_either_tokenizer_file(tmp_path):
    assert vocabulary.control_ids(tmp_path) == []
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9}, {"id": 3}]}))
    config = {"added_tokens_decoder": {"3": {}, "12": {}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert vocabulary.control_ids(tmp_path) == [3, 9, 12]
