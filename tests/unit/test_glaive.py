"""Glaive: flat text of turns and functions, with the faults of its public files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drafter.sources.glaive import convert
from drafter.sources.prompt import Prompt

LISTED = "SYSTEM: You have access to the following functions. Use them if required -\n"
TIDE = {"name": "tide", "parameters": {"type": "object", "properties": {"port": {}}}}
FERRY = {"name": "ferry", "parameters": {"type": "object", "properties": {}}}


def glaive(chat: str, system: str = LISTED + json.dumps(TIDE)) -> Prompt:
    prompt = convert({"system": system, "chat": chat})
    assert isinstance(prompt, Prompt), prompt
    return prompt


def spoken(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.messages]


BLANK_LINES_INSIDE = json.dumps(TIDE, indent=2).replace("\n", "\n\n")


@pytest.mark.parametrize(
    ("system", "names"),
    [
        ("SYSTEM: You are a helpful assistant, with no access to functions.", None),
        (LISTED + json.dumps(TIDE), ["tide"]),
        (LISTED + json.dumps(TIDE) + "\n\n" + json.dumps(FERRY), ["tide", "ferry"]),
        (LISTED + BLANK_LINES_INSIDE + "\n\n" + json.dumps(FERRY), ["tide", "ferry"]),
        (LISTED + json.dumps([TIDE, FERRY]), ["tide", "ferry"]),
        (LISTED + '{"name": "a{b}", "description": "}{"}', ["a{b}"]),
    ],
)
def test_functions_become_tools_however_they_are_laid_out(
    system: str, names: list[str] | None
) -> None:
    tools = glaive("USER: Hi", system).tools
    assert (tools and [tool["function"]["name"] for tool in tools]) == names
    assert all(tool["type"] == "function" for tool in tools or [])


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"properties": {}}, "none"])
def test_parameters_without_type_or_properties_are_completed(parameters: Any) -> None:
    system = LISTED + json.dumps({"name": "tide", "parameters": parameters})
    (tool,) = glaive("USER: Hi", system).tools or []
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}


def test_the_words_of_system_are_dropped() -> None:
    assert spoken(glaive("USER: Hi")) == [("user", "Hi")]


CALLS = [
    ("""'{"port": "St. Ives' pier"}'""", '{"port": "St. Ives\' pier"}'),
    ("""'{"port": "St. Ives\\' pier"}'""", '{"port": "St. Ives\' pier"}'),
    ("""'{"say": "it's \\"so\\""}'""", '{"say": "it\'s \\"so\\""}'),
    ("""{"port": "Bude"}""", '{"port": "Bude"}'),
    ("'{}'", "{}"),
    ("''", "{}"),
    (r'"{\"port\": \"Bude\"}"', '{"port": "Bude"}'),
    ("""'{"text": "two\nlines"}'""", '{"text": "two\\nlines"}'),
]


@pytest.mark.parametrize(("written", "arguments"), CALLS)
def test_arguments_in_single_quotes_are_read_without_replacing_quotes(
    written: str, arguments: str
) -> None:
    chat = (
        "USER: High?\n\n\nASSISTANT: Wait. <functioncall> "
        f'{{"name": "tide", "arguments": {written}}} <|endoftext|>'
        '\n\n\nFUNCTION RESPONSE: {"metres": 3.2}'
    )
    prompts = [glaive(chat.replace("High", f"High {i}")) for i in range(20)]
    prompt = max(prompts, key=lambda prompt: len(prompt.messages))
    call = {
        "id": "functions.tide:0",
        "type": "function",
        "function": {"name": "tide", "arguments": arguments},
    }
    assert prompt.messages[1:] == [
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.tide:0", "content": '{"metres": 3.2}'},
    ]


def test_a_chat_is_cut_at_user_turns_and_at_responses() -> None:
    call = """ASSISTANT: <functioncall> {"name": "tide", "arguments": '{}'} <|endoftext|>"""
    answered = [call, "FUNCTION RESPONSE: 3", "ASSISTANT: 3 m. <|endoftext|>"]
    chats = ["\n\n\n".join([f"USER: {i}", *answered, "USER: And now?", call]) for i in range(60)]
    first = ("user", "assistant", "tool")
    cuts = {tuple(role for role, _ in spoken(glaive(chat))) for chat in chats}
    assert cuts == {("user",), first, (*first, "assistant", "user")}


def test_nothing_behind_a_call_without_a_response_is_used() -> None:
    call = """ASSISTANT: <functioncall> {"name": "tide", "arguments": '{}'} <|endoftext|>"""
    chats = ["\n\n\n".join([f"USER: {i}", call, "USER: Hello?"]) for i in range(20)]
    assert {len(glaive(chat).messages) for chat in chats} == {1}


@pytest.mark.parametrize(
    "tools",
    [[TIDE], json.dumps([TIDE]), [json.dumps(TIDE)], [{"type": "function", "function": TIDE}]],
)
def test_republished_rows_give_what_the_flat_row_gives(tools: Any) -> None:
    for i in range(10):
        turns = [
            ("human", f"High {i}?"),
            ("function_call", '{"name": "tide", "arguments": {"port": "St. Ives\' pier"}}'),
            ("observation", "3.2"),
            ("gpt", "3.2 m"),
        ]
        listed = [{"from": said_by, "value": text} for said_by, text in turns]
        flat = (
            f"USER: High {i}?\n\n\nASSISTANT: <functioncall> "
            """{"name": "tide", "arguments": '{"port": "St. Ives' pier"}'} <|endoftext|>"""
            "\n\n\nFUNCTION RESPONSE: 3.2\n\n\nASSISTANT: 3.2 m <|endoftext|>"
        )
        assert convert({"conversations": listed, "tools": tools}) == glaive(flat)


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ("ASSISTANT: Hello. <|endoftext|>\n\n\nUSER: Hi", [("user", "Hi")]),
        ("USER: Hi\n\n\n", [("user", "Hi")]),
        (
            "USER: a\n\nASSISTANT: is a label\n\n\nb",
            [("user", "a\n\nASSISTANT: is a label\n\n\nb")],
        ),
        ("USER: what is <|endoftext|>?", [("user", "what is <|endoftext|>?")]),
        ("USER: a\r\n\r\n\r\nASSISTANT: b", [("user", "a")]),
        ("\nUSER: a\n\n\n\nUSER: b", [("user", "a\n\nb")]),
        ("USER: a\n\n\nASSISTANT: <functioncall> broken", [("user", "a")]),
    ],
)
def test_labels_count_at_the_start_and_behind_two_blank_lines_only(
    chat: str, expected: list[tuple[str, str]]
) -> None:
    assert spoken(glaive(chat)) == expected


def test_end_markers_of_earlier_answers_are_no_text() -> None:
    chats = [f"USER: {i}\n\n\nASSISTANT: Yes. <|endoftext|>\n\n\nUSER: b" for i in range(20)]
    prompt = max((glaive(chat) for chat in chats), key=lambda prompt: len(prompt.messages))
    assert spoken(prompt)[1:] == [("assistant", "Yes."), ("user", "b")]


@pytest.mark.parametrize(
    "chat",
    [
        f"USER: a{chr(10) * 1_000_000}b",
        f'USER: a\n\n\nASSISTANT: <functioncall> {{"name": "f", "arguments": {" " * 1_000_000}x',
    ],
    ids=["lines", "spaces in a call"],
)
def test_a_million_blanks_are_read_once(chat: str) -> None:
    # Each of them looked at from each other would take hours.
    prompt = convert({"system": "", "chat": chat})
    assert isinstance(prompt, Prompt)
    assert prompt.messages[0]["content"].startswith("a")
