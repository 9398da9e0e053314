"""The same generation against vLLM's raw-token route: its fields, its errors, its checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
    CLOSE,
    DATASET,
    FAMILY,
    STOP,
    TEXT,
    VOCAB,
    FakeVLLM,
    Reply,
    Site,
    assert_complete,
    generated,
    vllm_answer,
)

from drafter.engines import client
from drafter.engines.api import judge
from drafter.engines.vllm import VLLM
from drafter.errors import Busy, RecipeError
from drafter.files import read_json
from drafter.generation import workers

SAID = [TEXT, CLOSE, TEXT, STOP]
TOO_LONG = (
    "The decoder prompt (length 2048) plus the number of requested output tokens (at least 1) is"
    " longer than the maximum model length of 2048. Make sure that"
)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.02)
    monkeypatch.setattr(workers, "PAUSE_S", 0.02)


def fine(request: dict[str, Any], _number: int, _again: int) -> Reply:
    return Reply(body=vllm_answer(request, SAID))


def site_of(tmp_path: Path, engine: FakeVLLM, **more: Any) -> Site:
    return Site(tmp_path, urls=(engine.url,), engine={"kind": "vllm"}, **more)


def test_ids_go_out_and_come_back_as_vllm_spells_it(tmp_path: Path) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9}
    with FakeVLLM(fine, context=50) as engine:
        site = site_of(tmp_path, engine, settings=settings)
        generated(site)
        assert_complete(site, 60)
        assert len({request["request_id"] for request in engine.requests}) == 60
        for request in engine.requests:
            assert len(request["token_ids"]) == 6
            assert request["sampling_params"] == {
                "max_tokens": 43,
                "temperature": 0.7,
                "top_p": 0.9,
                "detokenize": False,
            }
    about = site.read(site.prepared.sessions)[0]["engine"]
    assert (about["kind"], about["context"], about["model"]) == ("vllm", 50, "/models/target")
    assert read_json(site.job().dir.progress)["answers"] == {"ok": 60}


def said(**changes: Any) -> Any:
    def behave(request: dict[str, Any], _number: int, _again: int) -> Reply:
        return Reply(body=vllm_answer(request, **{"output_ids": SAID, **changes}))

    return behave


FAULTS = {
    "abort": (said(ended="abort"), "abort"),
    "empty": (said(output_ids=[]), "empty"),
    "no choices": (lambda *_: Reply(body={"choices": [], "usage": {}}), "malformed"),
    "two choices": (lambda *_: Reply(body={"choices": [{}, {}], "usage": {}}), "malformed"),
    "wrong counts": (said(completion_tokens=3), "malformed"),
    "other prompt": (said(prompt_tokens=5), "malformed"),
    "id outside": (said(output_ids=[VOCAB, STOP]), "malformed"),
    "ended by repetition": (said(output_ids=[TEXT, TEXT]), "malformed"),
    "engine dead": (lambda *_: Reply(500, {"error": {"message": "EngineDeadError"}}), "transient"),
    "too long": (lambda *_: Reply(400, {"error": {"message": TOO_LONG}}), "prompt too long"),
    "other 400": (lambda *_: Reply(400, {"error": {"message": "temperature"}}), "permanent"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_class(fault: str, tmp_path: Path) -> None:
    behave, kind = FAULTS[fault]

    def one_bad(request: dict[str, Any], number: int, again: int) -> Reply:
        cursed = request["token_ids"][-1] == 3
        return behave(request, number, again) if cursed else fine(request, number, again)

    with FakeVLLM(one_bad) as engine:
        site = site_of(tmp_path, engine, num_prompts=6, settings={"attempts": 2})
        if kind in ("permanent", "prompt too long"):
            generated(site)
        else:
            with pytest.raises(Busy, match=f"1 {kind}"):
                generated(site)
    (failure,) = site.read(site.prepared.failed)
    assert (failure["sample_id"], failure["class"]) == (f"{DATASET}-0003", kind)


def test_a_cut_answer_is_kept_as_length() -> None:
    content = (
        b'{"request_id":"generate-tokens-r2","model":"/m","created":1,"usage":{"prompt_tokens":54,'
        b'"total_tokens":57,"completion_tokens":3},"prompt_logprobs":null,"choices":[{"index":0,'
        b'"finish_reason":"length","stop_reason":null,"token_ids":[586,326,358],"logprobs":null}]}'
    )
    outcome = judge(VLLM(), 200, content, "B1-1", 54, FAMILY)
    assert outcome.kind == "length" and outcome.row == {
        "sample_id": "B1-1",
        "output_ids": [586, 326, 358],
        "prompt_tokens": 54,
        "completion_tokens": 3,
        "finish_reason": "length",
    }


def test_what_is_wrong_with_the_server_is_said_before_the_first_request(tmp_path: Path) -> None:
    with FakeVLLM(fine) as engine:
        site = site_of(tmp_path, engine)
        engine.open_route = False
        with pytest.raises(RecipeError, match="start vLLM with --enable-scale-out"):
            generated(site)
        engine.open_route = True
        engine.model_path = "/models/other"
        with pytest.raises(RecipeError, match="serves /models/other"):
            generated(site)
        engine.model_path = "/models/target"
        engine.context = 0
        with pytest.raises(RecipeError, match="start vLLM with --max-model-len"):
            generated(site)
        site.engine["kind"] = "sglang"
        with pytest.raises(RecipeError, match="this is no SGLang server"):
            generated(site)
        assert not engine.requests
