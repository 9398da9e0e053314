"""Rows of source files of any layout, in bounded memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafter.errors import DataError
from drafter.sources import reading

SAMPLE = [{"a": 'x ] } , { \\" [', "b": [{"c": [1, {}]}, "é"]}, {}, {"d": "\\\\"}, {"e": [[], {}]}]
LAYOUTS: dict[str, str] = {
    "lines": "\n".join(map(json.dumps, SAMPLE)),
    "lines with a mark, blank lines and carriage returns": "\ufeff"
    + "\r\n\r\n".join(map(json.dumps, SAMPLE))
    + "\n",
    "array": json.dumps(SAMPLE),
    "array, compact": json.dumps(SAMPLE, separators=(",", ":"), ensure_ascii=False),
    "array, indented, with a mark": "\ufeff \n" + json.dumps(SAMPLE, indent=4) + "\n",
    "array of lines": "[\n" + ",\n".join(map(json.dumps, SAMPLE)) + "\n]\n",
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_read_from_any_layout(
    name: str, block: int, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", block)
    data = LAYOUTS[name].encode()
    path = tmp_path / "source"  # neither .gz nor .jsonl: what a file is shows in its bytes
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert list(reading.rows(path)) == SAMPLE


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a": 1}\n{"a": \n{"b": 2}\n', [{"a": 1}, "not JSON", {"b": 2}]),
        (b'{"a": 1}\n[1]\n"x"\n', [{"a": 1}, "not an object", "not an object"]),
        (b'{"a": "\xff"}\n{"b": 2}', ["not JSON", {"b": 2}]),
        (b'{"a": "\\ud83d"}\n', [{"a": "\ud83d"}]),
        (b'{"a":' + b"[" * 100_000 + b"\n{}\n", ["not JSON", {}]),
        (b'[{"a": 1}, {"a": ,}, 7, {"b": 2}]', [{"a": 1}, "not JSON", "not an object", {"b": 2}]),
        (b"[{'a': 1}, {\"b\": 2}]", ["not JSON", {"b": 2}]),
        (b"[]", []),
        (b" \n", []),
        (b"", []),
    ],
)
def test_a_bad_row_is_named_and_reading_goes_on(
    data: bytes, expected: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "source"
    path.write_bytes(data)
    assert list(reading.rows(path)) == expected


@pytest.mark.parametrize(
    ("text", "where"),
    [
        pytest.param('[{"a": 1}, {"a": 2}', "its array", id="no closing bracket"),
        pytest.param('[{"a": 1}, {"a"', "its array", id="half an element"),
        pytest.param('[{"a": 1}, {"b": "cut o', "its array", id="half a string"),
        pytest.param('[{"a": 1}, ', "its array", id="a comma"),
        pytest.param("[" * 100_000, "its array", id="brackets"),
        pytest.param('{"a": 1}\n{"a": ', "a row", id="half a line"),
    ],
)
def test_half_a_download_is_not_a_small_dataset(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"ends in the middle of {where}: fetch it again"):
        list(reading.rows(path))


def test_nan_is_read_as_python_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_text('{"difficulty": NaN, "problem": "x"}\n')
    (row,) = reading.rows(path)
    assert isinstance(row, dict)
    assert row["problem"] == "x"


def test_a_row_beyond_the_limit_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_text('{"a": 1}\n{"b": "' + "x" * 500 + '"}\n{"c": 3}\n')
    assert list(reading.rows(path, max_row_bytes=100)) == [{"a": 1}, "row too long", {"c": 3}]


def test_an_array_with_a_row_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 64)
    path = tmp_path / "source"
    path.write_text('[{"b": "' + "x" * 500 + '"}]')
    with pytest.raises(DataError, match="row of more than 100 bytes"):
        list(reading.rows(path, max_row_bytes=100))


@pytest.mark.parametrize("spoil", [lambda z: z[:-20], lambda z: z[:40] + b"\0" * 9 + z[49:]])
def test_a_damaged_gzip_stream_is_one_sentence(
    spoil: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "source"
    path.write_bytes(spoil(gzip.compress("\n".join(f'{{"n": {n}}}' for n in range(999)).encode())))
    with pytest.raises(DataError, match="is damaged"):
        list(reading.rows(path))


def test_an_array_larger_than_a_block_is_read_a_block_at_a_time(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "source"
    path.write_text(json.dumps([{"text": "word " * 2000} for _ in range(2000)]))  # 20 MB
    tracemalloc.start()
    assert sum(1 for _ in reading.rows(path)) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
