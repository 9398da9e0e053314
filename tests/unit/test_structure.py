"""How an answer is built, told from its ids: thinking, answer, tool calls, end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.fake_engine import BLANK, CLOSE, FAMILY, OPEN, STOP, TEXT, TOOL, TOOL_END

from drafter.rows import Family, Marked, mark
from drafter.validation.structure import look, reasoning, remarks, verdict

USER = 7
"""A control id that marks up messages."""


def marked(output_ids: list[int], family: Family = FAMILY) -> Marked:
    found = mark(output_ids, family)
    assert isinstance(found, Marked)
    return found


def row(output_ids: list[int], finish: str = "stop") -> dict[str, Any]:
    return {"output_ids": output_ids, "finish_reason": finish}


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
    cut = output_ids[-1] not in family.stop_ids
    assert reasoning(marked(output_ids, family), family, cut) == kind


@pytest.mark.parametrize(("family", "output_ids"), [(FAMILY, [TEXT]), (OPENED, [OPEN, TEXT])])
def test_what_an_engine_says_stopped_was_not_cut_though_its_stop_id_is_missing(
    family: Family, output_ids: list[int]
) -> None:
    assert reasoning(marked(output_ids, family), family, False) == "unclosed"
    assert verdict(row(output_ids), family, True) == ("broken", "unclosed")


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([TEXT, STOP], True),
        ([TOOL, STOP], True),
        ([BLANK, TEXT], True),
        ([STOP], False),
        ([BLANK, STOP], False),
        ([], False),
    ],
)
def test_an_answer_is_more_than_blank_and_stop(ids: list[int], wanted: bool) -> None:
    family = replace(FAMILY, tool_end=frozenset())
    kind = look(marked([TEXT, CLOSE, *ids], family), family, True, False).kind
    assert (kind == "closed") is wanted


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
    def is_open(family: Family) -> bool:
        return look(marked(output_ids, family), family, False, True).is_call_open

    assert is_open(FAMILY) is wanted
    # Nobody can tell where the family has no end, or none but the end of the answer.
    assert not is_open(replace(FAMILY, tool_end=frozenset()))
    assert not is_open(replace(FAMILY, tool_begin=frozenset()))


VERDICTS: list[tuple[bool, list[int], str, tuple[str, str]]] = [
    (True, [TEXT, CLOSE, TEXT, STOP], "stop", ("sound", "closed")),
    (True, [TEXT, TOOL, TEXT, TOOL_END, STOP], "stop", ("sound", "tool in thinking")),
    (True, [TEXT, CLOSE, TOOL, TEXT, TOOL_END, STOP], "stop", ("sound", "closed")),
    (True, [TEXT, CLOSE, TEXT], "length", ("sound", "closed")),
    (True, [TEXT, CLOSE, TOOL, TEXT], "length", ("sound", "closed")),
    (True, [TEXT, TOOL, TEXT], "length", ("sound", "tool in thinking")),
    (True, [TEXT, TEXT], "length", ("cut", "truncated in thinking")),
    (True, [TEXT, CLOSE], "length", ("cut", "no answer")),
    (True, [TEXT, CLOSE, STOP], "length", ("broken", "no answer")),
    (True, [TEXT, STOP], "length", ("broken", "unclosed")),
    (True, [TEXT, CLOSE, TEXT, STOP], "length", ("sound", "closed")),
    (True, [TEXT, CLOSE, TOOL, TEXT, STOP], "length", ("broken", "tool call not closed")),
    (True, [TEXT, CLOSE, STOP], "stop", ("broken", "no answer")),
    (True, [TEXT, STOP], "stop", ("broken", "unclosed")),
    (True, [CLOSE, TEXT, STOP], "stop", ("broken", "empty thinking")),
    (True, [TEXT, TOOL, TEXT, STOP], "stop", ("broken", "tool call not closed")),
    (True, [TEXT, CLOSE, TOOL, TEXT, STOP], "stop", ("broken", "tool call not closed")),
    (False, [TEXT, STOP], "stop", ("sound", "not thinking")),
    (False, [TOOL, TEXT, TOOL_END, STOP], "stop", ("sound", "not thinking")),
    (False, [TEXT, TEXT], "length", ("sound", "not thinking")),
    (False, [BLANK], "length", ("cut", "no answer")),
    (False, [STOP], "length", ("broken", "no answer")),
    (False, [STOP], "stop", ("broken", "no answer")),
    (False, [TOOL, TEXT, STOP], "stop", ("broken", "tool call not closed")),
    (False, [TEXT, CLOSE, TEXT, STOP], "stop", ("broken", "thinking although off")),
    (False, [OPEN, TEXT], "length", ("broken", "thinking although off")),
]


@pytest.mark.parametrize(("thinking", "output_ids", "finish", "wanted"), VERDICTS)
def test_the_content_is_judged_and_cuts_by_length_apart(
    thinking: bool, output_ids: list[int], finish: str, wanted: tuple[str, str]
) -> None:
    assert verdict(row(output_ids, finish), FAMILY, thinking) == wanted


def test_a_target_that_has_no_thinking_tokens_can_only_answer() -> None:
    family = replace(FAMILY, think_open=None, think_close=None, prefilled=False)
    assert verdict(row([TEXT, CLOSE, STOP]), family, False) == ("sound", "not thinking")


WITH_USER = replace(FAMILY, other_controls=frozenset({USER}))
REMARKS: list[tuple[list[int], str, list[str]]] = [
    ([TEXT, CLOSE, TEXT, STOP], "stop", []),
    ([OPEN, TEXT, CLOSE, TEXT, STOP], "stop", []),
    ([BLANK, OPEN, TEXT, CLOSE, TEXT, STOP], "stop", []),
    ([TEXT, CLOSE, TOOL, TEXT, TOOL_END, STOP], "stop", []),
    ([TEXT, TOOL, TEXT, TOOL_END, STOP], "stop", ["tool in thinking"]),
    ([TEXT, TOOL, TEXT, TOOL_END, CLOSE, STOP], "stop", ["tool in thinking"]),
    ([TEXT, CLOSE, TEXT, CLOSE, TEXT, STOP], "stop", ["several closes: 2"]),
    ([TEXT, CLOSE, TEXT], "stop", ["no stop id: last id 10"]),
    ([TEXT, CLOSE, TEXT], "length", ["cut by length"]),
    ([TEXT, CLOSE], "length", ["cut by length"]),
    ([TEXT, CLOSE, TOOL, TEXT], "length", ["cut by length in a tool call"]),
    ([TEXT, TOOL, TEXT], "length", ["tool in thinking", "cut by length in a tool call"]),
    ([TEXT, TEXT], "length", ["truncated in thinking"]),
    ([TEXT, STOP, CLOSE, TEXT, STOP], "stop", ["control token out of place: 5 at 1 of 5"]),
    ([TEXT, CLOSE, TEXT, USER, STOP], "stop", ["control token out of place: 7 at 3 of 5"]),
    ([TEXT, OPEN, TEXT, CLOSE, TEXT, STOP], "stop", ["control token out of place: 1 at 1 of 6"]),
    ([TEXT, CLOSE, OPEN, TEXT, STOP], "stop", ["control token out of place: 1 at 2 of 5"]),
    ([TEXT, TOOL_END, CLOSE, TEXT, STOP], "stop", ["control token out of place: 4 at 1 of 5"]),
    ([CLOSE, TEXT, CLOSE, TEXT, STOP], "stop", ["empty thinking", "several closes: 2"]),
    ([TEXT, STOP], "stop", ["unclosed"]),
    ([TEXT, CLOSE, STOP], "length", ["no answer", "cut by length"]),
    ([OPEN] * 20_000 + [STOP], "stop", ["unclosed"]),
    ([TEXT, TEXT], "stop", ["unclosed", "no stop id: last id 10"]),
    ([TEXT, 0, 1, CLOSE, TEXT, STOP], "stop", ["control token out of place: 1 at 2 of 6"]),
]


@pytest.mark.parametrize(("output_ids", "finish", "wanted"), REMARKS)
def test_all_that_is_odd_about_an_answer_is_said(
    output_ids: list[int], finish: str, wanted: list[str]
) -> None:
    found = marked(output_ids, WITH_USER)
    shape = look(found, WITH_USER, True, finish == "length")
    said = remarks(shape, found, row(output_ids, finish), WITH_USER, True)
    assert list(map(str, said)) == wanted


OPENED_WITH_USER = replace(WITH_USER, prefilled=False)
OPENING: list[tuple[list[int], list[str]]] = [
    ([OPEN, TEXT, CLOSE, TEXT, STOP], []),
    ([BLANK, OPEN, BLANK, TEXT, CLOSE, TEXT, STOP], []),
    ([OPEN, OPEN, TEXT, CLOSE, TEXT, STOP], []),
    ([TEXT, OPEN, TEXT, CLOSE, TEXT, STOP], ["control token out of place: 1 at 1 of 6"]),
    ([TEXT, OPEN, TEXT, CLOSE, STOP], ["no answer", "control token out of place: 1 at 1 of 5"]),
    ([TEXT, CLOSE, TEXT, STOP], ["unclosed: it never began to think"]),
    ([OPEN, TEXT, STOP], ["unclosed"]),
]


@pytest.mark.parametrize(("output_ids", "wanted"), OPENING)
def test_a_target_that_opens_its_thinking_itself_does_so_first(
    output_ids: list[int], wanted: list[str]
) -> None:
    found = marked(output_ids, OPENED_WITH_USER)
    shape = look(found, OPENED_WITH_USER, True, False)
    said = remarks(shape, found, row(output_ids), OPENED_WITH_USER, True)
    assert list(map(str, said)) == wanted


@pytest.mark.parametrize("output_ids", [[BLANK], [BLANK, BLANK], [STOP]])
def test_a_cut_before_anything_was_said_leaves_nothing_to_train_on(output_ids: list[int]) -> None:
    found = marked(output_ids)
    shape = look(found, FAMILY, False, True)
    said = remarks(shape, found, row(output_ids, "length"), FAMILY, False)
    assert [remark.kind for remark in said] == ["no answer", "cut by length"]
