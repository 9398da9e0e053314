"""What a misbehaving engine can do to a dataset: each fault ends in its class, no row is lost."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
    CLOSE,
    DATASET,
    STOP,
    TEXT,
    VOCAB,
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
from drafter.engines import balance, client
from drafter.engines.outcomes import MAX_RUNS, RULES
from drafter.errors import Busy, DataError, RecipeError
from drafter.files import read_section
from drafter.generation import workers


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.02)
    monkeypatch.setattr(balance, "PAUSE_S", 0.02)
    monkeypatch.setattr(balance, "PROBE_S", 0.05)
    monkeypatch.setattr(workers, "PAUSE_S", 0.02)


def bad(**changes: Any) -> Any:
    """A behaviour: a sound answer with ``changes`` to its output ids or meta_info, always."""

    def behave(request: dict[str, Any], _number: int, _again: int) -> Reply:
        body = answer(request, changes.get("output_ids", thoughtful(request)))
        body["meta_info"] |= {k: v for k, v in changes.items() if k != "output_ids"}
        return Reply(body=body)

    return behave


ENDLESS = 4 << 20
"""Bytes: more than an answer of 64 tokens has."""

FAULTS = {
    # name: (behaviour of the server, class, sends per prompt with 3 attempts)
    "503": (lambda *_: Reply(503, {"object": "error"}), "transient", 3),
    "500": (lambda *_: Reply(500, b"oops"), "transient", 3),
    "reset": (lambda *_: Reply(cut="reset"), "transient", 3),
    "body cut": (lambda *_: Reply(body={"output_ids": [1] * 9}, cut="truncated"), "transient", 3),
    "hang": (lambda *_: Reply(delay_s=60), "transient", 3),
    "error under 200": (lambda *_: Reply(body={"error": {"message": "x"}}), "malformed", 3),
    "list under 200": (lambda *_: Reply(body=[]), "malformed", 3),
    "half JSON": (lambda *_: Reply(body=b'{"output_ids": [1,'), "malformed", 3),
    "abort": (bad(finish_reason={"type": "abort", "message": "m"}), "abort", 3),
    "empty": (bad(output_ids=[]), "empty", 2),
    "wrong prompt_tokens": (bad(prompt_tokens=5), "malformed", 3),
    "wrong completion_tokens": (bad(completion_tokens=1), "malformed", 3),
    "id outside": (bad(output_ids=[VOCAB, CLOSE, TEXT, STOP]), "malformed", 3),
    "no stop id": (bad(output_ids=[TEXT, CLOSE, TEXT]), "malformed", 3),
    "bool id": (bad(output_ids=[True, CLOSE, TEXT, STOP]), "malformed", 3),
    "302": (lambda *_: Reply(302, headers={"Location": "/login"}), "malformed", 3),
    "204": (lambda *_: Reply(204, b""), "malformed", 3),
    "endless": (lambda *_: Reply(body=b"[" * ENDLESS), "malformed", 3),
    "400": (lambda *_: Reply(400, {"error": "bad sampling"}), "permanent", 1),
    "400 too long": (
        lambda *_: Reply(400, {"error": {"message": "Requested token count exceeds it"}}),
        "prompt too long",
        1,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_ends_in_its_class_after_its_number_of_sends(fault: str, tmp_path: Path) -> None:
    behave, kind, sends = FAULTS[fault]

    def one_bad(request: dict[str, Any], number: int, again: int) -> Reply:
        cursed = request["input_ids"][-1] == 3
        return behave(request, number, again) if cursed else sound(request, number, again)

    with FakeEngine(one_bad) as engine:
        # A request given up before a busy engine has read it would not be counted there.
        limits = {"queue_timeout_s": 1 if fault == "hang" else 30}
        site = Site(
            tmp_path,
            num_prompts=6,
            urls=(engine.url,),
            settings={"attempts": 3},
            engine=limits,
        )
        final = RULES[kind].final  # type: ignore[index]
        if final:
            assert generated(site)["counts"]["failed"] == {kind: 1}
        else:
            with pytest.raises(Busy, match=rf"no answer this time \(1 {kind}\), 5 new rows"):
                generated(site)
            assert read_section(site.prepared.manifest, "generate") is None
        assert len(site.responses()) == 5
        (failure,) = site.read(site.prepared.failed)
        assert failure.keys() == {"sample_id", "class", "reason"}
        assert (failure["sample_id"], failure["class"]) == (f"{DATASET}-0003", kind)
        assert len(engine.requests) == 5 + (sends if final else 2 * sends)
        engine.requests.clear()
        engine.behave = sound
        generated(site)
        assert len(engine.requests) == (0 if final else 1)
    assert plan.decide("generate", DATASET, site.job().workspace, site.recipe).action == "done"


def aborts(number_of_times: int, *prompts: int) -> Any:
    """A behaviour: the engine aborts the answers to ``prompts`` so many times each."""

    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if request["input_ids"][-1] in prompts and again < number_of_times:
            return Reply(body=answer(request, [TEXT], "abort"))
        return sound(request, number, again)

    return behave


def test_what_failed_is_asked_once_more_at_the_end_of_the_run(tmp_path: Path) -> None:
    with FakeEngine(aborts(3, 1, 3)) as engine:
        site = Site(tmp_path, num_prompts=6, urls=(engine.url,), settings={"attempts": 3})
        section = generated(site)
    assert section["counts"]["failed"] == {}
    assert site.prepared.failed.read_bytes() == b""
    assert_complete(site, 6)
    assert len(engine.requests) == 6 + 2 * 3


@pytest.mark.parametrize("num_prompts", [1, 20])
def test_prompts_that_fail_in_run_after_run_do_not_block_for_ever(
    num_prompts: int, tmp_path: Path
) -> None:
    with FakeEngine(sound) as engine:
        settings = {"attempts": 1}
        site = Site(tmp_path, num_prompts=0, urls=(engine.url,), settings=settings)
        prompts = [[TEXT, last] for i in range(num_prompts) for last in (i, 900 + i)]
        site.prepare(prompts)
        engine.behave = aborts(99, *range(900, 900 + num_prompts))
        for new in (num_prompts, 0):
            with pytest.raises(Busy, match=rf"\({num_prompts} abort\), {new} new rows"):
                generated(site)
        section = generated(site)
        assert section["counts"]["failed"] == {"abort": num_prompts}
        assert section["stop_reason"] == "prompts exhausted"
        engine.requests.clear()
        generated(site)
    assert not engine.requests
    assert len(site.read(site.prepared.failed)) == MAX_RUNS * num_prompts


def test_a_failure_does_not_matter_once_the_budget_is_met(tmp_path: Path) -> None:
    with FakeEngine(aborts(99, 900)) as engine:
        site = Site(tmp_path, num_prompts=0, urls=(engine.url,), settings={"attempts": 1})
        site.prepare([[TEXT, 900], *([TEXT, i] for i in range(60))])
        section = generated(site, token_budget=300)
    assert section["stop_reason"] == "budget"
    assert section["counts"]["failed"] == {"abort": 1}
    assert len(engine.requests) == 1 + section["counts"]["responses"]


def test_a_storm_of_faults_loses_no_row_and_sends_little_more_than_needed(tmp_path: Path) -> None:
    dice, faults = random.Random(3), Counter[str]()

    def storm(request: dict[str, Any], number: int, again: int) -> Reply:
        kinds = [
            name for name in FAULTS if FAULTS[name][2] == 3 and name not in ("hang", "endless")
        ]
        if again < 2 and dice.random() < 0.3:
            name = dice.choice(kinds)
            faults[name] += 1
            return FAULTS[name][0](request, number, again)  # type: ignore[no-any-return]
        return sound(request, number, again)

    with FakeEngine(storm) as engine:
        site = Site(tmp_path, num_prompts=400, urls=(engine.url,), in_flight=64)
        section = generated(site)
    assert section["counts"]["failed"] == {}
    assert_complete(site, 400)
    assert sum(faults.values()) > 100
    assert len(engine.requests) == 400 + sum(faults.values())


def test_prompts_that_leave_no_room_or_would_kill_the_engine_are_never_sent(
    tmp_path: Path,
) -> None:
    with FakeEngine(context=20) as engine:
        site = Site(tmp_path, num_prompts=0, urls=(engine.url,), settings={"max_new_tokens": 15})
        site.prepare([[TEXT] * 3, [TEXT] * 18, [TEXT] * 19, [TEXT, VOCAB], [TEXT, -1], []])
        engine.behave = lambda request, *_: Reply(
            body=answer(request, [TEXT] * request["sampling_params"]["max_new_tokens"], "length")
        )
        section = generated(site)
    asked = [(len(r["input_ids"]), r["sampling_params"]["max_new_tokens"]) for r in engine.requests]
    assert sorted(asked) == [(3, 15), (18, 1)]
    assert section["counts"]["failed"] == {"prompt too long": 1, "permanent": 3}


def test_an_engine_that_is_not_there_is_busy_before_anything_is_sent(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with pytest.raises(Busy, match=r"does not answer.*start it or correct engine\.urls"):
        generated(site)
    assert not site.prepared.sessions.exists()


def test_an_engine_that_dies_on_the_way_is_busy_and_no_prompt_is_blamed(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))

        def die(request: dict[str, Any], number: int, again: int) -> Reply:
            if number == 30:
                engine._loop.create_task(engine._drop())
            return sound(request, number, again)

        engine.behave = die
        with pytest.raises(Busy, match="does not answer any more"):
            generated(site)
        assert 20 <= len(site.responses()) <= 30
        assert site.prepared.failed.read_bytes() == b""
        engine.behave = sound
        engine.start()
        generated(site)
    assert_complete(site, 60)


@pytest.mark.parametrize(
    ("fault", "error"), [("500", Busy), ("400", DataError), ("half JSON", DataError)]
)
@pytest.mark.parametrize("num_prompts", [3, 60])
def test_an_engine_that_fails_everything_is_to_blame_not_the_prompts(
    fault: str, error: type[Exception], num_prompts: int, tmp_path: Path
) -> None:
    with FakeEngine(FAULTS[fault][0]) as engine:
        patient = {"patience_s": 60}
        site = Site(tmp_path, num_prompts=num_prompts, urls=(engine.url,), engine=patient)
        with pytest.raises(error, match="prompts in a row"):
            generated(site)
        assert len(engine.requests) <= 4 * (16 + 8)
        assert site.prepared.failed.read_bytes() == b""
        assert read_section(site.prepared.manifest, "generate") is None
        engine.behave = sound
        generated(site)
    assert_complete(site, num_prompts)


def test_the_key_is_sent_and_a_wrong_one_is_a_recipe_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeEngine(key="sesame") as engine:
        site = Site(tmp_path, urls=(engine.url,), engine={"api_key_env": "FAKE_KEY"})
        monkeypatch.delenv("FAKE_KEY", raising=False)
        with pytest.raises(RecipeError, match=r"FAKE_KEY is not set.*non-interactive SSH"):
            generated(site)
        monkeypatch.setenv("FAKE_KEY", "wrong")
        with pytest.raises(RecipeError, match="401"):
            generated(site)
        monkeypatch.setenv("FAKE_KEY", "sesame")
        generated(site)
    assert_complete(site, 60)


@pytest.mark.parametrize("key", ["secret\nX: y", "secret\x07", "s\u00e9cret", "\n"])
def test_a_key_that_no_header_may_carry_is_refused_and_never_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_KEY", key)
    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,), engine={"api_key_env": "FAKE_KEY"})
        with pytest.raises(RecipeError, match="FAKE_KEY") as refused:
            generated(site)
    assert "cret" not in str(refused.value)
    assert not site.prepared.failed.exists() or not site.prepared.failed.read_bytes()


def test_the_line_feed_after_a_key_is_not_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_KEY", "sesame\n")
    with FakeEngine(key="sesame") as engine:
        site = Site(tmp_path, urls=(engine.url,), engine={"api_key_env": "FAKE_KEY"})
        generated(site)
    assert_complete(site, 60)


def test_a_body_without_an_end_is_not_read_to_its_timeout(tmp_path: Path) -> None:
    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if number == 3:
            return Reply(body=b"[" * (2 * ENDLESS), stall_s=600)
        return sound(request, number, again)

    with FakeEngine(behave) as engine:
        site = Site(tmp_path, urls=(engine.url,), engine={"queue_timeout_s": 600})
        generated(site)
    assert_complete(site, 60)


def test_when_the_engine_is_found_broken_nothing_is_sent_again(tmp_path: Path) -> None:
    def behave(request: dict[str, Any], number: int, again: int) -> Reply:
        if number == 20:
            return Reply(403, b"no")
        return Reply(body=[], delay_s=0.3) if number > 12 else sound(request, number, again)

    with FakeEngine(behave) as engine:
        site = Site(tmp_path, urls=(engine.url,), settings={"attempts": 4})
        with pytest.raises(RecipeError, match="403"):
            generated(site)
        # Those in flight at that moment, and what was on its way.
        assert len(engine.requests) <= 20 + 8
    assert site.prepared.failed.read_bytes() == b""


def test_several_urls_share_the_work_and_a_dead_one_is_avoided(tmp_path: Path) -> None:
    slow = lambda request, *_: Reply(body=sound(request, 0, 0).body, delay_s=0.01)  # noqa: E731
    with FakeEngine(slow) as one, FakeEngine(slow) as two:
        site = Site(tmp_path, urls=(one.url, two.url))
        generated(site, token_budget=200)
        assert min(len(one.requests), len(two.requests)) >= 3
        one.behave = FAULTS["503"][0]
        generated(site)
    assert_complete(site, 60)
