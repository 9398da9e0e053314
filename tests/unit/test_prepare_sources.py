"""prepare over sources of every kind: in one process or several, the same prompts."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest
from families import KIMI
from unit.fake_hub import NAME, REVISION, FakeHub
from unit.test_prepare import Row, Site, ids, questions, read

from drafter import files, plan
from drafter.errors import DataError, RecipeError
from drafter.preparation import conversion, selection
from drafter.sections import Dataset
from drafter.sources import hub, reading

TEXTS = [f"Question {n}?" for n in range(200)]
ROWS = questions(*TEXTS, *(text.upper() for text in TEXTS[:50]), *TEXTS[:30], "", "x " * 900)
"""With duplicates, near duplicates (the smallest hash is kept), and two that give no prompt."""

COUNTS = {
    "source_rows": 282,
    "prompts": 200,
    "shortened": 0,
    "retired": 0,
    "adopted": 0,
    "dropped": {
        "duplicate": 13,
        "near duplicate": 67,
        "empty prompt": 1,
        "longer than max_prompt_tokens": 1,
    },
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    KIMI.save(site.target)
    return site


@pytest.fixture
def several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sources are spread as large ones are."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(conversion, "_ALONE_BYTES", 0)
    monkeypatch.setattr(conversion, "_PART_BYTES", 1000)
    monkeypatch.setattr(conversion, "_BATCH_KEYS", 5)
    monkeypatch.setattr(selection, "_ALONE", 0)
    monkeypatch.setattr(selection, "_CHUNK", 7)


def put(site: Site, **where: Any) -> None:
    """B2 as the recipe's only dataset."""
    entry = {"name": "B2", "format": "opencodeinstruct", "unbounded": True, **where}
    site.datasets = [entry]


def lines(rows: list[Row]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def written(site: Site, name: str = "B2") -> tuple[bytes, bytes]:
    prepared = site.prepared(name)
    return prepared.prompts.read_bytes(), prepared.prompt_ids.read_bytes()


# Kinds --------------------------------------------------------------------------------------------


def test_the_same_rows_give_the_same_prompts_however_they_are_kept(site: Site) -> None:
    folder = site.root / "data"
    folder.mkdir()
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=100)
    (folder / "rows.jsonl").write_bytes(lines(ROWS))
    (folder / "rows.json").write_text(json.dumps(ROWS, indent=2))
    (folder / "packed").write_bytes(gzip.compress(lines(ROWS)))
    (folder / "shards").mkdir()
    for n in range(0, len(ROWS), 90):
        (folder / "shards" / f"train-{n:05}.jsonl").write_bytes(lines(ROWS[n : n + 90]))
    (folder / "shards" / "README.md").write_text("no rows")
    seen = set()
    for path in ("rows.parquet", "rows.jsonl", "rows.json", "packed", "shards", "shards/*.jsonl"):
        put(site, path=str(folder / path))
        site.run()
        assert site.counts("B2") == COUNTS
        seen.add(written(site))
    assert len(seen) == 1
    prompts = read(site.prepared("B2").prompts)
    # The row's number counts over all files of the source.
    assert all(ROWS[row["source"]["row"]]["id"] == row["source"]["id"] for row in prompts)


def test_a_shard_that_comes_or_changes_is_prepared_and_one_that_stays_is_not(site: Site) -> None:
    folder = site.root / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(ROWS[:5]))
    put(site, path=str(folder))
    site.run()
    assert plan.decide("prepare", "all", site.workspace, site.recipe).action == "done"
    (folder / "b.jsonl").write_bytes(lines(ROWS[5:9]))
    change = plan.decide("prepare", "all", site.workspace, site.recipe)
    assert (change.action, change.reason) == ("start", "changed since it was done: sources")
    assert site.run()["prompts"] == 9
    assert site.run()["line"] == "the prompts are up to date"


def test_a_damaged_shard_is_named(site: Site) -> None:
    folder = site.root / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(ROWS))
    (folder / "b.parquet").write_bytes(b"PAR1 and no more")
    put(site, path=str(folder))
    with pytest.raises(DataError, match=r"data/b\.parquet is damaged"):
        site.run()


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_samples", [None, 1, 7, 60, 200, 500])
def test_several_processes_write_what_one_writes(
    max_samples: int | None, site: Site, request: pytest.FixtureRequest
) -> None:
    limits = {"max_samples": max_samples} if max_samples else {"unbounded": True}
    site.source("B2", "opencodeinstruct", ROWS, **limits)
    shared = [text.lower() for text in TEXTS[::2]]
    site.source("B3", "magicoder", [{"problem": text} for text in [*shared, *"abcdefgh", "A"]])
    site.run()
    before = [written(site, name) for name in ("B2", "B3")]
    counts = [site.counts(name) for name in ("B2", "B3")]
    for name in ("B2", "B3"):
        for path in site.prepared(name).root.iterdir():
            path.unlink()
    request.getfixturevalue("several_processes")
    assert len(conversion.parts(site.recipe.datasets)) > 8
    site.run()
    assert [written(site, name) for name in ("B2", "B3")] == before
    assert [site.counts(name) for name in ("B2", "B3")] == counts


