"""A real generate job against a real engine that does everything wrong that engines do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from integration.chaos import INCLUDE, OTHERS, SPOILT, UNANSWERED, ChaosEngine, plan
from unit.fake_engine import Site

from drafter import template
from drafter.files import read_json, read_section
from drafter.rows import check_row
from drafter.sources import CONVERT
from drafter.sources.prompt import Prompt

DEMO = INCLUDE / "demo"
NUM_ROWS = 480
IN_FLIGHT = 60


def prompts(target: Path, number: int) -> list[list[int]]:
    """Ids of the demo's first prompts of three sources."""
    tokenizer = template.load_tokenizer(target)
    found: list[list[int]] = []
    for path in sorted(DEMO.glob("prompts/B[236]_*.jsonl")):
        convert = CONVERT[path.stem.partition("_")[2]]  # type: ignore[index]
        for line in path.read_text().splitlines():
            prompt = convert(json.loads(line))
            if isinstance(prompt, Prompt):
                found.append(template.render(tokenizer, prompt, True))
    return found[:number]


@pytest.mark.parametrize("seed", [1])
def test_a_job_ends_with_every_row_and_every_class_counted(seed: int, tmp_path: Path) -> None:
    site = Site(
        tmp_path,
        num_prompts=0,
        in_flight=IN_FLIGHT,
        settings={"max_new_tokens": 200, "temperature": 0.7, "attempts": 10},
        engine={"queue_timeout_s": 20, "slowest_tokens_per_s": 1000, "patience_s": 120},
    )
    target = tmp_path / "target"
    shutil.copytree(DEMO / "target", target, dirs_exist_ok=True)
    site.prepare(asked := prompts(target, NUM_ROWS))
    faults = plan(seed, each=4, bursts=4, among=400)
    with ChaosEngine(target, faults, restart_at=250) as engine:
        site.urls = (engine.url,)
        job = site.job()
        done = subprocess.run(
            [sys.executable, "-m", "drafter", "run", str(job.dir.root)],
            env={**os.environ, "PYTHONPATH": str(INCLUDE)},
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    print(dict(engine.told), dict(engine.injected), f"{engine.requests} requests", done.stdout)

    assert engine.injected.keys() >= {*SPOILT, *UNANSWERED, *OTHERS, "restart"}
    progress = read_json(job.dir.progress)
    assert progress["answers"] == dict(engine.told)

    rows, family = site.responses(), template.family(target)
    lengths = {f"B1-{i:04d}": len(ids) for i, ids in enumerate(asked)}
    assert Counter(row["sample_id"] for row in rows) == Counter(lengths.keys())
    assert [check_row(row, family, lengths[row["sample_id"]]) for row in rows] == [None] * len(rows)
    stored = [(asked[int(row["sample_id"][-4:])], row["output_ids"]) for row in rows]
    assert sorted(stored) == sorted(engine.good)
    assert not site.read(site.prepared.failed)
    section = read_section(site.prepared.manifest, "generate") or {}
    assert section["counts"]["responses"] == len(rows)

    num_faults = engine.injected.total() - engine.injected["slow"]
    assert engine.requests == engine.told.total() == len(rows) + num_faults
