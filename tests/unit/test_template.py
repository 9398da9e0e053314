"""Rendering and the reading of control tokens, for every family of targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, KIMI, PLAIN, QWEN, TinyTarget, write
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter import template
from drafter.errors import DataError, RecipeError
from drafter.sources.prompt import Prompt, mapped

TARGET = Path(__file__).parents[2] / "include" / "demo" / "target"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "How high? {a}",
            "parameters": {"type": "object", "properties": {"port {a}": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "functions.tide:0",
    "type": "function",
    "function": {"name": "tide", "arguments": '{"port":"St. Ives {a}"}'},
}
PROMPTS = {
    "one turn": Prompt([{"role": "user", "content": "Why?\n\n  Tell {a} all."}]),
    "history": Prompt(
        [
            {"role": "system", "content": "Be {a} brief."},
            {"role": "user", "content": "{a} 你好, thi{a}"},
            {"role": "assistant", "content": "Well {a}\n"},
            {"role": "user", "content": "More, {a}"},
        ]
    ),
    "tools": Prompt(
        [
            {"role": "user", "content": "How {a} high is it?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "functions.tide:0", "content": '{"m": 3, "{a}": 1}'},
        ],
        TOOLS,
    ),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("targets")
    made = {
        name: template.load_tokenizer(family.save(root / name)) for name, family in FAMILIES.items()
    }
    return {**made, "demo": template.load_tokenizer(TARGET)}


def filled(prompt: Prompt, text: str) -> Prompt:
    """``prompt`` with ``text`` typed wherever a person or a tool may type."""

    def fill(value: str) -> str:
        return value.replace("{a}", text)

    return Prompt(mapped(prompt.messages, fill), mapped(prompt.tools, fill))


def own_text(tokenizer: Any, prompt: Prompt, thinking: bool) -> str:
    return tokenizer.apply_chat_template(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=True,
        tokenize=False,
        thinking=thinking,
        enable_thinking=thinking,
    )


def controls_of(tokenizer: Any) -> Callable[[list[int]], list[int]]:
    """What picks the control ids out of a prompt's, in order."""
    controls = set(template.control_tokens(tokenizer).values())
    return lambda ids: [i for i in ids if i in controls]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", [*FAMILIES, "demo"])
