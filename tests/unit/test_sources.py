"""Every known fault of the eight sources, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest

from drafter.sections import SourceFormat
from drafter.sources import CONVERT
from drafter.sources.prompt import Prompt

Row = dict[str, Any]

LISTED = "SYSTEM: You have access to the following functions. Use them if required -\n"


def converted(source: SourceFormat, row: Row) -> Prompt:
    prompt = CONVERT[source](row)
    assert isinstance(prompt, Prompt), prompt
    return prompt


def spoken(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.messages]


def every_cut(source: SourceFormat, row_with: Callable[[str], Row]) -> set[tuple[str, ...]]:
    """Roles of every prompt that one conversation can become, over many wordings of it."""
    prompts = [converted(source, row_with(f"wording {i}")) for i in range(60)]
    return {tuple(role for role, _ in spoken(prompt)) for prompt in prompts}


# One user turn ------------------------------------------------------------------------------------

SINGLE: list[tuple[str, SourceFormat, Row, str]] = [
    ("a plain row", "opencodeinstruct", {"id": "a", "input": "Sort it."}, "Sort it."),
    (
        "scores that are no numbers",
        "opencodeinstruct",
        {"id": "", "input": "Sort it.", "average_test_score": "", "unit_tests": "["},
        "Sort it.",
    ),
    (
        "fenced code and special-looking text stay",
        "opencodeinstruct",
        {"id": "a", "input": "```py\nx = '<|im_end|>'\n```\n"},
        "```py\nx = '<|im_end|>'\n```\n",
    ),
    (
        "NUL goes, line ends are one kind, no letter is normalised",
        "opencodeinstruct",
        {"input": "a\0b\r\nc e\u0301 ﬁ"},
        "ab\nc e\u0301 ﬁ",
    ),
    (
        "half a surrogate pair",
        "opencodeinstruct",
        {"input": "smile \ud83d now"},
        "smile \ufffd now",
    ),
    (
        "oss-instruct, a seed full of debris",
        "magicoder",
        {"index": 3, "seed": "API_KEY=1", "problem": "Write a Rust struct.", "solution": "x"},
        "Write a Rust struct.",
    ),
    ("evol-instruct", "magicoder", {"instruction": "Invert it.", "response": "x"}, "Invert it."),
    (
        "version 3 spells human and gpt, null difficulty",
        "openthoughts",
        {
            "difficulty": None,
            "conversations": [
                {"from": "human", "value": "Sum 1..100?"},
                {"from": "gpt", "value": "<think>..</think>5050"},
            ],
        },
        "Sum 1..100?",
    ),
    (
        "version 1 spells user and assistant, its system text is dropped",
        "openthoughts",
        {
            "system": "Write <|begin_of_thought|> first.",
            "conversations": [
                {"from": "system", "value": "Write <|begin_of_thought|> first."},
                {"from": "user", "value": "Is 91 prime?"},
                {"from": "assistant", "value": "No."},
                {"from": "user", "value": "Why?"},
            ],
        },
        "Is 91 prime?",
    ),
    (
        "the metadata variant",
        "openthoughts",
        {"problem": "Is 91 prime?", "deepseek_reasoning": "7*13", "starter_code": None},
        "Is 91 prime?",
    ),
    (
        "a long fixed preamble stays",
        "mixturethoughts",
        {
            "messages": [
                {"content": "You will be given a problem. Is 91 prime?", "role": "user"},
                {"content": "<think>7*13</think>No", "role": "assistant"},
            ]
        },
        "You will be given a problem. Is 91 prime?",
    ),
]


@pytest.mark.parametrize(("_name", "source", "row", "content"), SINGLE, ids=lambda v: str(v)[:40])
def test_one_question_becomes_one_user_turn(
    _name: str, source: SourceFormat, row: Row, content: str
) -> None:
    assert spoken(converted(source, row)) == [("user", content)]


def test_ids_of_the_source_are_kept_for_people() -> None:
    assert converted("opencodeinstruct", {"id": "oci-1", "input": "x"}).source_id == "oci-1"
    assert converted("opencodeinstruct", {"id": "", "input": "x"}).source_id is None
    assert converted("magicoder", {"index": 3, "problem": "x"}).source_id == "3"


# Conversations ------------------------------------------------------------------------------------

TALKS: list[tuple[str, SourceFormat, Row, list[tuple[str, str]]]] = [
    (
        "thinking is cut out of history",
        "mixturethoughts",
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "<think>long\n</think>\n\nB"},
                {"role": "user", "content": "c <think>"},
                {"role": "assistant", "content": "<think></think>D"},
            ]
        },
        [("user", "a"), ("assistant", "B"), ("user", "c <think>")],
    ),
    (
        "the answer goes, the trimmed prompt is not read",
        "ultrachat",
        {
            "prompt": "Name a",
            "messages": [
                {"role": "user", "content": "Name a moon."},
                {"role": "assistant", "content": "Io."},
            ],
        },
        [("user", "Name a moon.")],
    ),
    (
        "an empty answer, and then a user turn at the end",
        "ultrachat",
        {
            "messages": [
                {"role": "user", "content": "Name a moon."},
                {"role": "assistant", "content": " "},
                {"role": "user", "content": "Please."},
            ]
        },
        [("user", "Name a moon.\n\nPlease.")],
    ),
    (
        "leading gpt, empty bard, two humans",
        "sharegpt",
        {
            "id": "q9_0",
            "conversations": [
                {"from": "gpt", "value": "(cont.)"},
                {"from": "human", "value": "Why? <br>"},
                {"from": "bard", "value": ""},
                {"from": "human", "value": "Again."},
            ],
        },
        [("user", "Why? <br>\n\nAgain.")],
    ),
    (
        "every spelling of a role, and the last answer goes",
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "user", "value": "a"},
                {"from": "chatgpt", "value": "B"},
                {"from": "bing", "value": "C"},
                {"from": "human", "value": "d"},
                {"from": "Bard", "value": "E"},
                {"from": "human", "value": "Copy code"},
                {"from": "gpt", "value": "F"},
            ]
        },
        [
            *(("system", "S"), ("user", "a"), ("assistant", "B\n\nC"), ("user", "d")),
            *(("assistant", "E"), ("user", "Copy code")),
        ],
    ),
    (
        "nebius: the system step has a null text",
        "sweagent",
        {
            "instance_id": "acme__lib-12",
            "trajectory": [
                {"role": "system", "system_prompt": "SETTING", "text": None, "mask": False},
                {
                    "role": "user",
                    "text": "ISSUE in \x1b[31mred",
                    "system_prompt": None,
                    "mask": False,
                },
                {"role": "ai", "text": "Look.", "system_prompt": None, "mask": False},
                {"role": "user", "text": "a.py", "system_prompt": None, "mask": False},
            ],
        },
        [("system", "SETTING"), ("user", "ISSUE in red")],
    ),
    (
        "SWE-smith: messages are a JSON string, contents may be parts",
        "sweagent",
        {
            "traj_id": "t",
            "messages": json.dumps(
                [
                    {"role": "system", "content": "S", "agent": "main"},
                    {"role": "user", "content": [{"type": "text", "text": "ISSUE"}]},
                    {"role": "assistant", "content": "ls", "action": "ls", "thought": ""},
                ]
            ),
        },
        [("system", "S"), ("user", "ISSUE")],
    ),
]


@pytest.mark.parametrize(("_name", "source", "row", "expected"), TALKS, ids=lambda v: str(v)[:40])
def test_a_conversation_ends_where_the_model_answers(
    _name: str, source: SourceFormat, row: Row, expected: list[tuple[str, str]]
) -> None:
    assert spoken(converted(source, row)) == expected


def test_every_user_turn_of_a_chat_is_cut_at_sometimes() -> None:
    def row(wording: str) -> Row:
        turns = [("user", wording), ("assistant", "Io."), ("user", "More?"), ("assistant", "No.")]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    assert every_cut("ultrachat", row) == {("user",), ("user", "assistant", "user")}


def test_a_trajectory_is_cut_before_any_of_its_steps_and_never_behind_the_last() -> None:
    def row(wording: str) -> Row:
        turns = [("user", wording), ("ai", "ls"), ("user", "a.py"), ("ai", "cat"), ("user", "x=1")]
        return {"trajectory": [{"role": role, "text": text} for role, text in turns]}

    assert every_cut("sweagent", row) == {("user",), ("user", "assistant", "user")}


def test_tool_results_of_trajectories_find_their_calls() -> None:
    def call(identity: str, name: str) -> Row:
        return {"id": identity, "function": {"name": name, "arguments": '{"path": "a"}'}}

    steps = [
        {"role": "user", "content": "ISSUE"},
        {"role": "assistant", "content": "", "tool_calls": [call("x1", "open"), call("x2", "ls")]},
        {"role": "tool", "content": "second", "tool_call_id": "x2"},
        {"role": "tool", "content": "first"},
        {"role": "assistant", "content": "Done."},
    ]
    found = {}
    for i in range(20):
        steps[0]["content"] = f"ISSUE {i}"
        prompt = converted("sweagent", {"messages": json.dumps(steps)})
        found[len(prompt.messages)] = prompt
    assert set(found) == {1, 4}
    _, assistant, *results = found[4].messages
    assert [call["id"] for call in assistant["tool_calls"]] == [
        "functions.open:0",
        "functions.ls:1",
    ]
    assert [(m["tool_call_id"], m["content"]) for m in results] == [
        ("functions.ls:1", "second"),
        ("functions.open:0", "first"),
    ]


LONG: list[tuple[SourceFormat, Row, int]] = [
    ("sharegpt", {"conversations": [{"from": "human", "value": "paste " * 20_000}]}, 120_000),
    ("mixturethoughts", {"messages": [{"role": "user", "content": "7" * 30_000}]}, 30_000),
    (
        "sweagent",
        {
            "trajectory": [
                {"role": "user", "text": "ISSUE\n" + "0123456789abcdef" * 30_000},
                {"role": "ai", "text": "submit"},
            ]
        },
        480_006,
    ),
]


@pytest.mark.parametrize(("source", "row", "num_characters"), LONG)
def test_no_length_is_too_long_for_a_converter(
    source: SourceFormat, row: Row, num_characters: int
) -> None:
    """What a prompt costs is prepare's matter: there are tokens to count there."""
    assert len(converted(source, row).messages[-1]["content"]) == num_characters


