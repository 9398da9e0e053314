"""prepare end to end on the tiny target: counts, order, duplicates, growth beside responses."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from families import KIMI, PERMUTED_KIMI

from drafter import files, plan, prepare, template
from drafter.errors import Busy, DataError, RecipeError
from drafter.identity import generation_identity, target_identity
from drafter.job import Job, load_job
from drafter.layout import ALL, Prepared, Workspace
from drafter.recipe import Recipe, parse_recipe
from drafter.sources.prompt import Prompt

INCLUDE = Path(__file__).parents[2] / "include"
DEMO = INCLUDE / "demo"

Row = dict[str, Any]


class Site:
    """A workspace with sources and a target: what a host has before prepare runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workspace = Workspace(root / "workspace")
        self.target = root / "target"
        self.datasets: list[Row] = []
        self.generate: Row = {"max_prompt_tokens": 400}

    def source(self, name: str, format: str, rows: list[Row], **limits: Any) -> None:
        """Write the rows of a source; a known name keeps its place in the recipe."""
        path = self.root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        entry = {
            "name": name,
            "format": format,
            "path": str(path),
            **(limits or {"unbounded": True}),
        }
        names = [dataset["name"] for dataset in self.datasets]
        if name in names:
            self.datasets[names.index(name)] = entry
        else:
            self.datasets.append(entry)

    @property
    def recipe(self) -> Recipe:
        return parse_recipe(
            {
                "name": "tiny",
                "target": {"path": str(self.target), "revision": "r1"},
                "engine": {"urls": ["http://127.0.0.1:1"]},
                "datasets": self.datasets,
                "generate": self.generate,
                "host": {"workspace": str(self.workspace.root)},
            },
            "test",
        )

    def job(self, mode: str = "resume") -> Job:
        directory = self.workspace.job("prepare", ALL)
        spec = {
            "phase": "prepare",
            "dataset": ALL,
            "start_id": "s",
            "code": "c",
            "run_id": "run",
            "mode": mode,
            "token_budget": None,
            "in_flight": 1,
            "recipe": self.recipe.as_json(),
        }
        files.write_json(directory.job, spec)
        return load_job(directory.root)

    def run(self, mode: str = "resume") -> Row:
        """Run the phase; its final report."""
        job = self.job(mode)
        prepare.run(job)
        report: Row = files.read_json(job.dir.progress)
        assert report["done"]
        return report

    def prepared(self, name: str) -> Prepared:
        return self.workspace.prepared(name)

    def counts(self, name: str) -> Row:
        section = files.read_section(self.prepared(name).manifest, "prepare")
        assert section
        counts: Row = section["counts"]
        assert counts["source_rows"] == counts["prompts"] + sum(counts["dropped"].values())
        return counts

    def respond(self, name: str, ids: list[str]) -> None:
        lines = [json.dumps({"sample_id": identity}) + "\n" for identity in ids]
        self.prepared(name).responses.write_text("".join(lines))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    KIMI.save(site.target)
    return site


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ids(path: Path) -> list[str]:
    return [row["sample_id"] for row in read(path)]


def questions(*texts: str) -> list[Row]:
    return [{"id": f"q{i}", "input": text} for i, text in enumerate(texts)]


MANY = [f"Question {number}?" for number in range(30)]


# Contents -----------------------------------------------------------------------------------------