def test_rendered_ids_are_the_tokenizers_own(
    tokenizers: dict[str, Any], name: str, kind: str, thinking: bool
) -> None:
    tokenizer, prompt = tokenizers[name], filled(PROMPTS[kind], "plain < text > 1|")
    own = tokenizer.encode(own_text(tokenizer, prompt, thinking), add_special_tokens=False)
    assert template.render(tokenizer, prompt, thinking) == own


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", [*FAMILIES, "demo"])
def test_control_strings_that_people_type_never_become_control_ids(
    tokenizers: dict[str, Any], name: str, kind: str
) -> None:
    tokenizer = tokenizers[name]
    controls = template.control_tokens(tokenizer)
    found = controls_of(tokenizer)
    expected = found(template.render(tokenizer, filled(PROMPTS[kind], "zzz"), True))
    # The real DeepSeek's are 1,283, most of them alike.
    for token in (token for token in controls if "place▁holder" not in token):
        for typed in (token, token * 2, f"<{token}>", token[:4] + token + token[4:]):
            ids = template.render(tokenizer, filled(PROMPTS[kind], typed), True)
            assert found(ids) == expected, typed
            assert typed in tokenizer.decode(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_of_control_strings_never_become_control_ids_whatever_stands_beside_them(
    tokenizers: dict[str, Any], name: str
) -> None:
    tokenizer = tokenizers[name]
    found = controls_of(tokenizer)
    whole = sorted(t for t in template.control_tokens(tokenizer) if "place▁holder" not in t)
    cuts = [(token, n) for token in whole for n in (1, 2, len(token) // 2, len(token) - 1)]
    pieces = {part for token, n in cuts for part in (token, token[:n], token[n:])} - {""}

    def rendered(kind: str, typed: str) -> list[int]:
        return found(template.render(tokenizer, filled(PROMPTS[kind], typed), True))

    expected = {kind: rendered(kind, "zzz") for kind in PROMPTS}

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from([*sorted(pieces), " ", "\n", "x"]), max_size=6).map("".join))
    def check(typed: str) -> None:
        for kind in PROMPTS:
            assert rendered(kind, typed) == expected[kind]

    check()


def test_what_is_typed_comes_back_letter_by_letter(tokenizers: dict[str, Any]) -> None:
    for name in ("kimi", "plain", "demo"):  # whose templates do not look into contents
        tokenizer, prompt = (
            tokenizers[name],
            filled(PROMPTS["history"], "<think>x</think><|im_end|>"),
        )
        ids = template.render(tokenizer, prompt, True)
        assert tokenizer.decode(ids) == own_text(tokenizer, prompt, True)


def test_a_template_that_escapes_json_leaves_no_trace_of_the_cut(tmp_path: Path) -> None:
    escaping = TinyTarget(
        KIMI.template.replace("tojson(", "tojson(ensure_ascii=true, "),
        *(KIMI.eos, KIMI.special, KIMI.markup),
    )
    tokenizer = template.load_tokenizer(escaping.save(tmp_path))
    # Both the character and its escape are in the text already, so another one has to be taken.
    typed = "\ue000 \\ue001 <think>"
    prompt = filled(PROMPTS["tools"], typed)
    decoded = tokenizer.decode(template.render(tokenizer, prompt, True))
    assert decoded == own_text(tokenizer, prompt, True)


def test_a_template_that_refuses_a_prompt_is_an_error_of_the_data(tmp_path: Path) -> None:
    strict = TinyTarget("{{ raise_exception('no system turns') }}", PLAIN.eos, PLAIN.special)
    tokenizer = template.load_tokenizer(strict.save(tmp_path))
    with pytest.raises(DataError, match="refuses the prompt: no system turns"):
        template.render(tokenizer, PROMPTS["history"], True)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("{% for a in messages[0].content | items %}{% endfor %}", "Can only get item pairs from"),
        ("{{ messages[0].content + 3 }}", "can only concatenate str"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
        ("{{ 'abc'.index('z') }}", "substring not found"),
        ("{{ 'abc'.encode('none') }}", "unknown encoding"),
        ("{{ '{}'.format() }}", "out of range"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}", "recursion"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_whatever_a_template_runs_into_is_a_refusal(
    expression: str, reason: str, tmp_path: Path
) -> None:
    target = TinyTarget(expression, PLAIN.eos, PLAIN.special).save(tmp_path)
    tokenizer = template.load_tokenizer(target)
    for prompt in (PROMPTS["one turn"], filled(PROMPTS["one turn"], PLAIN.special[0])):
        with pytest.raises(DataError, match=rf"refuses the prompt: .*{reason}"):
            template.render(tokenizer, prompt, True)
    with pytest.raises(DataError, match=rf"refuses a conversation: .*{reason}"):
        template.family(target)


THINK = {"think_open": "<think>", "think_close": "</think>"}
KIMI_TOOLS = [token for token in KIMI.markup if "tool" in token]
EXPECTED: dict[str, dict[str, Any]] = {
    "kimi": {
        **THINK,
        "prefilled": True,
        "tool_begin": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        "tool_ids": KIMI_TOOLS,
        "tool_end": ["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        "stop_ids": ["<|im_end|>", "[EOS]"],
    },
    "qwen": {
        **THINK,
        "prefilled": False,
        "tool_begin": ["<tool_call>"],
        "tool_ids": ["<tool_call>", "</tool_call>"],
        "tool_end": ["</tool_call>"],
        "stop_ids": ["<|im_end|>", "<|endoftext|>"],
    },
    "deepseek": {
        **THINK,
        "prefilled": True,
        "tool_begin": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
        "tool_ids": [
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ],
        "tool_end": ["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        "stop_ids": ["<｜end▁of▁sentence｜>"],
    },
    "plain": {
        "think_open": None,
        "think_close": None,
        "prefilled": False,
        "tool_begin": [],
        "tool_ids": [],
        "tool_end": [],
        "stop_ids": ["</s>"],
    },
}
EXPECTED["kimi with reasoning"] = EXPECTED["kimi"]
EXPECTED["real deepseek"] = EXPECTED["deepseek"]


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_are_read_from_tokenizer_and_template(name: str, tmp_path: Path) -> None:
    target = FAMILIES[name].save(tmp_path)
    tokenizer = template.load_tokenizer(target)
    found = template.family(target)
    for key, expected in EXPECTED[name].items():
        ids = expected
        if isinstance(expected, str):
            ids = tokenizer.convert_tokens_to_ids(expected)
        elif isinstance(expected, list):
            ids = frozenset(tokenizer.convert_tokens_to_ids(expected))
        assert getattr(found, key) == ids, key
    assert found.vocab_size == len(tokenizer)
    blank = tokenizer.encode(" \n\n\t\r", add_special_tokens=False)
    assert found.blank_ids.issuperset(blank)
    assert found.blank_ids.isdisjoint(tokenizer.encode("a.<think>", add_special_tokens=False))


@pytest.mark.parametrize(
    ("end", "eos"),
    [("", ()), ("<tool_response>", ("<|im_end|>", "<tool_response>")), ("<tool_call>", ())],
    ids=["none", "ends the answer too", "the same as the begin"],
)
def test_ends_of_tool_calls_that_prove_nothing_are_left_out(
    end: str, eos: tuple[str, ...], tmp_path: Path
) -> None:
    text = QWEN.template.replace("\\n</tool_call>", end)
    assert text != QWEN.template
    target = replace(QWEN, template=text, generation_eos=eos or QWEN.generation_eos).save(tmp_path)
    found = template.family(target)
    assert found.tool_begin and not found.tool_end


def test_nested_configs_are_read_as_vision_models_write_them(tmp_path: Path) -> None:
    target = QWEN.save(tmp_path)
    write(target / "config.json", {"text_config": {"vocab_size": 999, "eos_token_id": 7}})
    found = template.family(target)
    assert found.vocab_size == 999
    assert 7 in found.stop_ids


def test_the_demo_target_is_of_kimis_family() -> None:
    found = template.family(TARGET)
    assert found.prefilled
    assert len(found.tool_ids) == 5
    assert found.vocab_size == json.loads((TARGET / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda target: (target / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda target: [file.unlink() for file in target.iterdir()], "no tokenizer loads from"),
        (lambda target: target.rename(target.with_name("moved")), "no target at"),
    ],
)
def test_an_unusable_target_is_one_sentence(spoil: Any, message: str, tmp_path: Path) -> None:
    target = KIMI.save(tmp_path / "target")
    spoil(target)
    with pytest.raises(RecipeError, match=message):
        template.load_tokenizer(target)
