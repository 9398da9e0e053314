"""Rows of every source, written by hand for this project, and what becomes of each.

``source_rows/<dataset>.jsonl`` holds rows in the schemas of a source and of its republished forms,
with every known fault among them; ``<dataset>.expected.jsonl`` says of each row why it is there and
what it becomes: ``reason`` (no prompt), or ``roles`` (``+n``: with n calls), how the last turn
``ends``, i.e. what it begins with, the names of its ``tools``, its ``id``, what its content ``has``
and ``lacks``; ``prepare`` says why prepare drops the prompt.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from families import KIMI
from unit.test_prepare import INCLUDE, Site, ids, read

from drafter import files
from drafter.sections import SourceFormat
from drafter.sources import COLUMNS, CONVERT, reading
from drafter.sources.prompt import Prompt

Row = dict[str, Any]

FIXTURES = Path(__file__).parent / "source_rows"
FILES = {
    path.stem: path
    for path in sorted(FIXTURES.iterdir())
    if not path.name.endswith(".expected.jsonl")
}
"""Dataset -> file. ShareGPT comes in both of its forms, lines and one array."""

MAX_PROMPT_TOKENS = 6000

# Reasons ------------------------------------------------------------------------------------------

_TURNS = {"no conversation", "turn is not an object", "unknown role", "turn is not text"}
_LINES = {"not JSON", "not an object", "row too long"}
REASONS: dict[SourceFormat, set[str]] = {
    "glaive": {
        *_TURNS,
        *("chat without a label", "no user turn", "unreadable function call"),
        "function response without a call",
        *("functions are not JSON", "function without a name"),
    },
    "opencodeinstruct": {"empty prompt", "prompt is not text"},
    "magicoder": {"empty prompt", "prompt is not text"},
    "mixturethoughts": {*_TURNS, "no user turn"},
    "openthoughts": {*_TURNS, "no user turn", "empty prompt", "prompt is not text"},
    "ultrachat": {*_TURNS, "no user turn"},
    "sharegpt": {*_TURNS, "no user turn"},
    "sweagent": {
        *_TURNS,
        *("messages are not JSON", "no assistant step", "unreadable tool call"),
        *("functions are not JSON", "function without a name"),
    },
}
"""Every word that a converter may give as the reason why a row gives no prompt."""


def format_of(dataset: str) -> SourceFormat:
    return cast(SourceFormat, dataset.split("_")[1])


def rows(dataset: str) -> list[Row | str]:
    return list(reading.rows(FILES[dataset]))


def converted(dataset: str, row: Row | str) -> Prompt | str:
    return CONVERT[format_of(dataset)](row) if isinstance(row, dict) else row


def expected(dataset: str) -> list[Row]:
    return read(FIXTURES / f"{dataset}.expected.jsonl")


# Row for row --------------------------------------------------------------------------------------

EACH = [
    pytest.param(dataset, row, wanted, id=f"{dataset}-{wanted['row']}-{wanted['why']}")
    for dataset in FILES
    for row, wanted in zip(rows(dataset), expected(dataset), strict=True)
]


@pytest.mark.parametrize(("dataset", "row", "wanted"), EACH)
def test_a_row_becomes_what_is_written_beside_it(dataset: str, row: Row | str, wanted: Row) -> None:
    prompt = converted(dataset, row)
    if "reason" in wanted:
        assert prompt == wanted["reason"]
        return
    assert isinstance(prompt, Prompt), prompt
    spoken = [
        message["role"] + (f"+{len(message['tool_calls'])}" if "tool_calls" in message else "")
        for message in prompt.messages
    ]
    assert " ".join(spoken) == wanted["roles"]
    assert prompt.messages[-1]["content"].startswith(wanted["ends"])
    assert [tool["function"]["name"] for tool in prompt.tools or []] == wanted.get("tools", [])
    assert prompt.source_id == wanted.get("id")
    content = json.dumps(prompt.content, ensure_ascii=False)
    assert [text for text in wanted.get("has", []) if text not in content] == []
    assert [text for text in wanted.get("lacks", []) if text in content] == []


@pytest.mark.parametrize("dataset", FILES)
def test_calls_have_results_and_ids_in_the_form_that_kimi_writes(dataset: str) -> None:
    for row in rows(dataset):
        prompt = converted(dataset, row)
        if isinstance(prompt, str):
            continue
        calls = [call for m in prompt.messages for call in m.get("tool_calls", ())]
        names = [call["function"]["name"] for call in calls]
        made = [f"functions.{name}:{i}" for i, name in enumerate(names)]
        assert [call["id"] for call in calls] == made
        results = [m["tool_call_id"] for m in prompt.messages if m["role"] == "tool"]
        assert sorted(results) == sorted(made)
        assert all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in calls)


@pytest.mark.parametrize("dataset", FILES)
def test_a_converter_looks_at_its_columns_only(dataset: str) -> None:
    """Of Parquet files the other columns are not read."""
    columns = COLUMNS[format_of(dataset)]
    for row in rows(dataset):
        if isinstance(row, dict):
            fewer = {key: value for key, value in row.items() if key in columns}
            assert converted(dataset, fewer) == converted(dataset, row)


def test_the_rows_show_every_reason_and_enough_of_each_source() -> None:
    seen: dict[str, set[str]] = {format: set() for format in CONVERT}
    count: Counter[str] = Counter()
    for dataset in FILES:
        wanted = expected(dataset)
        seen[format_of(dataset)] |= {row["reason"] for row in wanted if "reason" in row} - _LINES
        count[format_of(dataset)] += len(wanted)
    assert seen == REASONS
    assert all(count[format] >= 40 for format in CONVERT)


# Through prepare ----------------------------------------------------------------------------------


def make_site(root: Path, *datasets: str) -> Site:
    root.mkdir(exist_ok=True)
    site = Site(root)
    KIMI.save(site.target)
    site.generate["max_prompt_tokens"] = MAX_PROMPT_TOKENS
    for dataset in datasets or FILES:
        path, format = str(FILES[dataset]), format_of(dataset)
        site.datasets.append({"name": dataset, "format": format, "path": path, "unbounded": True})
    return site


IDS = {
    "B1_glaive": "5b26b3fe03ee6349",
    "B2_opencodeinstruct": "49b1362e9eb104e0",
    "B3_magicoder": "dca73c8c9b3b4201",
    "B4_mixturethoughts": "83486b9e0d2d45cc",
    "B5_openthoughts": "f880e179d2a0c069",
    "B6_ultrachat": "3ad4ad7bf894e552",
    "B7_sharegpt": "1f6c6e95ba66b58e",
    "B7_sharegpt_array": "de37f73fe1bafe55",
    "B8_sweagent": "02752e527a59a22e",
}
"""Digest of all sample ids of each file: one that changes means that rows become something else."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = make_site(tmp_path_factory.mktemp("all"))
    site.run()
    return site