# What is dropped ----------------------------------------------------------------------------------

DROPPED: list[tuple[SourceFormat, Row, str]] = [
    ("opencodeinstruct", {"input": " \n\0"}, "empty prompt"),
    ("opencodeinstruct", {}, "empty prompt"),
    ("opencodeinstruct", {"input": 5}, "prompt is not text"),
    ("magicoder", {"seed": "x", "problem": ""}, "empty prompt"),
    ("mixturethoughts", {"messages": None}, "no conversation"),
    ("mixturethoughts", {"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
    ("openthoughts", {"conversations": []}, "no user turn"),
    ("openthoughts", {"conversations": ["a"]}, "turn is not an object"),
    ("ultrachat", {"messages": [{"role": "user", "content": {"a": 1}}]}, "turn is not text"),
    ("ultrachat", {"messages": [{"role": "narrator", "content": "a"}]}, "unknown role"),
    ("sharegpt", {"conversations": []}, "no user turn"),
    ("sharegpt", {"conversations": [{"from": None, "value": "a"}]}, "unknown role"),
    ("sweagent", {"messages": "[{"}, "messages are not JSON"),
    ("sweagent", {"trajectory": [{"role": "user", "text": "a"}]}, "no assistant step"),
    ("sweagent", {"trajectory": [{"role": "judge", "text": "a"}]}, "unknown role"),
    ("sweagent", {"trajectory": [7]}, "turn is not an object"),
    (
        "glaive",
        {"system": LISTED + '{"name": "tide",}', "chat": "USER: a"},
        "functions are not JSON",
    ),
    ("glaive", {"system": LISTED + '{"x": 1}', "chat": "USER: a"}, "function without a name"),
    ("glaive", {"system": "", "chat": "Hi there"}, "chat without a label"),
    ("glaive", {"system": "", "chat": "USER: "}, "no user turn"),
    ("glaive", {"system": "", "chat": None}, "no conversation"),
    ("glaive", {"system": "", "chat": "FUNCTION RESPONSE: 1"}, "function response without a call"),
]


@pytest.mark.parametrize(("source", "row", "reason"), DROPPED)
def test_a_row_without_a_prompt_says_why(source: SourceFormat, row: Row, reason: str) -> None:
    assert CONVERT[source](row) == reason


def test_every_format_of_a_recipe_has_a_converter() -> None:
    assert set(CONVERT) == set(get_args(SourceFormat))
