"""When a prompt has failed for good, and when it may be the engine: no prompt is lost to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
    DATASET,
    TEXT,
    FakeEngine,
    Reply,
    Site,
    assert_complete,
    generated,
    sound,
)

from drafter.engines import balance, client
from drafter.engines.outcomes import MAX_RUNS
from drafter.errors import Busy, DataError
from drafter.files import read_section, write_section
from drafter.generation import workers


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.02)
    monkeypatch.setattr(balance, "PAUSE_S", 0.02)
    monkeypatch.setattr(balance, "PROBE_S", 0.05)
    monkeypatch.setattr(workers, "PAUSE_S", 0.02)


REFUSED = Reply(400, {"error": "bad sampling"})


def turns_bad(bad: Callable[[int], bool]) -> Any:
    """A behaviour: ``bad`` prompts get a 500 in the first pass, and then all get a 400."""

    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if again:
            return REFUSED
        broken = bad(request["input_ids"][-1])
        return Reply(500, b"oops") if broken else sound(request, number, again)

    return behave


@pytest.mark.parametrize("in_flight", [8, 150])
def test_an_engine_that_refuses_the_whole_second_pass_is_to_blame(
    in_flight: int, tmp_path: Path
) -> None:
    with FakeEngine() as engine:
        site = Site(
            tmp_path,
            num_prompts=200,
            urls=(engine.url,),
            in_flight=in_flight,
            settings={"attempts": 1},
        )
        engine.behave = turns_bad(lambda last: last % 2 == 1)
        with pytest.raises(DataError, match=r"prompts in a row got no answer.*permanent"):
            generated(site)
        assert site.prepared.failed.read_bytes() == b""
        assert read_section(site.prepared.manifest, "generate") is None
        engine.behave = sound
        generated(site)
    assert_complete(site, 200)


def refuses(*prompts: int) -> Any:
    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        return REFUSED if request["input_ids"][-1] in prompts else sound(request, number, again)

    return behave


@pytest.mark.parametrize("resumed", [False, True])
def test_refusals_that_no_answer_followed_are_asked_in_the_next_run(
    resumed: bool, tmp_path: Path
) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, num_prompts=0, urls=(engine.url,), in_flight=1)
        site.prepare([[TEXT, i] for i in range(40)])
        if resumed:
            rows = answered(site, 35)
            site.write(site.prepared.responses, rows)
        engine.behave = refuses(35, 36, 37, 38, 39)
        new = 0 if resumed else 35
        with pytest.raises(Busy, match=rf"\(5 permanent\), {new} new rows"):
            generated(site)
        engine.behave = sound
        generated(site)
    assert len(site.responses()) == 40


def answered(site: Site, number: int) -> list[dict[str, Any]]:
    """The rows of a run that was killed after ``number`` answers; its session too."""
    generated(site)
    rows = site.responses()[:number]
    section = read_section(site.prepared.manifest, "prepare") or {}
    site.prepared.manifest.unlink()
    write_section(site.prepared.manifest, "prepare", section)
    return rows


def test_a_prompt_that_is_refused_in_run_after_run_ends_the_dataset(tmp_path: Path) -> None:
    with FakeEngine(refuses(39)) as engine:
        site = Site(tmp_path, num_prompts=0, urls=(engine.url,), in_flight=1)
        site.prepare([[TEXT, i] for i in range(40)])
        for _ in range(MAX_RUNS - 1):
            with pytest.raises(Busy, match=r"\(1 permanent\)"):
                generated(site)
        section = generated(site)
        assert section["counts"]["failed"] == {"permanent": 1}
        assert section["stop_reason"] == "prompts exhausted"
        engine.requests.clear()
        generated(site)
    assert not engine.requests
    assert [row["sample_id"] for row in site.read(site.prepared.failed)] == [
        f"{DATASET}-0039"
    ] * MAX_RUNS


def test_a_refusal_that_an_answer_followed_is_for_good_at_once(tmp_path: Path) -> None:
    with FakeEngine(refuses(3)) as engine:
        site = Site(tmp_path, num_prompts=0, urls=(engine.url,), in_flight=1)
        site.prepare([[TEXT, i] for i in range(6)])
        assert generated(site)["counts"]["failed"] == {"permanent": 1}
        assert len(engine.requests) == 6
        generated(site)
        assert len(engine.requests) == 6
