"""Rows on disk that are found again by address, also when other processes wrote them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from drafter.spool import Spool, json_line


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with ExitStack() as files:
        yield Spool([files.enter_context(tempfile.TemporaryFile(dir=tmp_path)) for _ in range(3)])


def test_lines_of_any_length_come_back_from_their_address(spool: Spool) -> None:
    lines = [json_line({"n": n, "text": "é" * (7**n)}) for n in range(7)]  # up to 230 kB
    addresses = [spool.append(line, json_line({"second": n})) for n, line in enumerate(lines)]
    spool.flush()
    for n, (line, address) in enumerate(zip(lines, addresses, strict=True)):
        assert spool.lines(address) == [line]
        assert spool.lines(address, 2) == [line, json_line({"second": n})]


def test_each_process_has_a_file_of_its_own_and_all_are_read_by_the_first(spool: Spool) -> None:
    before = spool.append(b"mine\n")
    spool.flush()
    for number in (1, 2):
        if not (child := os.fork()):
            spool.use(number)
            spool.append(f"of process {number}\n".encode())
            spool.flush()
            os._exit(0)
        os.waitpid(child, 0)
    spool.use(1)  # goes on behind what the process wrote
    after = spool.append(b"mine again\n")
    spool.flush()
    assert spool.lines(before) == [b"mine\n"]
    assert spool.lines(1 << 48, 2) == [b"of process 1\n", b"mine again\n"]
    assert spool.lines(2 << 48) == [b"of process 2\n"]
    assert spool.lines(after) == [b"mine again\n"]
