"""Files appear whole, sections are replaced alone, locks are exclusive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafter.errors import Busy, DataError
from drafter.files import (
    clear_partial,
    digest,
    drop_sections,
    file_record,
    locked,
    read_json,
    read_section,
    whole_file,
    write_json,
    write_section,
)
from drafter.layout import Workspace, slug


def test_a_file_that_fails_half_way_leaves_the_old_one_and_no_debris(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"v": 1})
    with pytest.raises(OSError, match="disk"), whole_file(path) as partial:
        partial.write_text("half")
        raise OSError("disk full")
    assert read_json(path) == {"v": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    names = [".a.json.12.partial", ".b.json.7.partial", "a.json", ".lock", "x.partial"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / ".step-1.7.partial").mkdir()
    clear_partial(tmp_path, "a.json")
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], ".step-1.7.partial"])
    clear_partial(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*names[2:], ".step-1.7.partial"])
    clear_partial(tmp_path / "not there")


def test_dropped_sections_leave_the_others(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    drop_sections(path, ("prepare",))
    write_json(path, {"prepare": 1, "generate": 2, "validate": 3})
    drop_sections(path, ("generate", "validate"))
    assert read_json(path) == {"prepare": 1}


def test_a_section_is_replaced_without_touching_the_others(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    assert write_section(path, "prepare", {"n": 1})
    assert write_section(path, "generate", {"n": 2})
    assert write_section(path, "prepare", {"n": 3})
    assert read_json(path) == {"prepare": {"n": 3}, "generate": {"n": 2}}


def test_writing_the_same_section_again_changes_no_byte_and_no_date(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_section(path, "prepare", {"n": 1})
    before = path.stat()
    assert not write_section(path, "prepare", {"n": 1})
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_an_unfinished_section_reads_as_none(tmp_path: Path) -> None:
    assert read_section(tmp_path / "manifest.json", "prepare") is None
    write_section(tmp_path / "manifest.json", "prepare", {})
    assert read_section(tmp_path / "manifest.json", "generate") is None


def test_a_missing_or_broken_json_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.json is missing"):
        read_json(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match=r"bad\.json is not JSON"):
        read_json(tmp_path / "bad.json")


def test_a_second_holder_of_a_lock_is_refused_at_once(tmp_path: Path) -> None:
    lock = tmp_path / "x" / ".lock"
    with locked(lock), pytest.raises(Busy, match="held by another job"), locked(lock):
        pass
    with locked(lock):
        pass


def test_a_json_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match=r"list\.json is not a JSON object: restore it, or move"):
        read_json(tmp_path / "list.json")


def test_a_file_record_is_its_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert file_record(tmp_path / "f") == {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }


def test_a_digest_does_not_depend_on_key_order() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


@pytest.mark.parametrize(
    ("run_id", "expected"),
    [
        ("manual__2026-11-30T22:00:00+00:00", "manual__2026-11-30T22_00_00_00_00"),
        ("../../etc", ".._.._etc"),
    ],
)
def test_a_run_id_becomes_one_path_component(run_id: str, expected: str) -> None:
    assert slug(run_id) == expected
    assert "/" not in slug(run_id)


def test_jobs_on_a_dataset_share_its_lock_and_jobs_over_all_have_their_own(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.lock("generate", "B1") == workspace.lock("validate", "B1")
    assert workspace.lock("train", "all") != workspace.lock("prepare", "all")


@pytest.mark.parametrize("section", [3, "done", [], True])
def test_a_section_that_is_no_object_is_named(section: object, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    write_json(manifest, {"prepare": section})
    with pytest.raises(DataError, match=r"section prepare of .*manifest\.json is .*: remove it"):
        read_section(manifest, "prepare")
