"""tokenized_data.jsonl: what is trained on, written from bytes that are there already.

A row is the prompt's ids, then the output's; ids are never decoded and encoded again, and not even
parsed and printed again where the stored line is spelled as ours are. The same rows give the same
bytes either way.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple, Self

import orjson

from drafter.errors import DataError
from drafter.jsonl import Line, row_at, rows

_BEGIN = b'{"sample_id":%b,"output_ids":['
_END = b'],"prompt_tokens":%d,"completion_tokens":%d,"finish_reason":"%b"}\n'
_PROMPT = b'"input_ids":['


class Stored(NamedTuple):
    """Where the ids of a prompt stand in prompt_ids.jsonl: those of a whole dataset fill memory."""

    offset: int
    num_bytes: int
    """Of the ids and the commas between them; 0 when they are not spelled as ours are."""

    num_tokens: int


class Prompts:
    """The ids of the prompts of a dataset."""

    def __init__(self, prompt_ids: Path) -> None:
        """DataError when the file is missing or damaged."""
        if not prompt_ids.exists():
            raise DataError(f"{prompt_ids} is missing: run prepare first")
        self._path = prompt_ids
        self._stored = {
            line.value["sample_id"]: _stored(line, line.value["input_ids"])
            for line in rows(prompt_ids)
        }
        self._fd = os.open(prompt_ids, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def num_tokens(self, sample_id: str) -> int | None:
        """None when there is no such prompt."""
        stored = self._stored.get(sample_id)
        return stored.num_tokens if stored else None

    def text(self, sample_id: str) -> bytes:
        """The ids as JSON, without brackets."""
        stored = self._stored[sample_id]
        if stored.num_bytes:
            return os.pread(self._fd, stored.num_bytes, stored.offset)
        return text_of(row_at(self._path, stored.offset)["input_ids"])


def _stored(line: Line, input_ids: list[int]) -> Stored:
    begin = line.raw.find(_PROMPT) + len(_PROMPT)
    text = line.raw[begin : line.raw.find(b"]", begin)]
    # Another list in the line would not have as many commas.
    if _is_plain(text) and text.count(b",") == len(input_ids) - 1:
        return Stored(line.offset + begin, len(text), len(input_ids))
    return Stored(line.offset, 0, len(input_ids))


def text_of(ids: list[int]) -> bytes:
    """``ids`` as JSON, without brackets."""
    return orjson.dumps(ids)[1:-1]


def output_text(line: Line) -> bytes | None:
    """The ``output_ids`` of a valid row as they stand in its line, without brackets; None when
    the line is not spelled exactly as ours are."""
    row = line.value
    begin = _BEGIN % orjson.dumps(row["sample_id"])
    end = _END % (
        row["prompt_tokens"],
        row["completion_tokens"],
        row["finish_reason"].encode(),
    )
    if not (line.raw.startswith(begin) and line.raw.endswith(end)):
        return None
    text = line.raw[len(begin) : -len(end)]
    return text if _is_plain(text) else None


def _is_plain(text: bytes) -> bool:
    """Are there no quotes, signs or white space in what is known to be a list of numbers?"""
    return not (b'"' in text or b"-" in text or b" " in text or b"\t" in text or b"\r" in text)


def encoded(sample_id: str, prompt: bytes, output: bytes, prompt_tokens: int) -> bytes:
    """One line, the newline included; ``prompt`` and ``output`` as :func:`text_of` gives them."""
    return b'{"sample_id":%b,"input_ids":[%b,%b],"prompt_tokens":%d}\n' % (
        orjson.dumps(sample_id),
        prompt,
        output,
        prompt_tokens,
    )


def has_key_twice(line: Line) -> bool:
    """Does a key stand in a valid row more than once? Parsers keep the last and say nothing."""
    # Two for each key and for each of the two strings, where no string can hold one.
    if line.raw.count(b'"') == 2 * len(line.value) + 4 and b"\\" not in line.raw:
        return False
    try:
        return len(json.loads(line.raw, object_pairs_hook=list)) != len(line.value)
    except RecursionError:
        # What the parser kept is not deep: what it passed over is.
        return True
