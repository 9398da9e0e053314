"""An agent's run above the cap becomes a shorter prompt instead of none, and never loses its end.

Only what the surroundings have answered can go: the oldest answers first, each replaced by
``ELIDED`` (its call and the id of that stay), and as few as will do. Where all of them are not
enough the run is cut at an earlier answer, again with as few elided as will do. The task, what the
agent has said, and all behind its last word stay as they are. The same run, target and cap always
give the same prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from drafter.sections import SourceFormat
from drafter.sources.prompt import Message, Prompt, cuts

ELIDED = "[observation elided]"

FORMATS: frozenset[SourceFormat] = frozenset({"sweagent"})
"""Of any other format a prompt above the cap is dropped: it is one question, or a chat."""

_ANSWERS = ("user", "tool")

Render = Callable[[Prompt], list[int]]


class Shortened(NamedTuple):
    prompt: Prompt
    input_ids: list[int]
    num_elided: int
    num_cut: int
    """Messages that stood behind the new end."""


def shortened(prompt: Prompt, num_tokens: int, max_tokens: int, render: Render) -> Shortened | None:
    """``prompt``, of ``num_tokens`` when rendered, in ``max_tokens`` at most; None if impossible.

    Each message is weighed once, rendered alone; what template and markup add is known of the whole
    and of the shortest run, and between them taken to grow evenly. As that is not quite so, every
    choice is rendered, and corrects the rest when it turns out too long.
    """
    run = _Run(prompt, num_tokens, render)
    while (choice := run.choice(max_tokens)) is not None:
        end, num_elided = choice
        elided = set(run.observations[:num_elided])
        messages = [
            {**message, "content": ELIDED} if i in elided else message
            for i, message in enumerate(prompt.messages[:end])
        ]
        shorter = Prompt(messages, prompt.tools, prompt.source_id)
        input_ids = render(shorter)
        if len(input_ids) <= max_tokens:
            return Shortened(shorter, input_ids, num_elided, len(prompt.messages) - end)
        run.off += len(input_ids) - run.tokens(end, num_elided)
    return None


class _Run:
    def __init__(self, prompt: Prompt, num_tokens: int, render: Render) -> None:
        self._messages = messages = prompt.messages
        empty = len(render(_said("")))
        weights = [len(render(_said(_text(message)))) - empty for message in messages]
        marker = len(render(_said(ELIDED))) - empty
        roles = [message["role"] for message in messages]
        begin = roles.index("assistant") if "assistant" in roles else len(roles)
        self.observations = [
            i for i in range(begin, len(messages)) if roles[i] in _ANSWERS and weights[i] > marker
        ]
        """Oldest first; none that is as short as what would stand for it."""
        self.off = 0
        """Tokens that every choice has more than its weights say."""
        self._begins = [0, *accumulate(weights)]
        self._saved = [0, *accumulate(weights[i] - marker for i in self.observations)]
        self._ends = cuts(messages)
        self._shortest = shortest = self._ends[0]
        least = len(render(Prompt(messages[:shortest], prompt.tools)))
        self._least_markup = least - self._begins[shortest]
        self._more_markup = num_tokens - self._begins[-1] - self._least_markup

    def tokens(self, end: int, num_elided: int) -> int:
        behind, num_behind = end - self._shortest, len(self._messages) - self._shortest
        markup = self._least_markup + self._more_markup * behind // max(num_behind, 1)
        return self.off + markup + self._begins[end] - self._saved[num_elided]

    def choice(self, max_tokens: int) -> tuple[int, int] | None:
        """The latest end, and there the fewest elided, with which it seems to fit."""
        for end in reversed(self._ends):
            num_old = bisect_left(self.observations, self._last_word(end))
            too_many = self.tokens(end, 0) - max_tokens
            num_elided = bisect_left(self._saved, too_many, hi=num_old + 1)
            if num_elided <= num_old:
                return end, num_elided
        return None

    def _last_word(self, end: int) -> int:
        """Index behind the last message of the agent before ``end``."""
        while end and self._messages[end - 1]["role"] in _ANSWERS:
            end -= 1
        return end


def _said(text: str) -> Prompt:
    return Prompt([{"role": "user", "content": text}])


def _text(message: Message) -> str:
    """All of ``message`` that somebody wrote."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "".join([message["content"], *(f"{call['name']}{call['arguments']}" for call in calls)])
