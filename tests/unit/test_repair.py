"""Damaged lines are shown, and set aside only when a person says so; nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafter import cli, jsonl
from drafter.errors import Busy, DataError, RecipeError
from drafter.files import locked, read_json, write_json
from drafter.generation.responses import count_failures
from drafter.layout import Workspace

IDENTITY = {"revision": "r1"}
MESSAGES = [{"role": "user", "content": "x"}]
START = {"start_id": "s1", "run_id": "r", "code": "c", "identity": IDENTITY}


def row(number: int, **changes: Any) -> dict[str, Any]:
    ids = [10] * number
    told = {"sample_id": f"B1-{number}", "output_ids": ids, "completion_tokens": number}
    return {**told, "prompt_tokens": 1, "finish_reason": "stop", **changes}


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """B1 with three answers, in two sessions, and its sections."""
    workspace = Workspace(tmp_path / "w")
    prepared = workspace.prepared("B1")
    prepared.root.mkdir(parents=True)
    rows = [line(row(n)) for n in (1, 2, 3)]
    prepared.responses.write_bytes(b"".join(rows))
    prepared.failed.write_bytes(line({"sample_id": "B1-9", "class": "abort", "reason": "x"}))
    prepared.prompts.write_bytes(
        b"".join(line({"sample_id": f"B1-{n}", "messages": MESSAGES}) for n in range(4))
    )
    second = len(rows[0]) + len(rows[1])
    marks = [
        {"time": 100.0, "offset": 0, **START},
        {"time": 160.0, "offset": len(rows[0])},
        {"time": 500.0, "offset": second, **START, "start_id": "s2"},
        {"time": 560.0, "offset": second + len(rows[2])},
    ]
    prepared.sessions.write_bytes(b"".join(map(line, marks)))
    sections = {"prepare": {}, "generate": {"identity": IDENTITY}, "validate": {}}
    write_json(prepared.manifest, sections)
    return workspace


def repair(workspace: Workspace, *more: str) -> int:
    return cli.main(["repair", "B1", "--workspace", str(workspace.root), *more])


def files(workspace: Workspace) -> dict[str, bytes]:
    return {
        str(path.relative_to(workspace.root)): path.read_bytes()
        for path in workspace.root.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def offsets(workspace: Workspace) -> list[int]:
    return [line.value["offset"] for line in jsonl.rows(workspace.prepared("B1").sessions)]


def test_nothing_damaged_is_nothing_done(workspace: Workspace, capsys: Any) -> None:
    before = files(workspace)
    assert repair(workspace) == 0 and repair(workspace, "--yes") == 0
    assert files(workspace) == before
    assert capsys.readouterr().out == "B1: nothing is damaged\n" * 2


BAD = {
    "no JSON": (b'{"a":\n', "unexpected"),
    "no object": (b"[1]\n", "list instead of an object"),
    "NUL bytes": (b"\x00\x00\n", "unexpected"),
    "an escape": (b"\x1b[2J\n", "unexpected"),
    "an id that is no string": (line(row(4, sample_id=4)), "sample_id is 4"),
    "tokens that are no number": (line(row(4, completion_tokens="4")), "completion_tokens '4'"),
    "tokens beyond counting": (line(row(4, completion_tokens=2**63)), "completion_tokens 9223"),
    "tokens that are a bool": (line(row(4, completion_tokens=True)), "completion_tokens True"),
    "a row that is there already": (line(row(1, output_ids=[7])), "stands there twice"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD)
def test_a_damaged_answer_is_shown_and_then_set_aside(
    bad: bytes, reason: str, workspace: Workspace, capsys: Any
) -> None:
    path = workspace.prepared("B1").responses
    first, *rest = path.read_bytes().splitlines(keepends=True)
    good = offsets(workspace)
    moved = [offset + len(bad) * (offset > 0) for offset in good]
    _with_offsets(workspace, moved)
    path.write_bytes(b"".join([first, bad, *rest]))
    before = files(workspace)

    with pytest.raises(
        DataError, match=r"1 of raw_responses\.jsonl damaged: `drafter repair B1 --y"
    ):
        repair(workspace)
    shown = capsys.readouterr().out
    assert shown.startswith(f"{path}:2  ") and reason in shown and "\x1b" not in shown
    assert files(workspace) == before

    assert repair(workspace, "--yes") == 0
    after = files(workspace)
    assert path.read_bytes() == b"".join([first, *rest])
    assert path.with_name("raw_responses.jsonl.damaged").read_bytes() == bad
    assert offsets(workspace) == good
    assert read_json(workspace.prepared("B1").manifest) == {"prepare": {}}
    assert "set aside 1 of raw_responses.jsonl" in capsys.readouterr().out
    assert repair(workspace, "--yes") == 0
    assert files(workspace) == after


def _with_offsets(workspace: Workspace, offsets: list[int]) -> None:
    path = workspace.prepared("B1").sessions
    lines = [line.value for line in jsonl.rows(path)]
    path.write_bytes(
        b"".join(line({**old, "offset": o}) for old, o in zip(lines, offsets, strict=True))
    )


@pytest.mark.parametrize(
    ("name", "bad", "kept_sections"),
    [
        ("failed.jsonl", line({"sample_id": "a", "class": "no such"}), ["prepare", "validate"]),
        ("failed.jsonl", line({"class": "abort"}), ["prepare", "validate"]),
        ("sessions.jsonl", line({"time": 5}), ["generate", "prepare", "validate"]),
        ("sessions.jsonl", b"{{\n", ["generate", "prepare", "validate"]),
        *(
            ("prompts.jsonl", line(bad), ["generate", "prepare", "validate"])
            for bad in (
                {"sample_id": "B1-1", "messages": MESSAGES},
                {"sample_id": 7, "messages": MESSAGES},
                {"sample_id": "B1-7", "messages": []},
                {"sample_id": "B1-7", "messages": [{"content": "x"}]},
                {"sample_id": "B1-7", "messages": MESSAGES, "tools": {}},
            )
        ),
    ],
)
def test_only_sections_that_describe_a_changed_file_go(
    name: str, bad: bytes, kept_sections: list[str], workspace: Workspace
) -> None:
    path = workspace.prepared("B1").root / name
    good = path.read_bytes()
    path.write_bytes(good + bad + b"")
    with pytest.raises(DataError):
        repair(workspace)
    assert repair(workspace, "--yes") == 0
    assert path.read_bytes() == good or name == "sessions.jsonl"
    assert path.with_name(f"{name}.damaged").read_bytes() == bad
    assert sorted(read_json(workspace.prepared("B1").manifest)) == kept_sections


def test_every_reader_of_a_damaged_file_names_the_way_out(workspace: Workspace) -> None:
    prepared = workspace.prepared("B1")
    prepared.failed.write_bytes(line({"sample_id": "a", "class": ["abort"]}))
    with pytest.raises(DataError, match=r"failed\.jsonl:1 is damaged \(class is .*repair B1"):
        count_failures(prepared)
    for path in (prepared.prompts, prepared.responses, prepared.failed, prepared.sessions):
        path.write_bytes(b"[]\n")
        with pytest.raises(DataError, match=r"see what `drafter repair B1` would set aside"):
            list(jsonl.rows(path))
    prepared.prompt_ids.write_bytes(b"[]\n")
    with pytest.raises(DataError, match="run the phase that writes it"):
        list(jsonl.rows(prepared.prompt_ids))


def test_what_the_answers_were_made_with_outlives_its_damaged_line(workspace: Workspace) -> None:
    prepared = workspace.prepared("B1")
    prepared.sessions.write_bytes(b"{{\n")
    prepared.responses.write_bytes(b"[]\n" + prepared.responses.read_bytes())
    assert repair(workspace, "--yes") == 0
    assert [line.value.get("identity") for line in jsonl.rows(prepared.sessions)] == [IDENTITY]


def test_greedy_answers_are_repaired_too(workspace: Workspace) -> None:
    store = workspace.drafter("run").greedy("B1")
    store.parent.mkdir(parents=True)
    good = line({"sample_id": "a", "output_ids": [1], "finish_reason": "stop", "max_new_tokens": 4})
    store.write_bytes(good + b"{\n" + good)
    with pytest.raises(DataError, match=r"is damaged .*see what `drafter repair B1`"):
        list(jsonl.rows(store))
    assert repair(workspace, "--yes") == 0
    assert store.read_bytes() == good + good
    assert store.with_name("B1.greedy.jsonl.damaged").read_bytes() == b"{\n"


def test_a_torn_last_line_is_left_to_the_next_job(workspace: Workspace) -> None:
    path = workspace.prepared("B1").responses
    path.write_bytes(path.read_bytes() + b'{"sample')
    assert repair(workspace) == 0


def test_many_damaged_lines_are_a_few_and_a_count(workspace: Workspace, capsys: Any) -> None:
    path = workspace.prepared("B1").responses
    path.write_bytes(b"[]\n" * 1000 + path.read_bytes())
    with pytest.raises(DataError, match="1,000 of raw_responses"):
        repair(workspace)
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 21 and shown.endswith("and 980 more lines\n")


def test_a_line_of_a_broken_disk_is_never_held_in_memory(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    path = workspace.prepared("B1").responses
    good = path.read_bytes()
    path.write_bytes(b'{"a":"' + b"x" * 5_000_000 + b'"}\n' + good)
    assert repair(workspace, "--yes") == 0
    assert path.read_bytes() == good
    assert path.with_name("raw_responses.jsonl.damaged").stat().st_size == 5_000_009


def test_a_live_job_keeps_its_files(workspace: Workspace) -> None:
    with locked(workspace.prepared("B1").lock), pytest.raises(Busy):
        repair(workspace, "--yes")


def test_an_unknown_dataset_is_one_sentence(workspace: Workspace) -> None:
    with pytest.raises(RecipeError, match=r"no dataset 'B7' in .*: there are B1"):
        cli.main(["repair", "B7", "--workspace", str(workspace.root)])
