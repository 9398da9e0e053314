"""Samples for a person: readable, inert, and whatever stands in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unit.test_repair import line

from demo.make_target import TARGET
from drafter import cli, template
from drafter.errors import DataError, RecipeError
from drafter.files import write_json
from drafter.layout import Prepared, Workspace
from drafter.recipe import parse_recipe
from drafter.show import Reader, ids_at_ends
from drafter.sources.prompt import Prompt
from drafter.terminal import elide, inert, mark, one_line, unmark

TOKENIZER = template.load_tokenizer(TARGET)
CALL = "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}"
END = "<|tool_call_end|><|tool_calls_section_end|>"


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    """B1 of the demo's target, with six prompts and no answers."""
    tree = {
        "name": "test",
        "target": {"path": str(TARGET), "revision": "r1"},
        "engine": {"urls": ["http://127.0.0.1:9"]},
        "datasets": [{"name": "B1", "format": "glaive", "path": "/none", "unbounded": True}],
        "host": {"workspace": str(tmp_path)},
    }
    recipe = parse_recipe(tree, "test")
    workspace = Workspace(tmp_path)
    write_json(workspace.recipe, recipe.as_json())
    prepared = workspace.prepared("B1")
    prepared.root.mkdir(parents=True)
    for number in range(6):
        messages = [{"role": "user", "content": f"pine maple {'oak ' * number}"}]
        put(prepared.prompts, {"sample_id": f"B1-{number}", "messages": messages, "tools": None})
        ids = template.render(TOKENIZER, Prompt(messages), thinking=True)
        put(prepared.prompt_ids, {"sample_id": f"B1-{number}", "input_ids": ids})
    return prepared


def put(path: Path, *values: Any) -> None:
    with open(path, "ab") as file:
        for value in values:
            file.write(value if isinstance(value, bytes) else line(value))


def answer(sample: str, text: str, ended: str = "stop", **changes: Any) -> dict[str, Any]:
    """The demo's prompts end inside thinking: ``text`` begins there."""
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    prompt = PROMPT_TOKENS.get(sample, 5)
    told = {"sample_id": sample, "output_ids": ids, "prompt_tokens": prompt}
    return {**told, "completion_tokens": len(ids), "finish_reason": ended, **changes}


PROMPT_TOKENS = {
    f"B1-{n}": len(
        template.render(
            TOKENIZER, Prompt([{"role": "user", "content": f"pine maple {'oak ' * n}"}]), True
        )
    )
    for n in range(6)
}


def show(prepared: Prepared, capsys: Any, *more: str) -> str:
    assert cli.main(["show", "B1", "--workspace", str(prepared.root.parents[1]), *more]) == 0
    shown: str = capsys.readouterr().out
    return shown


def test_a_sample_has_all_its_parts(prepared: Prepared, capsys: Any) -> None:
    put(prepared.responses, answer("B1-2", f"oak elm</think>palm bay{CALL}{END}<|im_end|>"))
    shown = show(prepared, capsys)
    order = [
        "B1-2  raw_responses.jsonl:1",
        "finish_reason stop, ",
        " completion tokens, closed (sound)",
        "--- user\npine maple oak oak",
        "prompt ids: ",
        "--- thinking\noak elm</think>",
        "--- answer\npalm bay",
        f"--- tool calls\n{CALL}{END}<|im_end|>",
        "output ids: ",
    ]
    places = [shown.find(part) for part in order]
    assert -1 not in places and places == sorted(places)
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("oak</think>elm<|im_end|>", ["thinking", "answer"]),
        ("oak elm", ["thinking"]),
        (f"oak{CALL}", ["thinking", "tool calls"]),
        (f"oak</think>{CALL}", ["thinking", "tool calls"]),
        (f"oak</think>elm{CALL}", ["thinking", "answer", "tool calls"]),
    ],
)
def test_the_parts_are_all_of_the_answer(text: str, titles: list[str], prepared: Prepared) -> None:
    target = parse_recipe(json.loads((prepared.root.parents[1] / "recipe.json").read_text()), "t")
    reader = Reader(TOKENIZER, template.family(TARGET), target.target)
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    parts = reader.parts(ids)
    assert [title for title, _ in parts] == titles
    assert [i for _, part in parts for i in part] == ids


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], ["B1-2", "B1-3", "B1-4"]),
        (["--last", "1"], ["B1-4"]),
        (["--last", "99"], ["B1-0", "B1-1", "B1-2", "B1-3", "B1-4"]),
        (["--random", "99"], ["B1-0", "B1-1", "B1-2", "B1-3", "B1-4"]),
        (["--sample", "B1-1"], ["B1-1"]),
        (["--rejected"], ["B1-1", "B1-3"]),
        (["--rejected", "--last", "1"], ["B1-3"]),
    ],
)
def test_which_samples(
    more: list[str], expected: list[str], prepared: Prepared, capsys: Any
) -> None:
    for number in range(5):
        put(prepared.responses, answer(f"B1-{number}", "oak</think>elm<|im_end|>"))
    for number in (1, 3):
        put(prepared.rejected, {"sample_id": f"B1-{number}", "reason": "no answer: none"})
    shown = show(prepared, capsys, *more)
    heads = [text.split("  ")[0] for text in shown.splitlines() if "  raw_responses" in text]
    assert heads == expected
    assert shown.count("rejected: no answer: none") == len({"B1-1", "B1-3"} & set(expected))


