"""How one answer is built, told from its control ids alone: thinking, answer, tool calls, end.

:func:`look` finds the parts and gives the verdict that the canary of generate shares;
:func:`remarks` finds what else is wrong with them, which only validate asks. Text never enters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

from drafter.kinds import Kind
from drafter.rows import Family, Marked, has_stopped, mark

Reasoning = Literal[
    "closed", "tool in thinking", "truncated in thinking", "empty thinking", "unclosed"
]
Verdict = Literal["sound", "cut", "broken"]


class Remark(NamedTuple):
    kind: Kind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class Shape(NamedTuple):
    """The parts of one answer, as positions in its ids."""

    verdict: Verdict
    """``cut`` is an answer that the length limit ended before it had said anything after its
    thinking: a matter of max_new_tokens, not of the engine."""

    kind: Kind
    reasoning: Kind
    """How thinking ended, whatever else there is to say."""

    thinking: int
    """Where thinking begins, behind ``think_open``."""

    rest: int
    """Where thinking ends and what is left begins: its ``think_close``, or the tool call that left
    it. The number of ids when it never ends, 0 when the target does not think."""

    is_call_open: bool
    """A tool call was begun and not closed after that."""


def verdict(row: dict[str, Any], family: Family, thinking: bool) -> tuple[Verdict, Kind]:
    """Judge the content of a valid row: (verdict, class). ``thinking`` as the target was asked to.

    The classes of thinking are those of :func:`reasoning`.
    """
    marked = mark(row["output_ids"], family)
    assert isinstance(marked, Marked), marked
    shape = look(marked, family, thinking, row["finish_reason"] == "length")
    return shape.verdict, shape.kind


def look(marked: Marked, family: Family, thinking: bool, cut: bool) -> Shape:
    """``cut``: the length limit ended the answer, as the engine says; not so where the last id it
    allowed is one that stops."""
    cut = _is_cut(marked, family, cut)
    ended: Kind
    if thinking:
        ended, begin, rest = _thinking(marked, family, cut)
    else:
        ended, begin, rest = _bare(marked, family), 0, 0
    is_open = _is_call_open(marked, family, rest)
    judged: tuple[Verdict, Kind] = "sound", ended
    if ended == "truncated in thinking":
        judged = "cut", ended
    elif ended in ("unclosed", "empty thinking", "thinking although off"):
        judged = "broken", ended
    elif is_open and not cut:
        judged = "broken", "tool call not closed"
    elif ended != "tool in thinking" and not _has_answer(marked, family, rest):
        judged = "cut" if cut else "broken", "no answer"
    return Shape(*judged, ended, begin, rest, is_open)


def reasoning(marked: Marked, family: Family, cut: bool) -> Reasoning:
    """How the thinking of one answer ended. ``family.think_close`` must not be None.

    * closed                 something was thought, then ``think_close``
    * tool in thinking       something was thought, then a tool call began before ``think_close``
    * truncated in thinking  no ``think_close``: the length limit cut it, before any stop id
    * unclosed               no ``think_close``, yet it ended by itself (or thinking never opened)
    * empty thinking         nothing but blank before ``think_close`` or the tool call
    """
    return _thinking(marked, family, _is_cut(marked, family, cut))[0]


def _thinking(marked: Marked, family: Family, cut: bool) -> tuple[Reasoning, int, int]:
    """(reasoning, where thinking begins, where it ends)"""
    assert family.think_close is not None, "the target does not think"
    ids, at, tokens = marked
    begin, first = 0, 0
    if not family.prefilled:
        if family.think_open not in tokens:
            return _open_end(cut), len(ids), len(ids)
        first = tokens.index(family.think_open) + 1
        begin = at[first - 1] + 1
    for where, token in zip(at[first:], tokens[first:], strict=True):
        if token == family.think_close or token in family.tool_begin:
            # Some models open their thinking again although the prompt has done so.
            if _text_begin(marked, begin, where, family.blank_ids | {family.think_open}) == where:
                return "empty thinking", begin, where
            closed = token == family.think_close
            return ("closed" if closed else "tool in thinking"), begin, where
    return _open_end(cut), begin, len(ids)


def _open_end(cut: bool) -> Reasoning:
    # An engine may keep its stop ids to itself: their absence alone does not say that it was cut.
    return "truncated in thinking" if cut else "unclosed"


def _is_cut(marked: Marked, family: Family, cut: bool) -> bool:
    return cut and int(marked.ids[-1]) not in family.stop_ids


def _bare(marked: Marked, family: Family) -> Kind:
    thought = family.think_open in marked.tokens or family.think_close in marked.tokens
    return "thinking although off" if thought else "not thinking"


def _has_answer(marked: Marked, family: Family, rest: int) -> bool:
    """Is there an answer or a tool call in what follows the thinking, not only blank and stop?"""
    silent = family.blank_ids | family.stop_ids | {family.think_open, family.think_close}
    end = len(marked.ids)
    return _text_begin(marked, rest, end, silent) < end


def _text_begin(marked: Marked, begin: int, end: int, silent: Collection[int | None]) -> int:
    """Where the first id stands that is not in ``silent``; ``end`` when all of them are."""
    item = marked.ids.item
    while begin < end and item(begin) in silent:
        begin += 1
    return begin


def _is_call_open(marked: Marked, family: Family, rest: int) -> bool:
    """Never where :attr:`Family.tool_end` is empty."""
    if not family.tool_end:
        return False
    for where, token in zip(reversed(marked.at), reversed(marked.tokens), strict=True):
        if where < rest or token in family.tool_end:
            return False
        if token in family.tool_begin:
            return True
    return False


def remarks(
    shape: Shape, marked: Marked, row: dict[str, Any], family: Family, thinking: bool
) -> Iterator[Remark]:
    """What a person should know of a valid row beside, or as, the kind of its ``shape``: nothing
    for a sound one that ended by itself. Tool calls are looked into by toolcalls.py."""
    broken = shape.verdict == "broken" or shape.kind == "truncated in thinking"
    # Thinking that was cut before its answer is worth something; nothing at all is not.
    broken |= shape.kind == "no answer" and not thinking
    if broken or shape.kind == "tool in thinking":
        yield Remark(shape.kind, _never_opened(shape, marked, family))
    if row["finish_reason"] == "length" and shape.kind != "truncated in thinking":
        yield Remark("cut by length in a tool call" if shape.is_call_open else "cut by length")
    if not has_stopped(row, family):
        yield Remark("no stop id", f"last id {row['output_ids'][-1]}")
    if thinking and (closes := marked.tokens.count(family.think_close or -1)) > 1:
        yield Remark("several closes", f"{closes}")
    if (stray := _stray(shape, marked, family, thinking)) is not None:
        where, token = stray
        yield Remark("control token out of place", f"{token} at {where} of {len(marked.ids)}")


def _never_opened(shape: Shape, marked: Marked, family: Family) -> str:
    is_open = family.prefilled or family.think_open in marked.tokens
    return "it never began to think" if shape.kind == "unclosed" and not is_open else ""


def _stray(shape: Shape, marked: Marked, family: Family, thinking: bool) -> tuple[int, int] | None:
    """(position, id) of the first control id that stands where text belongs."""
    last = len(marked.ids) - 1
    silent = family.blank_ids | {family.think_open}
    text = _text_begin(marked, 0, len(marked.ids), silent)
    for where, token in zip(marked.at, marked.tokens, strict=True):
        if where == last and token in family.stop_ids:
            continue
        if token in (family.think_open, family.think_close):
            # Without thinking they make a class of their own, and so do several closes.
            # Thinking may be opened again, before there is any.
            if not thinking or token == family.think_close or where < text:
                continue
        elif token in family.tool_ids and where >= shape.rest:
            continue
        return where, token
    return None
