"""What a family of templates is to us: the same prompts as its own, the same reading of answers,
and no word about which numbers its control tokens happen to have."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from families import FAMILIES
from tokenizers import Tokenizer
from unit.test_template import CALL, PROMPTS, TOOLS, filled

from demo.make_prompts import PROMPTS as DEMO_PROMPTS
from drafter import template
from drafter.rows import Family, check_row
from drafter.sources import CONVERT, reading
from drafter.sources.prompt import Prompt
from drafter.validation.structure import verdict

PROMPTS_PER_SET = 15

ASKED = {"role": "user", "content": "How high is the tide?"}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": "3 m"}
THOUGHT = {"reasoning_content": "A tool knows.\n"}
HISTORIES = {
    "thinking beside an answer": Prompt(
        [
            ASKED,
            {"role": "assistant", "content": "3 m", **THOUGHT},
            {**ASKED, "content": "And now?"},
        ]
    ),
    "thinking before a tool call": Prompt(
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL], **THOUGHT}, RESULT],
        TOOLS,
    ),
    "answers and calls in turns": Prompt(
        [
            {"role": "system", "content": "Be brief."},
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL], **THOUGHT},
            RESULT,
            RESULT,
            {"role": "assistant", "content": "3 m", **THOUGHT},
            {**ASKED, "content": "At St. Ives?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], **THOUGHT},
            RESULT,
        ],
        TOOLS,
    ),
}
WRITTEN_OUT = "\n<think>Is <|im_end|> a tide? <think></think>3 m </think> or so"


class Way(NamedTuple):
    """What the tests must know of a family, in its own words."""

    switch: str | None
    """The template's variable that turns thinking on and off."""
    ends: tuple[str, str]
    """How a prompt ends, with thinking on and off."""
    opened: str
    """What the model itself writes before it thinks."""
    call: str
    stop: str
    drops_written_out: bool
    """Does the template take thinking out of the text of earlier answers?"""


KIMI_HEAD = "<|im_assistant|>assistant<|im_middle|>"
QWEN_HEAD = "<|im_start|>assistant\n"
KIMI_WAY = Way(
    "thinking",
    (f"{KIMI_HEAD}<think>", f"{KIMI_HEAD}<think></think>"),
    "",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.tide:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "<|im_end|>",
    False,
)
DEEPSEEK_WAY = Way(
    "thinking",
    ("<｜Assistant｜><think>", "<｜Assistant｜></think>"),
    "",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tide<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "<｜end▁of▁sentence｜>",
    True,
)
WAYS = {
    "kimi": KIMI_WAY,
    "kimi with reasoning": KIMI_WAY,
    "qwen": Way(
        "enable_thinking",
        (QWEN_HEAD, f"{QWEN_HEAD}<think>\n\n</think>\n\n"),
        "<think>\n",
        '<tool_call>\n{"name": "tide"}\n</tool_call>',
        "<|im_end|>",
        True,
    ),
    "deepseek": DEEPSEEK_WAY,
    "real deepseek": DEEPSEEK_WAY,
    "plain": Way(None, ("[/USER]", "[/USER]"), "", "", "</s>", False),
}
THINKING = [name for name in FAMILIES if WAYS[name].call]


