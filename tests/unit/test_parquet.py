"""Rows of Parquet files: any type, nested ones too, in bounded memory; and what is damaged."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest

from drafter.errors import DataError
from drafter.sources import reading

MESSAGES = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": None}]


def write(path: Path, table: Any, **options: Any) -> Path:
    pyarrow.parquet.write_table(table, path, **options)
    return path


def read(path: Path, columns: tuple[str, ...] | None = None) -> list[Any]:
    return list(reading.rows(path, columns=columns))


def test_rows_are_the_objects_that_jsonl_would_hold(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "messages": MESSAGES, "score": 0.5, "done": True, "nothing": None},
        {"id": None, "messages": [], "score": None, "done": False, "nothing": None},
        {"id": 3, "messages": None, "score": 1.0, "done": None, "nothing": None},
    ]
    path = write(tmp_path / "rows", pyarrow.Table.from_pylist(rows))
    assert read(path) == rows


@pytest.mark.parametrize("row_group_size", [1, 7, 1000])
def test_row_groups_and_their_parts_have_each_row_once_and_in_order(
    row_group_size: int, tmp_path: Path
) -> None:
    rows = [{"n": n, "text": "x" * n} for n in range(100)]
    path = write(tmp_path / "rows", pyarrow.Table.from_pylist(rows), row_group_size=row_group_size)
    assert read(path) == rows
    for num_bytes in (1, 300, 1 << 20):
        parts = reading.parts(path, num_bytes)
        assert [row for part in parts for row in reading.rows(path, part)] == rows
    assert len(reading.parts(path, 1)) == -(-100 // row_group_size)
    assert len(reading.parts(path, 1 << 20)) == 1


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        pytest.param([datetime.date(2024, 2, 29)], None, "2024-02-29", id="date"),
        pytest.param([datetime.time(1, 2, 3)], None, "01:02:03", id="time"),
        pytest.param(
            [1_700_000_000_000_001],
            pyarrow.timestamp("us", tz="UTC"),
            "2023-11-14T22:13:20.000001+00:00",
            id="moment",
        ),
        pytest.param(
            [1], pyarrow.timestamp("ns"), "1970-01-01T00:00:00.000000001", id="nanoseconds"
        ),
        pytest.param([1500], pyarrow.duration("ms"), 1.5, id="duration"),
        pytest.param([decimal.Decimal("1.50")], None, "1.50", id="decimal"),
        pytest.param(["é".encode()], pyarrow.binary(), "é", id="bytes that are text"),
        pytest.param([b"\xff\x00"], pyarrow.binary(), "/wA=", id="bytes that are none"),
        pytest.param([b"ab"], pyarrow.binary(2), "ab", id="bytes of one length"),
        pytest.param(
            [[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int8()), [["k", 1]], id="map"
        ),
        pytest.param([{"at": datetime.date(2024, 1, 1)}], None, {"at": "2024-01-01"}, id="nested"),
        pytest.param([[b"a", None]], None, ["a", None], id="list of bytes"),
        pytest.param([1.5], pyarrow.float16(), 1.5, id="half"),
        pytest.param([10**19], pyarrow.uint64(), 10**19, id="large number"),
        pytest.param(["a"], pyarrow.large_string(), "a", id="large text"),
    ],
)
def test_a_type_that_json_does_not_know_becomes_one_that_it_does(
    values: list[Any], kind: Any, expected: Any, tmp_path: Path
) -> None:
    table = pyarrow.table({"x": pyarrow.array([*values, None], kind)})
    first, last = read(write(tmp_path / "rows", table))
    assert (first, last) == ({"x": expected}, {"x": None})
    assert orjson.loads(orjson.dumps(first)) == first


def test_categories_are_their_values(tmp_path: Path) -> None:
    table = pyarrow.table({"x": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    assert read(write(tmp_path / "rows", table)) == [{"x": "a"}, {"x": "b"}, {"x": "a"}]


def test_a_value_that_cannot_be_read_costs_its_row_only(tmp_path: Path) -> None:
    far = pyarrow.array([0, 2**62, 1], pyarrow.timestamp("us"))
    spoilt = pyarrow.array([b"fine", b"fine", b"\xff"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, spoilt.buffers())
    rows = read(write(tmp_path / "rows", pyarrow.table({"at": far, "text": text})))
    assert rows == [
        {"at": "1970-01-01T00:00:00", "text": "fine"},
        "unreadable value",
        "unreadable value",
    ]


def test_only_the_columns_that_are_wanted_are_read(tmp_path: Path) -> None:
    rows = [{"answer": "long " * 50_000, "input": f"{n}?", "more": n} for n in range(20)]
    table = pyarrow.Table.from_pylist(rows)
    path = write(tmp_path / "rows", table, compression="none", use_dictionary=False)
    counted = Counted(path)
    assert list(reading.rows(counted, columns=("input", "id"))) == [
        {"input": row["input"]} for row in rows
    ]
    assert counted.num_bytes < 200_000 < path.stat().st_size / 20
    assert read(path, columns=("id",)) == [{}] * 20


class Counted:
    """A file that knows how much of it was read."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_bytes = path, 0

    def open(self, mode: str, buffering: int = -1) -> Any:
        outer = self

        class Raw(io.FileIO):
            def readinto(self, buffer: Any) -> int:
                num_bytes = super().readinto(buffer)
                outer.num_bytes += num_bytes
                return num_bytes

            def read(self, size: int | None = -1) -> bytes:
                data = super().read(size)
                outer.num_bytes += len(data)
                return data

        raw = Raw(self.path, mode)
        return raw if buffering == 0 else io.BufferedReader(raw)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: data[:-30], id="end missing"),
        pytest.param(lambda data: data[:100], id="hardly begun"),
        pytest.param(lambda data: data[:4], id="nothing but the magic"),
        pytest.param(lambda data: data[:60] + b"\xff" * 300 + data[360:], id="pages"),
        pytest.param(lambda data: data[:-60] + b"\xff" * 40 + data[-20:], id="footer"),
    ],
)
def test_a_damaged_file_is_one_sentence(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    table = pyarrow.table({"text": [f"row {n} of many" for n in range(1000)]})
    path = write(tmp_path / "rows", table, use_dictionary=False)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=r"rows is damaged \(.*\): fetch it again"):
        read(path)


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows", pyarrow.table({"x": pyarrow.array([], pyarrow.string())}))
    assert read(path) == []
    assert [row for part in reading.parts(path, 1) for row in reading.rows(path, part)] == []


def test_one_large_row_group_is_read_a_batch_at_a_time(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [f"{n} " * 100 for n in range(60_000)]})  # 36 MB
    path = write(tmp_path / "rows", table)
    tracemalloc.start()
    before = pyarrow.total_allocated_bytes()
    largest = num_rows = 0
    for _ in reading.rows(path):
        num_rows += 1
        largest = max(largest, pyarrow.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_rows == 60_000
    assert peak < 4 << 20
    assert largest < 16 << 20


def test_text_within_a_batch_is_what_json_says(tmp_path: Path) -> None:
    text = 'a "quoted" \\ \u2028 \x7f line\nend'
    path = write(tmp_path / "rows", pyarrow.table({"x": [text], "y": [json.dumps(text)]}))
    (row,) = read(path)
    assert row == {"x": text, "y": json.dumps(text)}
