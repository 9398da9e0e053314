"""What a valid row is, and what its reasoning looks like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.fake_engine import BLANK, CLOSE, FAMILY, OPEN, STOP, TEXT, TOOL, TOOL_END, VOCAB

from drafter.rows import (
    Family,
    answered,
    check_row,
    reason_class,
    reasoning,
    tool_call_open,
    verdict,
)

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


OPENED = replace(FAMILY, prefilled=False)
REASONING: list[tuple[Family, list[int], str]] = [
    (FAMILY, [TEXT, CLOSE, TEXT, STOP], "closed"),
    (FAMILY, [TEXT, CLOSE], "closed"),
    (FAMILY, [TEXT, CLOSE, TEXT, CLOSE, STOP], "closed"),
    (FAMILY, [TEXT, CLOSE, TOOL, TEXT, STOP], "closed"),
    (FAMILY, [TEXT, TOOL, TEXT, STOP], "tool in thinking"),
    (FAMILY, [TEXT, TOOL, TEXT, CLOSE, STOP], "tool in thinking"),
    (FAMILY, [TEXT, TEXT], "truncated in thinking"),
    (FAMILY, [TEXT, TEXT, STOP], "unclosed"),
    (FAMILY, [STOP], "unclosed"),
    (FAMILY, [CLOSE, TEXT, STOP], "empty thinking"),
    (FAMILY, [BLANK, CLOSE, TEXT, STOP], "empty thinking"),
    (FAMILY, [BLANK, TOOL, TEXT, STOP], "empty thinking"),
    (FAMILY, [OPEN, BLANK, CLOSE, TEXT, STOP], "empty thinking"),
    (FAMILY, [OPEN, TEXT, CLOSE, TEXT, STOP], "closed"),
    (OPENED, [OPEN, TEXT, CLOSE, TEXT, STOP], "closed"),
    (OPENED, [OPEN, CLOSE, TEXT, STOP], "empty thinking"),
    (OPENED, [OPEN, TEXT], "truncated in thinking"),
    (OPENED, [TEXT, CLOSE, TEXT, STOP], "unclosed"),
    (OPENED, [TEXT, STOP], "unclosed"),
    (replace(FAMILY, tool_begin=frozenset()), [TEXT, TOOL, TEXT, STOP], "unclosed"),
]


@pytest.mark.parametrize(("family", "output_ids", "kind"), REASONING)
def test_reasoning_is_classified(family: Family, output_ids: list[int], kind: str) -> None:
    assert reasoning(output_ids, family) == kind


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([CLOSE, TEXT, STOP], True),
        ([CLOSE, TOOL, STOP], True),
        ([TOOL, STOP], True),
        ([CLOSE, STOP], False),
        ([CLOSE, BLANK, STOP], False),
        ([], False),
    ],
)
def test_an_answer_is_more_than_blank_and_stop(ids: list[int], wanted: bool) -> None:
    assert answered(ids, FAMILY) is wanted


@pytest.mark.parametrize(
    ("output_ids", "wanted"),
    [
        ([TEXT, STOP], False),
        ([TEXT, TOOL_END, STOP], False),
        ([TEXT, TOOL, TEXT, STOP], True),
        ([TEXT, TOOL, TEXT, TOOL_END, STOP], False),
        ([TEXT, TOOL, TOOL, TEXT, TOOL_END, TEXT, TOOL_END, STOP], False),
        ([TEXT, TOOL, TEXT, TOOL_END, TOOL, TEXT, STOP], True),
        ([TEXT, TOOL_END, TOOL, STOP], True),
    ],
)
def test_a_tool_call_is_closed_by_an_end_behind_its_begin(
    output_ids: list[int], wanted: bool
) -> None:
    assert tool_call_open(output_ids, FAMILY) is wanted
    # Nobody can tell where the family has no end, or none but the end of the answer.
    assert not tool_call_open(output_ids, replace(FAMILY, tool_end=frozenset()))
    assert not tool_call_open(output_ids, replace(FAMILY, tool_begin=frozenset()))


VERDICTS: list[tuple[bool, list[int], str, tuple[str, str]]] = [
    (True, [TEXT, CLOSE, TEXT, STOP], "stop", ("sound", "closed")),
    (True, [TEXT, TOOL, TEXT, TOOL_END, STOP], "stop", ("sound", "tool in thinking")),
    (True, [TEXT, CLOSE, TOOL, TEXT, TOOL_END, STOP], "stop", ("sound", "closed")),
    (True, [TEXT, CLOSE, TEXT], "length", ("sound", "closed")),
    (True, [TEXT, CLOSE, TOOL, TEXT], "length", ("sound", "closed")),
    (True, [TEXT, TOOL, TEXT], "length", ("sound", "tool in thinking")),
    (True, [TEXT, TEXT], "length", ("cut", "truncated in thinking")),
    (True, [TEXT, CLOSE], "length", ("cut", "no answer")),
    (True, [TEXT, CLOSE, STOP], "stop", ("broken", "no answer")),
    (True, [TEXT, STOP], "stop", ("broken", "unclosed")),
    (True, [CLOSE, TEXT, STOP], "stop", ("broken", "empty thinking")),
    (True, [TEXT, TOOL, TEXT, STOP], "stop", ("broken", "tool call not closed")),
    (True, [TEXT, CLOSE, TOOL, TEXT, STOP], "stop", ("broken", "tool call not closed")),
    (False, [TEXT, STOP], "stop", ("sound", "not thinking")),
    (False, [TOOL, TEXT, TOOL_END, STOP], "stop", ("sound", "not thinking")),
    (False, [TEXT, TEXT], "length", ("sound", "not thinking")),
    (False, [BLANK], "length", ("cut", "no answer")),
    (False, [STOP], "stop", ("broken", "no answer")),
    (False, [TOOL, TEXT, STOP], "stop", ("broken", "tool call not closed")),
    (False, [TEXT, CLOSE, TEXT, STOP], "stop", ("broken", "thinking although off")),
    (False, [OPEN, TEXT], "length", ("broken", "thinking although off")),
]


@pytest.mark.parametrize(("thinking", "output_ids", "finish", "wanted"), VERDICTS)
def test_the_content_is_judged_and_cuts_by_length_apart(
    thinking: bool, output_ids: list[int], finish: str, wanted: tuple[str, str]
) -> None:
    row = {**GOOD, "output_ids": output_ids, "finish_reason": finish}
    assert verdict(row, FAMILY, thinking) == wanted


def test_a_target_that_has_no_thinking_tokens_can_only_answer() -> None:
    family = replace(FAMILY, think_open=None, think_close=None, prefilled=False)
    row = {**GOOD, "output_ids": [TEXT, CLOSE, STOP]}
    assert verdict(row, family, False) == ("sound", "not thinking")