class Target(NamedTuple):
    path: Path
    tokenizer: Any
    family: Family

    def ids(self, text: str) -> list[int]:
        """Of what a model says, control tokens included."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def load(path: Path) -> Target:
    return Target(path, template.load_tokenizer(path), template.family(path))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    root = tmp_path_factory.mktemp("targets")
    return {name: load(family.save(root / name)) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """The same with the ids of their added tokens dealt anew."""
    root = tmp_path_factory.mktemp("shuffled")
    return {name: load(family.save(root / name, Random(name))) for name, family in FAMILIES.items()}


def own_ids(tokenizer: Any, prompt: Prompt, switch: str | None, thinking: bool) -> list[int]:
    """As a person who knows the target asks its tokenizer."""
    options = {switch: thinking} if switch else {}
    made = tokenizer.apply_chat_template(
        prompt.messages, tools=prompt.tools, add_generation_prompt=True, **options
    )
    return made["input_ids"]


@pytest.fixture(scope="module")
def demo_prompts() -> list[Prompt]:
    """Of all eight sets."""
    found = []
    for path in sorted(DEMO_PROMPTS.iterdir()):
        rows = list(reading.rows(path))
        made = [CONVERT[path.stem.partition("_")[2]](row) for row in rows]
        prompts = [prompt for prompt in made if isinstance(prompt, Prompt)]
        found += Random(path.stem).sample(prompts, PROMPTS_PER_SET)
    return found


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_and_histories_are_rendered_as_the_tokenizer_does(
    name: str, thinking: bool, targets: dict[str, Target], demo_prompts: list[Prompt]
) -> None:
    tokenizer, switch = targets[name].tokenizer, WAYS[name].switch
    assert len(demo_prompts) == 8 * PROMPTS_PER_SET
    assert any(prompt.tools for prompt in demo_prompts)
    assert any(len(prompt.messages) > 2 for prompt in demo_prompts)
    for prompt in [*demo_prompts, *HISTORIES.values()]:
        own = own_ids(tokenizer, prompt, switch, thinking)
        assert template.render(tokenizer, prompt, thinking) == own


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_ends_as_the_familys_switch_says(
    name: str, thinking: bool, targets: dict[str, Target]
) -> None:
    tokenizer = targets[name].tokenizer
    text = tokenizer.decode(template.render(tokenizer, Prompt([ASKED]), thinking))
    assert text.endswith(WAYS[name].ends[0 if thinking else 1])


@pytest.mark.parametrize("name", FAMILIES)
def test_thinking_written_out_in_history_goes_where_the_template_takes_it_out_and_is_text_elsewhere(
    name: str, targets: dict[str, Target]
) -> None:
    tokenizer = targets[name].tokenizer

    def said(text: str) -> str:
        prompt = Prompt([ASKED, {"role": "assistant", "content": text}, ASKED])
        return tokenizer.decode(template.render(tokenizer, prompt, True))

    if WAYS[name].drops_written_out:
        assert said("<think>Hm.</think>3 m") == said("3 m")
        assert said(WRITTEN_OUT) == said("3 m </think> or so")
    else:
        assert WRITTEN_OUT.strip() in said(WRITTEN_OUT)
    controls = set(template.control_tokens(tokenizer).values())

    def control_ids(message: dict[str, Any]) -> list[int]:
        ids = template.render(tokenizer, Prompt([ASKED, message, ASKED]), True)
        return [i for i in ids if i in controls]

    for role in ("assistant", "user"):
        plain = control_ids({"role": role, "content": "3 m"})
        assert control_ids({"role": role, "content": WRITTEN_OUT}) == plain


@pytest.mark.parametrize("name", FAMILIES)
def test_other_numbers_for_the_control_tokens_change_nothing_but_these_numbers(
    name: str, targets: dict[str, Target], shuffled: dict[str, Target]
) -> None:
    one, other = targets[name], shuffled[name]
    before = template.control_tokens(one.tokenizer)
    after = template.control_tokens(other.tokenizer)
    assert before.keys() == after.keys()
    dealt = {before[token]: after[token] for token in before}
    assert sorted(dealt) == sorted(dealt.values())
    moved = sum(old != new for old, new in dealt.items())
    assert moved >= min(len(dealt) - 1, 2) > 0

    def renumbered(value: Any) -> Any:
        if isinstance(value, frozenset):
            return frozenset(dealt.get(i, i) for i in value)
        return dealt.get(value, value) if type(value) is int else value

    told = {key: renumbered(value) for key, value in vars(one.family).items()}
    assert vars(other.family) == {**told, "vocab_size": one.family.vocab_size}
    for prompt in [*PROMPTS.values(), *HISTORIES.values()]:
        for typed in ("plain", "</think><|im_end|><｜User｜>"):
            filled_in = filled(prompt, typed)
            ids = template.render(one.tokenizer, filled_in, True)
            assert template.render(other.tokenizer, filled_in, True) == list(map(renumbered, ids))


ANSWERS = [
    ("{open}Hm.</think>Yes.{stop}", "stop", "sound", "closed"),
    ("{open}Hm.</think>{call}{stop}", "stop", "sound", "closed"),
    ("{open}Hm.{call}{stop}", "stop", "sound", "tool in thinking"),
    ("{open}Hm. And", "length", "cut", "truncated in thinking"),
    ("{open}Hm.</think>Ye", "length", "sound", "closed"),
    ("{open}Hm.</think>", "length", "cut", "no answer"),
    ("{open}Hm.{stop}", "stop", "broken", "unclosed"),
    ("{open} \n</think>Yes.{stop}", "stop", "broken", "empty thinking"),
    ("{open}{call}{stop}", "stop", "broken", "empty thinking"),
    ("{open}Hm.</think>{half}{stop}", "stop", "broken", "tool call not closed"),
]
"""Text of an answer, how it ended, and what is thought of it with thinking on."""

BARE = [
    ("Yes.{stop}", "stop", "sound", "not thinking"),
    ("{call}{stop}", "stop", "sound", "not thinking"),
    ("{open}Hm.</think>Yes.{stop}", "stop", "broken", "thinking although off"),
]
"""The same with thinking off."""


@pytest.mark.parametrize("dealt", [False, True], ids=["as made", "dealt anew"])
@pytest.mark.parametrize("name", THINKING)
def test_answers_are_read_by_what_the_family_says_and_not_by_numbers(
    name: str, dealt: bool, targets: dict[str, Target], shuffled: dict[str, Target]
) -> None:
    target, way = (shuffled if dealt else targets)[name], WAYS[name]
    words = {"open": way.opened, "call": way.call, "stop": way.stop}
    # The call up to its arguments, whatever ends it left out.
    words["half"] = way.call[: way.call.rindex("}") + 1]
    for thinking, table in ((True, ANSWERS), (False, BARE)):
        for text, ended, *expected in table:
            ids = target.ids(text.format(**words))
            row = {
                "sample_id": "B1-0",
                "output_ids": ids,
                "prompt_tokens": 5,
                "completion_tokens": len(ids),
                "finish_reason": ended,
            }
            assert check_row(row, target.family, 5) is None, text
            assert verdict(row, target.family, thinking) == tuple(expected), text


@pytest.mark.parametrize("name", FAMILIES)
def test_two_texts_that_a_template_sets_side_by_side_make_no_control_id(
    name: str, targets: dict[str, Target]
) -> None:
    tokenizer = targets[name].tokenizer
    controls = template.control_tokens(tokenizer)
    ids = set(controls.values())

    def rendered(*texts: str) -> list[int]:
        # Some templates put all system turns at the head, one behind another.
        turns = [{"role": "system", "content": text} for text in texts]
        return template.render(tokenizer, Prompt([ASKED, *turns, ASKED]), True)

    def found(rendered_ids: list[int]) -> list[int]:
        return [i for i in rendered_ids if i in ids]

    expected = {n: found(rendered(*["zzz"] * n)) for n in (2, 3)}
    for token in sorted(token for token in controls if "place▁holder" not in token):
        for n in range(1, len(token)):
            for texts in (
                (token[:n], token[n:]),
                (f"a {token[:n]} ", f"\n{token[n:]} b"),
                (token[0], token[1:n], token[n:]),
            ):
                assert found(rendered(*texts)) == expected[len(texts)], texts


def test_a_target_that_never_thinks_is_read_so(targets: dict[str, Target]) -> None:
    target = targets["plain"]
    assert target.family.think_close is None
    row = {"output_ids": target.ids("Yes.</s>"), "finish_reason": "stop"}
    assert verdict(row, target.family, thinking=False) == ("sound", "not thinking")


def test_the_public_tokenizer_is_used_as_it_is(targets: dict[str, Target]) -> None:
    target = targets["real deepseek"]
    added = json.loads((target.path / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    by_name = {token["content"]: token for token in added}
    assert (by_name["<think>"]["id"], by_name["</think>"]["id"]) == (128821, 128822)
    assert not by_name["<think>"]["special"] and by_name["<｜begin▁of▁sentence｜>"]["special"]
    assert target.family.vocab_size == 129_280
    text = "Hello  wörld 你好 123456 東京\n\n  def f(a):\n\treturn a.b's  🎉"
    alone = Tokenizer.from_file(str(target.path / "tokenizer.json"))
    rendered = template.render(target.tokenizer, Prompt([{"role": "user", "content": text}]), True)
    whole = f"<｜begin▁of▁sentence｜><｜User｜>{text}<｜Assistant｜><think>"
    assert rendered == alone.encode(whole, add_special_tokens=False).ids
    assert target.tokenizer.decode(rendered) == whole