def test_strange_rows_are_shown_as_they_are(prepared: Prepared, capsys: Any) -> None:
    put(prepared.prompts, {"sample_id": "B1-9", "retired": True, "messages": "\x1b]0;title\x07"})
    put(
        prepared.responses,
        answer("nobody", "oak</think>elm<|im_end|>"),
        answer("B1-9", "", output_ids="b64", finish_reason={"type": "stop"}),
        answer("B1-5", "oak", output_ids=[1, 10**9, -4], completion_tokens=3),
        b"[]\n",
        b'{"sample_id": "B1-4", "outp',
    )
    shown = show(prepared, capsys)
    for part in (
        "prompt unknown: not in prompts.jsonl",
        "B1-9  raw_responses.jsonl:2, retired",
        "not a valid row: wrong type of output_ids: ",
        '"finish_reason": {"type": "stop"}',
        "<id 1000000000><id -4>",
        "id outside the vocabulary",
        "1 damaged lines: see `drafter repair B1`",
        "raw_responses.jsonl:5 is torn",
        r"\u001b]0;title",
    ):
        assert part in shown
    assert "\x1b" not in shown and "\x07" not in shown


def test_a_sample_without_an_answer_shows_why(prepared: Prepared, capsys: Any) -> None:
    put(prepared.failed, {"sample_id": "B1-0", "class": "permanent", "reason": "HTTP 400: \x1b[2J"})
    shown = show(prepared, capsys, "--sample", "B1-0")
    assert "B1-0  no response" in shown and "failed: permanent, HTTP 400: \\x1b[2J" in shown
    with pytest.raises(RecipeError, match="no sample 'B1-77'"):
        show(prepared, capsys, "--sample", "B1-77")
    with pytest.raises(DataError, match="run validate first"):
        show(prepared, capsys, "--rejected")
    assert show(prepared, capsys) == "B1: no such responses\n"


@pytest.mark.parametrize(
    "spelled",
    [
        b'{"sample_id":"B1-\xc3\xa4","messages":"found"}\n',
        b'{"sample_id": "B1-\\u00e4", "messages": "found"}\n',
        b'{"messages": "found", "sample_id": "B1-\xc3\xa4"}\n',
        b'{ "sample_id" : "B1-\xc3\xa4", "messages": "found"}',
        b'{"sample_id": "B1-0", "messages": "no"\n{"sample_id":"B1-\xc3\xa4","messages":"found"}\n',
    ],
)
def test_a_prompt_is_found_however_its_line_is_spelled(
    spelled: bytes, prepared: Prepared, capsys: Any
) -> None:
    put(prepared.prompts, b'{"sample_id": "B1-a", "messages": "B1-\xc3\xa4"}\n', spelled)
    put(prepared.responses, answer("B1-ä", "oak</think>elm<|im_end|>"))
    assert '--- message\n"found"' in show(prepared, capsys)


def test_long_texts_lose_their_middle_unless_asked(prepared: Prepared, capsys: Any) -> None:
    put(prepared.responses, answer("B1-0", "oak " * 3000 + "</think>elm<|im_end|>"))
    assert " characters ...]" in show(prepared, capsys)
    whole = show(prepared, capsys, "--full")
    assert " characters ...]" not in whole and whole.count("oak") >= 3000


ACTIVE = "\x1b[31m \x9b31m \x07 \r \x00 \x7f \u202e \u2066 \ufeff \u2028 \ud800 \U000e0041"


def test_nothing_that_a_terminal_acts_on_gets_through() -> None:
    text = inert(f"a\tb\n{ACTIVE} é 漢 \x01\x02")
    assert text.startswith("a\tb\n") and " é 漢 " in text
    assert all(c.isprintable() or c in "\t\n" for c in text)
    text.encode()
    assert "\n" not in one_line("a\nb")


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 11, 12, 50])
def test_elided_text_tells_how_much(limit: int) -> None:
    text = "0123456789" + mark("<x>")
    short = elide(text, limit)
    if limit >= len(text):
        assert short == text
        return
    head, middle, tail = short.split("\n")
    left = unmark(head + tail, str)
    assert len(left) + int(middle.split()[1]) == 13 and len(head + tail) == limit


def test_marks_are_painted_even_when_cut() -> None:
    text = f"a{mark('<b>')}c"
    assert unmark(text, str.upper) == "a<B>c"
    assert unmark(text[:3], str.upper) == "a<" and unmark(text[3:], str.upper) == "b>c"


def test_ids_at_both_ends() -> None:
    assert ids_at_ends(range(3)) == "0 1 2"
    assert ids_at_ends(range(1016)).startswith("0 1 2 3 4 5 6 7 [... 1,000 ...] 1008 ")
