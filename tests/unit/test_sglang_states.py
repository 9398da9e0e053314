"""States through SGLang are those of a plain forward, or a sentence says which flag is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from unit.fake_engine import Reply
from unit.fake_states import FakeSGLangStates, layers_of
from unit.random_targets import (
    AUX_LAYERS,
    LAYERS,
    greedy_rows,
    one_thread,
    save_target,
    validated_job,
)

from drafter.backends import servers
from drafter.backends.sglang import SGLangBackend, captured_layers, spelled_layers
from drafter.backends.transformers import TransformersBackend
from drafter.errors import Busy, DataError, DrafterError, RecipeError
from drafter.extract import run
from drafter.files import read_section
from drafter.sections import Extract

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [35, 8], [9, 7, 9, 3, 2], [35, 8]]
HIDDEN = 32
RIGHT = {
    "enable_return_aux_hidden_states": True,
    "aux_hidden_state_capture": "eagle3",
    "return_aux_hidden_state_layer_ids": [k - 1 for k in AUX_LAYERS],
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
    "max_req_input_len": 65,
}
FLAGS = (
    "start SGLang with --enable-return-aux-hidden-states --speculative-algorithm EAGLE3 "
    "--return-aux-hidden-state-layer-ids 0 2 3 --disable-radix-cache --chunked-prefill-size -1"
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "BACKOFF_S", 0.01)
    monkeypatch.setattr(servers, "PATIENCE_S", 0.1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        save_target(directory)
        yield directory


def fake(target: Path, told: dict[str, Any] | None = None, **more: Any) -> FakeSGLangStates:
    states = layers_of(target, LAYERS, AUX_LAYERS)
    return FakeSGLangStates(target, states, RIGHT | (told or {}), **more)


def backend(
    target: Path, *urls: str, aux: tuple[int, ...] = AUX_LAYERS, **more: Any
) -> SGLangBackend:
    settings = Extract.model_validate(
        {"backend": "sglang", "urls": urls, "max_length": 64, "dtype": "float32", **more}
    )
    return SGLangBackend(settings, target, torch.float32, aux)


@pytest.mark.parametrize("aux", [AUX_LAYERS, AUX_LAYERS[::-1]], ids=["ascending", "descending"])
def test_every_layer_of_every_row_equals_a_plain_forward(
    target: Path, aux: tuple[int, ...]
) -> None:
    plain = TransformersBackend(target, torch.float32, aux)
    with fake(target) as one, fake(target) as other:
        ours = backend(target, one.url, other.url, aux=aux)
        for row, got in zip(ROWS, ours.features(ROWS), strict=True):
            (want,) = plain.features([row])
            torch.testing.assert_close(got.aux_TAD, want.aux_TAD, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(got.final_TD, want.final_TD, rtol=1e-4, atol=1e-4)
        assert len(one.requests) == len(other.requests) == 2
        limits = [request["sampling_params"]["max_new_tokens"] for request in one.requests]
        assert limits == [1, 1]


def test_the_whole_phase_ends_as_it_does_without_a_server(tmp_path: Path, target: Path) -> None:
    with one_thread():
        rows = greedy_rows(AutoModelForCausalLM.from_pretrained(target), 12)
    sections = []
    with fake(target) as server:
        for name, more in {
            "here": {},
            "served": {"backend": "sglang", "urls": [server.url]},
        }.items():
            job = validated_job(tmp_path / name, target, rows, **more)
            run(job)
            sections.append(
                read_section(job.workspace.hidden_states("B1").manifest, "extract") or {}
            )
    here, served = sections
    assert served["counts"] == here["counts"]
    assert served["gates"]["argmax_share"] == here["gates"]["argmax_share"] == 1.0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a radix cache": ({"disable_radix_cache": False}, "--disable-radix-cache is missing"),
    "chunked prefill": ({"chunked_prefill_size": 8192}, "in chunks of 8192 tokens"),
    "no auxiliary states": (
        {"enable_return_aux_hidden_states": False},
        "--enable-return-aux-hidden-states is missing",
    ),
    "an older server": ({"enable_return_aux_hidden_states": None}, "is missing"),
    "another convention": ({"aux_hidden_state_capture": "dflash"}, "needed is EAGLE3"),
    "ids as inputs": (
        {"return_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
        r"returns hidden_states \[2, 4, 5\].*needed are \[1, 3, 4\]",
    ),
    "the default ids": (
        {"return_aux_hidden_state_layer_ids": None},
        r"returns hidden_states \[2, 3, 3\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_with_the_wrong_flags_is_refused_before_the_first_row(
    target: Path, name: str
) -> None:
    told, match = WRONG[name]
    with fake(target, told) as server:
        with pytest.raises(RecipeError, match=match) as caught:
            backend(target, server.url)
        assert str(caught.value).endswith(FLAGS)
        assert server.requests == []


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"max_req_input_len": 64}, "rows of 63 tokens, extract.max_length is 64.*context-length"),
        ({"model_path": "/models/another"}, "serves /models/another.*right model"),
    ],
    ids=["a short context", "another model"],
)
def test_a_server_of_another_size_or_model_is_refused(
    target: Path, told: dict[str, Any], match: str
) -> None:
    with fake(target, told) as server, pytest.raises(RecipeError, match=match):
        backend(target, server.url)


FAULTS: dict[str, tuple[dict[str, Any], type[DrafterError], str]] = {
    "no states": ({"spoil": lambda _: None}, RecipeError, "without hidden states: start SGLang"),
    "one layer": (
        {"spoil": lambda rows: [[row[:HIDDEN] for row in rows]]},
        RecipeError,
        r"gives states \[9, 32\], needed are 3 layers of 32",
    ),
    "ragged rows": (
        {"spoil": lambda rows: [[rows[0], rows[1][:3]]]}, RecipeError, "are no numbers",
    ),
    "a key": ({"disturb": lambda _: Reply(401)}, RecipeError, r"401.*extract\.api_key_env"),
    "no route": ({"disturb": lambda _: Reply(404)}, RecipeError, "no SGLang server"),
    "bad request": ({"disturb": lambda _: Reply(400)}, RecipeError, "answers 400"),
    "always 500": ({"disturb": lambda _: Reply(500)}, Busy, "SGLang does not give states .*500"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_sentence_with_a_remedy(target: Path, name: str) -> None:
    settings, kind, match = FAULTS[name]
    with fake(target, **settings) as server:
        ours = backend(target, server.url)
        with pytest.raises(kind, match=match):
            ours.features(ROWS[:1])


def test_short_rows_are_passed_on_for_the_gates_to_judge(target: Path) -> None:
    with fake(target, spoil=lambda rows: [rows[4:]]) as server:
        (got,) = backend(target, server.url).features(ROWS[:1])
    assert (len(got.aux_TAD), len(got.final_TD)) == (len(ROWS[0]) - 4, len(ROWS[0]))


def test_of_two_servers_each_must_give_the_proven_states(tmp_path: Path, target: Path) -> None:
    with one_thread():
        rows = greedy_rows(AutoModelForCausalLM.from_pretrained(target), 12)
    with fake(target) as one, fake(target) as other:
        other.states = layers_of(target, LAYERS, (1, 2, 4))
        job = validated_job(tmp_path, target, rows, backend="sglang", urls=[one.url, other.url])
        with pytest.raises(DataError, match="aux layer 3 "):
            run(job)
    assert list(job.workspace.hidden_states("B1").root.iterdir()) == []


ABORTED = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "m"}}}


@pytest.mark.parametrize(
    "first",
    [Reply(body=ABORTED), Reply(503), Reply(cut="reset")],
    ids=["abort", "503", "reset"],
)
def test_a_row_that_got_no_states_is_sent_again(target: Path, first: Reply) -> None:
    def disturb(number: int) -> Reply | None:
        return first if number == 1 else None

    with fake(target, disturb=disturb) as server:
        assert len(backend(target, server.url).features(ROWS)) == len(ROWS)
        assert len(server.requests) == len(ROWS) + 1


def test_no_server_is_busy_with_the_url(target: Path) -> None:
    with fake(target) as server:
        url = server.url
    with pytest.raises(Busy, match=rf"no SGLang answers for 0\.1 s \({url}"):
        backend(target, url)


CONVENTIONS = [
    ("qwen3", [2, 30, 58], [1, 29, 57]),
    ("llama", [58, 1, 30], [0, 29, 57]),
    ("deepseek_v3", [2, 30, 58], [2, 30, 58]),
    ("kimi_k25", [2, 30, 58], [2, 30, 58]),
    ("kimi_k2", [1, 30, 58], [30, 58, 1]),
    ("deepseek_v3", [3, 2, 1], [2, 3, 1]),
]


@pytest.mark.parametrize(
    ("model_type", "layers", "ids"),
    CONVENTIONS,
    ids=[f"{model_type} {layers}" for model_type, layers, _ in CONVENTIONS],
)
def test_ids_are_spelled_so_that_the_wanted_layers_come_back(
    model_type: str, layers: list[int], ids: list[int]
) -> None:
    assert spelled_layers(model_type, layers) == ids
    assert captured_layers(model_type, ids) == sorted(layers)


def test_ids_that_begin_with_one_are_outputs_to_deepseek_too() -> None:
    assert captured_layers("deepseek_v3", [1, 29, 57]) == [2, 30, 58]


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3"])
def test_the_embeddings_are_refused(model_type: str) -> None:
    with pytest.raises(RecipeError, match="does not return layer 0"):
        spelled_layers(model_type, [0, 2, 4])