@pytest.mark.usefixtures("several_processes")
def test_an_error_in_one_process_is_the_jobs_error(site: Site) -> None:
    site.source("B2", "opencodeinstruct", ROWS)
    with open(site.datasets[0]["path"], "a") as file:
        file.write('{"torn": ')
    with pytest.raises(DataError, match=r"B2\.jsonl ends in the middle of a row: fetch it again"):
        site.run()
    assert not [path.name for path in site.workspace.job("prepare", "all").root.iterdir()][2:]


@pytest.mark.usefixtures("several_processes")
def test_progress_goes_on_while_others_work(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.source("B2", "opencodeinstruct", ROWS)
    reports: list[Row] = []
    monkeypatch.setattr(
        "drafter.job.Job.report", lambda _, **numbers: reports.append(numbers) or None
    )
    monkeypatch.setattr("drafter.prepare._REPORT_S", 0)
    from drafter import prepare

    prepare.run(site.job())
    read_rows = [report["source_rows"] for report in reports if "source_rows" in report]
    assert len(read_rows) > 10
    assert read_rows == sorted(read_rows)
    assert [r["rendered"] for r in reports if "rendered" in r] == list(range(1, 202))


# The hub ------------------------------------------------------------------------------------------


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    remote = FakeHub()
    with remote.serving() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setattr(hub, "_FIRST_WAIT_S", 0.01)
        yield remote


@pytest.mark.parametrize("spread", [False, True])
def test_the_hub_gives_the_prompts_that_its_files_would(
    spread: bool, site: Site, remote: FakeHub, request: pytest.FixtureRequest
) -> None:
    site.source("B2", "opencodeinstruct", ROWS)
    site.run()
    expected = [
        {**row, "source": {**row["source"], "revision": REVISION}}
        for row in read(site.prepared("B2").prompts)
    ]
    if spread:
        request.getfixturevalue("several_processes")
    table = pyarrow.Table.from_pylist([{**row, "output": "x" * 500} for row in ROWS])
    for n in range(3):
        shard = table.slice(n * 100, 100)
        pyarrow.parquet.write_table(shard, site.root / "shard", row_group_size=30)
        remote.files[f"data/train-{n:05}-of-00003.parquet"] = (site.root / "shard").read_bytes()
    remote.faults = [("cut", 20), ("status", 503), ("cut", 200)]
    put(site, hub=NAME, revision=REVISION, files="data/train-*.parquet")
    site.run()
    assert site.counts("B2") == COUNTS
    assert read(site.prepared("B2").prompts) == expected


def test_a_commit_on_the_hub_is_asked_once(site: Site, remote: FakeHub) -> None:
    remote.files["rows.jsonl"] = lines(ROWS)
    put(site, hub=NAME, revision=REVISION)
    site.run()
    asked = remote.listings
    section = files.read_section(site.prepared("B2").manifest, "prepare")
    assert section
    assert section["inputs"]["sources"]["B2"]["hub"] == NAME
    assert site.run()["line"] == "the prompts are up to date"
    assert plan.decide("prepare", "all", site.workspace, site.recipe).action == "done"
    assert remote.listings == asked
    put(site, hub=NAME, revision=REVISION, files="*.jsonl")
    assert plan.decide("prepare", "all", site.workspace, site.recipe).action == "start"


def test_a_refusal_of_the_hub_leaves_what_is_there(site: Site, remote: FakeHub) -> None:
    site.source("B2", "opencodeinstruct", ROWS)
    site.run()
    before = written(site)
    remote.refusal = (403, "Gated.")
    put(site, hub=NAME, revision=REVISION)
    with pytest.raises(RecipeError, match="accept its terms"):
        site.run()
    assert written(site) == before
    assert ids(site.prepared("B2").prompts)


def test_rows_are_read_from_the_hub_as_from_a_file(remote: FakeHub) -> None:
    remote.files["rows.jsonl"] = lines(ROWS)
    (file,) = hub.files(
        Dataset(name="B2", format="opencodeinstruct", hub=NAME, revision=REVISION, unbounded=True)
    )
    assert list(reading.rows(file)) == ROWS
