"""What is accepted of every family is what a grammar of answers allows."""

from __future__ import annotations

import re

import pytest
from families import DEEPSEEK, KIMI, PLAIN, QWEN, TinyTarget
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.kimi_dataset import World, line, make_world

TARGETS = {"kimi": KIMI, "qwen": QWEN, "deepseek": DEEPSEEK, "plain": PLAIN}
CALLS = {
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.tide:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "qwen": '<tool_call>\n{"name": "tide", "arguments": {}}\n</tool_call>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tide<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
}
BEGINS = {"kimi": "[BOS]", "qwen": "<|im_start|>", "deepseek": "<｜User｜>", "plain": "<s>"}
ENDS = {"kimi": "<|tool_call_end|>", "qwen": "</tool_call>", "deepseek": "<｜tool▁call▁end｜>"}

Case = tuple[str, bool]
CASES: list[Case] = [
    (name, on) for name in TARGETS for on in (True, False) if (name, on) != ("plain", True)
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, World]:
    return {
        (name, thinking): make_world(tmp_path_factory.mktemp("world"), TARGETS[name], thinking)
        for name, thinking in CASES
    }


def grammar(target: TinyTarget, thinking: bool, cut: bool) -> str:
    """Of answers without their stop id: ``T`` text, ``B`` blank, ``O`` and ``C`` open and close
    thinking, ``K`` a tool call."""
    said = "[TBK]*[TK][TBK]*"
    if target is PLAIN:
        # Its template knows no thinking: to open it is text, to close it is not.
        return "[TBO]*[TO][TBO]*"
    if not thinking:
        return said
    opened = "B*O[BO]*" if target is QWEN else "[BO]*"
    answer = "[TBK]*" if cut else said
    return f"{opened}T[TB]*(C{answer}|K[TBK]*(C[TBK]*)?)"


@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_an_answer_is_accepted_if_and_only_if_the_grammar_has_it(
    worlds: dict[Case, World], data: st.DataObject
) -> None:
    name, thinking = data.draw(st.sampled_from(CASES))
    world = worlds[name, thinking]
    opened = "O" if name == "qwen" else ""
    letters = st.text(alphabet="TBOCSXKe", max_size=5)
    whole = st.sampled_from([f"{opened}TCT", f"{opened}TCTK", f"{opened}TBCBT", "T", "TK", ""])
    answer = "".join(data.draw(st.tuples(letters, whole, letters, st.sampled_from(["", "S"]))))
    if name not in CALLS:
        answer = re.sub("[Ke]", "", answer)
    spelled = {
        "T": "Hm so",
        "B": "\n",
        "O": "<think>",
        "C": "</think>",
        "S": world.tokenizer.convert_ids_to_tokens(min(world.family.stop_ids)),
        "X": BEGINS[name],
        "K": CALLS.get(name, ""),
        "e": ENDS.get(name, ""),
    }
    ids = [i for letter in answer for i in world.ids(spelled[letter])]
    if not ids:
        return
    finish = data.draw(st.sampled_from(["stop", "length"]))
    (judged,) = world.look(line(world.of(ids, finish_reason=finish)))
    stopped = answer.endswith("S")
    said = re.fullmatch(grammar(TARGETS[name], thinking, not stopped), answer.removesuffix("S"))
    wanted = said is not None and (stopped or finish == "length")
    # The same call three times over is a loop.
    if "repetition" not in judged.facts.kinds:
        assert (judged.tokenized is not None) is wanted, (name, thinking, answer, judged.facts)
