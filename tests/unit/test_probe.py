"""One raw request, shown as it went out and as it came back."""

from __future__ import annotations

from typing import Any

import pytest
from unit.fake_engine import FakeEngine, Reply
from unit.fake_engine import answer as reply_to
from unit.test_show import TOKENIZER, prepared, put

from drafter import cli
from drafter.errors import Busy, DataError, RecipeError
from drafter.files import read_json, write_json
from drafter.layout import Prepared

__all__ = ["prepared"]
SAID = TOKENIZER("oak</think>elm pine<|im_end|>", add_special_tokens=False).input_ids


def probe(prepared: Prepared, *more: str) -> int:
    return cli.main(["probe", "--workspace", str(prepared.root.parents[1]), *more])


def with_engine(prepared: Prepared, **engine: Any) -> None:
    path = prepared.root.parents[1] / "recipe.json"
    recipe = read_json(path)
    write_json(path, {**recipe, "engine": {**recipe["engine"], **engine}})


ANSWERS = {
    "sound": (Reply(), "ok, goes to raw_responses", 0),
    "cut": (Reply(body=b""), "length, goes to raw_responses", 0),
    "full": (Reply(503, b"queue \x1b[2Jfull"), "transient: HTTP 503: queue \\x1b[2Jfull", 1),
    "no JSON": (Reply(body=b'{"a'), "malformed: HTTP 200 without an answer", 1),
    "refused": (Reply(400, b"bad"), "permanent: HTTP 400: bad, goes to failed, for good", 1),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_gets_the_class_that_the_client_gives_it(
    name: str, prepared: Prepared, capsys: Any
) -> None:
    reply, told, code = ANSWERS[name]

    def behave(request: dict[str, Any], _number: int, _again: int) -> Reply:
        if name == "sound":
            return Reply(body=reply_to(request, SAID))
        return Reply(body=reply_to(request, SAID[:2], "length")) if name == "cut" else reply

    with FakeEngine(behave) as engine:
        with_engine(prepared, urls=[engine.url])
        assert probe(prepared) == code
    shown = capsys.readouterr().out
    assert f"class: {told}" in shown and "\x1b" not in shown
    assert f"POST {engine.url}/generate\n" in shown
    assert f"HTTP {reply.status} after " in shown and "content-length: " in shown
    if name == "sound":
        assert shown.endswith("--- thinking\noak</think>\n--- answer\nelm pine<|im_end|>\n")


def test_the_request_is_the_clients_with_ids_elided(prepared: Prepared, capsys: Any) -> None:
    put(prepared.prompt_ids, {"sample_id": "long", "input_ids": [7] * 500})
    with FakeEngine(lambda request, *_: Reply(body=reply_to(request, SAID))) as engine:
        assert probe(prepared, "--sample", "long", "--dataset", "B1", "--url", engine.url) == 0
    (request,) = engine.requests
    assert request["input_ids"] == [7] * 500
    assert request["sampling_params"]["max_new_tokens"] == 1024
    shown = capsys.readouterr().out
    assert '"500 ids: 7 7 7 7 7 7 7 7 [... 484 ...] 7 7' in shown and request["rid"] in shown
    assert shown.startswith("long, 500 prompt tokens\n")


def test_the_key_is_sent_and_never_shown(
    prepared: Prepared, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "hunter2")
    with FakeEngine(
        lambda request, *_: Reply(body=reply_to(request, SAID)), key="hunter2"
    ) as engine:
        with_engine(prepared, urls=[engine.url], api_key_env="ENGINE_KEY")
        assert probe(prepared) == 0
        assert "hunter2" not in capsys.readouterr().out
        monkeypatch.setenv("ENGINE_KEY", "wrong")
        with pytest.raises(RecipeError, match="answers 401: set the variable"):
            probe(prepared)
        assert "HTTP 401 after" in capsys.readouterr().out


def test_what_cannot_be_asked_is_one_sentence(prepared: Prepared) -> None:
    with pytest.raises(Busy, match=r"gave no answer, after .* would call it transient"):
        probe(prepared, "--url", "http://127.0.0.1:9")
    with pytest.raises(RecipeError, match="is no URL"):
        probe(prepared, "--url", "ftp://x")
    with pytest.raises(DataError, match="no sample 'nobody'"):
        probe(prepared, "--sample", "nobody")
    put(prepared.prompt_ids, {"sample_id": "deadly", "input_ids": [1, 10**7]})
    with FakeEngine() as engine:
        with pytest.raises(DataError, match=r"deadly cannot be sent.*\[10000000\]"):
            probe(prepared, "--sample", "deadly", "--url", engine.url)
        assert engine.requests == []
