"""Are the tool calls of an answer such that somebody could carry them out?

Marks are found by id. Only what stands between them is decoded, to read it: arguments are a JSON
object, the name is one that the prompt declares. How a family spells a call is learnt from its own
template, by rendering calls whose name and arguments are known; a family whose calls cannot be read
back that way (arguments as XML, no mark at the end) is not judged::

    Kimi            functions.NAME:INDEX <arguments> JSON     in a section
    DeepSeek V3.1   NAME <arguments> JSON                     in a section
    DeepSeek R1     function <arguments> NAME, fenced JSON    in a section
    Qwen, Hermes    {"name": NAME, "arguments": JSON}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import orjson

from drafter import template
from drafter.kinds import Kind
from drafter.rows import Family, Marked
from drafter.validation.structure import Remark, Shape

Call = tuple[str, Any]
"""(name, arguments)"""

Read = Callable[[str, str], Call]
"""From what stands before and behind the mark of the arguments; the latter is empty without one.
Raises ValueError, KeyError or TypeError where no call stands."""

Decode = Callable[[list[int]], str]

_KIMI = re.compile(r"\s*functions\.(.+):\d+\s*")
_FENCED = re.compile(r"\s*(\S+)\s*```json\s(.*)```\s*", re.DOTALL)
_KNOWN_NAMES = 4096
"""Decoded once each."""

_SHOWN = 60
"""Characters of what cannot be read."""


class Spelling(NamedTuple):
    """How a family marks up its calls."""

    section: tuple[int, int] | None
    """Around all calls of an answer."""

    begin: int
    arguments: int | None
    end: int
    read: Read

    def letters(self, tokens: Sequence[int]) -> str:
        """Marks as letters, so that patterns can say in which order they stand: ``(bae)``."""
        letter = {self.begin: "b", self.end: "e"}
        if self.arguments is not None:
            letter[self.arguments] = "a"
        if self.section:
            letter |= {self.section[0]: "(", self.section[1]: ")"}
        return "".join(letter.get(token, "?") for token in tokens)


class Calls(NamedTuple):
    """What was found in one answer."""

    num_tokens: int = 0
    """From the first mark to the last, both included."""

    num_calls: int = 0
    """That were begun."""

    num_valid: int = 0
    remarks: tuple[Remark, ...] = ()


class Judge:
    """Judges the calls of one family. Without a spelling it only counts."""

    def __init__(self, family: Family, spelling: Spelling | None, decode: Decode) -> None:
        self._family = family
        self._spelling = spelling
        self.decode = decode
        self._name = lru_cache(_KNOWN_NAMES)(lambda ids: decode(list(ids)))
        if spelling:
            call = "bae" if spelling.arguments is not None else "be"
            begun = "b?a?" if spelling.arguments is not None else "b?"
            group = rf"\((?:{call})+\)" if spelling.section else call
            self._call = re.compile(call)
            self._whole = re.compile(rf"(?:{group})*")
            self._cut = re.compile(rf"\((?:{call})*{begun}" if spelling.section else rf"{begun}")

    def look(
        self, shape: Shape, marked: Marked, cut: bool, declared: Callable[[], frozenset[str] | None]
    ) -> Calls:
        """``declared``: the names that the prompt offers, None when nobody knows; asked only for
        an answer with calls."""
        marks = [
            (where, token)
            for where, token in zip(marked.at, marked.tokens, strict=True)
            if where >= shape.rest and token in self._family.tool_ids
        ]
        if not marks:
            return Calls()
        num_tokens = marks[-1][0] - marks[0][0] + 1
        if self._spelling is None:
            begun = sum(token in self._family.tool_begin for _, token in marks)
            unknown = Remark("tool call not judged", "the template's spelling is not known")
            return Calls(num_tokens, begun, 0, (unknown,))
        letters = self._spelling.letters([token for _, token in marks])
        found: dict[Kind, Remark] = {}
        whole = self._whole.match(letters)
        assert whole is not None
        left = letters[whole.end() :]
        is_cut = cut and self._cut.fullmatch(left)
        if left and not is_cut and shape.kind != "tool call not closed":
            where, token = marks[whole.end()]
            found["tool call unbalanced"] = Remark(
                "tool call unbalanced", f"id {token} at {where} of {len(marked.ids)}"
            )
        num_valid = 0
        names = declared()
        for call in self._call.finditer(letters):
            at = [where for where, _ in marks[call.start() : call.end()]]
            remark = self._fault(marked, at, names)
            num_valid += remark is None
            if remark:
                found.setdefault(remark.kind, remark)
        return Calls(num_tokens, letters.count("b"), num_valid, tuple(found.values()))

    def _fault(
        self, marked: Marked, at: Sequence[int], declared: frozenset[str] | None
    ) -> Remark | None:
        assert self._spelling is not None
        pieces = [marked.ids[begin + 1 : end].tolist() for begin, end in pairwise(at)]
        if len(pieces) == 2:
            before, behind = self._name(tuple(pieces[0])), self.decode(pieces[1])
        else:
            before, behind = self.decode(pieces[0]), ""
        try:
            name, arguments = self._spelling.read(before, behind)
        except (ValueError, KeyError, TypeError):
            return Remark("tool call unparsable", f"{before + behind:.{_SHOWN}}")
        if type(name) is not str or not isinstance(arguments, dict):
            return Remark("tool call unparsable", f"{before + behind:.{_SHOWN}}")
        if declared is None:
            return Remark("tool call not judged", "its prompt is not in prompts.jsonl")
        if name not in declared:
            return Remark("tool not declared", f"{name:.{_SHOWN}}")
        return None


def learn(tokenizer: Any, family: Family) -> Spelling | None:
    """How ``family`` spells calls, read off what its template makes of one and of two."""
    if not family.tool_end:
        return None
    one, two = (_marks(tokenizer, family, number) for number in (1, 2))
    tokens = [token for token, _ in one]
    inner = tokens
    section = None
    if len(two) != 2 * len(one):
        section, inner = (tokens[0], tokens[-1]), tokens[1:-1]
    twice = [*tokens[:1], *inner, *inner, *tokens[-1:]] if section else [*inner, *inner]
    if len(inner) not in (2, 3) or twice != [token for token, _ in two]:
        return None
    if len({*inner, *(section or ())}) != len(tokens):
        return None
    texts = [text for _, text in (one[1:] if section else one)]
    before, behind = texts[0], texts[1] if len(inner) == 3 else ""
    for read in (_kimi, _plain, _fenced) if len(inner) == 3 else (_object,):
        try:
            if read(before, behind) == template.PROBE_CALL:
                arguments = inner[1] if len(inner) == 3 else None
                return Spelling(section, inner[0], arguments, inner[-1], read)
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _marks(tokenizer: Any, family: Family, num_calls: int) -> list[tuple[int, str]]:
    """Each mark of rendered calls, with the text up to the next."""
    ids = template.encode(tokenizer, template.called(tokenizer, num_calls))
    at = [where for where, token in enumerate(ids) if token in family.tool_ids]
    ends = [*at[1:], len(ids)]
    return [
        (ids[begin], template.decode(tokenizer, ids[begin + 1 : end]))
        for begin, end in zip(at, ends, strict=True)
    ]


def _kimi(before: str, behind: str) -> Call:
    match = _KIMI.fullmatch(before)
    if not match:
        raise ValueError(before)
    return match[1], orjson.loads(behind)


def _plain(before: str, behind: str) -> Call:
    return before.strip(), orjson.loads(behind)


def _fenced(before: str, behind: str) -> Call:
    match = _FENCED.fullmatch(behind)
    if before.strip() != "function" or not match:
        raise ValueError(behind)
    return match[1], orjson.loads(match[2])


def _object(text: str, _: str) -> Call:
    call = orjson.loads(text)
    return call["name"], call["arguments"]
