"""Rows to keys, and from a key back to its prompt."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from drafter.errors import DataError
from drafter.files import digest
from drafter.preparation import conversion
from drafter.preparation.row_store import RowStore
from drafter.sections import Dataset

ROWS = [{"id": f"q{n}", "input": f"Question {n}?"} for n in range(20)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RowStore]:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        yield RowStore([file])


@pytest.fixture(params=["lines", "array", "packed"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    data = {"lines": lines, "array": json.dumps(ROWS).encode(), "packed": gzip.compress(lines)}
    path = tmp_path / request.param
    path.write_bytes(data[request.param])
    return Dataset(name="B2", format="opencodeinstruct", path=str(path), unbounded=True)


def converted(
    source: Dataset, store: RowStore
) -> tuple[list[conversion.Part], list[tuple[int, Any]]]:
    """The parts of a source, and (part, key) of each of its rows."""
    parts = conversion.parts([source])
    keys = [
        (index, key)
        for index, batch in conversion.batches(parts, [source], 0, store)
        for key in numpy.frombuffer(batch.keys, conversion.KEY)
    ]
    return parts, keys


def test_a_key_leads_back_to_its_prompt(
    source: Dataset, store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_PART_BYTES", 300)
    parts, keys = converted(source, store)
    assert (len(parts) > 2) == str(source.path).endswith("lines")
    begin: dict[int, int] = {}
    for number, (index, key) in enumerate(keys):
        row = conversion.recall(source, parts[index], key, store)
        text = [{"role": "user", "content": f"Question {number}?"}]
        assert (row["messages"], row["tools"]) == (text, None)
        in_part = number - begin.setdefault(index, number)
        assert row["source"] == {"id": f"q{number}", "row": in_part, "revision": "local"}
        content = digest({"messages": text, "tools": None})
        assert f"{int(key['content']):016x}" == content[:16]


@pytest.mark.parametrize("change", ["other row", "no row", "shorter"])
def test_a_file_that_is_changed_meanwhile_is_named(
    change: str, tmp_path: Path, store: RowStore
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = Dataset(name="B2", format="opencodeinstruct", path=str(path), unbounded=True)
    parts, keys = converted(source, store)
    text = path.read_text()
    path.write_text(
        {
            "other row": text.replace("Question 19", "Question 91"),
            "no row": text.replace('{"', "!!"),
        }.get(change, text[:200])
    )
    index, key = keys[19]
    with pytest.raises(DataError, match=r"rows\.jsonl was changed while it was read: run prepare"):
        conversion.recall(source, parts[index], key, store)
