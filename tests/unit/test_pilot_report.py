"""What a person sees of a pilot, and what their answer does to the files."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from unit.fake_engine import BLANK, CLOSE, FAMILY, STOP, TEXT, TOOL, TOOL_END
from unit.test_show import CALL, END, answer, prepared, put

from drafter import cli
from drafter.errors import Busy, DataError, RecipeError
from drafter.files import locked, read_json, read_section, write_json, write_section
from drafter.generation import approval
from drafter.generation.pilot import chosen, figures, story
from drafter.identity import generation_identity
from drafter.layout import Prepared
from drafter.recipe import Recipe, parse_recipe

__all__ = ["prepared"]


def row(number: int, ids: list[int], ended: str = "stop", **changes: Any) -> dict[str, Any]:
    told = {"sample_id": f"s{number}", "output_ids": ids, "prompt_tokens": 1}
    return {**told, "completion_tokens": len(ids), "finish_reason": ended, **changes}


EVERY_VERDICT = [
    row(0, [TEXT, CLOSE, TEXT, STOP]),
    row(1, [TEXT, CLOSE, TEXT, TEXT, TEXT, TEXT, STOP]),
    row(2, [TEXT, TOOL, TEXT, TOOL_END, STOP]),
    row(3, [TEXT, CLOSE, TOOL, TEXT, TOOL_END, STOP]),
    row(4, [TEXT, TEXT], "length"),
    row(5, [TEXT, CLOSE], "length"),
    row(6, [TEXT, STOP]),
    row(7, [BLANK, CLOSE, TEXT, STOP]),
    row(8, [TEXT, CLOSE, STOP]),
    row(9, [TEXT, CLOSE, TOOL, TEXT, STOP]),
    row(10, [TEXT, CLOSE, TEXT, STOP], completion_tokens=9),
]


def test_figures_tell_every_verdict() -> None:
    found, judged = figures(EVERY_VERDICT, FAMILY, thinking=True)
    assert found == {
        "rows": 11,
        "verdicts": {"sound": 4, "cut": 2, "broken": 5},
        "faults": {
            "no answer": 2, "truncated in thinking": 1, "unclosed": 1, "empty thinking": 1,
            "tool call not closed": 1, "wrong completion_tokens": 1,
        },
        "thinking": {
            "closed": 6, "tool in thinking": 1, "truncated in thinking": 1, "unclosed": 1,
            "empty thinking": 1,
        },
        "tool_calls": 3,
        "finish_reasons": {"stop": 8, "length": 2},
        "completion_tokens": 40,
        "longest": 7,
    }  # fmt: skip
    assert [name for name, is_sound in judged if is_sound] == ["s0", "s1", "s2", "s3"]
    assert list(story({**found, "failed": {"abort": 2}}, 1000)) == [
        "11 rows, 40 completion tokens: mean 4, most 7",
        "sound: 4 (36%); cut: 2, broken: 5 (2 no answer, 1 truncated in thinking, 1 unclosed,"
        " 1 empty thinking, 1 tool call not closed, 1 wrong completion_tokens)",
        "thinking: 6 closed, 1 tool in thinking, 1 truncated in thinking, 1 unclosed, 1 empty"
        " thinking",
        "rows with tool calls: 3",
        "finish reasons: 8 stop, 2 length",
        "prompts without an answer: 2 abort",
        "at this mean the budget of 1,000 tokens is met after 275 rows",
    ]


def test_a_target_that_does_not_think_has_no_thoughts_to_count() -> None:
    found, _ = figures([row(0, [TEXT, STOP]), row(1, [TEXT, CLOSE, STOP])], FAMILY, thinking=False)
    assert found["thinking"] == {} and found["faults"] == {"thinking although off": 1}
    assert not any(line.startswith("thinking:") for line in story({**found, "failed": {}}, None))


def test_no_rows_are_one_line() -> None:
    found, judged = figures([], FAMILY, thinking=True)
    assert (list(story({**found, "failed": {}}, 9)), judged) == (["no rows"], [])


CHOICES = {
    # name: (sound ones, not sound ones, number, ids chosen)
    "all sound": (10, 0, 3, ["s0", "s3", "s6"]),
    "one is not": (9, 1, 3, ["b0", "s0", "s4"]),
    "many are not": (5, 5, 3, ["b0", "b1", "s0"]),
    "none is sound": (0, 5, 3, ["b0", "b1", "b2"]),
    "one to show": (5, 5, 1, ["s0"]),
    "more than there are": (1, 1, 9, ["b0", "s0"]),
    "nothing": (0, 0, 3, []),
}


@pytest.mark.parametrize(("num_sound", "num_bad", "number", "ids"), CHOICES.values(), ids=CHOICES)
def test_what_is_not_sound_is_shown_first(
    num_sound: int, num_bad: int, number: int, ids: list[str]
) -> None:
    judged = [(f"s{i}", True) for i in range(num_sound)]
    assert chosen([*judged, *((f"b{i}", False) for i in range(num_bad))], number) == ids


def recipe_with(prepared: Prepared, **sections: Any) -> Recipe:
    path = prepared.root.parents[1] / "recipe.json"
    recipe = parse_recipe({**read_json(path), **sections}, "test")
    write_json(path, recipe.as_json())
    return recipe


@pytest.fixture
def recipe(prepared: Prepared) -> Recipe:
    """Five rows of six prompts, a pilot wants eight; prepared by hand."""
    recipe = recipe_with(prepared, pilot={"rows": 8, "samples": 2})
    for number in range(5):
        text = "oak elm</think>palm bay<|im_end|>" if number else f"oak{CALL}{END}<|im_end|>"
        put(prepared.responses, answer(f"B1-{number}", text))
    put(prepared.failed, {"sample_id": "B1-5", "class": "abort", "reason": "x"})
    identity = generation_identity(recipe)
    session = {"time": 1.0, "offset": 0, "start_id": "s", "identity": identity}
    put(prepared.sessions, session)
    record = {"bytes": 1, "sha256": ""}
    section = {"files": {"prompt_ids.jsonl": record}, "counts": {}}
    write_section(prepared.manifest, "prepare", section)
    return recipe


def pilot(prepared: Prepared, act: str, *more: str) -> int:
    return cli.main(["pilot", act, "B1", "--workspace", str(prepared.root.parents[1]), *more])


def shown(prepared: Prepared, capsys: Any, *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert pilot(prepared, "show", "--json", *more) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def given(prepared: Prepared, recipe: Recipe) -> dict[str, Any] | None:
    return approval.given(prepared, generation_identity(recipe))


def files(prepared: Prepared) -> dict[str, bytes]:
    paths = [path for path in prepared.root.rglob("*") if path.is_file()]
    return {str(path.relative_to(prepared.root)): path.read_bytes() for path in paths}


def test_a_pilot_is_shown_with_figures_and_samples(
    prepared: Prepared, recipe: Recipe, capsys: Any
) -> None:
    before = files(prepared)
    told = shown(prepared, capsys)
    assert (told["action"], told["rejected"]) == ("pilot", None)
    assert told["figures"]["rows"] == 5 and told["figures"]["failed"] == {"abort": 1}
    assert told["figures"]["thinking"] == {"closed": 4, "tool in thinking": 1}
    assert len(told["samples"]) == recipe.pilot.samples if recipe.pilot else False
    order = ["B1-2  raw_responses", "closed (sound)", "--- user\npine", "--- thinking\noak elm",
             "--- answer\npalm bay"]  # fmt: skip
    places = [told["samples"][1].find(part) for part in order]
    assert -1 not in places and places == sorted(places)
    assert pilot(prepared, "show", "--samples", "1") == 0
    text = capsys.readouterr().out
    assert text.startswith("B1: pilot, a pilot first, 5 of its 6 rows are stored\n5 rows, ")
    assert text.count("--- answer") + text.count("--- tool calls") == 1
    assert files(prepared) == before


def test_of_a_long_prompt_the_ends_are_shown(
    prepared: Prepared, recipe: Recipe, capsys: Any
) -> None:
    assert recipe.pilot
    turns = [{"role": "user", "content": f"turn {number}"} for number in range(50)]
    put(prepared.prompts, {"sample_id": "B1-0", "messages": turns})
    sample = shown(prepared, capsys, "--samples", "1")["samples"][0]
    assert re.findall("turn [0-9]+", sample) == ["turn 0", "turn 47", "turn 48", "turn 49"]
    assert "[46 messages]" in sample


def test_an_approval_is_kept_for_the_identity_it_was_given_for(
    prepared: Prepared, recipe: Recipe, capsys: Any
) -> None:
    before = files(prepared)
    assert pilot(prepared, "approve", "--by", "Ada") == 0
    assert "add --yes" in capsys.readouterr().out and files(prepared) == before
    seen = shown(prepared, capsys)["seen"]
    told = ["--by=Ada", "--run-id", "run:1", "--seen", seen, "--yes"]
    assert pilot(prepared, "approve", *told) == 0
    assert capsys.readouterr().out == "B1: Ada approved the pilot of 5 rows\n"
    kept = given(prepared, recipe)
    assert kept and (kept["by"], kept["run_id"], kept["rows"]) == ("Ada", "run:1", 5)
    once = files(prepared)
    assert pilot(prepared, "approve", "--by=Bob", "--yes") == 0
    assert "its pilot was approved by Ada" in capsys.readouterr().out and files(prepared) == once
    assert shown(prepared, capsys) == {"action": "resume", "reason": "5 responses stored"}
    with pytest.raises(RecipeError, match=r"nothing to reject.*approved by Ada: `drafter discard"):
        pilot(prepared, "reject", "--yes")
    other = recipe_with(prepared, generate={"temperature": 0.5})
    assert given(prepared, other) is None


@pytest.mark.parametrize("first", [0, 3])
def test_a_rejection_moves_the_pilot_and_nothing_else(
    first: int, prepared: Prepared, recipe: Recipe, capsys: Any
) -> None:
    assert recipe.pilot
    if first:
        approval.take_back(prepared, first)
    lines = prepared.responses.read_bytes().splitlines(keepends=True)
    sessions = prepared.sessions.read_bytes()
    killed = prepared.archive("rejected-run_0.partial")
    killed.mkdir(parents=True)
    seen = shown(prepared, capsys)["seen"]
    told = ["--by=Ada", "--run-id", "run:1", "--seen", seen, "--yes"]
    assert pilot(prepared, "reject", *told) == 0
    said = capsys.readouterr().out
    archive = prepared.archive("rejected-run:1")
    assert f"Ada rejected the pilot: {5 - first} answers" in said and str(archive) in said
    assert "and 1 failures are now in" in said
    assert prepared.responses.read_bytes() == b"".join(lines[:first])
    assert (archive / "raw_responses.jsonl").read_bytes() == b"".join(lines[first:])
    assert (archive / "sessions.jsonl").read_bytes() == sessions
    assert prepared.failed.read_bytes() == b"" and (archive / "failed.jsonl").read_bytes()
    assert not killed.exists()

    after = files(prepared)
    assert shown(prepared, capsys, "--run-id", "run:1")["rejected"] == str(archive)
    assert shown(prepared, capsys, "--run-id", "run:2")["rejected"] is None
    assert pilot(prepared, "reject", *told) == 0
    assert "rejected already" in capsys.readouterr().out and files(prepared) == after
    with pytest.raises(DataError, match="B1 has no pilot: clear its pilot task"):
        pilot(prepared, "approve", "--yes")

    put(prepared.responses, answer("B1-4", "oak</think>elm<|im_end|>"))
    assert shown(prepared, capsys, "--run-id", "run:1")["rejected"] is None
    assert pilot(prepared, "reject", "--run-id", "run:1", "--yes") == 0
    assert (prepared.archive("rejected-run:1-2") / "raw_responses.jsonl").exists()


@pytest.mark.parametrize("act", ["approve", "reject"])
def test_an_answer_counts_for_the_rows_that_were_shown(
    act: str, prepared: Prepared, recipe: Recipe, capsys: Any
) -> None:
    seen = shown(prepared, capsys)["seen"]
    put(prepared.responses, answer("B1-5", "oak</think>elm<|im_end|>"))
    before = files(prepared)
    with pytest.raises(DataError, match="not those that were shown any more: clear the task"):
        pilot(prepared, act, "--seen", seen, "--yes")
    with locked(prepared.lock), pytest.raises(Busy):
        pilot(prepared, act, "--yes")
    after = files(prepared)
    after.pop(prepared.lock.name)
    assert after == before and given(prepared, recipe) is None


def test_a_recipe_without_a_pilot_and_rows_of_unknown_origin_are_refused(
    prepared: Prepared, capsys: Any
) -> None:
    with pytest.raises(RecipeError, match=r"asks for no pilot: add a section \[pilot\]"):
        pilot(prepared, "show")
    recipe_with(prepared, pilot={})
    put(prepared.responses, answer("B1-0", "oak</think>elm<|im_end|>"))
    section = {"files": {"prompt_ids.jsonl": {}}, "counts": {}}
    write_section(prepared.manifest, "prepare", section)
    for act in ("show", "approve", "reject"):
        with pytest.raises(RecipeError, match="nothing says what they were made with"):
            pilot(prepared, act, "--yes")
    assert read_section(prepared.manifest, approval.SECTION) is None
    assert capsys.readouterr().out == ""


def test_a_bad_number_of_rows_is_one_sentence(prepared: Prepared) -> None:
    with pytest.raises(RecipeError, match=r"pilot.rows = 7: .*greater than or equal to 8"):
        recipe_with(prepared, pilot={"rows": 7})
