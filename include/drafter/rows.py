"""What a valid response row is, and what its reasoning looks like: pure functions on token ids.

The one place where this is decided: the engine client, the canary of generate and validate all ask
here. Text never enters, so nothing depends on decoding.

A reason is ``"<class>"`` or ``"<class>: <detail>"``; :func:`reason_class` gives the part to count.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

ROW_KEYS = frozenset(
    {"sample_id", "output_ids", "prompt_tokens", "completion_tokens", "finish_reason"}
)

Reasoning = Literal[
    "closed", "tool in thinking", "truncated in thinking", "empty thinking", "unclosed"
]
Kind = Literal[
    Reasoning, "not thinking", "thinking although off", "tool call not closed", "no answer"
]


@dataclass(frozen=True)
class Family:
    """The control tokens of a target's template family, as ids of its tokenizer."""

    think_open: int | None
    """Begins thinking; None when the model has no such token."""

    think_close: int | None
    """Ends thinking; None when the model does not think."""

    prefilled: bool
    """The rendered prompt already ends inside thinking, so the output holds no ``think_open``."""

    tool_begin: frozenset[int]
    """Ids that begin a section of tool calls, in every spelling the target is known to emit."""

    tool_ids: frozenset[int]
    """Every id that tool calls are marked up with, ``tool_begin`` included."""

    stop_ids: frozenset[int]
    """Ids of which one ends every answer that was not cut."""

    vocab_size: int
    """Ids are in [0, vocab_size)."""

    blank_ids: frozenset[int] = frozenset()
    """Ids that decode to white space only: thinking made of nothing else is empty."""

    tool_end: frozenset[int] = frozenset()
    """Ids of which one follows the arguments of every tool call. Empty when the family has none, or
    none but the end of the answer: then nobody can tell whether a call was closed."""


def reason_class(reason: str) -> str:
    """The countable part of a reason."""
    return reason.partition(":")[0]


MAX_COUNT = 1 << 40
"""No answer has so many tokens; sums of them stay within 64 bits."""


def key_fault(row: dict[str, Any]) -> str | None:
    """Why a stored row cannot even be counted; all else about it is for :func:`check_row`."""
    sample_id, tokens = row.get("sample_id"), row.get("completion_tokens")
    if type(sample_id) is str and type(tokens) is int and 0 <= tokens < MAX_COUNT:
        return None
    return (
        f"sample_id is {sample_id!r:.60} and completion_tokens {tokens!r:.60}, needs a string and a"
        " number"
    )


def check_row(row: object, family: Family, prompt_tokens: int | None) -> str | None:
    """Why ``row`` is not a valid response, or None when it is.

    ``prompt_tokens`` is the length of the stored prompt; None when the sample id is not known,
    which the caller judges.
    """
    if not isinstance(row, dict):
        return f"not an object: {type(row).__name__}"
    if row.keys() != ROW_KEYS:
        missing, extra = sorted(ROW_KEYS - row.keys()), sorted(row.keys() - ROW_KEYS)
        return f"wrong keys: {missing} missing, {extra} unknown"
    return (
        _check_types(row)
        or _check_ids(row["output_ids"], family)
        or _check_counts(row, prompt_tokens)
        or _check_end(row, family)
    )


def _check_types(row: dict[str, Any]) -> str | None:
    # type() rather than isinstance(): a bool is an int to Python and not to JSON.
    for key, kind in (
        ("sample_id", str),
        ("output_ids", list),
        ("prompt_tokens", int),
        ("completion_tokens", int),
        ("finish_reason", str),
    ):
        if type(row[key]) is not kind:
            return f"wrong type of {key}: {type(row[key]).__name__}, needs {kind.__name__}"
    if not row["sample_id"]:
        return "empty sample_id"
    if row["finish_reason"] not in ("stop", "length"):
        return f"unknown finish_reason: {row['finish_reason'][:40]!r}, needs 'stop' or 'length'"
    return None


def _check_ids(output_ids: list[Any], family: Family) -> str | None:
    if not output_ids:
        return "empty output_ids"
    # array() takes integers and bools only, a third of the time that min, max and type take.
    try:
        ids = np.frombuffer(array("q", output_ids), dtype=np.int64)
    except (TypeError, OverflowError):
        return "wrong type in output_ids: needs integers only"
    if ids.min() <= 1 and set(map(type, output_ids)) != {int}:
        return "wrong type in output_ids: needs integers only, has bools"
    outside = ids[(ids < 0) | (ids >= family.vocab_size)]
    if outside.size:
        return f"id outside the vocabulary: {outside[0]}, needs 0..{family.vocab_size - 1}"
    return None


