"""Calls are read the way their family spells them, and judged by whether they could be made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from families import DEEPSEEK, FAMILIES, KIMI, PLAIN, QWEN, TinyTarget, write

from drafter import template
from drafter.rows import Family, Marked, mark
from drafter.validation import toolcalls
from drafter.validation.declared import Tools
from drafter.validation.structure import look
from drafter.validation.toolcalls import Calls, Judge

TOOLS = frozenset({"tide", "wind.now", "a:1"})
ARGUMENTS = '{"port": "St. Ives", "at": [1, null]}'


def respelled(target: TinyTarget, old: str, new: str) -> TinyTarget:
    assert target.template.count(old) == 1
    return replace(target, template=target.template.replace(old, new))


FENCED_DEEPSEEK = respelled(
    DEEPSEEK,
    """{{- '<｜tool▁call▁begin｜>' + call.function.name -}}
{{- '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' -}}
""",
    r"""{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name -}}
{{- '\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜>' -}}
""",
)
XML_QWEN = respelled(
    QWEN,
    r"{{- call.function.arguments + '}\n</tool_call>' -}}",
    r"{{- 'x' + '}\n</tool_call>' -}}",
)
SPELLED: dict[str, tuple[TinyTarget, str]] = {
    "kimi": (
        KIMI,
        "<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{a}<|tool_call_end|>",
    ),
    "deepseek": (DEEPSEEK, "<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{a}<｜tool▁call▁end｜>"),
    "fenced deepseek": (
        FENCED_DEEPSEEK,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{a}\n```<｜tool▁call▁end｜>",
    ),
    "qwen": (QWEN, '<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>\n'),
}
SECTIONS = {
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
}
SECTIONS["fenced deepseek"] = SECTIONS["deepseek"]


class Reading(NamedTuple):
    tokenizer: Any
    family: Family
    judge: Judge

    def calls(self, text: str, *, cut: bool = False, declared: Any = TOOLS) -> Calls:
        """Of an answer that thinks, then says ``text``."""
        stop = self.tokenizer.convert_ids_to_tokens(min(self.family.stop_ids))
        opened = "" if self.family.prefilled else "<think>"
        whole = f"{opened}Hm.</think>{text}{'' if cut else stop}"
        marked = mark(template.encode(self.tokenizer, whole), self.family)
        assert isinstance(marked, Marked)
        return self.judge.look(look(marked, self.family, True, cut), marked, cut, lambda: declared)


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reading]:
    return {
        name: reading(target.save(tmp_path_factory.mktemp("target")))
        for name, (target, _) in SPELLED.items()
    }


def reading(target: Path) -> Reading:
    tokenizer = template.load_tokenizer(target)
    family = template.family(target, tokenizer)
    spelling = toolcalls.learn(tokenizer, family)
    return Reading(
        tokenizer,
        family,
        Judge(family, spelling, lambda ids: template.decode(tokenizer, ids)),
    )


def spelled(name: str, *calls: tuple[str, str]) -> str:
    begin, end = SECTIONS.get(name, ("", ""))
    form = SPELLED[name][1]
    return begin + "".join(form.format(n=n, a=a) for n, a in calls) + end


GOOD = ("tide", ARGUMENTS)
CASES: list[tuple[list[tuple[str, str]], int, list[str]]] = [
    ([GOOD], 1, []),
    ([GOOD, ("wind.now", "{}")], 2, []),
    ([("a:1", "{}")], 1, []),
    ([("tide", ' {"port":\n"ü 你好"} ')], 1, []),
    ([("moon", "{}")], 0, ["tool not declared: moon"]),
    ([GOOD, ("moon", "{}"), ("sun", "{}")], 1, ["tool not declared: moon"]),
    ([("tide", '{"port": "St. Ives"')], 0, ["tool call unparsable"]),
    ([("tide", "{'port': 'St. Ives'}")], 0, ["tool call unparsable"]),
    ([("tide", "")], 0, ["tool call unparsable"]),
    ([("tide", "[1]")], 0, ["tool call unparsable"]),
    ([("tide", "null")], 0, ["tool call unparsable"]),
    ([("tide", "NaN")], 0, ["tool call unparsable"]),
    ([("moon", "{}"), ("tide", "x")], 0, ["tool not declared: moon", "tool call unparsable"]),
]


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize(("calls", "valid", "remarks"), CASES)
def test_each_family_is_judged_by_its_own_spelling(
    readings: dict[str, Reading],
    name: str,
    calls: list[tuple[str, str]],
    valid: int,
    remarks: list[str],
) -> None:
    found = readings[name].calls("Let us see. " + spelled(name, *calls))
    assert (found.num_calls, found.num_valid) == (len(calls), valid)
    said = [str(remark) for remark in found.remarks]
    assert len(said) == len(remarks)
    assert all(a.startswith(b) for a, b in zip(said, remarks, strict=True)), said
    assert found.num_tokens > 2


MARKS = {
    "b": "<|tool_call_begin|>functions.tide:0",
    "a": "<|tool_call_argument_begin|>{}",
    "e": "<|tool_call_end|>",
    "(": "<|tool_calls_section_begin|>",
    ")": "<|tool_calls_section_end|>",
}


@pytest.mark.parametrize(
    ("marks", "where", "valid"),
    [
        ("(bae)", None, 1),
        ("(baebae)", None, 2),
        ("(bae)(bae)", None, 2),
        ("bae", "b", 1),
        ("(bae", "(", 1),
        ("bae)", "b", 1),
        ("()", "(", 0),
        ("(be)", "(", 0),
        ("(bae)e", "e", 1),
        ("(bae)a", "a", 1),
        ("(abe)", "(", 0),
        (")(bae)", ")", 1),
        ("(baae)", "(", 0),
        ("((bae))", "(", 1),
        ("(babae)", "(", 1),
        ("(bae)bae", "b", 2),
    ],
)
def test_marks_that_do_not_pair_up_are_named(
    readings: dict[str, Reading], marks: str, where: str | None, valid: int
) -> None:
    kimi = readings["kimi"]
    found = kimi.calls("".join(MARKS[mark] for mark in marks))
    unbalanced = [r for r in found.remarks if r.kind == "tool call unbalanced"]
    assert bool(unbalanced) is (where is not None)
    if where:
        token = template.encode(kimi.tokenizer, MARKS[where])[0]
        assert unbalanced[0].detail.startswith(f"id {token} at ")
    assert (found.num_calls, found.num_valid) == (marks.count("b"), valid)


@pytest.mark.parametrize("marks", ["(", "(b", "(ba", "(bae", "(baeb", "(bae)(ba"])
def test_the_length_limit_may_end_an_answer_anywhere_in_its_calls(
    readings: dict[str, Reading], marks: str
) -> None:
    text = "".join(MARKS[mark] for mark in marks)
    assert readings["kimi"].calls(text, cut=True).remarks == ()


def test_a_call_that_is_merely_not_closed_is_the_structure_s_to_name(
    readings: dict[str, Reading],
) -> None:
    found = readings["kimi"].calls("".join(MARKS[mark] for mark in "(ba"))
    assert found.remarks == () and found.num_calls == 1


def test_an_answer_without_calls_asks_for_no_tools(readings: dict[str, Reading]) -> None:
    for one in readings.values():
        found = one.calls("No {} call.", declared=None)
        assert found == Calls()


def test_without_its_prompt_a_call_is_not_judged(readings: dict[str, Reading]) -> None:
    found = readings["qwen"].calls(spelled("qwen", GOOD), declared=None)
    assert found.num_valid == 0
    assert [remark.kind for remark in found.remarks] == ["tool call not judged"]


@pytest.mark.parametrize("target", [XML_QWEN, replace(QWEN, template=PLAIN.template)])
def test_calls_of_a_spelling_that_nobody_knows_are_counted_and_not_judged(
    target: TinyTarget, tmp_path: Path
) -> None:
    unknown = reading(target.save(tmp_path))
    assert toolcalls.learn(unknown.tokenizer, unknown.family) is None
    if not unknown.family.tool_ids:
        return
    found = unknown.calls("<tool_call>\n<function=tide>x}\n</tool_call>")
    assert (found.num_calls, found.num_valid) == (1, 0)
    assert [remark.kind for remark in found.remarks] == ["tool call not judged"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_that_calls_tools_is_learnt_whatever_its_ids(
    name: str, tmp_path: Path
) -> None:
    one = reading(FAMILIES[name].save(tmp_path))
    spelling = toolcalls.learn(one.tokenizer, one.family)
    assert (spelling is not None) is bool(one.family.tool_ids)
    if spelling:
        rendered = template.encode(one.tokenizer, template.called(one.tokenizer, 3))
        marks = [token for token in rendered if token in one.family.tool_ids]
        form = "bae" if spelling.arguments else "be"
        wanted = f"({form * 3})" if spelling.section else form * 3
        assert spelling.letters(marks) == wanted


def test_declared_names_are_read_from_prompts_and_damage_is_kept_for_later(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "x"}]
    tide = {"type": "function", "function": {"name": "tide"}}
    rows: list[Any] = [
        {"sample_id": "a", "messages": message, "tools": [tide, {"name": "bare"}, 7, {"x": 1}]},
        {"sample_id": "b", "messages": message, "tools": None},
        {"sample_id": "c", "messages": message},
        {"sample_id": "d", "messages": message, "tools": "tide"},
        ["e"],
    ]
    for row in rows:
        write(tmp_path / "row", row)
        with open(tmp_path / "prompts.jsonl", "a") as file:
            file.write((tmp_path / "row").read_text() + "\n")
    tools = Tools(tmp_path / "prompts.jsonl")
    assert tools.names("a") == {"tide", "bare"}
    assert tools.names("b") == tools.names("c") == frozenset()
    assert tools.names("d") is None and tools.names("none") is None
    assert [str(error).split(" ")[0][-16:] for error in tools.damaged] == [
        "/prompts.jsonl:4",
        "/prompts.jsonl:5",
    ]


def test_without_a_file_no_prompt_is_known(tmp_path: Path) -> None:
    assert Tools(tmp_path / "prompts.jsonl").names("a") is None
