"""Generation against a real HTTP server that misbehaves, through kills and changes of mind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
    CLOSE,
    DATASET,
    FAMILY,
    STOP,
    TEXT,
    FakeEngine,
    Reply,
    Site,
    answer,
    assert_complete,
    generated,
    sound,
    thoughtful,
)

from drafter import plan
from drafter.errors import DataError, RecipeError
from drafter.files import file_record, read_json, read_section, write_section
from drafter.generate import open_responses
from drafter.generation.responses import Tainted


def test_every_prompt_is_answered_once_and_the_manifest_says_so(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        section = generated(site)
    assert_complete(site, 60)
    tokens = sum(row["completion_tokens"] for row in site.responses())
    assert section["counts"] == {
        "prompts": 60,
        "responses": 60,
        "completion_tokens": tokens,
        "failed": {},
    }
    assert section["stop_reason"] == "prompts exhausted"
    assert section["inputs"] == plan.inputs("generate", DATASET, site.job().workspace, site.recipe)
    progress = read_json(site.job().dir.progress)
    assert progress["done"] and progress["changed"] and "60 responses" in progress["line"]
    sessions = site.read(site.prepared.sessions)
    assert sessions[0]["engine"]["model_info"] == {"model_path": "/models/target"}
    assert sessions[0]["offset"] == 0
    assert engine.most_in_flight <= 8
    assert len({request["rid"] for request in engine.requests}) == 60


def test_a_second_run_asks_nothing_and_changes_nothing(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site)
    before = {path: path.read_bytes() for path in site.prepared.root.iterdir()}
    generated(site)  # the engine is gone, and not missed
    assert {path: path.read_bytes() for path in site.prepared.root.iterdir()} == before
    assert read_json(site.job().dir.progress)["changed"] is False


def test_no_prompts_is_a_finished_dataset(tmp_path: Path) -> None:
    section = generated(Site(tmp_path, num_prompts=0))
    assert section["stop_reason"] == "prompts exhausted"
    assert section["counts"]["responses"] == 0


def test_holes_of_a_killed_run_are_answered_first(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,), in_flight=1)
        generated(site, token_budget=400)
        kept = [row for i, row in enumerate(site.responses()) if i not in (0, 2)]
        site.write(site.prepared.responses, kept)
        with open(site.prepared.responses, "a") as file:
            file.write('{"sample_id": "B1-0000", "output')
        engine.requests.clear()
        generated(site, token_budget=400)
    first, second = (request["input_ids"][-1] for request in engine.requests[:2])
    assert (first, second) == (0, 2)
    torn = site.prepared.responses.with_name("raw_responses.jsonl.torn")
    assert torn.read_text() == '{"sample_id": "B1-0000", "output\n'


def test_the_budget_ends_admission_and_a_raised_one_continues(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,), dataset={"token_budget": 300})
        section = generated(site)
        assert section["stop_reason"] == "budget" and section["token_budget"] == 300
        tokens = section["counts"]["completion_tokens"]
        assert 300 <= tokens < 450
        rows = site.prepared.responses.read_bytes()
        assert generated(site, token_budget=10)["counts"]["completion_tokens"] == tokens
        assert site.prepared.responses.read_bytes() == rows
        raised = generated(site, token_budget=600)
    assert raised["counts"]["completion_tokens"] >= 600
    assert site.prepared.responses.read_bytes().startswith(rows)


def test_a_sample_quota_ends_with_its_own_stop_reason(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,), dataset={"max_samples": 20})
        section = generated(site)
    assert section["stop_reason"] == "quota"
    assert_complete(site, 20)


@pytest.mark.parametrize("finished", [True, False])
def test_another_identity_is_refused_with_the_difference_and_the_ways_out(
    finished: bool, tmp_path: Path
) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site)
        if not finished:
            manifest = read_json(site.prepared.manifest)
            del manifest["generate"]
            site.prepared.manifest.write_text(
                str(manifest).replace("'", '"').replace("True", "true")
            )
        site.settings = {"temperature": 0.5}
        with pytest.raises(RecipeError, match=r"temperature was 1.0 and is now 0.5.*restart"):
            generated(site)
        section = generated(site, mode="restart", run_id="again")
    assert section["identity"]["temperature"] == 0.5
    assert_complete(site, 60)


def test_responses_of_unknown_origin_are_refused(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.write(site.prepared.responses, [{"sample_id": "x", "completion_tokens": 1}])
    with pytest.raises(RecipeError, match="nothing says what they were made with"):
        generated(site)


def test_restart_moves_everything_once_and_a_retry_of_the_run_resumes(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site, token_budget=300)
        before = site.prepared.responses.read_bytes()
        generated(site, token_budget=200, mode="restart", run_id="manual__2:1+0")
        archive = site.prepared.archive("manual__2:1+0")
        assert (archive / "raw_responses.jsonl").read_bytes() == before
        assert "generate" in read_json(archive / "manifest.json")
        again = site.prepared.responses.read_bytes()
        generated(site, mode="restart", run_id="manual__2:1+0")
    assert site.prepared.responses.read_bytes().startswith(again)
    assert_complete(site, 60)


def test_a_restart_that_was_killed_halfway_is_finished_by_the_next_start(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site, token_budget=300)
        before = site.prepared.responses.read_bytes()
        archive = site.prepared.archive("r")
        partial = archive.with_name("r.partial")
        partial.mkdir(parents=True)
        site.prepared.responses.rename(partial / site.prepared.responses.name)
        generated(site, mode="restart", run_id="r")
    assert (archive / "raw_responses.jsonl").read_bytes() == before
    assert (archive / "sessions.jsonl").exists() and not partial.exists()
    assert_complete(site, 60)


def test_the_canary_looks_back_over_a_kill(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site, token_budget=800)
        rows = site.responses()
        broken = [{**rows[0], "sample_id": f"x{i}", "output_ids": [STOP]} for i in range(16)]
        site.write(site.prepared.responses, [*rows, *broken])
        engine.requests.clear()
        with pytest.raises(DataError, match="first x0"):
            generated(site)
    assert not engine.requests
    assert site.responses() == rows[: len(rows) - 32]


def test_the_canary_stops_a_dataset_that_lost_its_reasoning_and_a_clear_starts_clean(
    tmp_path: Path,
) -> None:
    def loses_it(request: dict[str, Any], number: int, _again: int) -> Reply:
        ids = thoughtful(request)
        return Reply(body=answer(request, ids if number <= 100 else [TEXT, TEXT, STOP]))

    with FakeEngine(loses_it) as engine:
        site = Site(tmp_path, num_prompts=300, urls=(engine.url,))
        with pytest.raises(DataError, match=r"unclosed.*rows are now in"):
            generated(site)
        assert len(engine.requests) <= 100 + 32 + 8
        kept = site.responses()
        (moved,) = site.prepared.archive("run:1").iterdir()
        tainted = site.read(moved)
        # One window before the first bad row goes with it, and what was on its way beside that.
        unclosed = [CLOSE not in row["output_ids"] for row in tainted]
        assert unclosed.index(True) == 32
        assert len(kept) + unclosed.count(False) == 100
        assert all(CLOSE in row["output_ids"] for row in kept)
        engine.behave = sound
        generated(site)
    assert_complete(site, 300)


def test_damage_inside_the_file_stops_generation_with_file_and_line(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site, token_budget=200)
        lines = site.prepared.responses.read_bytes().splitlines(keepends=True)
        damaged = b"".join([lines[0], b'{"sample_id": "B1\n', *lines[1:]])
        site.prepared.responses.write_bytes(damaged)
        with pytest.raises(DataError, match=r"raw_responses\.jsonl:2 is damaged"):
            generated(site)
    assert site.prepared.responses.read_bytes() == damaged


@pytest.mark.parametrize("size", ["same", "other", "none"])
def test_prompt_ids_that_are_not_as_prepare_left_them_are_refused(
    size: str, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    path = site.prepared.prompt_ids
    if size == "none":
        path.unlink()
    else:
        text = path.read_text().replace("[10, 11, 0, 0, 0, 1]", "[10, 11, 0, 0, 0, 2]")
        path.write_text(text if size == "same" else text[: len(text) // 2])
    with pytest.raises(DataError, match=r"prompt_ids\.jsonl is not as prepare left it: delete"):
        generated(site)


def test_responses_beside_prompts_of_another_target_are_refused(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site, token_budget=200)
        site.thinking = False
        site.prepare([[TEXT, i] for i in range(60)])
        with pytest.raises(RecipeError, match="generate with mode restart for this dataset"):
            generated(site)


def test_a_restart_of_nothing_still_marks_the_run(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site, token_budget=300, mode="restart", run_id="r")
        before = site.prepared.responses.read_bytes()
        generated(site, mode="restart", run_id="r")
    assert site.prepared.responses.read_bytes().startswith(before)
    assert not (site.prepared.archive("r") / "raw_responses.jsonl").exists()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    site = Site(tmp_path, num_prompts=0)
    stale = site.prepared.root / ".tokenized_data.jsonl.123.partial"
    stale.write_text("half")
    generated(site)
    assert not stale.exists()


def test_an_engine_of_another_model_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        engine.model_path = "/models/other"
        with pytest.raises(RecipeError, match=r"serves /models/other, the recipe's target is"):
            generated(site)
    assert not engine.requests


def test_a_retired_prompt_is_not_asked_again_when_its_row_has_gone(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, num_prompts=3, urls=(engine.url,))
        prompts = [{"sample_id": f"{DATASET}-{i}", "input_ids": [TEXT, i]} for i in range(3)]
        site.write(site.prepared.prompt_ids, [{**prompts[0], "retired": True}, *prompts[1:]])
        section = {**read_json(site.prepared.manifest)["prepare"]}
        section["files"] = {site.prepared.prompt_ids.name: file_record(site.prepared.prompt_ids)}
        write_section(site.prepared.manifest, "prepare", section)
        generated(site)
    assert [row["sample_id"] for row in site.responses()] == [f"{DATASET}-1", f"{DATASET}-2"]


@pytest.mark.parametrize("retired", [[1], [1, 2, 5], [0, 40]])
def test_a_retired_prompt_among_answered_ones_does_not_stop_a_resume(
    retired: list[int], tmp_path: Path
) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,), in_flight=8)
        mark_prompts(site, {position: {"retired": True} for position in retired})
        generated(site, token_budget=1200)
        before = site.prepared.responses.read_bytes()
        generated(site)
    assert site.prepared.responses.read_bytes().startswith(before)
    answered = {row["sample_id"] for row in site.responses()}
    assert answered == {f"{DATASET}-{i:04d}" for i in range(60) if i not in retired}


def mark_prompts(site: Site, marks: dict[int, dict[str, bool]]) -> None:
    """Add keys to rows of prompt_ids.jsonl, by position, as prepare would."""
    path = site.prepared.prompt_ids
    rows = site.read(path)
    site.write(path, [{**row, **marks.get(i, {})} for i, row in enumerate(rows)])
    section = {**(read_section(site.prepared.manifest, "prepare") or {})}
    section["files"] = {path.name: file_record(path)}
    write_section(site.prepared.manifest, "prepare", section)


BAD_SESSIONS = {
    "no offset": ({"time": 1.0, "start_id": "s", "identity": {}}, "offset None"),
    "an identity that is none": (
        {"time": 1.0, "offset": 0, "start_id": "s", "identity": "abc"},
        "identity is no object",
    ),
    "an offset that is none": ({"time": 1.0, "offset": "0"}, "offset '0'"),
}


@pytest.mark.parametrize(("session", "fault"), BAD_SESSIONS.values(), ids=BAD_SESSIONS)
def test_a_line_that_is_no_session_names_itself_and_the_way_out(
    session: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site, token_budget=300)
        site.write(site.prepared.sessions, [*site.read(site.prepared.sessions), session])
        with pytest.raises(DataError, match=rf"sessions\.jsonl:2 is damaged \(.*{fault}.*repair"):
            generated(site)
        with pytest.raises(DataError, match=r"sessions\.jsonl:2 is damaged.*drafter repair B1"):
            open_responses(site.job(), FAMILY)


@pytest.mark.parametrize("fault", ["tainted", "damaged", "session"])
def test_files_are_closed_when_opening_them_fails(fault: str, tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generated(site, token_budget=800)
        rows = site.responses()
        broken = [{**rows[0], "sample_id": f"x{i}", "output_ids": [STOP]} for i in range(32)]
        site.write(site.prepared.responses, [*rows, *(broken if fault == "tainted" else [[]])])
        if fault == "session":
            site.write(site.prepared.responses, rows)
            site.write(site.prepared.sessions, [{"identity": "abc"}])
    before = open_files(site)
    with pytest.raises((Tainted, DataError)):
        open_responses(site.job(), FAMILY)
    assert open_files(site) == before == []


def open_files(site: Site) -> list[str]:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    paths = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [path for path in paths if path.startswith(str(site.prepared.root))]
