"""Rows on disk that are found again by address, also when other processes wrote them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from drafter.preparation.row_store import RowStore, json_line


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RowStore]:
    with ExitStack() as files:
        yield RowStore(
            [files.enter_context(tempfile.TemporaryFile(dir=tmp_path)) for _ in range(3)]
        )


def test_lines_of_any_length_come_back_from_their_address(store: RowStore) -> None:
    lines = [json_line({"n": n, "text": "é" * (7**n)}) for n in range(7)]  # up to 230 kB
    addresses = [store.append(line, json_line({"second": n})) for n, line in enumerate(lines)]
    store.flush()
    for n, (line, address) in enumerate(zip(lines, addresses, strict=True)):
        assert store.lines(address) == [line]
        assert store.lines(address, 2) == [line, json_line({"second": n})]


def test_each_process_has_a_file_of_its_own_and_all_are_read_by_the_first(store: RowStore) -> None:
    before = store.append(b"mine\n")
    store.flush()
    for number in (1, 2):
        if not (child := os.fork()):
            store.use(number)
            store.append(f"of process {number}\n".encode())
            store.flush()
            os._exit(0)
        os.waitpid(child, 0)
    store.use(1)  # goes on behind what the process wrote
    after = store.append(b"mine again\n")
    store.flush()
    assert store.lines(before) == [b"mine\n"]
    assert store.lines(1 << 48, 2) == [b"of process 1\n", b"mine again\n"]
    assert store.lines(2 << 48) == [b"of process 2\n"]
    assert store.lines(after) == [b"mine again\n"]
