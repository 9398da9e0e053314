"""The embedded engine over real HTTP, with a tiny random model; transformers says what is right."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from unit.tiny_model import CONTEXT, EOS_IDS, SHAPE, greedy, prompts, saved

from drafter.engines.embedded import serve
from drafter.errors import RecipeError

INCLUDE = Path(__file__).parents[2] / "include"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small, threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()


@pytest.fixture(scope="module")
def model_dir(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("model") / "tiny")


class Engine:
    """``python -m drafter serve`` in a process of its own."""

    def __init__(self, model_dir: Path) -> None:
        command = [sys.executable, "-m", "drafter", "serve", "--model", model_dir, "--port", "0"]
        environment = os.environ | {"PYTHONPATH": str(INCLUDE)}
        self.process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.hello = self.process.stdout.readline()
        self.url = next(word for word in self.hello.split() if word.startswith("http")).rstrip(",")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def generate(self, input_ids: Any, rid: Any = None, **sampling: Any) -> Any:
        body = {"rid": rid, "input_ids": input_ids, "sampling_params": sampling}
        answer = self.post("/generate", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate_all(self, bodies: list[dict[str, Any]]) -> list[Any]:
        """All in flight at once, on a connection each."""

        async def together() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=len(bodies))
            async with httpx.AsyncClient(timeout=60, limits=limits) as client:
                url = self.url + "/generate"
                return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

        answers = asyncio.run(together())
        assert Counter(answer.status_code for answer in answers) == {200: len(bodies)}
        return [answer.json() for answer in answers]

    def wait_until(self, idle: bool) -> None:
        """flush_cache is refused while requests run or wait."""
        deadline = time.monotonic() + 20
        while (self.get("/flush_cache").status_code == 200) != idle:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    engine = Engine(model_dir)
    yield engine
    engine.process.kill()
    engine.process.wait()


def cut(output_ids: list[int], stop_ids: list[int]) -> list[int]:
    """Up to and with the first stop id."""
    for i, token in enumerate(output_ids):
        if token in stop_ids:
            return output_ids[: i + 1]
    return output_ids


def test_it_says_what_it_is(engine: Engine, model_dir: Path) -> None:
    assert engine.hello.startswith("embedded engine for demos and tests, in place of SGLang")
    assert engine.get("/health").status_code == 200
    for path in ("/model_info", "/get_model_info"):
        info = engine.get(path).json()
        assert info["model_path"] == str(model_dir)
        assert info["architectures"] == ["Qwen3ForCausalLM"]
    for path in ("/server_info", "/get_server_info"):
        info = engine.get(path).json()
        assert (info["version"], info["context_length"]) == ("embedded", CONTEXT)
        assert info["max_running_requests"] >= 150


def test_150_requests_in_flight_are_all_right(engine: Engine, model: Any) -> None:
    asked = [*prompts(50, 3), *prompts(50, 20), *prompts(50, 70)]
    longest = [ids for i in (0, 50, 100) for ids in greedy(model, asked[i : i + 50], 24)]
    bodies = [
        {
            "rid": f"row-{i}",
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8 + i % 17},
        }
        for i, ids in enumerate(asked)
    ]
    before = engine.get("/server_info").json()["generate_requests"]
    ends = Counter()
    for i, answer in enumerate(engine.generate_all(bodies)):
        meta, output_ids, limit = answer["meta_info"], answer["output_ids"], 8 + i % 17
        assert output_ids == cut(longest[i][:limit], EOS_IDS)
        assert meta["id"] == f"row-{i}"
        assert meta["prompt_tokens"] == len(asked[i])
        assert meta["completion_tokens"] == len(output_ids)
        assert meta["cached_tokens"] == 0
        stopped = output_ids[-1] in EOS_IDS and len(output_ids) < limit
        assert meta["finish_reason"] == (
            {"type": "stop", "matched": output_ids[-1]}
            if stopped
            else {"type": "length", "length": limit}
        )
        ends[meta["finish_reason"]["type"]] += 1
    assert min(ends["stop"], ends["length"]) > 10
    assert engine.get("/server_info").json()["generate_requests"] == before + 150


def test_a_batch_answers_in_its_order(engine: Engine, model: Any) -> None:
    asked = prompts(3, 5)
    answers = engine.generate(asked, temperature=0, max_new_tokens=6, ignore_eos=True)
    assert [answer["output_ids"] for answer in answers] == greedy(model, asked, 6)
    one = engine.generate(asked[:1], temperature=0, max_new_tokens=6, ignore_eos=True)
    assert [answer["output_ids"] for answer in one] == greedy(model, asked[:1], 6)


def test_a_stop_id_ends_the_row_and_stays_in_it(engine: Engine, model: Any) -> None:
    asked = prompts(9, 9)
    prompt, expected = next(
        (ids, answer)
        for ids, answer in zip(asked, greedy(model, asked, 20), strict=True)
        if not {*answer[:8]} & {*EOS_IDS}
    )
    sampling = {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": [expected[7]]}
    answer = engine.generate(prompt, **sampling)
    assert answer["output_ids"] == cut(expected, [expected[7]])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[7]}


def test_eos_at_the_last_allowed_id_counts_as_length(engine: Engine, model: Any) -> None:
    asked = prompts(50, 3)
    prompt, answer = next(
        (ids, cut(answer, EOS_IDS))
        for ids, answer in zip(asked, greedy(model, asked, 20), strict=True)
        if {*answer} & {*EOS_IDS}
    )
    got = engine.generate(prompt, temperature=0, max_new_tokens=len(answer))
    assert got["output_ids"] == answer
    assert got["meta_info"]["finish_reason"] == {"type": "length", "length": len(answer)}


def test_no_new_tokens_is_an_empty_answer(engine: Engine) -> None:
    answer = engine.generate([8, 9], max_new_tokens=0)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_the_default_is_128_new_tokens(engine: Engine) -> None:
    answer = engine.generate([8, 9], ignore_eos=True)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


def test_a_prompt_may_fill_the_context_but_for_the_answer(engine: Engine) -> None:
    prompt = prompts(1, CONTEXT - 2)[0]
    answer = engine.generate(prompt, max_new_tokens=2, ignore_eos=True)
    assert answer["meta_info"]["completion_tokens"] == 2


def test_a_seed_gives_the_same_ids_whatever_else_runs(engine: Engine) -> None:
    narrow = {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 7, "top_p": 0.9}
    plain = {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 7}
    alone = [engine.generate([8, 9, 10], **sampling)["output_ids"] for sampling in (narrow, plain)]
    bodies = [
        {"input_ids": [8, 9, 10], "sampling_params": sampling}
        for sampling in (narrow, plain, narrow, plain, {"max_new_tokens": 40})
    ]
    outputs = [answer["output_ids"] for answer in engine.generate_all(bodies)]
    assert outputs[:4] == alone * 2
    other = engine.generate([8, 9, 10], **(plain | {"sampling_seed": 8}))
    assert other["output_ids"] != alone[1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({"input_ids": [[8], []]}, "input_ids cannot be empty."),
    ({}, "input_ids is missing"),
    ({"text": "hello"}, "text is not supported"),
    ({"input_ids": [8], "stream": True}, "stream is not supported by the embedded engine"),
    ({"input_ids": [8], "return_hidden_states": True}, "return_hidden_states is not supported"),
    ({"input_ids": [8, 96]}, "id 96 is outside the vocabulary of 96 ids"),
    ({"input_ids": [8, -1]}, "id -1 is outside"),
    ({"input_ids": [8, 1.5]}, "not an integer"),
    ({"input_ids": [8, True]}, "not an integer"),
    ({"input_ids": [8] * 4096}, "The input (4096 tokens) is longer than the model's context"),
    ({"input_ids": [8] * 4000}, "You requested a total of 4128 tokens"),
    ({"input_ids": [8], "rid": 3}, "rid is 3"),
    ({"input_ids": [[8], [9]], "rid": ["a"]}, "rid of a batch of 2"),
    ({"input_ids": [[8], [9]], "rid": ["a", "a"]}, "Duplicate request ID detected: a"),
    (
        {"input_ids": [8], "sampling_params": {"min_p": 0.1}},
        "sampling_params has min_p, the embedded engine knows: max_new_tokens, temperature",
    ),
    ({"input_ids": [8], "sampling_params": {"temperature": -1}}, "temperature = -1"),
    ({"input_ids": [8], "sampling_params": {"top_p": 0}}, "top_p = 0"),
    ({"input_ids": [8], "sampling_params": {"max_new_tokens": "9"}}, "max_new_tokens = '9'"),
    ({"input_ids": [8], "sampling_params": {"n": 2}}, "n = 2"),
    ({"input_ids": [8], "sampling_params": 3}, "sampling_params = 3"),
]


@pytest.mark.parametrize(("body", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_request_is_refused_by_name(
    engine: Engine, body: dict[str, Any], sentence: str
) -> None:
    answer = engine.post("/generate", body)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_a_connection_outlives_errors(engine: Engine) -> None:
    with httpx.Client(base_url=engine.url) as client:
        assert client.post("/generate", content=b"{").status_code == 400
        assert client.post("/generate", json=[1]).status_code == 400
        assert client.post("/nowhere", json={"a": 1}).status_code == 404
        assert client.get("/generate").status_code == 405
        answer = client.put("/generate", json={"input_ids": [8], "priority": 1})
        assert answer.status_code == 200


@pytest.mark.parametrize("which", [{"rid": "long"}, {"abort_all": True}])
def test_an_aborted_request_answers_with_what_it_had(engine: Engine, which: dict[str, Any]) -> None:
    async def aborted() -> tuple[httpx.Response, httpx.Response]:
        body = {
            "rid": "long",
            "input_ids": [8],
            "sampling_params": {"max_new_tokens": CONTEXT - 1, "ignore_eos": True},
        }
        async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
            running = asyncio.create_task(client.post("/generate", json=body))
            await asyncio.to_thread(engine.wait_until, False)
            twice = await client.post("/generate", json=body)
            assert (await client.post("/abort_request", json={"rid": "lon"})).status_code == 200
            assert (await client.post("/abort_request", json=which)).status_code == 200
            return twice, await running

    twice, answer = asyncio.run(aborted())
    assert "Duplicate request ID detected: long" in twice.text
    assert answer.status_code == 200
    meta = answer.json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["completion_tokens"] == len(answer.json()["output_ids"]) < CONTEXT - 1


def test_requests_of_a_client_that_hung_up_end(engine: Engine) -> None:
    sampling = {"max_new_tokens": CONTEXT - 1, "ignore_eos": True}
    body = {"input_ids": [[8]] * 200, "sampling_params": sampling}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(engine.url + "/generate", json=body, timeout=0.2)
    engine.wait_until(idle=True)


def test_a_taken_port_is_named(engine: Engine, model_dir: Path) -> None:
    port = int(engine.url.rpartition(":")[2])
    with pytest.raises(RecipeError, match=f"port {port} is taken: "):
        serve(model_dir, "127.0.0.1", port)


def test_sigterm_ends_it_at_once_whatever_runs(engine: Engine) -> None:
    """Last, because it ends the engine that the other tests share."""
    sampling = {"max_new_tokens": CONTEXT - 1, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        body = {"input_ids": [8], "sampling_params": sampling}
        httpx.post(engine.url + "/generate", json=body, timeout=0.2)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(timeout=2) == 0
