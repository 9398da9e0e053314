"""Appending and reading survive kills, full disks and damage."""

from __future__ import annotations

import json
import resource
import tracemalloc
from pathlib import Path

import pytest

from drafter import jsonl
from drafter.errors import DataError, DrafterError
from drafter.jsonl import Appender, row_at, rows, scan

ROW = {"sample_id": "é", "output_ids": [1, 2]}
LINE = json.dumps(ROW, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def test_rows_come_back_with_number_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Appender(path) as file:
        offsets = [file.append({**ROW, "i": i}) for i in range(3)]
    assert [(line.number, line.offset, line.value["i"]) for line in rows(path)] == [
        (i + 1, offset, i) for i, offset in enumerate(offsets)
    ]
    assert row_at(path, offsets[1])["i"] == 1


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert list(scan(tmp_path / "none")) == []


@pytest.mark.parametrize("cut", range(1, len(LINE) - 1))
def test_a_line_torn_at_any_byte_is_set_aside_before_the_next_row(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + LINE[:cut])
    assert [line.number for line in rows(path)] == [1]
    for _ in range(2):  # the second opening finds nothing to do
        with Appender(path) as file:
            torn_bytes = file.torn_bytes
    assert torn_bytes == 0
    with Appender(path) as file:
        file.append(ROW)
    assert path.read_bytes() == LINE + LINE
    assert path.with_name("a.jsonl.torn").read_bytes() == LINE[:cut] + b"\n"


def test_a_whole_row_without_its_newline_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + LINE[:-1])
    assert len(list(rows(path))) == 2
    with Appender(path) as file:
        assert file.torn_bytes == 0
    assert path.read_bytes() == LINE + LINE
    assert not path.with_name("a.jsonl.torn").exists()


@pytest.mark.parametrize("tail", [b"12", b'"x"', b"\x00\x00", b"[1]", b"\xc3"])
def test_a_tail_that_is_no_object_is_torn_even_when_it_parses(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + tail)
    assert len(list(rows(path))) == 1
    with Appender(path) as file:
        assert file.torn_bytes == len(tail)
    assert path.read_bytes() == LINE


def test_a_torn_line_longer_than_any_buffer_is_found_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b'{"a":"' + b"x" * 5_000_000)
    with Appender(path) as file:
        assert file.torn_bytes == 5_000_006
    assert path.read_bytes() == LINE


@pytest.mark.parametrize("bad", [b'{"a":\n', b"\n", b"[1]\n", b"\xff\n", b"null\n"])
def test_damage_with_a_newline_names_file_and_line(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + bad + LINE)
    with pytest.raises(DataError, match=r"a\.jsonl:2 is damaged"):
        list(rows(path))
    assert [isinstance(line.value, dict) for line in scan(path)] == [True, False, True]


@pytest.mark.parametrize("begin", [b"[", b'{"a":'])
@pytest.mark.parametrize(("levels", "fault"), [(200, None), (201, "more than 200 lists")])
def test_lists_and_objects_deep_in_each_other_are_damage_that_every_reader_survives(
    begin: bytes, levels: int, fault: str | None
) -> None:
    end = {b"[": b"]", b'{"a":': b"}"}[begin]
    # What stands in a string, or beside, is not deep.
    raw = b'{"text": "%b", "flat": [%b0], "deep": %b0%b}' % (
        *(b"[" * 500, b"[],{}," * 500),
        *(begin * (levels - 1), end * (levels - 1)),
    )
    value, told = jsonl.parse(raw)
    assert (value is None) is (fault is not None)
    assert (told or "").startswith(fault or "")


@pytest.mark.parametrize("size", [999, 1000, 1001, 20_000_000])
def test_a_line_longer_than_the_limit_is_damage_and_skipped_in_blocks(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    long = b'{"a":"' + b"x" * (size - 9) + b'"}\n'
    path.write_bytes(LINE + long + LINE)
    if size <= 1000:
        assert len(list(rows(path))) == 3
        return
    with pytest.raises(DataError, match=r"a\.jsonl:2 is damaged \(longer than"):
        list(rows(path))
    tracemalloc.start()
    try:
        assert [(line.offset, line.num_bytes) for line in scan(path)] == [
            (0, len(LINE)),
            (len(LINE), size),
            (len(LINE) + size, len(LINE)),
        ]
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()


def test_a_torn_line_longer_than_the_limit_is_set_aside_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    torn = b'{"a":"' + b"x" * 20_000_000
    path.write_bytes(LINE + torn)
    assert [line.torn for line in scan(path)] == [False, True]
    tracemalloc.start()
    try:
        with Appender(path) as file:
            assert file.torn_bytes == len(torn)
        assert tracemalloc.get_traced_memory()[1] < 3_500_000
    finally:
        tracemalloc.stop()
    assert path.read_bytes() == LINE
    assert path.with_name("a.jsonl.torn").read_bytes() == torn + b"\n"


def test_a_full_disk_is_one_sentence_and_takes_the_half_written_row_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Appender(path) as file:
        file.append(ROW)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * len(LINE) - 5, limits[1]))
        try:
            with pytest.raises(DrafterError, match="free some space"):
                file.append(ROW)
            with pytest.raises(DrafterError, match="free some space"):
                file.append({**ROW, "more": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        file.append(ROW)
    assert path.read_bytes() == LINE + LINE


def test_reading_takes_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE * 60_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in rows(path)) == 60_000
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_lines", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("lines", [b"", b"{}\n", b'{"a":1}\n{}\n{"b":22}\n', b"{}\n\n\n{}\n"])
def test_the_tail_begins_at_the_first_of_the_last_lines(
    lines: bytes, block: int, num_lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block)
    (path := tmp_path / "x.jsonl").write_bytes(lines)
    whole = lines.splitlines(keepends=True)
    expected = len(b"".join(whole[: max(len(whole) - num_lines, 0)]))
    assert jsonl.tail(path, num_lines) == expected
