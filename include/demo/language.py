"""The demo's language: questions about a random loop of words, in the manner of eight datasets.

A prompt holds a loop as shuffled pairs ("elm ash ; ash fir ; fir elm") and names two of its words
("from ash then elm"). The thinking walks the loop from the first of them until it is back there,
the answer does the same from the second:

    thinking  "walk ash fir elm ash"        answer  "route elm ash fir elm"

Every word after the first follows from the prompt alone, by finding the pair that begins with the
word before it. That takes two attention layers in a row (mark each word with its predecessor, then
look the predecessor up), so neither a table of n-grams nor a one-layer drafter without the
target's states can guess it, while a drafter that reads those states can. Nearly all that is
generated is such words: boilerplate would let a table of n-grams win.

Everything is drawn from the ``random.Random`` that is passed in.
"""

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

WORDS = (
    "alder ash aspen bay beech birch box cedar cherry clove cork elder elm fig fir gum hazel holly "
    "ivy larch lemon lime maple myrtle oak olive palm pear pine plum rowan yew"
).split()

MIN_LOOP, MAX_LOOP = 8, 12
"""Words in a loop: long enough to drown the boilerplate, short enough for a tiny model."""

SECOND_WORD_SHARE = 0.2
"""The one thing that is random in an answer. Far from a half, so that greedy answers agree
between engines whose arithmetic differs in the last bits."""

TOOLS = ("trace", "plan", "follow")
"""Names of the functions a B1 prompt may offer; the user's verb says which one to call."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """How one dataset words a loop, its questions and its replies."""

    pair: str
    ask: str
    """First user turn, with {pairs}, {start}, {then} (and {verb} where tools are offered)."""
    think: tuple[str, str]
    """First words of the thinking: the usual one, and one that sampling meets now and then."""
    answer: str
    """First word of the answer."""
    again: str | None = None
    """Later user turns; None where the dataset has one question per row."""
    system: str | None = None


STYLES: dict[str, Style] = {
    "B1_glaive": Style(
        pair="{} {} ;",
        ask="Links {pairs} Please {verb} from {start} then {then}",
        think=("call", "so"),
        answer="found",
    ),
    "B2_opencodeinstruct": Style(
        pair="{}: {},",
        ask="next = {{ {pairs} }} Write go( {start} , {then} )",
        think=("loop", "def"),
        answer="return",
    ),
    "B3_magicoder": Style(
        pair="{} -> {};",
        ask="enum Hop {{ {pairs} }} fn hop from {start} then {then}",
        think=("let", "fn"),
        answer="vec",
    ),
    "B4_mixturethoughts": Style(
        pair="( {} {} )",
        ask="Problem. Edges {pairs} Find the path from {start} then {then}",
        think=("hmm", "ok"),
        answer="path",
    ),
    "B5_openthoughts": Style(
        pair="{} | {} .",
        ask="Given {pairs} Which way leads from {start} then {then} ?",
        think=("first", "now"),
        answer="way",
    ),
    "B6_ultrachat": Style(
        pair="{} to {} ,",
        ask="Hello! Trains run {pairs} How do I ride from {start} then {then} ?",
        again="Thanks! How do I ride from {start} then {then} ?",
        think=("ride", "so"),
        answer="take",
    ),
    "B7_sharegpt": Style(
        pair="{} > {} /",
        ask="my notes {pairs}\n\ngo from {start} then {then}",
        again="ok now go from {start} then {then}",
        think=("notes", "ok"),
        answer="go",
    ),
    "B8_sweagent": Style(
        pair="\n {} = {}",
        ask="ISSUE: links are broken{pairs}\nOpen from {start} then {then}",
        again="OBSERVATION: done\nOpen from {start} then {then}",
        think=("check", "see"),
        answer="open",
        system="SETTING: You repair links.",
    ),
}
DATASETS = tuple(STYLES)


@dataclass(frozen=True)
class Exchange:
    """One user or tool turn and what the target should say to it."""

    asked: str
    thinking: str
    answer: str
    call: str | None = None
    """Name of the function to call; the answer is then its JSON arguments."""
    role: str = "user"

    @property
    def call_id(self) -> str:
        return f"functions.{self.call}:0"

    def reply(self) -> str:
        """What is generated after ``</think>``, up to and without ``<|im_end|>``."""
        if self.call is None:
            return self.answer
        return (
            f"<|tool_calls_section_begin|><|tool_call_begin|>{self.call_id}"
            f"<|tool_call_argument_begin|>{self.answer}<|tool_call_end|><|tool_calls_section_end|>"
        )

    def assistant(self) -> Message:
        """The reply as a turn of history, in OpenAI's form."""
        if self.call is None:
            return {"role": "assistant", "content": self.answer}
        function = {"name": self.call, "arguments": self.answer}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


