"""An agent's run above the cap: what goes first, what never goes, and that tools still fit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from families import DEEPSEEK, KIMI, QWEN, TinyTarget

from drafter import template
from drafter.sources.prompt import Prompt
from drafter.sources.shortening import ELIDED, Render, shortened

FAMILIES = {"kimi": KIMI, "qwen": QWEN, "deepseek": DEEPSEEK}


@pytest.fixture(params=FAMILIES)
def render(request: pytest.FixtureRequest, tmp_path: Path) -> Render:
    target: TinyTarget = FAMILIES[request.param]
    tokenizer = template.load_tokenizer(target.save(tmp_path / "target"))
    return functools.partial(template.render, tokenizer, thinking=True)


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def run(*observations: str, calls: bool = False) -> Prompt:
    """A task, and a step of the agent before each observation."""
    messages = [said("system", "You repair code."), said("user", "The task: repair the links.")]
    for i, observation in enumerate(observations):
        if calls:
            function = {"name": "look", "arguments": f'{{"page": {i}}}'}
            call = {"id": f"functions.look:{i}", "type": "function", "function": function}
            messages.append(said("assistant", f"Step {i}.", tool_calls=[call]))
            messages.append(said("tool", observation, tool_call_id=call["id"]))
        else:
            messages.append(said("assistant", f"Step {i}: look at page {i}"))
            messages.append(said("user", observation))
    return Prompt(messages, source_id="run 1")


def pages(*sizes: int) -> list[str]:
    return [f"page {i}: " + "link " * size for i, size in enumerate(sizes)]


def contents(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages]


@pytest.mark.parametrize("calls", [False, True])
def test_the_oldest_observations_go_first_and_no_more_than_needed(
    calls: bool, render: Render
) -> None:
    prompt = run(*pages(50, 50, 50, 50, 50), calls=calls)
    num_tokens = len(render(prompt))
    before = contents(prompt)
    for num_elided in range(5):
        stays = [ELIDED if i in [3, 5, 7, 9][:num_elided] else t for i, t in enumerate(before)]
        messages = [{**m, "content": t} for m, t in zip(prompt.messages, stays, strict=True)]
        fits = len(render(Prompt(messages)))
        result = shortened(prompt, num_tokens, fits, render)
        assert result
        assert contents(result.prompt) == stays
        assert (result.num_elided, result.num_cut) == (num_elided, 0)
        assert result.input_ids == render(result.prompt)


def test_calls_and_their_ids_stay_when_what_they_answered_goes(render: Render) -> None:
    prompt = run(*pages(50, 50, 2), calls=True)
    result = shortened(prompt, len(render(prompt)), len(render(prompt)) - 300, render)
    assert result
    assert result.num_elided
    for old, new in zip(prompt.messages, result.prompt.messages, strict=True):
        assert {**old, "content": None} == {**new, "content": None}
        assert new["content"] in (old["content"], ELIDED)


def test_a_last_observation_that_is_too_long_by_itself_means_an_earlier_end(
    render: Render,
) -> None:
    prompt = run(*pages(20, 30, 900))
    cap = len(render(run(*pages(20, 30)))) + 5
    result = shortened(prompt, len(render(prompt)), cap, render)
    assert result
    assert contents(result.prompt) == contents(run(*pages(20, 30)))
    assert (result.num_elided, result.num_cut) == (0, 2)


def test_both_at_once(render: Render) -> None:
    prompt = run(*pages(40, 40, 40, 900))
    expected = run(ELIDED, *pages(0, 40, 40)[1:])
    result = shortened(prompt, len(render(prompt)), len(render(expected)) + 5, render)
    assert result
    assert contents(result.prompt) == contents(expected)
    assert (result.num_elided, result.num_cut) == (1, 2)


def test_what_several_tools_answered_at_the_end_stays_whole(render: Render) -> None:
    prompt = run(*pages(60), calls=True)
    first = prompt.messages[-1]
    second = {
        "id": "functions.look:1",
        "type": "function",
        "function": {"name": "look", "arguments": "{}"},
    }
    calls = [*prompt.messages[-2]["tool_calls"], second]
    messages = [
        *prompt.messages[:-2],
        {**prompt.messages[-2], "tool_calls": calls},
        first,
        said("tool", "link " * 60, tool_call_id="functions.look:1"),
    ]
    prompt = Prompt(messages)
    result = shortened(prompt, len(render(prompt)), len(render(prompt)) - 10, render)
    assert result
    assert result.prompt.messages == messages[:2]


def test_the_task_alone_is_the_least_there_is(render: Render) -> None:
    prompt = run(*pages(100, 100))
    task = Prompt(prompt.messages[:2])
    num_tokens, least = len(render(prompt)), len(render(task))
    result = shortened(prompt, num_tokens, least + 3, render)
    assert result
    assert result.prompt.messages == task.messages
    assert shortened(prompt, num_tokens, least - 1, render) is None


def test_an_observation_shorter_than_the_mark_is_left_alone(render: Render) -> None:
    prompt = run("ok", *pages(0, 80, 5)[1:])
    result = shortened(prompt, len(render(prompt)), len(render(prompt)) - 20, render)
    assert result
    assert contents(result.prompt)[3] == "ok"
    assert contents(result.prompt)[5] == ELIDED
    assert result.num_elided == 1


def test_every_cap_is_kept_and_the_longer_one_keeps_no_less(render: Render) -> None:
    prompt = run(*pages(3, 40, 0, 17, 90, 8), "<think> <|im_end|> " * 20, "done", calls=True)
    num_tokens = len(render(prompt))
    kept = []
    for cap in range(60, num_tokens, 23):
        result = shortened(prompt, num_tokens, cap, render)
        if result is None:
            assert not kept
            continue
        assert len(result.input_ids) <= cap
        again = shortened(prompt, num_tokens, cap, render)
        assert again == result
        kept.append((-result.num_cut, -result.num_elided))
    assert len(kept) > 20
    ends = [end for end, _ in kept]
    assert ends == sorted(ends)


class Counted:
    """Counts what is rendered; says more than it is told, as template and tokenizer may."""

    def __init__(self, render: Render) -> None:
        self.render, self.num_long = render, 0

    def __call__(self, prompt: Prompt) -> list[int]:
        self.num_long += len(prompt.messages) > 2
        return self.render(prompt) + [0] * (len(prompt.messages) ** 2 // 10)


def test_few_long_prompts_are_rendered_though_the_weights_are_off(render: Render) -> None:
    prompt = run(*pages(*range(10, 90)))
    counted = Counted(render)
    num_tokens = len(counted(prompt))
    counted.num_long = 0
    result = shortened(prompt, num_tokens, num_tokens // 3, counted)
    assert result
    assert len(result.input_ids) <= num_tokens // 3
    assert counted.num_long <= 3
