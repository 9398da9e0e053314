"""Rows of source files of any layout, in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
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


def zstandard(data: bytes) -> bytes:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(data)
    return bytes(packed.getvalue())


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "Zstandard": zstandard,
}


@pytest.mark.parametrize("packed", [None, *PACK])
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_read_from_any_layout(
    name: str, block: int, packed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", block)
    data = LAYOUTS[name].encode()
    path = tmp_path / "source"  # neither .gz nor .jsonl: what a file is shows in its bytes
    path.write_bytes(PACK[packed](data) if packed else data)
    assert list(reading.rows(path)) == SAMPLE


@pytest.mark.parametrize("packed", PACK)
def test_what_was_packed_in_pieces_is_one_file(packed: str, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(PACK[packed](b'{"a": 1}\n{"a"') + PACK[packed](b": 2}\n"))
    assert list(reading.rows(path)) == [{"a": 1}, {"a": 2}]


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


@pytest.mark.parametrize("behind", ['[{"a": 2}]', " \n x", "," + " " * 99 + '{"a": 2}'])
def test_what_stands_behind_an_array_is_refused_and_white_space_is_not(
    behind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 8)
    path = tmp_path / "source"
    path.write_text('[{"a": 1}]' + " \n" * 20)
    assert list(reading.rows(path)) == [{"a": 1}]
    path.write_text(f'[{{"a": 1}}]{behind}')
    with pytest.raises(DataError, match="goes on behind its array with"):
        list(reading.rows(path))


def torn(data: bytes) -> bytes:
    return data[:-20]


def spoilt(data: bytes) -> bytes:
    middle = len(data) // 2
    return (
        data[:middle]
        + bytes(byte ^ 0xFF for byte in data[middle : middle + 9])
        + data[middle + 9 :]
    )


# pyarrow's Zstandard has no checksum: what is spoilt there is found by chance.
@pytest.mark.parametrize(
    ("packed", "damage"),
    [*((packed, torn) for packed in PACK), *((p, spoilt) for p in PACK if p != "Zstandard")],
)
def test_a_damaged_stream_is_one_sentence(
    packed: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "source"
    data = random.Random(0).randbytes(2000).hex()
    path.write_bytes(damage(PACK[packed](f'{{"n": "{data}"}}\n'.encode() * 9)))
    with pytest.raises(DataError, match=r"source is damaged \(.*\): fetch it again"):
        list(reading.rows(path))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"PK\x03\x04 and so on", "is a zip archive: unpack it"),
        (b"7z\xbc\xaf\x27\x1c and so on", "is a 7z archive: unpack it"),
        (b"ARROW1\0\0 and so on", "is an Arrow file: write it as Parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "fetch it with git lfs pull"),
    ],
)
def test_what_is_no_source_at_all_is_refused_with_what_to_do(
    data: bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "source"
    path.write_bytes(data)
    with pytest.raises(DataError, match=sentence):
        list(reading.rows(path))


def test_a_file_that_is_not_there_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(reading.rows(tmp_path / "absent"))


# Parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("num_bytes", [1, 9, 10, 11, 40, 1 << 20])
@pytest.mark.parametrize("block", [1, 64])
def test_the_parts_of_a_file_have_each_row_once_and_in_order(
    block: int, num_bytes: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", block)
    lines = [
        *(json.dumps({"n": n}) for n in range(20)),
        "[1]",
        "",
        "no",
        '{"n": "' + "x" * 70 + '"}',
    ]
    path = tmp_path / "source"
    path.write_text("\ufeff" + "\n".join(lines) + end)
    whole = list(reading.rows(path))
    assert whole[-3:] == ["not an object", "not JSON", {"n": "x" * 70}]
    parts = reading.parts(path, num_bytes)
    assert len(parts) > 5 or num_bytes >= 40
    assert [row for part in parts for row in reading.rows(path, part)] == whole


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_each_row_of_a_part_is_found_again_by_its_place(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "source"
    lines = [*(json.dumps({"n": n, "é": "\u2028"}) for n in range(9)), "", "no", "[1]", '{"n": 9}']
    path.write_text(mark + "\r\n".join(lines), encoding="utf-8", newline="")
    for num_bytes in (1, 50, 1 << 20):
        for part in reading.parts(path, num_bytes):
            assert isinstance(part, reading.Bytes)
            for place, row in reading.placed_rows(path, part):
                assert reading.row_at(path, part, place) == row


def test_a_torn_last_row_is_found_in_the_last_part(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    *others, last = reading.parts(path, 4)
    assert [list(reading.rows(path, part)) for part in others] == [[{"a": 1}], [{"a": 2}]]
    with pytest.raises(DataError, match="ends in the middle of a row"):
        list(reading.rows(path, last))


@pytest.mark.parametrize(
    "data",
    [json.dumps(SAMPLE).encode(), gzip.compress(b"{}\n" * 999), b""],
    ids=["array", "packed", "empty"],
)
def test_arrays_and_packed_files_have_one_part(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(data)
    assert reading.parts(path, 8) == [None]


# Memory -------------------------------------------------------------------------------------------


def test_an_array_larger_than_a_block_is_read_a_block_at_a_time(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "source"
    path.write_text(json.dumps([{"text": "word " * 2000} for _ in range(2000)]))  # 20 MB
    tracemalloc.start()
    assert sum(1 for _ in reading.rows(path)) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
