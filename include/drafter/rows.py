"""What a valid response row is: fields, types, values, counts. Pure functions on token ids.

The one place where this is decided: the engine client, the canary of generate and validate all ask
here, and structure.py for what the ids say. Text never enters, so nothing depends on decoding.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafter import formats

ROW_KEYS = frozenset(
    {"sample_id", "output_ids", "prompt_tokens", "completion_tokens", "finish_reason"}
)

IdArray = NDArray[np.uint32]

_BOOLS = frozenset({0, 1})
"""As which an array takes ``false`` and ``true``."""

_SHOWN = 200
"""Characters of keys that nobody knows."""


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

    other_controls: frozenset[int] = frozenset()
    """Control ids that no answer has a use for: those that mark up messages or begin documents."""

    @cached_property
    def controls(self) -> frozenset[int]:
        """Every id that is not text."""
        think = {i for i in (self.think_open, self.think_close) if i is not None}
        return self.tool_ids | self.stop_ids | self.other_controls | think

    @cached_property
    def marked(self) -> NDArray[np.bool_]:
        """[vocab_size]: where :func:`mark` looks: the controls, and what may be a bool."""
        table = np.zeros(self.vocab_size, dtype=np.bool_)
        table[[i for i in self.controls | _BOOLS if i < self.vocab_size]] = True
        return table


class Marked(NamedTuple):
    """Ids, and which of them are control ids: what a thousand tokens come down to."""

    ids: IdArray
    at: list[int]
    """Where the control ids are, in order."""

    tokens: list[int]
    """Which they are."""


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
    marked = read_row(row, family, prompt_tokens)
    if isinstance(marked, str):
        return marked
    assert isinstance(row, dict)
    if has_stopped(row, family):
        return None
    return f"no stop id at the end: finish_reason is stop, last id {row['output_ids'][-1]}"


def read_row(row: object, family: Family, prompt_tokens: int | None) -> Marked | str:
    """The ids of a row with valid fields, or why they are not valid. How it ended is not judged."""
    if not isinstance(row, dict):
        return f"not an object: {type(row).__name__}"
    if row.keys() != ROW_KEYS:
        if older := formats.older(row):
            return f"older format: {older}"
        missing, extra = sorted(ROW_KEYS - row.keys()), sorted(row.keys() - ROW_KEYS)
        return f"wrong keys: {missing} missing, {extra!s:.{_SHOWN}} unknown"
    if fault := _type_fault(row):
        return fault
    marked = mark(row["output_ids"], family)
    if isinstance(marked, str):
        return marked
    return _count_fault(row, prompt_tokens) or marked


def has_stopped(row: dict[str, Any], family: Family) -> bool:
    """Does a row that says it stopped end in an id that stops?"""
    return row["finish_reason"] != "stop" or row["output_ids"][-1] in family.stop_ids


def mark(output_ids: list[Any], family: Family) -> Marked | str:
    """The ids as an array with their control ids found, or why they are no ids of the family."""
    if not output_ids:
        return "empty output_ids"
    # array() takes integers and bools only, and makes an array in a third of numpy's time.
    try:
        ids = np.frombuffer(array("I", output_ids), dtype=np.uint32)
        at = family.marked.take(ids).nonzero()[0]
    except TypeError:
        return _wrong_type(output_ids)
    except (OverflowError, IndexError):
        outside = next(
            i for i in output_ids if type(i) is not int or not 0 <= i < family.vocab_size
        )
        if type(outside) is not int:
            return _wrong_type(output_ids)
        return f"id outside the vocabulary: {outside}, needs 0..{family.vocab_size - 1}"
    marked = Marked(ids, at.tolist(), ids[at].tolist())
    return _without_bools(marked, output_ids, family) if _BOOLS & {*marked.tokens} else marked


def _without_bools(marked: Marked, output_ids: list[Any], family: Family) -> Marked | str:
    """``marked`` without the 0 and 1 that are integers; many tokenizers have them for ! and \"."""
    found = list(zip(marked.at, marked.tokens, strict=True))
    if any(type(output_ids[i]) is not int for i, token in found if token in _BOOLS):
        return _wrong_type(output_ids)
    kept = [both for both in found if both[1] in family.controls]
    return Marked(marked.ids, [i for i, _ in kept], [token for _, token in kept])


def _wrong_type(output_ids: list[Any]) -> str:
    first = next(i for i in output_ids if type(i) is not int)
    return f"wrong type in output_ids: {first!r:.40} is {type(first).__name__}, needs integers only"


def _type_fault(row: dict[str, Any]) -> str | None:
    # type() rather than isinstance(): a bool is an int to Python and not to JSON.
    for key, kind in (
        ("sample_id", str),
        ("output_ids", list),
        ("prompt_tokens", int),
        ("completion_tokens", int),
        ("finish_reason", str),
    ):
        if type(row[key]) is not kind:
            drift = formats.drift(key, row[key])
            return (
                f"wrong type of {key}: {type(row[key]).__name__}, needs {kind.__name__}"
                f"{f' ({drift})' if drift else ''}"
            )
    if not row["sample_id"]:
        return "empty sample_id"
    if row["finish_reason"] not in ("stop", "length"):
        return f"unknown finish_reason: {row['finish_reason'][:40]!r}, needs 'stop' or 'length'"
    return None


def _count_fault(row: dict[str, Any], prompt_tokens: int | None) -> str | None:
    if row["completion_tokens"] != len(row["output_ids"]):
        return f"wrong completion_tokens: {row['completion_tokens']}, ids {len(row['output_ids'])}"
    if row["prompt_tokens"] < 1:
        return f"wrong prompt_tokens: {row['prompt_tokens']}, needs at least 1"
    if prompt_tokens is not None and row["prompt_tokens"] != prompt_tokens:
        return f"wrong prompt_tokens: {row['prompt_tokens']}, stored prompt {prompt_tokens}"
    return None
