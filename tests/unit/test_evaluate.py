"""The evaluation phase: the target is asked once, four drafters are compared."""

import json
import weakref
from dataclasses import replace
from typing import ClassVar

import orjson
import pytest
import torch
from unit.drafter_site import FAMILY, STOP, DrafterSite, TableBackend, greedy
from unit.fake_engine import FakeEngine, Reply, answer

from drafter import train
from drafter.errors import Busy, DataError
from drafter.evaluate import evaluate
from drafter.evaluation import greedy as asking
from drafter.extraction.shards import Features
from drafter.files import read_json


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> DrafterSite:
    site = DrafterSite(
        tmp_path_factory.mktemp("evaluate"),
        num_rows=60,
        train={"steps": 100, "checkpoint_every_steps": 100, "batch_tokens": 500},
    )
    train.run(site.job("train"))
    return site


def truthful(request, _number, _again) -> Reply:
    limit = request["sampling_params"]["max_new_tokens"]
    ids = greedy(request["input_ids"], limit)
    return Reply(body=answer(request, ids, "stop" if ids[-1] == STOP else "length"))


def run(site: DrafterSite, dataset: str = "B1"):
    evaluate(site.job("evaluate", dataset), FAMILY, TableBackend)
    return read_json(site.run.evaluation(dataset))


def test_the_states_are_what_the_drafter_is_good_for(trained):
    trained.answer_greedily("B1")
    result = run(trained)
    length = result["acceptance_length"]
    assert length["trained"] > 1.3
    assert length["trained"] > 1.3 * max(length["ngram"], length["no_states"])
    assert length["untrained"] < 1.2
    assert result["counts"]["prompts"] == 8 and result["counts"]["failed"] == {}
    assert result["sums"]["trained"]["generated"] == result["counts"]["tokens"] - 8
    progress = read_json(trained.job("evaluate", "B1").dir.progress)
    assert progress["done"] and progress["changed"] and "trained" in progress["line"]

    before = trained.run.evaluation("B1").read_bytes()
    run(trained)
    assert trained.run.evaluation("B1").read_bytes() == before
    assert not read_json(trained.job("evaluate", "B1").dir.progress)["changed"]


def test_without_training_steps_trained_is_untrained(tmp_path):
    site = DrafterSite(tmp_path, train={"steps": 0, "no_states_baseline": False})
    train.run(site.job("train"))
    site.answer_greedily("B1")
    result = run(site)
    assert result["sums"]["trained"] == result["sums"]["untrained"]
    assert result["acceptance_length"]["no_states"] is None


def test_no_prompt_is_asked_twice(trained):
    path = trained.run.greedy("B2")
    path.unlink(missing_ok=True)
    with FakeEngine(truthful) as engine:
        trained.urls = (engine.url,)
        first = run(trained, "B2")
        asked = [request["sampling_params"] for request in engine.requests]
        assert len(asked) == first["counts"]["prompts"] == 8
        assert all(sampling["temperature"] == 0 for sampling in asked)
        assert all(sampling["max_new_tokens"] == 24 for sampling in asked)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:5]) + lines[5][:20])
        assert run(trained, "B2") == first
        assert len(engine.requests) == 11
    assert len(path.read_bytes().splitlines()) == 8


def test_an_answer_cut_by_a_lower_limit_is_asked_anew_and_a_longer_one_is_cut(tmp_path):
    store = tmp_path / "greedy.jsonl"
    rows = [
        {"sample_id": "a", "output_ids": [1, 2], "finish_reason": "length", "max_new_tokens": 2},
        {"sample_id": "b", "output_ids": [1, 0], "finish_reason": "stop", "max_new_tokens": 2},
        {"sample_id": "c", "output_ids": [1] * 9, "finish_reason": "length", "max_new_tokens": 9},
    ]
    store.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert asking.answers(store, 4) == {"b": [1, 0], "c": [1] * 4}
    assert asking.answers(store, 2) == {"a": [1, 2], "b": [1, 0], "c": [1] * 2}


def test_a_prompt_that_the_engine_refuses_for_good_is_counted(trained):
    def refuses_one(request, number, again) -> Reply:
        return Reply(400, {"error": "no"}) if number == 3 else truthful(request, number, again)

    trained.run.greedy("B2").unlink(missing_ok=True)
    with FakeEngine(refuses_one) as engine:
        trained.urls = (engine.url,)
        counts = run(trained, "B2")["counts"]
    assert (counts["prompts"], counts["failed"]) == (7, {"permanent": 1})


