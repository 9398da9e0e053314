"""The client over real connections: engines that fill up, die, hang and come back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
    FakeEngine,
    Reply,
    Site,
    assert_complete,
    generated,
    sound,
)

from drafter.engines import balance, client
from drafter.errors import Busy, RecipeError
from drafter.files import read_json
from drafter.generation import workers


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PAUSE_S", 0.02)
    monkeypatch.setattr(client, "BACKOFF_S", 0.02)
    monkeypatch.setattr(balance, "PAUSE_S", 0.02)
    monkeypatch.setattr(balance, "PROBE_S", 0.05)
    monkeypatch.setattr(balance, "CUT_COOLDOWN_S", 0.05)


def counted(site: Site) -> dict[str, int]:
    """Answers by class, as the last report says."""
    answers: dict[str, int] = read_json(site.job().dir.progress)["answers"]
    return answers


def slowly(request: dict[str, Any], number: int, again: int) -> Reply:
    return Reply(body=sound(request, number, again).body, delay_s=0.02)


@pytest.mark.usefixtures("_quick")
def test_an_engine_that_is_full_for_a_while_is_asked_less_and_all_are_answered(
    tmp_path: Path,
) -> None:
    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if engine.in_flight >= 6:
            return Reply(503, {"message": "The request queue is full.", "code": 503})
        return slowly(request, number, again)

    with FakeEngine(behave) as engine:
        settings = {"attempts": 20}
        site = Site(tmp_path, 300, urls=(engine.url,), in_flight=24, settings=settings)
        section = generated(site)
        assert_complete(site, 300)
        assert section["counts"]["failed"] == {}
        answers = counted(site)
        assert answers.pop("transient") == len(engine.requests) - 300 > 0
        assert sum(answers.values()) == 300
        # Without a limit that shrinks, 18 of 24 would be refused all the time: 1,200 requests.
        assert len(engine.requests) < 900


@pytest.mark.usefixtures("_quick")
def test_an_engine_that_names_a_time_is_left_alone_until_then(tmp_path: Path) -> None:
    seen: list[float] = []

    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        seen.append(time.monotonic())
        if number == 1:
            return Reply(429, b"", headers={"Retry-After": "1"})
        return sound(request, number, again)

    with FakeEngine(behave) as engine:
        site = Site(tmp_path, 5, urls=(engine.url,), in_flight=1)
        generated(site)
    assert_complete(site, 5)
    assert len(seen) == 6 and seen[1] - seen[0] >= 1.0


@pytest.mark.usefixtures("_quick")
def test_one_of_two_endpoints_dies_and_no_prompt_is_lost_or_blamed(tmp_path: Path) -> None:
    with FakeEngine(slowly) as one, FakeEngine(slowly) as two:

        def die(request: dict[str, Any], number: int, again: int) -> Reply:
            if number == 20:
                one._loop.create_task(one._drop())
            return slowly(request, number, again)

        one.behave = die
        site = Site(tmp_path, 200, urls=(one.url, two.url), settings={"attempts": 2})
        section = generated(site)
        assert_complete(site, 200)
        assert section["counts"]["failed"] == {}
        sent = len(one.requests) + len(two.requests)
        # What was on its way when the engine died was sent, and never seen.
        assert sent <= sum(counted(site).values()) <= 200 + 8


@pytest.mark.usefixtures("_quick")
def test_all_endpoints_die_and_come_back_and_the_run_goes_on(tmp_path: Path) -> None:
    with FakeEngine(slowly) as one, FakeEngine(slowly) as two:
        site = Site(
            tmp_path,
            200,
            urls=(one.url, two.url),
            settings={"attempts": 2},
            engine={"patience_s": 60},
        )
        for engine in (one, two):
            engine.behave = dies_and_returns(engine, at=25, after_s=0.7)
        section = generated(site)
        assert_complete(site, 200)
        assert section["counts"]["failed"] == {}
        assert len(one.requests) + len(two.requests) <= 200 + 16


def dies_and_returns(engine: FakeEngine, at: int, after_s: float, model: str | None = None) -> Any:
    """A behaviour: at request ``at`` the engine dies, to listen again later, serving ``model``."""

    async def restart() -> None:
        await engine._drop()
        await asyncio.sleep(after_s)
        engine.model_path = model or engine.model_path
        await engine._listen()

    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if number == at:
            engine._loop.create_task(restart())
        return slowly(request, number, again)

    return behave


@pytest.mark.usefixtures("_quick")
def test_an_engine_that_comes_back_with_another_model_gets_no_prompt(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        engine.behave = dies_and_returns(engine, 30, 0.5, model="/models/other")
        site = Site(tmp_path, 200, urls=(engine.url,), engine={"patience_s": 60})
        with pytest.raises(RecipeError, match="serves /models/other"):
            generated(site)
        assert 20 <= len(site.responses()) <= 38
        assert len(engine.requests) <= 38
        assert site.prepared.failed.read_bytes() == b""


@pytest.mark.usefixtures("_quick")
def test_the_right_one_of_two_goes_on_when_the_other_comes_back_wrong(tmp_path: Path) -> None:
    with FakeEngine(slowly) as one, FakeEngine(slowly) as two:
        one.behave = dies_and_returns(one, 20, 0.1, model="/models/other")
        site = Site(tmp_path, 200, urls=(one.url, two.url))
        generated(site)
        assert_complete(site, 200)
        assert len(one.requests) <= 28


@pytest.mark.usefixtures("_quick")
def test_a_run_begins_when_one_of_several_answers_but_never_with_a_wrong_one(
    tmp_path: Path,
) -> None:
    with FakeEngine() as one, FakeEngine() as wrong:
        site = Site(tmp_path, urls=("http://127.0.0.1:9", one.url))
        generated(site)
        assert_complete(site, 60)
        session = site.read(site.prepared.sessions)[0]["engine"]
        assert list(session["down"]) == ["http://127.0.0.1:9"]
        wrong.model_path = "/models/other"
        site = Site(tmp_path / "wrong", urls=(one.url, wrong.url))
        with pytest.raises(RecipeError, match="serves /models/other"):
            generated(site)


@pytest.mark.usefixtures("_quick")
def test_an_engine_that_stays_away_is_busy_after_the_patience_of_the_recipe(
    tmp_path: Path,
) -> None:
    with FakeEngine() as one, FakeEngine() as two:
        site = Site(tmp_path, urls=(one.url, two.url), engine={"patience_s": 0.5})

        def die(request: dict[str, Any], number: int, again: int) -> Reply:
            if number == 10:
                for engine in (one, two):
                    engine._loop.call_soon_threadsafe(
                        lambda engine=engine: engine._loop.create_task(engine._drop())
                    )
            return sound(request, number, again)

        one.behave = die
        with pytest.raises(Busy, match=r"does not answer any more.*start it again, \d+ new rows"):
            generated(site)
        assert site.prepared.failed.read_bytes() == b""


@pytest.mark.usefixtures("_quick")
def test_an_engine_whose_health_lies_is_tried_gently_and_blamed(tmp_path: Path) -> None:
    with FakeEngine(lambda *_: Reply(500, b"oops")) as engine:
        settings = {"attempts": 2}
        site = Site(tmp_path, urls=(engine.url,), settings=settings, engine={"patience_s": 60})
        with pytest.raises(Busy, match="prompts in a row"):
            generated(site)
        assert len(engine.requests) <= 2 * 24
        assert site.prepared.failed.read_bytes() == b""


@pytest.mark.usefixtures("_quick")
def test_a_prompt_that_always_gets_a_500_fails_alone(tmp_path: Path) -> None:
    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        poison = request["input_ids"][-2:] == [0, 3]
        return Reply(500, b"oops") if poison else slowly(request, number, again)

    with FakeEngine(behave) as engine:
        site = Site(tmp_path, 100, urls=(engine.url,), settings={"attempts": 3})
        with pytest.raises(Busy, match=r"\(1 transient\), 99 new rows"):
            generated(site)
        assert len(engine.requests) == 99 + 2 * 3


@pytest.mark.usefixtures("_quick")
def test_a_body_that_stalls_beyond_the_timeout_is_given_up_and_asked_again(tmp_path: Path) -> None:
    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        stall_s = 60 if number == 3 else 0
        return Reply(body=sound(request, number, again).body, stall_s=stall_s)

    with FakeEngine(behave) as engine:
        limits = {"queue_timeout_s": 1, "slowest_tokens_per_s": 1000}
        site = Site(tmp_path, 20, urls=(engine.url,), engine=limits)
        generated(site)
        assert_complete(site, 20)
        assert len(engine.requests) == 21 and counted(site)["transient"] == 1


def test_the_timeout_of_a_request_is_sized_to_what_it_may_write(tmp_path: Path) -> None:
    engine = Site(tmp_path, 0).recipe.engine
    engine = engine.model_copy(update={"queue_timeout_s": 600, "slowest_tokens_per_s": 5})
    assert client.timeout_s(engine, 32_768) == 600 + 6553.6
    assert client.timeout_s(engine, 1) == 600.2


@pytest.mark.parametrize("same", [True, False])
def test_an_engine_with_another_tokenizer_is_refused(same: bool, tmp_path: Path) -> None:
    theirs = tmp_path / "elsewhere" / "target"
    theirs.mkdir(parents=True)
    (theirs / "tokenizer.json").write_text("{}" if same else '{"other": 1}')
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        engine.model_info = {"tokenizer_path": str(theirs)}
        if same:
            generated(site)
        else:
            with pytest.raises(RecipeError, match=r"another tokenizer\.json"):
                generated(site)
            engine.model_info = {"tokenizer_path": "/models/other-tokenizer"}
            with pytest.raises(RecipeError, match="has the tokenizer /models/other-tokenizer"):
                generated(site)
            assert not engine.requests


HANGS_LONG = {"queue_timeout_s": 1, "slowest_tokens_per_s": 0.01, "patience_s": 0.5}
"""An answer may take hours here, and a second of silence is looked into."""


def hanging(engine: FakeEngine, after: int, health: int) -> None:
    """From request ``after`` on nothing is answered; /health says ``health``."""

    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if number <= after:
            return sound(request, number, again)
        engine.health = health
        return Reply(body=sound(request, number, again).body, delay_s=3 if health == 200 else 999)

    engine.behave = behave


def test_an_engine_that_hangs_is_found_out_before_its_longest_answer_is_due(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        hanging(engine, 20, 503)
        site = Site(tmp_path, urls=(engine.url,), engine=HANGS_LONG)
        with pytest.raises(Busy, match="does not answer any more"):
            generated(site)
    assert len(site.responses()) == 20


def test_what_a_hanging_endpoint_held_goes_to_the_other(tmp_path: Path) -> None:
    with FakeEngine() as one, FakeEngine() as two:
        hanging(one, 10, 503)
        generated(Site(tmp_path, urls=(one.url, two.url), engine=HANGS_LONG))
        site = Site(tmp_path, urls=(one.url, two.url))
    assert_complete(site, 60)


def test_silence_alone_ends_no_request(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        hanging(engine, 56, 200)
        site = Site(tmp_path, urls=(engine.url,), engine=HANGS_LONG)
        generated(site)
        assert len(engine.requests) == 60
    assert_complete(site, 60)


def test_an_engine_that_hangs_with_all_in_flight_and_recovers_costs_no_attempt(
    tmp_path: Path,
) -> None:
    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if number <= 20 or (engine.health == 200 and number > 28):
            return sound(request, number, again)
        if number == 28:
            engine.health = 503
            engine._loop.call_later(3, setattr, engine, "health", 200)
        return Reply(delay_s=999)

    with FakeEngine(behave) as engine:
        settings, limits = {"attempts": 1}, {**HANGS_LONG, "patience_s": 60}
        site = Site(tmp_path, urls=(engine.url,), settings=settings, engine=limits)
        section = generated(site)
        assert len(engine.requests) == 68
    assert_complete(site, 60)
    assert section["counts"]["failed"] == {}
    assert counted(site) == {"ok": 60, "transient": 8}


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_one_of_two_that_becomes_another_server_is_left_alone(status: int, tmp_path: Path) -> None:
    with FakeEngine(slowly) as one, FakeEngine(slowly) as two:

        def other(request: dict[str, Any], number: int, again: int) -> Reply:
            return Reply(status, b"no") if number > 20 else slowly(request, number, again)

        one.behave = other
        settings = {"attempts": 1}
        site = Site(tmp_path, 200, urls=(one.url, two.url), settings=settings)
        section = generated(site)
        sent = len(one.requests) + len(two.requests)
        assert sum(counted(site).values()) == sent <= 200 + 16
    assert section["counts"]["failed"] == {}
    assert_complete(site, 200)


@pytest.mark.usefixtures("_quick")
def test_an_engine_that_refuses_all_for_a_while_is_waited_for(tmp_path: Path) -> None:
    begun = time.monotonic()

    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if number > 20 and time.monotonic() < begun + 3:
            return Reply(503, b"loading")
        return sound(request, number, again)

    with FakeEngine(behave) as engine:
        settings, patience = {"attempts": 4}, {"patience_s": 60}
        site = Site(tmp_path, 60, urls=(engine.url,), settings=settings, engine=patience)
        section = generated(site)
        assert sum(counted(site).values()) == len(engine.requests)
    assert section["counts"]["failed"] == {}
    assert_complete(site, 60)


@pytest.mark.usefixtures("_quick")
def test_an_engine_that_refuses_all_for_too_long_is_busy(tmp_path: Path) -> None:
    with FakeEngine(lambda *_: Reply(503, b"loading")) as engine:
        site = Site(tmp_path, 60, urls=(engine.url,), engine={"patience_s": 0.5})
        with pytest.raises(Busy, match="answers no request"):
            generated(site)
    assert site.prepared.failed.read_bytes() == b""
