"""States through vLLM are those of a plain forward, or a sentence says which flag is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from unit.fake_engine import Reply
from unit.fake_states import FakeVLLMStates, layers_of
from unit.random_targets import (
    AUX_LAYERS,
    LAYERS,
    greedy_rows,
    one_thread,
    save_target,
    validated_job,
)
from unit.test_reference import quantise

from drafter.backends import handover, servers
from drafter.backends.transformers import TransformersBackend
from drafter.backends.vllm import VLLMBackend
from drafter.errors import Busy, DataError, DrafterError, RecipeError
from drafter.extract import run
from drafter.files import read_section
from drafter.sections import Extract

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [35, 8], [9, 7, 9, 3, 2], [35, 8]]
ALL = (0, *AUX_LAYERS, LAYERS)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "BACKOFF_S", 0.01)
    monkeypatch.setattr(servers, "PATIENCE_S", 0.1)
    monkeypatch.setattr(handover, "APPEAR_S", 0.05)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        save_target(directory)
        yield directory


def fake(target: Path, directory: Path, layers: tuple[int, ...] = ALL, **more: Any) -> Any:
    return FakeVLLMStates(target, directory, layers_of(target, LAYERS, layers), **more)


def backend(
    target: Path, *urls: str, aux: tuple[int, ...] = AUX_LAYERS, **more: Any
) -> VLLMBackend:
    settings = Extract.model_validate(
        {"backend": "vllm", "urls": urls, "max_length": 64, "dtype": "float32", **more}
    )
    return VLLMBackend(settings, target, torch.float32, aux)


@pytest.mark.parametrize("layers", [ALL, ALL[1:]], ids=["with embeddings", "without"])
@pytest.mark.parametrize("aux", [AUX_LAYERS, AUX_LAYERS[::-1]], ids=["ascending", "descending"])
def test_every_layer_of_every_row_equals_a_plain_forward_and_no_file_stays(
    tmp_path: Path, target: Path, layers: tuple[int, ...], aux: tuple[int, ...]
) -> None:
    plain = TransformersBackend(target, torch.float32, aux)
    with fake(target, tmp_path, layers, write_delay_s=0.01) as server:
        ours = backend(target, server.url, aux=aux)
        for row, got in zip(ROWS, ours.features(ROWS), strict=True):
            (want,) = plain.features([row])
            torch.testing.assert_close(got.aux_TAD, want.aux_TAD)
            torch.testing.assert_close(got.final_TD, want.final_TD)
            assert got.returned_ids == row
            assert (got.low_TD is not None) == (0 in layers)
            if got.low_TD is not None:
                torch.testing.assert_close(got.low_TD, plain.reference(row).layers[0])
            want_logits = plain.logits_rows(want.final_TD)
            torch.testing.assert_close(
                ours.logits_rows(got.final_TD), want_logits, rtol=1e-4, atol=1e-4
            )
        assert sorted(request["prompt"] for request in server.requests) == sorted(ROWS)
        assert {request["max_tokens"] for request in server.requests} == {1}
    assert os.listdir(tmp_path) == []


def test_the_embeddings_may_be_an_auxiliary_layer(tmp_path: Path, target: Path) -> None:
    aux = (4, 0, 2)
    with fake(target, tmp_path, (0, 2, 4, LAYERS)) as server:
        (got,) = backend(target, server.url, aux=aux).features(ROWS[:1])
    (want,) = TransformersBackend(target, torch.float32, aux).features(ROWS[:1])
    torch.testing.assert_close(got.aux_TAD, want.aux_TAD)
    torch.testing.assert_close(got.low_TD, want.aux_TAD[:, 1])


def test_the_whole_phase_ends_as_it_does_without_a_server(tmp_path: Path, target: Path) -> None:
    with one_thread():
        rows = greedy_rows(AutoModelForCausalLM.from_pretrained(target), 12)
    sections = []
    files = tmp_path / "files"
    files.mkdir()
    with fake(target, files) as server:
        for name, more in {
            "here": {},
            "served": {"backend": "vllm", "urls": [server.url]},
        }.items():
            job = validated_job(tmp_path / name, target, rows, **more)
            run(job)
            sections.append(
                read_section(job.workspace.hidden_states("B1").manifest, "extract") or {}
            )
    here, served = sections
    assert served["counts"] == here["counts"]
    assert served["gates"]["argmax_share"] == here["gates"]["argmax_share"] == 1.0
    assert os.listdir(files) == []


FAULTS: dict[str, tuple[dict[str, Any], type[DrafterError], str]] = {
    "no path": (
        {"fault": "no path"},
        RecipeError,
        r"without kv_transfer_params\.hidden_states_path: start vLLM with --speculative-config .*"
        r"extract_hidden_states.*--kv-transfer-config .*shared_storage_path.* that the GPU host",
    ),
    "another disk": (
        {"fault": "no directory"},
        RecipeError,
        "not there on this host.*server and job share",
    ),
    "a late file": ({"fault": "no file"}, RecipeError, "server and job share under one path"),
    "no lock": ({"fault": "no lock"}, RecipeError, "use_synchronization_lock"),
    "garbage": ({"fault": "garbage"}, DrafterError, "holds no whole states .*free disk space"),
    "unwritten": ({"fault": "unwritten"}, DrafterError, "without writing it"),
    "flat": ({"fault": "flat"}, RecipeError, r"needed are \[T, layers, D\]"),
    "two layers": (
        {"layers": (1, LAYERS)},
        RecipeError,
        r"gives 2 layers, needed are 4 or, with layer 0, 5 \(vLLM never tells which they are.*"
        r'"eagle_aux_hidden_state_layer_ids": \[0, 1, 3, 4, 6\]',
    ),
    "all layers": ({"layers": tuple(range(LAYERS + 1))}, RecipeError, "gives 7 layers"),
    "bad request": (
        {"disturb": lambda _: Reply(400, {"error": "too long"})},
        RecipeError,
        "answers 400.*too long",
    ),
    "no access": ({"disturb": lambda _: Reply(403)}, RecipeError, r"answers 403.*api_key_env"),
    "no route": ({"disturb": lambda _: Reply(404)}, RecipeError, r"correct extract\.urls"),
    "no JSON": ({"disturb": lambda _: Reply(body=b"<html>")}, RecipeError, "no JSON object"),
    "always 500": ({"disturb": lambda _: Reply(500, {"error": "x"})}, Busy, "answers 500"),
    "resets": ({"disturb": lambda _: Reply(cut="reset")}, Busy, "does not give states .*http://"),
    "hangs": (
        {"disturb": lambda _: Reply(delay_s=60), "timeout_s": 0.2},
        Busy,
        "no states of a row within 0.2 s",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_sentence_with_a_remedy_and_leaves_no_file(
    tmp_path: Path, target: Path, name: str
) -> None:
    settings, kind, match = FAULTS[name]
    more = {key: value for key, value in settings.items() if key == "timeout_s"}
    with fake(target, tmp_path, **{k: v for k, v in settings.items() if k not in more}) as server:
        ours = backend(target, server.url, **more)
        with pytest.raises(kind, match=match) as caught:
            ours.features(ROWS)
    assert type(caught.value) is kind
    assert os.listdir(tmp_path) == []


def test_short_rows_and_foreign_ids_are_passed_on_for_the_gates_to_judge(
    tmp_path: Path, target: Path
) -> None:
    with fake(target, tmp_path, fault="short") as server:
        (got,) = backend(target, server.url).features(ROWS[:1])
        assert len(got.aux_TAD) == len(got.final_TD) == len(ROWS[0]) - 1
        server.fault = "foreign ids"
        (got,) = backend(target, server.url).features(ROWS[:1])
        assert got.returned_ids == ROWS[0][::-1]


def test_layer_0_is_not_asked_of_a_deepseek_which_it_would_kill(tmp_path: Path) -> None:
    target = tmp_path / "deepseek"
    save_target(target, "deepseek-v3")
    with fake(target, tmp_path, fault="no path") as server:
        with pytest.raises(RecipeError, match=r"hidden_state_layer_ids\": \[1, 3, 4, 6\]"):
            backend(target, server.url).features(ROWS[:1])
        with pytest.raises(RecipeError, match=r"layer 0 .* of a deepseek_v3: choose other"):
            backend(target, server.url, aux=(0, 2, 4))


@pytest.mark.parametrize("off", [0, 1], ids=["right", "a layer late"])
def test_a_quantised_deepseek_is_checked_in_the_layer_after_its_dense_one(
    tmp_path: Path, off: int
) -> None:
    """As Kimi-K2.5: no layer 0 from vLLM, and experts from layer 1 on that nobody else can run."""
    target, files = tmp_path / "deepseek", tmp_path / "files"
    rows = greedy_rows(save_target(target, "deepseek-v3"), 4)
    layers = (1, 2, 4, 5, LAYERS)
    files.mkdir()
    captured = (layers[0] + off, *layers[1:])
    with FakeVLLMStates(target, files, layers_of(target, LAYERS, captured)) as server:
        ours = backend(target, server.url, aux=(2, 4, 5))
        (got,) = ours.features(ROWS[:1])
        (want,) = TransformersBackend(target, torch.float32, (1, 2, 3)).features(ROWS[:1])
        assert got.low_TD is not None and ours.low_layer == 1
        torch.testing.assert_close(got.low_TD, want.aux_TAD[:, off])
        quantise(target, 1)
        job = validated_job(
            tmp_path, target, rows, aux_layers=(2, 4, 5), backend="vllm", urls=[server.url]
        )
        if off:
            with pytest.raises(DataError, match="layer 1 differs from a plain forward"):
                run(job)
        else:
            run(job)
            section = read_section(job.workspace.hidden_states("B1").manifest, "extract")
            assert section is not None and section["gates"]["reference_error"] < 1e-4


@pytest.mark.parametrize(
    "first",
    [
        Reply(500, {"error": "x"}),
        Reply(503),
        Reply(429),
        Reply(cut="reset"),
        Reply(cut="truncated"),
    ],
    ids=["500", "503", "429", "reset", "truncated"],
)
def test_a_row_that_got_no_answer_is_sent_again_under_another_id(
    tmp_path: Path, target: Path, first: Reply
) -> None:
    def disturb(number: int) -> Reply | None:
        return first if number == 1 else None

    with fake(target, tmp_path, disturb=disturb) as server:
        assert len(backend(target, server.url).features(ROWS)) == len(ROWS)
        assert len(server.requests) == len(ROWS) + 1
        assert len({request["request_id"] for request in server.requests}) == len(ROWS) + 1
    assert os.listdir(tmp_path) == []


def test_two_servers_share_the_rows_and_one_that_is_gone_leaves_them_to_the_other(
    tmp_path: Path, target: Path
) -> None:
    with fake(target, tmp_path) as one, fake(target, tmp_path) as other:
        ours = backend(target, one.url, f"{other.url}/")
        assert len(ours.features(ROWS)) == 4
        assert len(one.requests) == len(other.requests) == 2
        one.stop()
        assert [got.returned_ids for got in ours.features(ROWS)] == ROWS
        assert len(one.requests) == 2
        again = backend(target, one.url, other.url)
        assert [got.returned_ids for got in again.features(ROWS)] == ROWS
        assert len(other.requests) == 10


def test_a_server_that_comes_back_as_another_is_refused(tmp_path: Path, target: Path) -> None:
    with fake(target, tmp_path) as server:
        ours = backend(target, server.url)
        server.stop()
        server.model_path = "/models/another"
        server.start()
        server.disturb = lambda number: Reply(cut="reset") if number == 1 else None
        with pytest.raises(RecipeError, match="serves /models/another, the recipe's target is"):
            ours.features(ROWS[:1])


def test_no_server_is_busy_with_the_url(tmp_path: Path, target: Path) -> None:
    with fake(target, tmp_path) as server:
        url = server.url
    with pytest.raises(Busy, match=rf"no vLLM answers for 0\.1 s \({url}.*correct extract\.urls"):
        backend(target, url)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_path": "/models/another"}, "serves /models/another.*right model"),
    "a short context": (
        {"context": 64},
        "context of 64 tokens.*--max-model-len 65 or lower extract.max_length",
    ),
    "another engine": ({"about": dict}, "404.*this is no vLLM server"),
    "a key": ({"key": "k"}, r"answers 401.*extract\.api_key_env"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_wrong_server_is_refused_before_the_first_row(
    tmp_path: Path, target: Path, name: str
) -> None:
    changes, match = WRONG[name]
    with fake(target, tmp_path) as server:
        for attribute, value in changes.items():
            setattr(server, attribute, value)
        with pytest.raises(RecipeError, match=match):
            backend(target, server.url)
        assert server.requests == []


def test_the_key_travels_and_its_absence_is_named(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake(target, tmp_path, key="secret") as server:
        with pytest.raises(RecipeError, match="STATES_KEY is not set"):
            backend(target, server.url, api_key_env="STATES_KEY")
        monkeypatch.setenv("STATES_KEY", "secret\n")
        assert backend(target, server.url, api_key_env="STATES_KEY").features(ROWS[:1])
        monkeypatch.setenv("STATES_KEY", "a\nb")
        with pytest.raises(RecipeError, match="no HTTP header"):
            backend(target, server.url, api_key_env="STATES_KEY")
