"""What is trained on is spliced from stored bytes, and is what writing the row anew would give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.errors import DataError
from drafter.jsonl import Line
from drafter.validation.tokenized import Prompts, encoded, has_key_twice, output_text, text_of

OURS = {
    "sample_id": "B1-0",
    "output_ids": [10, 2, 163839],
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "finish_reason": "stop",
}


def line(raw: bytes) -> Line:
    return Line(1, 0, len(raw), orjson.loads(raw), None, False, raw)


def spaced(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


ODD_NAMES = ["B1-0", 'a"b', "a\\", "ü 你", '"output_ids":[1]', "\u2028\t", "]},"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_ids_are_taken_from_a_line_that_is_spelled_as_ours(name: str) -> None:
    raw = orjson.dumps({**OURS, "sample_id": name}, option=orjson.OPT_APPEND_NEWLINE)
    assert output_text(line(raw)) == b"10,2,163839"


@pytest.mark.parametrize(
    "raw",
    [
        spaced(OURS),
        orjson.dumps(dict(reversed(OURS.items()))) + b"\n",
        orjson.dumps(OURS),
        orjson.dumps(OURS) + b"\r\n",
        orjson.dumps(OURS).replace(b"10,2", b"10, 2") + b"\n",
        orjson.dumps(OURS).replace(b"10,2", b"10\t,2") + b"\n",
        orjson.dumps(OURS).replace(b"10,2", b"-0,10,2") + b"\n",
        orjson.dumps(OURS).replace(b"B1-0", b"\\u00421-0") + b"\n",
        orjson.dumps(OURS).replace(b"[10", b'[1],"output_ids":[10') + b"\n",
    ],
)
def test_any_other_spelling_is_left_to_the_parser(raw: bytes) -> None:
    assert output_text(line(raw)) is None


ids_lists = st.lists(st.integers(0, 200_000), min_size=1, max_size=20)


@given(st.text(max_size=8), ids_lists, ids_lists)
def test_the_written_line_is_what_the_row_would_be_written_as(
    name: str, prompt: list[int], output: list[int]
) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    row = {"sample_id": name, "input_ids": [*prompt, *output], "prompt_tokens": len(prompt)}
    written = encoded(name, text_of(prompt), text_of(output), len(prompt))
    assert written == orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


@pytest.mark.parametrize("write", [spaced, lambda row: orjson.dumps(row) + b"\n"])
@pytest.mark.parametrize("more", [{}, {"retired": True}, {"tags": [1, 2]}])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_prompts_are_found_whatever_their_spelling(
    write: Any, more: dict[str, Any], name: str, tmp_path: Path
) -> None:
    rows = [
        {"sample_id": "first", "input_ids": [1]},
        {"sample_id": name, "input_ids": [5, 60], **more},
    ]
    (tmp_path / "p").write_bytes(b"".join(map(write, rows)))
    with Prompts(tmp_path / "p") as prompts:
        assert prompts.num_tokens(name) == 2 and prompts.text(name) == b"5,60"
        assert prompts.text("first") == b"1"
        assert prompts.num_tokens("none") is None


def test_missing_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run prepare first"):
        Prompts(tmp_path / "prompt_ids.jsonl")


@pytest.mark.parametrize("name", [*ODD_NAMES, "\\u0022"])
def test_a_key_that_comes_once_is_no_key_twice(name: str) -> None:
    for raw in (spaced({**OURS, "sample_id": name}), orjson.dumps({**OURS, "sample_id": name})):
        assert not has_key_twice(line(raw))
    escaped = orjson.dumps(OURS).replace(b"B1-0", b"\\u0022")
    assert not has_key_twice(line(escaped))


@pytest.mark.parametrize("key", OURS)
def test_a_key_that_comes_twice_is_seen_whichever_value_the_parser_kept(key: str) -> None:
    again = b"{" + orjson.dumps({key: OURS[key]})[1:-1] + b"," + orjson.dumps(OURS)[1:]
    assert has_key_twice(line(again))
