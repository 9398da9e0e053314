"""``drafter states``: whole or not at all, the same however often, and never against extraction."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.random_targets import greedy_rows, one_thread, save_target
from unit.states_site import (
    StatesSite,
    contents,
    save_specforge,
    save_speculators,
    specforge_path,
    specforge_row,
    speculators_states,
)

from drafter import cli, extract, plan
from drafter.errors import Busy, DataError, DrafterError, RecipeError
from drafter.extraction.shards import read_rows
from drafter.files import locked, write_json, write_section
from drafter.recipe import parse_recipe
from drafter.target_head import load_head
from drafter.training import corpus

SYSTEMS = ("specforge", "speculators")


@dataclass(frozen=True)
class Target:
    directory: Path
    model: Any
    rows: list[dict[str, Any]]

    def site(self, root: Path, **settings: Any) -> StatesSite:
        return StatesSite(root, self.directory, self.rows, **settings)

    def save(self, system: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """``directory`` as ``system`` would have left it."""
        if system == "specforge":
            files = [specforge_row(self.model, row, dtype) for row in self.rows]
            save_specforge(directory, files)
        else:
            stored = [speculators_states(self.model, row, dtype) for row in self.rows]
            save_speculators(directory, self.rows, stored)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(directory)
        yield Target(directory, model, greedy_rows(model, 20))


def dates(directory: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in sorted(directory.rglob("*")) if p.is_file()}


# Export.


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_second_export_changes_no_byte(tmp_path: Path, target: Target, system: str) -> None:
    site = target.site(tmp_path / "w")
    site.extract()
    site.states("export", system, tmp_path / "files")
    before = dates(tmp_path / "files")
    site.states("export", system, tmp_path / "files")
    assert dates(tmp_path / "files") == before
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_killed_export_is_completed_by_the_same_command(
    tmp_path: Path, target: Target, system: str
) -> None:
    site = target.site(tmp_path / "w")
    site.extract()
    site.states("export", system, tmp_path / "whole")
    site.states("export", system, tmp_path / "files")
    killed = tmp_path / ".files.partial"
    (tmp_path / "files").rename(killed)
    rows = sorted([*killed.rglob("*.ckpt"), *killed.rglob("hs_*")])
    for path in [*rows[10:], *killed.glob("*.arrow"), *killed.glob("sample_ids*")]:
        path.unlink()
    (rows[0].parent / f".{rows[12].name}.77.partial").write_bytes(b"half")
    kept = {name.name: date for name, date in dates(killed).items() if name in rows}
    site.states("export", system, tmp_path / "files")
    assert contents(tmp_path / "files").keys() == contents(tmp_path / "whole").keys()
    assert contents(tmp_path / "files") == contents(tmp_path / "whole")
    after = {name.name: date for name, date in dates(tmp_path / "files").items()}
    assert kept.items() <= after.items() and len(kept) == 10
    assert not killed.exists()


def test_an_export_never_writes_into_what_is_something_else(tmp_path: Path, target: Target) -> None:
    site = target.site(tmp_path / "w")
    site.extract()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine.txt").write_text("keep")
    with pytest.raises(DataError, match="is no export of these states"):
        site.states("export", "specforge", tmp_path / "files")
    assert contents(tmp_path / "files").keys() == {"mine.txt"}
    site.states("export", "specforge", tmp_path / "other")
    with pytest.raises(DataError, match="is no export of these states"):
        site.states("export", "speculators", tmp_path / "other")
    (tmp_path / "empty").mkdir()
    site.states("export", "specforge", tmp_path / "empty")
    assert contents(tmp_path / "empty") == contents(tmp_path / "other")


def test_the_norm_of_another_revision_is_not_applied(tmp_path: Path, target: Target) -> None:
    site = target.site(tmp_path / "w")
    site.extract()
    section = site.section
    section["identity"]["revision"] = "r0"
    write_section(site.hidden.manifest, "extract", section)
    with pytest.raises(RecipeError, match="these states are of revision r0"):
        site.states("export", "specforge", tmp_path / "files")


# Import.


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_killed_import_makes_only_what_is_missing(
    tmp_path: Path, target: Target, system: str
) -> None:
    target.save(system, tmp_path / "theirs", torch.bfloat16)
    site = target.site(tmp_path / "w", dtype="bfloat16")
    site.states("import", system, tmp_path / "theirs")
    assert site.section["gates"]["reference_error"] > 0
    whole, staging = site.digests(), site.workspace.importing("B1").root
    site.hidden.root.rename(staging)
    (staging / "manifest.json").unlink()
    (staging / "shard-00001.safetensors").write_bytes(b"torn")
    (staging / "shard-00009.safetensors").write_bytes(b"of another try")
    (staging / ".shard-00002.safetensors.77.partial").write_bytes(b"half")
    first = (staging / "shard-00000.safetensors").stat()
    assert plan.decide("extract", "B1", site.workspace, site.recipe).action == "start"
    site.states("import", system, tmp_path / "theirs")
    assert site.digests() == whole and not staging.exists()
    kept = site.hidden.shard(0).stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_second_import_changes_nothing_and_makes_a_lost_shard_again(
    tmp_path: Path, target: Target, system: str
) -> None:
    target.save(system, tmp_path / "theirs", torch.bfloat16)
    site = target.site(tmp_path / "w", dtype="bfloat16")
    site.states("import", system, tmp_path / "theirs")
    whole, before = site.digests(), dates(site.hidden.root)
    site.states("import", system, tmp_path / "theirs")
    assert dates(site.hidden.root) == before
    site.hidden.shard(1).unlink()
    decision = plan.decide("extract", "B1", site.workspace, site.recipe)
    assert decision.action == "refuse" and "shard-00001" in decision.reason
    site.states("import", system, tmp_path / "theirs")
    assert site.digests() == whole
    for shard in (site.hidden.shard(0), site.hidden.shard(2)):
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    site.states("import", system, tmp_path / "theirs")
    assert site.digests() == whole


def test_other_files_do_not_replace_an_import(tmp_path: Path, target: Target) -> None:
    target.save("specforge", tmp_path / "theirs")
    site = target.site(tmp_path / "w")
    site.states("import", "specforge", tmp_path / "theirs")
    whole = site.digests()
    specforge_path(tmp_path / "theirs", 19).write_bytes(b"torn")
    with pytest.raises(DataError, match="was imported from other files"):
        site.states("import", "specforge", tmp_path / "theirs")
    target.save("speculators", tmp_path / "others")
    with pytest.raises(DataError, match="was imported from other files"):
        site.states("import", "speculators", tmp_path / "others")
    assert site.digests() == whole


def test_an_import_never_replaces_what_was_extracted_here(tmp_path: Path, target: Target) -> None:
    target.save("specforge", tmp_path / "theirs")
    site = target.site(tmp_path / "w")
    site.extract()
    whole = site.digests()
    with pytest.raises(DataError, match="holds states that were extracted here"):
        site.states("import", "specforge", tmp_path / "theirs")
    site.hidden.manifest.unlink()
    with pytest.raises(DataError, match="holds states that were extracted here"):
        site.states("import", "specforge", tmp_path / "theirs")
    assert site.digests().items() <= whole.items()


def test_sampled_rows_below_the_bound_are_refused(tmp_path: Path, target: Target) -> None:
    files = [specforge_row(target.model, row, torch.float32) for row in target.rows]
    for tensors in files:
        tensors["input_ids"] = tensors["input_ids"].flip(0)
    save_specforge(tmp_path / "theirs", files)
    site = target.site(tmp_path / "w", min_argmax_share=0.9)
    with pytest.raises(DataError, match="likely cause"):
        site.states("import", "specforge", tmp_path / "theirs")
    assert not site.hidden.root.exists()


def test_a_target_too_large_for_memory_is_told_and_the_other_gates_judge(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    target.save("specforge", tmp_path / "theirs")
    large = tmp_path / "large"
    shutil.copytree(target.directory, large)
    with open(large / "more.safetensors", "wb") as file:
        file.truncate(1 << 42)
    site = StatesSite(tmp_path / "w", large, target.rows)
    site.states("import", "specforge", tmp_path / "theirs")
    said = capsys.readouterr().out
    assert "no plain forward of" in said
    assert (
        "B1: no plain forward of the target fits here: its states are judged by their form" in said
    )
    assert site.section["gates"].keys() == {"argmax_share", "response_tokens"}
    assert site.section["gates"]["argmax_share"] == 1.0


# Beside extraction and training.


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_imported_dataset_is_extracted_and_a_run_leaves_it_alone(
    tmp_path: Path, target: Target, system: str
) -> None:
    target.save(system, tmp_path / "theirs")
    site = target.site(tmp_path / "w")
    site.states("import", system, tmp_path / "theirs")
    decision = plan.decide("extract", "B1", site.workspace, site.recipe)
    assert (decision.action, decision.reason) == ("done", f"imported from {system}, not extracted")
    assert plan.joined("extract", site.workspace, site.recipe)["missing"] == []
    before = dates(site.hidden.root)
    site.extract()
    assert dates(site.hidden.root) == before
    # Nothing was prepared or validated: there is nothing to extract from, and no need to.
    site.workspace.prepared("B1").manifest.unlink()
    assert plan.decide("extract", "B1", site.workspace, site.recipe).action == "done"


def test_an_import_of_another_target_is_refused_and_kept(tmp_path: Path, target: Target) -> None:
    target.save("specforge", tmp_path / "theirs")
    site = target.site(tmp_path / "w")
    site.states("import", "specforge", tmp_path / "theirs")
    tree = site.recipe.as_json()
    tree["target"]["revision"] = "r2"
    recipe = parse_recipe(tree, "test")
    decision = plan.decide("extract", "B1", site.workspace, recipe)
    assert decision.action == "refuse" and "of revision r1" in decision.reason
    before = dates(site.hidden.root)
    with pytest.raises(DataError, match="imported from specforge, of revision r1"):
        extract.run(replace(site.job, recipe=recipe))
    assert dates(site.hidden.root) == before


def test_training_judges_by_the_same_states_whichever_side_of_the_norm_they_are_on(
    tmp_path: Path, target: Target
) -> None:
    target.save("specforge", tmp_path / "theirs")
    ours, imported = (target.site(tmp_path / name) for name in "ab")
    ours.extract()
    imported.states("import", "specforge", tmp_path / "theirs")
    judged = []
    for site, norm in ((ours, "before"), (imported, "after")):
        rows = corpus.collect(site.workspace, site.recipe)
        assert rows.identity["norm"] == norm
        head = corpus.read_head(site.recipe, rows)
        judged.append([head.normed(row.final_TD) for row in site.rows()])
    for one, other in zip(*judged, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_rows_after_the_norm_are_never_normed_again(target: Target) -> None:
    head = load_head(target.directory)
    final = torch.randn(3, 32)
    after = head.reading("after").to("cpu", torch.float32)
    assert torch.equal(after.normed(final), final)
    assert torch.equal(after.logits(head.normed(final)), head.logits(final))
    assert torch.equal(after.reading("before").normed(final), head.normed(final))


def test_a_corpus_on_both_sides_of_the_norm_is_refused(tmp_path: Path, target: Target) -> None:
    target.save("specforge", tmp_path / "theirs")
    site = target.site(tmp_path / "w")
    site.extract()
    tree = site.recipe.as_json()
    tree["datasets"].append({**tree["datasets"][0], "name": "B2"})
    both = replace(site.job, recipe=parse_recipe(tree, "test"))
    write_json(site.workspace.recipe, tree)
    where = ["B2", str(tmp_path / "theirs"), "--workspace", str(site.workspace.root)]
    assert cli.main(["states", "import", "specforge", *where]) == 0
    assert len(list(read_rows(site.workspace.hidden_states("B2")))) == 20
    with pytest.raises(DataError, match=r"extracted differently \(norm: before and after\)"):
        corpus.collect(site.workspace, both.recipe)


# Mistakes.


MISTAKES: dict[str, tuple[list[str], type[DrafterError], str]] = {
    "no dataset": (
        ["import", "specforge", "B7", "."],
        RecipeError,
        "no dataset 'B7' in the recipe",
    ),
    "no directory": (["import", "specforge", "B1", "none"], DataError, "none is no directory"),
    "no system": (["import", "eagle", "B1", "."], RecipeError, "invalid choice: 'eagle'"),
    "not extracted": (["export", "specforge", "B1", "f"], DataError, "is not extracted yet"),
    "no layers": (
        ["import", "specforge", "B1", ".", "--aux-layers", "a,b"],
        RecipeError,
        "'a,b' is no list of layers",
    ),
    "layers of an export": (
        ["export", "specforge", "B1", "f", "--aux-layers", "1,2,3"],
        RecipeError,
        "--aux-layers is of what is imported",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence(
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    error: type[DrafterError],
    sentence: str,
) -> None:
    site = target.site(tmp_path / "w")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(sentence)):
        cli.main(["states", *arguments, "--workspace", str(site.workspace.root)])
    assert os.listdir(tmp_path) == ["w"]


@pytest.mark.parametrize("direction", ["export", "import"])
def test_a_dataset_at_work_is_not_touched(tmp_path: Path, target: Target, direction: str) -> None:
    target.save("specforge", tmp_path / "theirs")
    site = target.site(tmp_path / "w")
    with locked(site.workspace.lock("extract", "B1")), pytest.raises(Busy):
        site.states(direction, "specforge", tmp_path / "theirs")


def test_the_help_says_how_specforge_counts_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["states", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "[1, n//2 - 1, n - 4] are 2, n//2, n - 3" in told
    assert "states are judged by their form and by the tokens that they predict alone" in told