def test_an_engine_that_cuts_answers_off_leaves_the_others_and_is_told_busy(tmp_path):
    def aborts_some(request, number, again) -> Reply:
        ids = request["input_ids"]
        return Reply(body=answer(request, [1], "abort")) if len(ids) > 4 else truthful(
            request, number, again
        )  # fmt: skip

    site = DrafterSite(tmp_path, train={"steps": 0, "no_states_baseline": False})
    train.run(site.job("train"))
    prompts = site.held_out("B1")
    with FakeEngine(aborts_some) as engine:
        site.urls = (engine.url,)
        job = site.job("evaluate", "B1")
        job = job.__class__(**{**vars(job), "recipe": once(site)})
        with pytest.raises(Busy, match=r"held-out prompts got no answer \(abort"):
            asking.ask(job, FAMILY, site.run.greedy("B1"), prompts)
    kept = [orjson.loads(line) for line in site.run.greedy("B1").read_bytes().splitlines()]
    assert {row["sample_id"] for row in kept} == {i for i, ids in prompts.items() if len(ids) <= 4}


def once(site: DrafterSite):
    """The recipe with one send per prompt: retries wait."""
    recipe = site.recipe
    return recipe.model_copy(
        update={"generate": recipe.generate.model_copy(update={"attempts": 1})}
    )


def test_a_dataset_without_held_out_prompts_says_what_to_raise(tmp_path):
    site = DrafterSite(
        tmp_path, num_rows=3,
        train={"steps": 0, "no_states_baseline": False, "held_out_share": 1e-9},
    )  # fmt: skip
    train.run(site.job("train"))
    with pytest.raises(DataError, match=r"B1: none of the prompts .* raise train.held_out_share"):
        run(site)


def test_it_waits_for_training(tmp_path):
    site = DrafterSite(tmp_path)
    with pytest.raises(DataError, match="train"):
        run(site)


class WatchedBackend(TableBackend):
    """Remembers how many tokens of states were alive whenever more were asked for."""

    alive: ClassVar[list[int]] = []
    made: ClassVar[list[weakref.ref]] = []

    def features(self, batch):
        kept = [tensor() for tensor in self.made]
        self.alive.append(sum(len(tensor) for tensor in kept if tensor is not None))
        made = super().features(batch)
        self.made.extend(weakref.ref(each.aux_TAD) for each in made)
        return made


def test_memory_holds_the_states_of_a_batch_and_not_of_the_dataset(trained, monkeypatch):
    monkeypatch.setattr(trained, "evaluate", {"max_prompts": 60})
    trained.answer_greedily("B1")
    job, recipe = trained.job("evaluate", "B1"), trained.recipe
    small = recipe.extract.model_copy(update={"batch_tokens": 64})
    job = job.__class__(**{**vars(job), "recipe": recipe.model_copy(update={"extract": small})})
    evaluate(job, FAMILY, WatchedBackend)
    assert len(WatchedBackend.alive) >= 4
    assert max(WatchedBackend.alive) <= 64
    sums = read_json(trained.run.evaluation("B1"))["sums"]
    assert len({each["generated"] for each in sums.values()}) == 1


def limited(site: DrafterSite, **extract):
    """A job on B1 whose recipe has other limits of extraction."""
    job, recipe = site.job("evaluate", "B1"), site.recipe
    changed = recipe.extract.model_copy(update=extract)
    return job.__class__(**{**vars(job), "recipe": recipe.model_copy(update={"extract": changed})})


def test_rows_longer_than_a_server_takes_are_left_out_and_counted(trained):
    trained.answer_greedily("B1")
    whole = run(trained)["counts"]
    answers = asking.answers(trained.run.greedy("B1"), 24)
    prompts = trained.held_out("B1")
    lengths = sorted(len(ids) + len(answers[i]) for i, ids in list(prompts.items())[:8])
    limit = lengths[-1] - 1
    evaluate(limited(trained, max_length=limit), FAMILY, TableBackend)
    counts = read_json(trained.run.evaluation("B1"))["counts"]
    fitting = sum(length <= limit for length in lengths)
    assert counts["left_out"] == {"longer than extract.max_length": 8 - fitting}
    assert (counts["prompts"], whole["prompts"], whole["left_out"]) == (fitting, 8, {})
    with pytest.raises(
        DataError, match=r"longer than extract.max_length \(3\): raise it, or lower"
    ):
        evaluate(limited(trained, max_length=3), FAMILY, TableBackend)


class Short(TableBackend):
    def features(self, batch):
        return [Features(got.aux_TAD[1:], got.final_TD[1:]) for got in super().features(batch)]


class NotFinite(TableBackend):
    def features(self, batch):
        made = super().features(batch)
        made[-1].aux_TAD[0, 0, 0] = torch.nan
        return made


class Constant(TableBackend):
    def features(self, batch):
        made = super().features(batch)
        made[-1].final_TD[:] = 1.5
        return made


class OtherIds(TableBackend):
    def features(self, batch):
        made = zip(batch, super().features(batch), strict=True)
        return [replace(got, returned_ids=ids[::-1]) for ids, got in made]


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        (Short, "a prefix-cache hit or chunked prefill"),
        (NotFinite, "aux layer 1 is not finite"),
        (Constant, "final is constant"),
        (OtherIds, "differ from the"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_states_that_no_batch_may_have_are_refused_here_too(trained, backend, sentence):
    trained.answer_greedily("B1")
    with pytest.raises(DataError, match=sentence):
        evaluate(trained.job("evaluate", "B1"), FAMILY, backend)
