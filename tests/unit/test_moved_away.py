"""Answers that a canary or a restart moved away: prompts that are retired or adopted, and kills."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
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
from unit.test_discard import killed_at
from unit.test_generate import mark_prompts
from unit.test_repair import files

from drafter.errors import Busy, DataError, DrafterError
from drafter.files import read_section
from drafter.generate import generate
from drafter.layout import Workspace

NUM_PROMPTS, RETIRED = 200, (3, 60, 110)


def tainted_after(num_sound: int) -> Any:
    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if number <= num_sound:
            return sound(request, number, again)
        return Reply(body=answer(request, [TEXT, TEXT, STOP]))

    return behave


def row(index: int) -> dict[str, Any]:
    """The stored answer to the prompt at ``index`` of a Site."""
    ids = thoughtful({"input_ids": [TEXT, TEXT + 1, *map(int, f"{index:04d}")]})
    told = {"sample_id": f"{DATASET}-{index:04d}", "output_ids": ids, "finish_reason": "stop"}
    return {**told, "prompt_tokens": 6, "completion_tokens": len(ids)}


def sample_ids(site: Site) -> set[str]:
    ids = [row["sample_id"] for row in site.responses()]
    assert len(ids) == len(set(ids))
    return set(ids)


def test_a_cut_takes_the_rows_of_retired_prompts_for_good_and_no_others(tmp_path: Path) -> None:
    """Row 60 was answered before its prompt was retired, and the cut reaches it."""
    with FakeEngine(tainted_after(80)) as engine:
        site = Site(tmp_path, NUM_PROMPTS, urls=(engine.url,), in_flight=4)
        retired = {index: {"retired": True} for index in RETIRED}
        generated(site, token_budget=1500)
        assert f"{DATASET}-0060" in sample_ids(site)
        mark_prompts(site, retired)
        with pytest.raises(DataError, match="rows are now in"):
            generated(site)
        kept = site.responses()
        assert len(kept) == 80 - 32
        assert read_section(site.prepared.manifest, "generate") is None
        engine.behave = sound
        section = generated(site)
    assert site.responses()[: len(kept)] == kept
    gone = {f"{DATASET}-{index:04d}" for index in (60, 110)}
    assert sample_ids(site) == {f"{DATASET}-{i:04d}" for i in range(NUM_PROMPTS)} - gone
    assert section["stop_reason"] == "prompts exhausted"


def test_a_restart_asks_retired_prompts_no_more(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, num_prompts=60, urls=(engine.url,))
        generated(site)
        mark_prompts(site, {3: {"retired": True}})
        engine.requests.clear()
        generated(site, mode="restart", run_id="again")
        assert len(engine.requests) == 59
    assert sample_ids(site) == {f"{DATASET}-{i:04d}" for i in range(60) if i != 3}


def adoptable(site: Site, number: int) -> list[dict[str, Any]]:
    """Rows of which nothing says what they were made with."""
    rows = [row(index) for index in range(number)]
    site.write(site.prepared.responses, rows)
    return rows


def test_a_cut_into_adopted_answers_leaves_the_others_adopted(tmp_path: Path) -> None:
    with FakeEngine(tainted_after(0)) as engine:
        site = Site(tmp_path, NUM_PROMPTS, urls=(engine.url,), in_flight=4)
        adopted = adoptable(site, 100)
        with pytest.raises(DataError, match="rows are now in"):
            generated(site, mode="adopt")
        assert site.responses() == adopted[: 100 - 32]
        engine.behave = sound
        generated(site)
        assert_complete(site, NUM_PROMPTS)
        assert len([s for s in site.read(site.prepared.sessions) if "adopted" in s]) == 1
        engine.requests.clear()
        generated(site, mode="restart", run_id="again")
        assert len(engine.requests) == NUM_PROMPTS
    assert_complete(site, NUM_PROMPTS)
    archive = site.prepared.archive("again")
    assert "adopted" in (archive / "sessions.jsonl").read_text()
    assert site.read(archive / "raw_responses.jsonl")[:68] == adopted[:68]


def test_killed_at_any_moment_of_an_archiving_no_row_is_lost(tmp_path: Path) -> None:
    """Between copy and cut too: the next start alarms again, and then nothing is left to move."""
    with FakeEngine() as engine:
        site = Site(tmp_path, 120, urls=(engine.url,))
        generated(site, token_budget=1500)
        good = site.responses()
        bad = [
            {**row(i), "output_ids": [TEXT, STOP], "completion_tokens": 2} for i in range(88, 120)
        ]
        site.write(site.prepared.responses, [*good, *bad])
        whole = site.prepared.responses.read_bytes()
        at_first = files(Workspace(site.prepared.root))
        lines = whole.splitlines(keepends=True)

        def start() -> None:
            with contextlib.suppress(DataError):
                generate(site.job(), FAMILY)

        cuts = 0
        for moment in itertools.count(1):
            for name, content in at_first.items():
                (site.prepared.root / name).write_bytes(content)
            for path in site.prepared.root.glob("archive/*/*"):
                path.unlink()
            if not killed_at(moment, start):
                break
            both = [*site.prepared.root.glob("archive/*/canary-*"), site.prepared.responses]
            everywhere = b"".join(path.read_bytes() for path in both)
            assert all(line in everywhere for line in lines)
            if site.prepared.responses.stat().st_size < len(whole):
                continue
            cuts += len(both) > 1
            with pytest.raises(DataError, match="rows are now in"):
                generated(site)
            assert site.responses() == good[:-32]
        assert cuts, "never between copy and cut"
        assert not engine.requests[len(good) :]


def test_killed_between_the_adoption_and_the_first_row_the_next_run_resumes(
    tmp_path: Path,
) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, 120, urls=(engine.url,))
        before = files(Workspace(site.prepared.root))
        nowhere = Site(tmp_path, 120)
        adopted = adoptable(site, 40)

        def adopt() -> None:
            with contextlib.suppress(Busy):
                generate(nowhere.job(mode="adopt"), FAMILY)

        lines = set[int]()
        for moment in itertools.count(1):
            for path in site.prepared.root.glob("*.jsonl"):
                path.unlink()
            for name, content in before.items():
                (site.prepared.root / name).write_bytes(content)
            adoptable(site, 40)
            died = killed_at(moment, adopt)
            sessions = site.prepared.sessions
            said = sessions.exists() and len(site.read(sessions))
            lines.add(int(said))
            if said:
                generated(site)
            else:
                with pytest.raises(DrafterError, match="mode adopt"):
                    generated(site)
                generated(site, mode="adopt")
            assert site.responses()[:40] == adopted
            assert_complete(site, 120)
            assert sum("adopted" in line for line in site.read(sessions)) == 1
            if not died:
                break
        assert lines == {0, 1}
