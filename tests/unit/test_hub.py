"""Datasets on the hub, over real HTTP: what is read, what is asked for, and what goes wrong."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from unit.fake_hub import NAME, REVISION, FakeHub

from drafter.errors import Busy, DataError, RecipeError
from drafter.sections import Dataset
from drafter.sources import hub, reading

ROWS = [{"id": n, "input": f"question {n} " * 20} for n in range(200)]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    remote = FakeHub()
    with remote.serving() as url:
        monkeypatch.setenv("HF_ENDPOINT", url + "/")
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "nobody"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hub, "_FIRST_WAIT_S", 0.01)
        yield remote


def source(**changes: Any) -> Dataset:
    given = {"name": "B2", "format": "opencodeinstruct", "hub": NAME, "revision": REVISION}
    return Dataset.model_validate({**given, "unbounded": True, **changes})


def read(**changes: Any) -> list[Any]:
    return [row for file in hub.files(source(**changes)) for row in reading.rows(file)]


# What is read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [500, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lines(ROWS), id="lines"),
        pytest.param(json.dumps(ROWS, indent=1).encode(), id="array"),
        pytest.param(gzip.compress(lines(ROWS)), id="packed lines"),
    ],
)
def test_json_is_read_a_range_at_a_time(
    data: bytes, block: int, remote: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "BLOCK_BYTES", block)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 100)
    remote.files["rows.json"] = data
    assert read() == ROWS
    first, *others = [(begin, end) for _, begin, end in remote.ranges]
    assert first == (0, 32)  # what is it?
    assert [begin for begin, _ in others] == [0, *(end for _, end in others[:-1])]
    assert others[-1][1] == len(data)
    assert data.startswith(b"\x1f") or max(end - begin for begin, end in others) <= block


def test_of_parquet_only_the_wanted_columns_travel(remote: FakeHub, tmp_path: Path) -> None:
    rows = [{**row, "output": random.Random(row["id"]).randbytes(20_000).hex()} for row in ROWS]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "file", row_group_size=50)
    remote.files["data/train-00000-of-00001.parquet"] = (tmp_path / "file").read_bytes()
    (file,) = hub.files(source())
    assert list(reading.rows(file, columns=("id", "input", "absent"))) == ROWS
    assert sum(end - begin for _, begin, end in remote.ranges) < file.size / 10


def test_shards_are_read_in_the_order_of_their_names_whatever_the_order_of_the_tree(
    remote: FakeHub,
) -> None:
    remote.page_size = 3
    for n in reversed(range(10)):
        remote.files[f"data/train-{n:05d}-of-00010.jsonl"] = lines(ROWS[n : n + 1])
    remote.files["README.md"] = b"not data"
    assert read() == ROWS[:10]
    assert remote.listings == 4


def test_a_name_that_needs_quoting_is_found(remote: FakeHub) -> None:
    remote.files["data/the rows #1 50%.jsonl"] = lines(ROWS)
    assert read() == ROWS


def test_an_empty_file_has_no_rows_and_asks_for_no_bytes(remote: FakeHub) -> None:
    remote.files["rows.jsonl"] = b""
    assert read() == []
    assert remote.ranges == []


def test_files_chooses_a_split(remote: FakeHub) -> None:
    for split in ("train_sft", "test_sft"):
        for n in range(2):
            remote.files[f"data/{split}-0000{n}-of-00002.jsonl"] = lines([{"split": split}])
    assert read(files="data/train_sft-*.jsonl") == [{"split": "train_sft"}] * 2


@pytest.mark.parametrize(
    ("names", "files", "sentence"),
    [
        (
            ["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"],
            None,
            f"B2: {NAME} holds 2 kinds of data files: set files to what is meant"
            " (data/test-*.parquet, data/train-*.parquet)",
        ),
        (
            ["rows-v1.json", "rows-v2.json"],
            None,
            f"B2: {NAME} holds 2 kinds of data files: set files to what is meant"
            " (rows-v1.json, rows-v2.json)",
        ),
        (
            ["a.jsonl"],
            "b*.jsonl",
            f"B2: no file of {NAME} matches files = 'b*.jsonl': set files to what is meant"
            " (a.jsonl)",
        ),
        (
            ["README.md"],
            None,
            f"B2: {NAME} holds 0 kinds of data files: set files to what is meant"
            " (it holds no data)",
        ),
    ],
)
def test_what_is_not_clear_is_asked_with_the_choices(
    names: list[str], files: str | None, sentence: str, remote: FakeHub
) -> None:
    remote.files.update(dict.fromkeys(names, b"{}\n"))
    with pytest.raises(RecipeError) as caught:
        read(files=files)
    assert str(caught.value) == sentence


# The token ----------------------------------------------------------------------------------------


def test_the_token_of_the_host_goes_to_the_hub_and_not_to_its_storage(
    remote: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.token = "hf_secret"
    remote.page_size = 1  # with links that point elsewhere
    remote.files.update({"rows-1.jsonl": lines(ROWS[:1]), "rows-2.jsonl": lines(ROWS[1:2])})
    with pytest.raises(RecipeError, match=rf"refuses {NAME} \(401 Invalid credentials\).*HF_TOKEN"):
        read()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert read() == ROWS[:2]
    assert remote.storage_headers
    assert not any("secret" in str(headers) for headers in remote.storage_headers)


def test_who_has_logged_in_on_the_host_needs_no_variable(
    remote: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    (tmp_path / "token").write_text("hf_stored\n")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    remote.token = "hf_stored"
    remote.files["rows.jsonl"] = lines(ROWS)
    assert read() == ROWS


# What goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [("cut", 0), ("cut", 700), ("status", 503), ("status", 403), ("retry after", 0)],
    ids=str,
)
def test_what_may_pass_is_tried_again(fault: tuple[str, int], remote: FakeHub) -> None:
    """403 is what a storage says to a link whose time is over."""
    remote.files["rows.jsonl"] = lines(ROWS)
    remote.faults = [fault] * 3
    assert read() == ROWS
    assert remote.faults == []


def test_what_was_cut_off_goes_on_at_the_byte_where_it_ended(remote: FakeHub) -> None:
    data = lines(ROWS)
    remote.files["rows.jsonl"] = data
    (file,) = hub.files(source())
    remote.faults = [("cut", 1000), ("cut", 2000), ("cut", 3000)]
    with file.open("rb", buffering=0) as raw:
        assert raw.read(len(data)) == data
    assert [begin for _, begin, _ in remote.ranges] == [0, 1000, 3000, 6000]


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "set HF_TOKEN on the GPU host"),
        (403, r"accept its terms at http://.*/datasets/owner/name, or set HF_TOKEN"),
        (404, "correct hub and revision"),
        (410, "fetch it and set path"),
    ],
)
def test_a_refusal_is_one_sentence_with_what_the_hub_says(
    status: int, remedy: str, remote: FakeHub
) -> None:
    remote.refusal = (status, "Because.")
    with pytest.raises(RecipeError, match=rf"refuses {NAME} \({status} Because\.\): .*{remedy}"):
        read()


def test_a_file_that_may_not_be_read_is_a_refusal_too(remote: FakeHub) -> None:
    remote.files["rows.jsonl"] = lines(ROWS)
    (file,) = hub.files(source())
    remote.refusal = (403, "Gated.")
    with pytest.raises(RecipeError, match="403 Gated"):
        list(reading.rows(file))


@pytest.mark.usefixtures("remote")
def test_a_hub_that_is_not_there_is_waited_for_and_then_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "PATIENCE_S", 0.05)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Busy, match=r"nothing of owner/name has come from http://127\.0\.0\.1:9"):
        read()


def test_patience_begins_anew_with_every_byte(
    remote: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "PATIENCE_S", 0.05)
    remote.files["rows.jsonl"] = lines(ROWS)
    remote.faults = [("cut", 40)] * 30
    assert read() == ROWS
    remote.faults = [("status", 503)] * 1000
    with pytest.raises(Busy, match="503"):
        read()


def test_a_server_without_ranges_is_named(remote: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.files["rows.jsonl"] = lines(ROWS)
    remote.gives_ranges = False
    monkeypatch.setattr(hub, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 100)
    with pytest.raises(RecipeError, match="gives no ranges: correct HF_ENDPOINT"):
        read()


def test_a_file_of_another_size_than_its_tree_says_is_refused(remote: FakeHub) -> None:
    remote.files["rows.jsonl"] = lines(ROWS)
    (file,) = hub.files(source())
    remote.files["rows.jsonl"] = lines(ROWS * 2)
    with pytest.raises(DataError, match="its tree says"):
        list(reading.rows(file))


def test_an_endpoint_that_is_no_hub_is_named(
    remote: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.portal = b"<html>Please log in</html>"
    with pytest.raises(RecipeError, match="answers no list of files: correct HF_ENDPOINT, or the"):
        read()
    for endpoint in ("huggingface.co", "http://", "https://a:b"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(RecipeError, match="needs http:// or https:// and a host"):
            read()


@pytest.mark.parametrize(
    "page",
    [
        '{"error": "x"}',
        "null",
        "3",
        '["a"]',
        "[[]]",
        '[{"path": "a"}]',
        '[{"type": "file"}]',
        '[{"type": "file", "path": "a.jsonl", "size": null}]',
    ],
)
def test_json_that_is_no_list_of_files_is_named(page: str, remote: FakeHub) -> None:
    remote.portal = page.encode()
    with pytest.raises(RecipeError, match="answers no list of files: correct HF_ENDPOINT"):
        read()


def test_a_list_of_files_that_begins_anew_has_an_end(remote: FakeHub) -> None:
    remote.files = {f"{n}.jsonl": lines(ROWS[:1]) for n in range(5)}
    remote.page_size = 2
    remote.last_cursor = 2
    with pytest.raises(RecipeError, match="begins its list of files anew: correct HF_ENDPOINT"):
        read()
    assert remote.listings == 2


def test_bytes_from_another_place_than_asked_for_are_not_read(
    remote: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "BLOCK_BYTES", 500)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 100)
    remote.files["rows.jsonl"] = lines(ROWS)
    remote.faults = [("none", 0), ("none", 0), ("from the begin", 0)]
    with pytest.raises(RecipeError, match="gives no ranges: correct HF_ENDPOINT"):
        read()


def test_more_than_asked_for_is_not_waited_for(remote: FakeHub) -> None:
    remote.files["rows.jsonl"] = lines(ROWS)
    remote.faults = [("endless", 0)]
    assert read() == ROWS
