"""What a valid row is: fields, types, values, counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.fake_engine import CLOSE, FAMILY, STOP, TEXT, TOOL, VOCAB

from drafter.kinds import reason_class
from drafter.rows import Marked, check_row, mark

GOOD: dict[str, Any] = {
    "sample_id": "B1-0",
    "output_ids": [TEXT, CLOSE, TEXT, STOP],
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "finish_reason": "stop",
}
CUT = {**GOOD, "output_ids": [TEXT] * 4, "finish_reason": "length"}


def ids(output_ids: list[Any]) -> dict[str, Any]:
    return {"output_ids": output_ids, "completion_tokens": len(output_ids)}


@pytest.mark.parametrize("row", [GOOD, CUT, {**GOOD, **ids([STOP])}])
def test_good_rows_pass(row: dict[str, Any]) -> None:
    assert check_row(row, FAMILY, 7) is None


@pytest.mark.parametrize("value", [None, [], "x", 1, [GOOD], True])
def test_what_is_no_object_is_refused(value: object) -> None:
    assert reason_class(check_row(value, FAMILY, 7) or "") == "not an object"


@pytest.mark.parametrize("key", GOOD)
def test_every_key_must_be_there(key: str) -> None:
    row = {k: v for k, v in GOOD.items() if k != key}
    assert reason_class(check_row(row, FAMILY, 7) or "") == "wrong keys"


DAMAGE = [
    ({"text": "x"}, "wrong keys"),
    ({"sample_id": 1}, "wrong type of sample_id"),
    ({"sample_id": None}, "wrong type of sample_id"),
    ({"sample_id": ""}, "empty sample_id"),
    ({"output_ids": None}, "wrong type of output_ids"),
    ({"output_ids": "AQID"}, "wrong type of output_ids"),
    ({"output_ids": {"0": 1}}, "wrong type of output_ids"),
    (ids([]), "empty output_ids"),
    (ids([TEXT, True, STOP]), "wrong type in output_ids"),
    (ids([TEXT, 1.0, STOP]), "wrong type in output_ids"),
    (ids([TEXT, None, STOP]), "wrong type in output_ids"),
    (ids([TEXT, "5", STOP]), "wrong type in output_ids"),
    (ids([[TEXT], STOP]), "wrong type in output_ids"),
    (ids([-1, STOP]), "id outside the vocabulary"),
    (ids([VOCAB, STOP]), "id outside the vocabulary"),
    (ids([2**40, STOP]), "id outside the vocabulary"),
    ({"prompt_tokens": True}, "wrong type of prompt_tokens"),
    ({"prompt_tokens": "7"}, "wrong type of prompt_tokens"),
    ({"prompt_tokens": 7.0}, "wrong type of prompt_tokens"),
    ({"prompt_tokens": 0}, "wrong prompt_tokens"),
    ({"prompt_tokens": 8}, "wrong prompt_tokens"),
    ({"completion_tokens": True}, "wrong type of completion_tokens"),
    ({"completion_tokens": 5}, "wrong completion_tokens"),
    ({"completion_tokens": 0}, "wrong completion_tokens"),
    ({"finish_reason": None}, "wrong type of finish_reason"),
    ({"finish_reason": {"type": "stop"}}, "wrong type of finish_reason"),
    ({"finish_reason": "abort"}, "unknown finish_reason"),
    ({"finish_reason": ""}, "unknown finish_reason"),
    (ids([TEXT, CLOSE, TEXT]), "no stop id at the end"),
    (ids([STOP, TEXT]), "no stop id at the end"),
]


@pytest.mark.parametrize(("change", "reason"), DAMAGE)
def test_damage_is_named(change: dict[str, Any], reason: str) -> None:
    assert reason_class(check_row({**GOOD, **change}, FAMILY, 7) or "") == reason


def test_an_unknown_prompt_length_is_not_compared() -> None:
    assert check_row({**GOOD, "prompt_tokens": 99}, FAMILY, None) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(GOOD)), json_values)
def test_random_damage_is_never_accepted_and_never_crashes(key: str, value: Any) -> None:
    harmless = (key == "sample_id" and isinstance(value, str) and value) or (
        key == "finish_reason" and value in ("stop", "length")
    )
    same = type(value) is type(GOOD[key]) and value == GOOD[key]
    assert (check_row({**GOOD, key: value}, FAMILY, 7) is None) == bool(harmless or same)


def test_control_ids_are_found_where_they_are_and_words_are_not() -> None:
    marked = mark([TEXT, CLOSE, TEXT, TOOL, VOCAB - 1, STOP], FAMILY)
    assert isinstance(marked, Marked)
    assert (marked.at, marked.tokens) == ([1, 3, 5], [CLOSE, TOOL, STOP])
    assert marked.ids.tolist() == [TEXT, CLOSE, TEXT, TOOL, VOCAB - 1, STOP]


@pytest.mark.parametrize(
    ("output_ids", "names"),
    [
        ([TEXT, -7, STOP], "-7, needs 0..999"),
        ([TEXT, VOCAB, -7], f"{VOCAB}, needs"),
        ([TEXT, 2**32 + TEXT, STOP], f"{2**32 + TEXT}, needs"),
        ([TEXT, 2**64 - 1, STOP], f"{2**64 - 1}, needs"),
        ([TEXT, 1e300, STOP], "1e+300 is float"),
        ([TEXT, False, STOP], "False is bool"),
        ([0, TEXT, 1, True, STOP], "True is bool"),
        ([True, VOCAB], "True is bool"),
        ([[TEXT, STOP]], "[10, 5] is list"),
    ],
)
def test_the_first_id_that_is_none_is_named(output_ids: list[Any], names: str) -> None:
    assert names in str(mark(output_ids, FAMILY))


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1))
def test_any_ids_of_the_vocabulary_are_ids(output_ids: list[int]) -> None:
    marked = mark(output_ids, FAMILY)
    assert isinstance(marked, Marked) and marked.ids.tolist() == output_ids
    named = [(i, x) for i, x in enumerate(output_ids) if x in FAMILY.controls]
    assert list(zip(marked.at, marked.tokens, strict=True)) == named
