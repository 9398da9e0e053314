"""Which files a path means, and when a source counts as another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from drafter.errors import RecipeError
from drafter.sections import Dataset
from drafter.source_files import holds_rows, identity, local_files


def source(at: Path | str, **changes: Any) -> Dataset:
    given = {"name": "B2", "format": "opencodeinstruct", "path": str(at), "unbounded": True}
    return Dataset.model_validate({**given, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.parquet", "c.json.gz", "README.md", ".d.jsonl", "deep/e.jsonl"):
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}\n")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("b.jsonl", ["b.jsonl"]),
        ("README.md", ["README.md"]),
        ("", ["a.parquet", "b.jsonl", "c.json.gz"]),
        ("*.json*", ["b.jsonl", "c.json.gz"]),
        ("**/*.jsonl", ["b.jsonl", "deep/e.jsonl"]),
        ("*/*.jsonl", ["deep/e.jsonl"]),
        (".d.*", [".d.jsonl"]),
        ("d*", None),
        ("*.bz2", None),
        ("absent.jsonl", None),
        ("deep/../b.jsonl", ["deep/../b.jsonl"]),
    ],
)
def test_a_path_is_a_file_a_folder_or_a_glob(
    path: str, names: list[str] | None, folder: Path
) -> None:
    meant = source(folder / path)
    if names is None:
        with pytest.raises(RecipeError, match=r"B2: source .* cannot be read \(.+\): correct"):
            local_files(meant)
    else:
        assert local_files(meant) == [folder / name for name in names]


def test_a_name_with_brackets_is_a_name_if_there_is_such_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows[1].jsonl"
    file.touch()
    assert local_files(source(file)) == [file]


def test_a_folder_without_data_and_a_file_without_rights_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"empty cannot be read \(no \.jsonl, \.json or"):
        local_files(source(folder / "empty"))

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RecipeError, match=r"cannot be read \(Permission denied\)"):
        local_files(source(folder / "b.jsonl"))


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("pipe", "it is neither a file nor a directory"),
        ("/dev/zero", "it is neither a file nor a directory"),
        ("a" * 300, "File name too long"),
        ("a\0b", "embedded null byte"),
        ("a**/b.jsonl", "Invalid pattern: .*"),
    ],
)
def test_what_cannot_be_a_source_is_refused_and_not_waited_for(
    path: str, fault: str, folder: Path
) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(RecipeError, match=rf"cannot be read \({fault}\): correct its path"):
        local_files(source(folder / path))


@pytest.mark.parametrize("path", ["", "*.jsonl", "b.jsonl"])
def test_a_folder_that_may_not_be_looked_into_is_a_wrong_path(
    path: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    meant = source(folder / path)
    # Whoever is root may look anywhere; and pytest must be able to.
    with monkeypatch.context() as here:
        for name in ("stat", "iterdir"):
            here.setattr(Path, name, refuse)
        with pytest.raises(RecipeError) as refusal:
            local_files(meant)
    assert "cannot be read (Permission denied): correct its path" in str(refusal.value)


def test_links_that_lead_back_do_not_keep_a_glob_busy(folder: Path) -> None:
    for name in ("deep/up", "deep/again"):
        (folder / name).symlink_to("..")
    (folder / "linked.jsonl").symlink_to("b.jsonl")
    found = local_files(source(folder / "**" / "*.jsonl"))
    assert found == [folder / name for name in ("b.jsonl", "deep/e.jsonl", "linked.jsonl")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", True),
        ("a.JSON", True),
        ("a.ndjson.zst", True),
        ("train-00000-of-00002.parquet", True),
        ("a.jsonl.gz.lock", False),
        ("dataset_infos.json.md", False),
        (".a.jsonl", False),
        ("jsonl", False),
    ],
)
def test_data_is_told_from_what_lies_beside_it(name: str, expected: bool) -> None:
    assert holds_rows(name) is expected


def test_a_source_is_another_when_a_file_of_it_comes_goes_or_changes(folder: Path) -> None:
    meant = source(folder)
    seen = [identity(meant)]

    def expect_another() -> None:
        assert identity(meant) not in seen
        assert identity(meant) == identity(meant)
        seen.append(identity(meant))

    (folder / "b.jsonl").write_text("{}\n{}\n")
    expect_another()
    os.utime(folder / "b.jsonl", ns=(1, 1))
    expect_another()
    (folder / "b2.jsonl").write_text("{}\n")
    expect_another()
    (folder / "b.jsonl").rename(folder / "b3.jsonl")
    expect_another()
    (folder / "README.md").write_text("changed")
    assert identity(meant) == seen[-1]


def test_a_folder_that_moved_is_the_same_source(folder: Path) -> None:
    before = identity(source(folder))
    moved = folder.rename(folder.with_name("moved"))
    assert identity(source(moved)) == before


def test_what_lies_on_the_hub_is_asked_for_nothing() -> None:
    chosen = {"path": None, "hub": "o/n", "files": "*.parquet", "revision": "0" * 40}
    assert identity(source("unused", **chosen)) == {"hub": "o/n", "files": "*.parquet"}