@dataclass(frozen=True)
class Dialogue:
    """A conversation of one dataset."""

    dataset: str
    exchanges: list[Exchange]
    system: str | None = None
    functions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return [{"type": "function", "function": f} for f in self.functions] or None

    def messages(self, last: int = 0) -> list[Message]:
        """The prompt that ends with the question of exchange ``last``: system turn, history, it."""
        turns: list[Message] = []
        if self.system is not None:
            turns.append({"role": "system", "content": self.system})
        for i, exchange in enumerate(self.exchanges[: last + 1]):
            turn: Message = {"role": exchange.role, "content": exchange.asked}
            if exchange.role == "tool":
                turn["tool_call_id"] = self.exchanges[i - 1].call_id
            turns += [turn, exchange.assistant()]
        return turns[:-1]


def walk(loop: list[str], start: str) -> list[str]:
    """The words of the loop from ``start`` until it comes round again."""
    first = loop.index(start)
    return [*loop[first:], *loop[: first + 1]]


def function(name: str) -> dict[str, Any]:
    """The declaration of one tool, as a glaive row lists it."""
    stops = {"stops": {"type": "string"}}
    return {
        "name": name,
        "description": f"{name} links",
        "parameters": {"type": "object", "properties": stops, "required": ["stops"]},
    }


def dialogue(dataset: str, rng: Random) -> Dialogue:
    """Draw one conversation in the manner of ``dataset``."""
    style = STYLES[dataset]
    loop = rng.sample(WORDS, rng.randint(MIN_LOOP, MAX_LOOP))
    pairs = [style.pair.format(*pair) for pair in zip(loop, loop[1:] + loop[:1], strict=True)]
    rng.shuffle(pairs)
    joined = ("" if style.pair[0] == "\n" else " ").join(pairs)
    functions, verb = [], None
    if dataset == "B1_glaive":
        names = rng.sample(TOOLS, rng.randint(1, 2))
        functions, verb = [function(name) for name in names], rng.choice(names)
    exchanges = []
    for turn in range(rng.randint(1, 3) if style.again else 1):
        start, then = rng.sample(loop, 2)
        template = style.again if turn and style.again else style.ask
        asked = template.format(pairs=joined, start=start, then=then, verb=verb)
        (first_word,) = rng.choices(style.think, weights=(1 - SECOND_WORD_SHARE, SECOND_WORD_SHARE))
        thinking = " ".join([first_word, *walk(loop, start)])
        route = walk(loop, then)
        text = " ".join([style.answer, *route])
        if verb is None:
            exchanges.append(Exchange(asked, thinking, text))
        else:
            exchanges.append(Exchange(asked, thinking, arguments(route), call=verb))
            exchanges.append(Exchange('{"open":true}', thinking, text, role="tool"))
    return Dialogue(dataset, exchanges, style.system, functions)


def arguments(route: list[str]) -> str:
    """A tool call's arguments, compact, so that little of the call is boilerplate.

    "via" lets every word of the route follow a space: one token per word throughout.
    """
    return json.dumps({"stops": " ".join(["via", *route])}, separators=(",", ":"))