def _check_counts(row: dict[str, Any], prompt_tokens: int | None) -> str | None:
    if row["completion_tokens"] != len(row["output_ids"]):
        return f"wrong completion_tokens: {row['completion_tokens']}, ids {len(row['output_ids'])}"
    if row["prompt_tokens"] < 1:
        return f"wrong prompt_tokens: {row['prompt_tokens']}, needs at least 1"
    if prompt_tokens is not None and row["prompt_tokens"] != prompt_tokens:
        return f"wrong prompt_tokens: {row['prompt_tokens']}, stored prompt {prompt_tokens}"
    return None


def _check_end(row: dict[str, Any], family: Family) -> str | None:
    last = row["output_ids"][-1]
    if row["finish_reason"] == "stop" and last not in family.stop_ids:
        return f"no stop id at the end: finish_reason is stop, last id {last}"
    return None


def reasoning(output_ids: list[int], family: Family) -> Reasoning:
    """How the thinking of one answer ended. ``family.think_close`` must not be None.

    * closed                 something was thought, then ``think_close``
    * tool in thinking       something was thought, then a tool call began before ``think_close``
    * truncated in thinking  no ``think_close``, and no stop id at the end: cut by length
    * unclosed               no ``think_close``, yet ended by a stop id (or thinking never opened)
    * empty thinking         nothing but blank before ``think_close`` or the tool call
    """
    return _thinking(output_ids, family)[0]


def _thinking(output_ids: list[int], family: Family) -> tuple[Reasoning, int]:
    """(reasoning, index of the token that ended it, or the number of ids)"""
    assert family.think_close is not None, "the target does not think"
    begin = 0
    if not family.prefilled:
        opened = _first(output_ids, {family.think_open})
        if opened is None:
            return _open_end(output_ids, family)
        begin = opened + 1
    end = _first(output_ids, family.tool_begin | {family.think_close}, begin)
    if end is None:
        return _open_end(output_ids, family)
    # Some models open their thinking again although the prompt has done so.
    if (family.blank_ids | {family.think_open}).issuperset(output_ids[begin:end]):
        return "empty thinking", end
    return ("closed" if output_ids[end] == family.think_close else "tool in thinking"), end


def _open_end(output_ids: list[int], family: Family) -> tuple[Reasoning, int]:
    ended = bool(output_ids) and output_ids[-1] in family.stop_ids
    return ("unclosed" if ended else "truncated in thinking"), len(output_ids)


def answered(ids: list[int], family: Family) -> bool:
    """Is there an answer or a tool call in what follows the thinking, not only blank and a stop
    id?"""
    silent = family.blank_ids | family.stop_ids | {family.think_open, family.think_close}
    return not silent.issuperset(ids)


def tool_call_open(ids: list[int], family: Family) -> bool:
    """Was a tool call begun, and not closed after that? Never where :attr:`Family.tool_end` is
    empty."""
    if not family.tool_end or _first(ids, family.tool_begin) is None:
        return False
    backwards = ids[::-1]
    end = _first(backwards, family.tool_end)
    return end is None or _first(backwards[:end], family.tool_begin) is not None


def _first(ids: list[int], wanted: Collection[int | None], begin: int = 0) -> int | None:
    """Index of the first of ``wanted`` in ``ids`` from ``begin``. list.index runs at C speed."""
    found: int | None = None
    for token in wanted:
        if token is None:
            continue
        try:
            found = ids.index(token, begin, len(ids) if found is None else found)
        except ValueError:
            continue
    return found


Verdict = Literal["sound", "cut", "broken"]


def verdict(row: dict[str, Any], family: Family, thinking: bool) -> tuple[Verdict, Kind]:
    """Judge the content of a valid row: (verdict, class). ``thinking`` as the target was asked to.

    ``cut`` is an answer that the length limit ended before it had said anything after its thinking:
    a matter of max_new_tokens, not of the engine.
    """
    output_ids, cut = row["output_ids"], row["finish_reason"] == "length"
    kind, begin = _thinking(output_ids, family) if thinking else (_bare(output_ids, family), 0)
    if kind == "truncated in thinking":
        return "cut", kind
    if kind in ("unclosed", "empty thinking", "thinking although off"):
        return "broken", kind
    rest = output_ids[begin:]
    if not cut and tool_call_open(rest, family):
        return "broken", "tool call not closed"
    if kind == "tool in thinking" or answered(rest, family):
        return "sound", kind
    return ("cut" if cut else "broken"), "no answer"


def _bare(output_ids: list[int], family: Family) -> Kind:
    thought = _first(output_ids, {family.think_open, family.think_close}) is not None
    return "thinking although off" if thought else "not thinking"
