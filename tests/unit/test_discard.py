"""Answers of a session, or since a time, go to the archive; killed at any moment, none is lost."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import FakeEngine, Site, assert_complete, generated
from unit.test_repair import files, offsets, workspace

from drafter import cli, jsonl, rewrite
from drafter.errors import Busy, DataError, RecipeError
from drafter.files import locked, read_json
from drafter.generation.discard import SLACK_S
from drafter.layout import Workspace
from drafter.rewrite import true_offsets

__all__ = ["workspace"]


def run(workspace: Workspace, command: str, *more: str) -> int:
    return cli.main([command, "B1", "--workspace", str(workspace.root), *more])


def ids(path: Path) -> list[str]:
    return [line.value["sample_id"] for line in jsonl.rows(path)]


def archives(workspace: Workspace, pattern: str = "discard-*") -> list[Path]:
    return sorted((workspace.prepared("B1").root / "archive").glob(pattern))


SELECTED = {
    "first session": (["--session", "1"], ["B1-1", "B1-2"], 3, [0, 0, 0, 1]),
    "second session": (["--session", "2"], ["B1-3"], 3, [0, 1, 2, 2]),
    "by its start_id": (["--session", "s2"], ["B1-3"], 3, [0, 1, 2, 2]),
    "since before all": (["--since", "50"], ["B1-1", "B1-2", "B1-3"], 6, [0, 0, 0, 0]),
    "since a mark": (["--since", "160"], ["B1-2", "B1-3"], 5, [0, 1, 1, 1]),
    "since shortly after a mark": (["--since", "200"], ["B1-2", "B1-3"], 5, [0, 1, 1, 1]),
    "since a pause": (["--since", "400"], ["B1-3"], 3, [0, 1, 2, 2]),
    "since an ISO time": (["--since", "1970-01-01T00:08:20"], ["B1-3"], 3, [0, 1, 2, 2]),
    "with a time zone": (["--since", "1970-01-01T01:08:20+01:00"], ["B1-3"], 3, [0, 1, 2, 2]),
}


@pytest.mark.parametrize(("arguments", "gone", "tokens", "moved"), SELECTED.values(), ids=SELECTED)
def test_what_is_shown_is_what_goes(
    arguments: list[str],
    gone: list[str],
    tokens: int,
    moved: list[int],
    workspace: Workspace,
    capsys: Any,
) -> None:
    prepared = workspace.prepared("B1")
    before, whole = files(workspace), prepared.responses.read_bytes().splitlines(keepends=True)
    kept = [sample_id for sample_id in ids(prepared.responses) if sample_id not in gone]
    assert run(workspace, "discard", *arguments) == 0
    shown = capsys.readouterr().out
    assert f"{len(gone)} answers with {tokens} tokens" in shown and "1 failures" in shown
    assert "add --yes" in shown and files(workspace) == before

    assert run(workspace, "discard", *arguments, "--yes") == 0
    assert ids(prepared.responses) == kept
    # In rows rather than bytes: behind so many of the kept ones.
    ends = [0, *itertools.accumulate(len(text) for text in whole if _id(text) in kept)]
    assert offsets(workspace) == [ends[n] for n in moved]
    (archive,) = archives(workspace)
    assert ids(archive / "raw_responses.jsonl") == gone
    assert (archive / "sessions.jsonl").read_bytes() == before["prepared/B1/sessions.jsonl"]
    assert (archive / "manifest.json").read_bytes() == before["prepared/B1/manifest.json"]
    assert ids(archive / "failed.jsonl") == ["B1-9"] and prepared.failed.read_bytes() == b""
    assert read_json(prepared.manifest) == {"prepare": {}}

    after = files(workspace)
    capsys.readouterr()
    assert run(workspace, "discard", *arguments, "--yes") == 0
    assert "nothing to discard" in capsys.readouterr().out
    assert files(workspace) == after


def _id(text: bytes) -> str:
    return str(json.loads(text)["sample_id"])


def test_since_a_time_after_the_last_answer_is_nothing(workspace: Workspace, capsys: Any) -> None:
    path = workspace.prepared("B1").responses
    os.utime(path, (600, 600))
    assert run(workspace, "discard", "--since", str(561 + SLACK_S)) == 0
    assert "0 answers" in capsys.readouterr().out
    os.utime(path, (10_000, 10_000))
    assert run(workspace, "discard", "--since", str(561 + SLACK_S)) == 0
    assert "0 answers" in capsys.readouterr().out, "no row behind the last mark"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--session", "3"], RecipeError, "no session 3: give a number from 1 to 2 or a start_id"),
        (["--session", "0"], RecipeError, "no session 0"),
        (["--session", "nobody"], RecipeError, "no session nobody"),
        (["--since", "yesterday"], RecipeError, "'yesterday' is neither an ISO nor a Unix time"),
        ([], RecipeError, "one of the arguments --session --since is required"),
    ],
)
def test_a_wrong_selection_is_one_sentence(
    arguments: list[str], kind: type[Exception], message: str, workspace: Workspace
) -> None:
    before = files(workspace)
    with pytest.raises(kind, match=message):
        run(workspace, "discard", *arguments, "--yes")
    assert files(workspace) == before


def test_sessions_that_do_not_fit_the_answers_are_refused(workspace: Workspace) -> None:
    path = workspace.prepared("B1").sessions
    path.write_text(path.read_text().replace('"offset": 0, "start_id"', '"offset": 7, "start_id"'))
    before = files(workspace)
    with pytest.raises(DataError, match="does not fit"):
        run(workspace, "discard", "--session", "1", "--yes")
    assert files(workspace) == before


@pytest.mark.parametrize(
    ("offsets", "size", "expected"),
    [
        ([], 9, []),
        ([0, 5, 9], 9, [0, 5, 9]),
        ([0, 5, 9], 4, [0, 4, 4]),  # the canary cut the end off
        ([0, 5, 9, 3, 8, 2], 6, [0, 2, 2, 2, 2, 2]),  # twice, and later sessions grew again
    ],
)
def test_no_offset_is_behind_a_later_one(
    offsets: list[int], size: int, expected: list[int]
) -> None:
    assert true_offsets(offsets, size) == expected


@pytest.mark.parametrize("command", ["discard", "restart"])
def test_a_live_job_keeps_its_answers(command: str, workspace: Workspace) -> None:
    more = ["--session", "1"] if command == "discard" else []
    with locked(workspace.prepared("B1").lock), pytest.raises(Busy):
        run(workspace, command, *more, "--yes")


def test_restart_shows_and_moves_all(workspace: Workspace, capsys: Any) -> None:
    prepared, before = workspace.prepared("B1"), files(workspace)
    assert run(workspace, "restart") == 0
    assert "3 answers with 6 tokens and 1 failures move to archive/" in capsys.readouterr().out
    assert files(workspace) == before
    assert run(workspace, "restart", "--yes") == 0
    (archive,) = archives(workspace, "restart-*")
    assert ids(archive / "raw_responses.jsonl") == ["B1-1", "B1-2", "B1-3"]
    assert not prepared.responses.exists() and not prepared.sessions.exists()
    after = files(workspace)
    assert run(workspace, "restart", "--yes") == 0
    assert "nothing to move" in capsys.readouterr().out
    assert files(workspace) == after


CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree"}


def killed_at(moment: int, act: Callable[[], Any]) -> bool:
    """Do ``act`` in a child that dies before its ``moment``-th change of files; False: it ended."""
    child = os.fork()
    if child == 0:
        left = itertools.count(1)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            if (event in CHANGES or writes) and next(left) == moment:
                os._exit(9)

        sys.addaudithook(hook)
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


ACTS = {
    "discard a session": ["discard", "--session", "1"],
    "discard since": ["discard", "--since", "160"],
    "restart": ["restart"],
    "repair": ["repair"],
}


@pytest.mark.parametrize("command", ACTS.values(), ids=ACTS)
def test_killed_at_any_moment_nothing_is_lost_and_a_rerun_finishes(
    command: list[str], workspace: Workspace
) -> None:
    prepared = workspace.prepared("B1")
    damaged = b"[]\n" if command == ["repair"] else b""
    prepared.responses.write_bytes(prepared.responses.read_bytes() + damaged)
    start = files(workspace)

    def restore() -> None:
        for path in sorted(workspace.root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for name, content in start.items():
            path = workspace.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def act() -> Any:
        return run(workspace, *command, "--yes")

    def live() -> dict[str, bytes]:
        return {n: c for n, c in files(workspace).items() if "archive/" not in n and "dam" not in n}

    act()
    expected = live()
    moments = 0
    for moment in itertools.count(1):
        restore()
        if not killed_at(moment, act):
            break
        moments += 1
        everywhere = b"".join(files(workspace).values())
        for text in start["prepared/B1/raw_responses.jsonl"].splitlines(keepends=True):
            assert text in everywhere
        act()
        assert live() == expected
    assert moments > 5


def test_a_job_finishes_what_a_killed_discard_decided(tmp_path: Path) -> None:
    """And asks again what went, failures too; the offsets of its sessions are true."""
    with FakeEngine() as engine:
        site = Site(tmp_path, num_prompts=20, urls=(engine.url,))
        engine.model_path = str(tmp_path / "target")
        generated(site)
        prepared = site.prepared
        discarding = ["discard", "B1", "--session", "1", "--yes"]
        discarding += ["--workspace", str(prepared.root.parents[1])]
        for moment in itertools.count(1):
            if not killed_at(moment, lambda: cli.main(discarding)):
                pytest.fail("never decided and unfinished")
            if prepared.rewrite.exists():
                break
        assert len(site.responses()) == 20
        generated(site)
        assert_complete(site, 20)
    assert len(engine.requests) == 40
    starts = [event.offset for event in rewrite.events(prepared) if event.is_start]
    assert starts == [0, 0]


def test_adopted_answers_carry_no_time_and_go_by_session_only(
    workspace: Workspace, capsys: Any
) -> None:
    path = workspace.prepared("B1").sessions
    path.write_text(path.read_text().replace('"start_id": "s1"', '"adopted": {}, "start_id": "s1"'))
    assert run(workspace, "discard", "--since", "1") == 0
    assert "2 answers with 5 tokens, stored from 1970-01-01T00:02:40Z" in capsys.readouterr().out
    assert run(workspace, "discard", "--session", "1") == 0
    assert "2 answers with 3 tokens, stored from 1970-01-01T00:01:40Z to 1970-01-01T00:04:40Z" in (
        capsys.readouterr().out
    )