def test_the_demos_datasets_are_prepared_row_for_row(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.target = DEMO / "target"
    for file in sorted((DEMO / "prompts").iterdir()):
        format = file.stem.split("_")[1]
        entry = {"name": file.stem, "format": format, "path": str(file), "unbounded": True}
        site.datasets.append(entry)
    assert len(site.datasets) == 8
    site.run()
    tokenizer = template.load_tokenizer(site.target)
    for dataset in site.recipe.dataset_names:
        assert site.counts(dataset)["prompts"] > 100
        prompts = read(site.prepared(dataset).prompts)
        prompt_ids = read(site.prepared(dataset).prompt_ids)
        assert [row["sample_id"] for row in prompts] == [row["sample_id"] for row in prompt_ids]
        for row, rendered in list(zip(prompts, prompt_ids, strict=True))[:10]:
            assert list(row) == ["sample_id", "messages", "tools", "source"]
            content = {"messages": row["messages"], "tools": row["tools"]}
            assert row["sample_id"] == f"{dataset}-{files.digest(content)[:16]}"
            own = template.render(tokenizer, Prompt(row["messages"], row["tools"]), True)
            assert rendered == {"sample_id": row["sample_id"], "input_ids": own}


def test_every_row_is_counted_under_a_reason(site: Site) -> None:
    rows = [*questions("a", "b", "A", "a", "b  ", "", "c " * 500), {"id": "x"}, {"input": 7}]
    site.source("B2", "opencodeinstruct", rows)
    path = Path(site.datasets[0]["path"])
    path.write_text(path.read_text() + '["no row"]\n{"torn\n')
    site.run()
    assert site.counts("B2") == {
        "source_rows": 11,
        "prompts": 2,
        "shortened": 0,
        "retired": 0,
        "adopted": 0,
        "dropped": {
            "duplicate": 1,
            "near duplicate": 2,
            "empty prompt": 2,
            "prompt is not text": 1,
            "longer than max_prompt_tokens": 1,
            "not an object": 1,
            "not JSON": 1,
        },
    }
    section = files.read_section(site.prepared("B2").manifest, "prepare")
    assert section
    assert section["inputs"] == plan.inputs("prepare", "B2", site.workspace, site.recipe)
    assert section["files"]["prompts.jsonl"] == files.file_record(site.prepared("B2").prompts)
    assert section["identity"] == {
        "target": str(site.target),
        **target_identity(site.recipe),
    }


def test_a_prompt_of_two_datasets_stays_in_the_first_of_the_recipe(site: Site) -> None:
    site.source("B3", "magicoder", [{"problem": "shared"}, {"problem": "mine"}])
    site.source("B2", "opencodeinstruct", questions("Shared ", "other"))
    site.run()
    assert site.counts("B3")["dropped"] == {}
    assert site.counts("B2")["dropped"] == {"near duplicate of B3": 1}


def test_rows_beyond_the_quota_are_counted_and_a_larger_quota_only_appends(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions(*MANY), max_samples=10)
    site.run()
    assert site.counts("B2")["dropped"] == {"beyond max_samples": 20}
    few = site.prepared("B2").prompt_ids.read_bytes()
    site.source("B2", "opencodeinstruct", questions(*MANY), max_samples=20)
    site.run()
    assert site.prepared("B2").prompt_ids.read_bytes().startswith(few)
    assert site.counts("B2")["prompts"] == 20


# Order --------------------------------------------------------------------------------------------


def test_a_shuffled_source_gives_the_same_prompts_and_another_seed_another_order(
    site: Site,
) -> None:
    rows = questions(*MANY, *(text.upper() for text in MANY))
    site.source("B2", "opencodeinstruct", rows, max_samples=20)
    site.run()
    before = site.prepared("B2").prompt_ids.read_bytes()
    random.Random(1).shuffle(rows)
    site.source("B2", "opencodeinstruct", rows, max_samples=20)
    site.run()
    assert site.prepared("B2").prompt_ids.read_bytes() == before
    site.generate["seed"] = 1
    site.run()
    assert site.prepared("B2").prompt_ids.read_bytes() != before


def test_another_process_with_another_hash_seed_and_locale_writes_the_same_bytes(
    site: Site,
) -> None:
    site.source("B3", "magicoder", [{"problem": f"Schreib {text} für 你好"} for text in MANY])
    turns = [{"from": "human", "value": "é"}, {"from": "gpt", "value": ""}]
    site.source("B7", "sharegpt", [{"conversations": turns}])
    job = site.job()
    subprocess.run(
        [sys.executable, "-m", "drafter", "run", str(job.dir.root)],
        env={**os.environ, "PYTHONPATH": str(INCLUDE), "PYTHONHASHSEED": "77", "LC_ALL": "POSIX"},
        check=True,
    )
    paths = [
        path
        for name in site.recipe.dataset_names
        for path in (site.prepared(name).prompts, site.prepared(name).prompt_ids)
    ]
    there = [path.read_bytes() for path in paths]
    for path in [*paths, *(site.prepared(name).manifest for name in site.recipe.dataset_names)]:
        path.unlink()
    site.run()
    assert [path.read_bytes() for path in paths] == there


# Twice --------------------------------------------------------------------------------------------


def test_a_second_run_changes_no_byte(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions(*MANY))
    assert site.run()["changed"] is True
    paths = [path for path in site.prepared("B2").root.iterdir() if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in paths}
    assert site.run()["changed"] is False
    assert {path: path.stat().st_mtime_ns for path in paths} == before


def test_files_whose_bytes_stay_are_not_written_again(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions("a", "b"))
    site.source("B3", "magicoder", [{"problem": "c"}])
    site.run()
    before = site.prepared("B2").prompts.stat().st_ino
    site.source("B3", "magicoder", [{"problem": "d"}])
    assert site.run()["changed"] is True
    assert site.prepared("B2").prompts.stat().st_ino == before


# Beside responses ---------------------------------------------------------------------------------


def test_responses_of_another_tokenizer_are_refused_unless_all_starts_anew(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions("a"))
    site.run()
    site.respond("B2", ids(site.prepared("B2").prompts))
    PERMUTED_KIMI.save(site.target)
    with pytest.raises(RecipeError, match=r"B2 has responses for tokenizer .* another workspace"):
        site.run()
    assert site.run("restart")["changed"] is True


def test_after_a_restart_of_other_datasets_the_recipe_can_be_restored(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions("a"))
    site.run()
    made_with = generation_identity(site.recipe)
    before = site.prepared("B2").prompt_ids.read_bytes()
    site.respond("B2", ids(site.prepared("B2").prompts))
    files.write_section(site.prepared("B2").manifest, "generate", {"identity": made_with})
    PERMUTED_KIMI.save(site.target)
    site.run("restart")
    site.source("B3", "magicoder", [{"problem": "another input"}])
    with pytest.raises(RecipeError, match="trigger generate with mode restart for this dataset"):
        site.run()
    KIMI.save(site.target)
    site.run()
    assert site.prepared("B2").prompt_ids.read_bytes() == before


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompt_ids.jsonl"])
def test_a_file_that_is_gone_or_cut_is_made_again(name: str, site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions(*MANY))
    site.run()
    path = site.prepared("B2").root / name
    before = path.read_bytes()
    path.unlink()
    site.run()
    assert path.read_bytes() == before
    path.write_bytes(before[:99])
    site.run()
    assert path.read_bytes() == before


def test_what_a_killed_prepare_left_is_removed(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions("a"))
    site.prepared("B2").root.mkdir(parents=True)
    stale = site.prepared("B2").root / ".prompts.jsonl.ab12.partial"
    stale.write_text("half")
    site.run()
    assert not stale.exists()


def test_a_target_that_only_moved_is_the_same_target(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions("a"))
    site.run()
    site.respond("B2", ids(site.prepared("B2").prompts))
    site.target = site.target.rename(site.root / "moved")
    assert site.run()["changed"] is False


# Refusals -----------------------------------------------------------------------------------------


def test_a_source_that_is_not_there_is_named(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions("a"))
    site.datasets[0]["path"] = "/nowhere/rows.jsonl"
    with pytest.raises(RecipeError, match=r"B2: source /nowhere/rows\.jsonl cannot be read"):
        site.run()


def test_a_dataset_without_a_prompt_fails_and_the_others_are_written(site: Site) -> None:
    site.source("B2", "ultrachat", questions("a"))
    site.source("B3", "magicoder", [{"problem": "b"}])
    with pytest.raises(DataError, match=r"no prompt is left in B2: 0 prompts of 1 rows \(1 no"):
        site.run()
    assert site.counts("B3")["prompts"] == 1


def test_a_dataset_that_somebody_works_on_is_busy(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions("a"))
    with files.locked(site.prepared("B2").lock), pytest.raises(Busy):
        site.run()
    site.run()