@pytest.mark.parametrize("dataset", FILES)
def test_prepare_accounts_for_every_row_under_the_expected_reason(
    prepared: Site, dataset: str
) -> None:
    wanted = expected(dataset)
    dropped = Counter(row.get("reason") or row["prepare"] for row in wanted if _is_dropped(row))
    counts = prepared.counts(dataset)
    assert counts["dropped"] == dict(dropped)
    assert counts["source_rows"] == len(wanted)
    assert counts["prompts"] == len(wanted) - dropped.total()
    assert counts["prompts"] == len(ids(prepared.prepared(dataset).prompt_ids))


def _is_dropped(row: Row) -> bool:
    return "reason" in row or "prepare" in row


@pytest.mark.parametrize("dataset", FILES)
def test_sample_ids_stay_as_they_are(prepared: Site, dataset: str) -> None:
    made = sorted(ids(prepared.prepared(dataset).prompts))
    assert files.digest(made)[:16] == IDS[dataset]


def prompt_ids(site: Site) -> dict[str, bytes]:
    return {name: site.prepared(name).prompt_ids.read_bytes() for name in site.recipe.dataset_names}


ENVIRONMENTS = [
    {"PYTHONHASHSEED": "0", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
    {
        "PYTHONHASHSEED": "4711",
        "LC_ALL": "C.UTF-8",
        "LANG": "tr_TR.UTF-8",
        "TZ": "Asia/Tokyo",
        "OMP_NUM_THREADS": "5",
        "RAYON_NUM_THREADS": "5",
        "TOKENIZERS_PARALLELISM": "true",
    },
]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_another_process_writes_the_same_ids_in_the_same_order_from_shuffled_sources(
    prepared: Site, tmp_path: Path, environment: dict[str, str]
) -> None:
    site = make_site(tmp_path)
    for entry in site.datasets:
        shuffled = tmp_path / Path(entry["path"]).name
        _shuffle(Path(entry["path"]), shuffled)
        entry["path"] = str(shuffled)
    job = site.job()
    subprocess.run(
        [sys.executable, "-m", "drafter", "run", str(job.dir.root)],
        env={**os.environ, "PYTHONPATH": str(INCLUDE), **environment},
        check=True,
    )
    assert prompt_ids(site) == prompt_ids(prepared)


def _shuffle(source: Path, shuffled: Path) -> None:
    lines = source.read_text(encoding="utf-8").splitlines()
    if source.suffix == ".json":
        lines = [line.removesuffix(",") for line in lines[1:-1]]
    random.Random(source.name).shuffle(lines)
    text = "[" + ",\n".join(lines) + "]" if source.suffix == ".json" else "\n".join(lines) + "\n"
    shuffled.write_text(text, encoding="utf-8", newline="")


@pytest.mark.parametrize("alone", ["B1_glaive", "B3_magicoder", "B5_openthoughts", "B8_sweagent"])
def test_a_dataset_alone_in_its_recipe_has_the_same_ids_in_the_same_order(
    prepared: Site, tmp_path: Path, alone: str
) -> None:
    site = make_site(tmp_path, alone)
    site.run()
    mine, together = (ids(s.prepared(alone).prompt_ids) for s in (site, prepared))
    repeated = sum("duplicate of" in row.get("prepare", "") for row in expected(alone))
    assert [identity for identity in mine if identity in together] == together
    assert len(mine) == len(together) + repeated
