"""The served phase against servers that count as vLLM and SGLang do: real HTTP, no model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from unit.drafter_site import FAMILY, STOP, DrafterSite, TableBackend, greedy
from unit.fake_engine import FakeEngine, FakeVLLM, Reply, answer, vllm_answer
from unit.random_targets import one_thread

from drafter import cli, export, served, train
from drafter.errors import Busy, DataError, RecipeError
from drafter.evaluate import evaluate
from drafter.evaluation import held_out, measurement
from drafter.files import read_json, write_json
from drafter.job import Job
from drafter.plan import run_name
from drafter.recipe import parse_recipe

ACCEPTED = 2
"""Of each draft, by the drafting servers here."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> DrafterSite:
    site = DrafterSite(
        tmp_path_factory.mktemp("served"),
        train={"steps": 0, "no_states_baseline": False},
    )
    with one_thread():
        train.run(site.job("train"))
        for dataset in site.datasets:
            site.answer_greedily(dataset)
            evaluate(site.job("evaluate", dataset), FAMILY, TableBackend)
        export.run(site.job("export"))
    return site


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_LOOK_S", 0.01)


class CountingVLLM(FakeVLLM):
    """Drafts ``drafted`` tokens at a time (none when 0) and counts; ``tamper`` changes what it says
    in /metrics, by how often it was asked."""

    def __init__(self, drafted: int = 3, wrong: frozenset[int] = frozenset()) -> None:
        super().__init__(self._answer)
        self.drafted, self.wrong = drafted, wrong
        self.written = self.verifications = 0
        self.tamper = lambda written, _asked: written
        self.has_metrics = True
        self.is_late = False
        """Its text has the drafts as they were when it was last read."""
        self._shown = 0

    def _answer(self, request: dict[str, Any], number: int, _again: int) -> Reply:
        ids = greedy(request["token_ids"], request["sampling_params"]["max_tokens"])
        if number in self.wrong:
            ids = [ids[0] % 100 + 1, *ids[1:]]
        self.written += len(ids)
        self.verifications += -(-(len(ids) - 1) // (ACCEPTED + 1)) if self.drafted else 0
        return Reply(body=vllm_answer(request, ids, "stop" if ids[-1] == STOP else "length"))

    def about(self) -> dict[str, Any]:
        return {**super().about(), **({"/metrics": self._metrics()} if self.has_metrics else {})}

    def _metrics(self) -> bytes:
        verifications = self._shown if self.is_late else self.verifications
        self._shown = self.verifications
        written = self.tamper(self.written, len(self.requests))
        lines = {"generation_tokens_total{": written}
        if self.drafted:
            lines |= {
                "spec_decode_num_drafts_total{": verifications,
                "spec_decode_num_draft_tokens_total{": self.drafted * verifications,
                "spec_decode_num_accepted_tokens_total{": ACCEPTED * verifications,
            }
            for position in range(self.drafted):
                name = f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}",'
                lines[name] = verifications * (position < ACCEPTED)
        return "".join(f'vllm:{n}engine="0"}} {float(v)}\n' for n, v in lines.items()).encode()


class CountingSGLang(FakeEngine):
    """The same in SGLang's words."""

    def __init__(self, *, drafts: bool = True) -> None:
        super().__init__(self._answer)
        self.drafts = drafts
        self.written = self.verifications = 0

    def _answer(self, request: dict[str, Any], _number: int, _again: int) -> Reply:
        ids = greedy(request["input_ids"], request["sampling_params"]["max_new_tokens"])
        self.written += len(ids)
        self.verifications += self.drafts * -(-(len(ids) - 1) // (ACCEPTED + 1))
        return Reply(body=answer(request, ids, "stop" if ids[-1] == STOP else "length"))

    def about(self) -> dict[str, Any]:
        about = super().about()
        about["/server_info"]["internal_states"] = [{"avg_spec_accept_length": 3.0}]
        lines = [
            f"sglang:generation_tokens_total {self.written}",
            f"sglang:spec_verify_calls_total {self.verifications}",
            "sglang:spec_accept_length 2.9",
            "sglang:spec_accept_rate 0.63",
        ]
        return {**about, "/metrics": "\n".join(lines).encode()}


def job(site: DrafterSite, *urls: str, plain: str = "", kind: str = "vllm", **changes: Any) -> Job:
    told = {"kind": kind, "urls": list(urls), "plain_urls": [plain] if plain else []}
    evaluate = site.recipe.evaluate.model_dump() | {"served": told, **changes}
    recipe = parse_recipe({**site.recipe.as_json(), "evaluate": evaluate}, "test")
    return dataclasses.replace(site.job(served.PHASE), recipe=recipe)


def measured(job: Job) -> dict[str, Any]:
    served.compare(job, FAMILY)
    return read_json(job.workspace.drafter(run_name(job.workspace, job.recipe)).served)


def anew(job: Job) -> Job:
    return dataclasses.replace(job, mode="restart")


def test_length_and_speed_are_those_of_the_held_out_prompts(site: DrafterSite) -> None:
    prompts = {
        sample_id: ids
        for dataset in site.datasets
        for sample_id, ids in held_out.prompts(site.workspace, site.recipe, dataset).items()
    }
    answers = [greedy(ids, 24) for ids in prompts.values()]
    tokens = sum(map(len, answers))
    verifications = sum(-(-(len(ids) - 1) // (ACCEPTED + 1)) for ids in answers)
    with CountingVLLM() as drafting, CountingVLLM(drafted=0) as plain:
        asked = anew(job(site, drafting.url, plain=plain.url))
        result = measured(asked)
        few = len(list(prompts)[:: -(-len(prompts) // measurement.ONE_BY_ONE)])
        assert len(drafting.requests) == len(plain.requests) == 1 + len(prompts) + few
        assert {r["sampling_params"]["temperature"] for r in drafting.requests} == {0}
        assert drafting.most_in_flight <= asked.in_flight
    length = result["acceptance_length"]
    assert length["served"] == pytest.approx((tokens - len(prompts)) / verifications)
    assert length["engine"] == 1 + ACCEPTED
    evaluated = [read_json(site.run.evaluation(name))["sums"]["trained"] for name in site.datasets]
    assert length["replayed"] == pytest.approx(
        sum(each["generated"] for each in evaluated)
        / sum(each["verifications"] for each in evaluated)
    )
    assert result["accepted_share"] == [1.0, 1.0, 0.0]
    assert result["counts"] == {
        "prompts": len(prompts),
        "tokens": tokens,
        "verifications": verifications,
        "drafted": 3 * verifications,
        "accepted": 2 * verifications,
        "differing": 0,
        "differing_plain": 0,
    }
    assert result["tokens_per_s"].keys() == {"one", "all"}
    for name, in_flight in (("one", 1), ("all", asked.in_flight)):
        rates = result["tokens_per_s"][name]
        assert rates["in_flight"] == in_flight
        assert rates["ratio"] == pytest.approx(rates["served"] / rates["plain"])
    progress = read_json(asked.dir.progress)
    assert progress["done"] and progress["changed"] and "speed x" in progress["line"]


def test_only_prompts_that_were_replayed_are_asked(site: DrafterSite) -> None:
    lengths = sorted(
        len(ids) + len(greedy(ids, 24))
        for dataset in site.datasets
        for ids in held_out.prompts(site.workspace, site.recipe, dataset).values()
    )
    with CountingVLLM() as drafting:
        asked = anew(job(site, drafting.url))
        shorter = asked.recipe.extract.model_copy(update={"max_length": lengths[-1] - 1})
        recipe = asked.recipe.model_copy(update={"extract": shorter})
        found = measured(dataclasses.replace(asked, recipe=recipe))["counts"]["prompts"]
    assert found == sum(length < lengths[-1] for length in lengths) < len(lengths)


def test_it_is_done_while_export_and_recipe_are_the_same(site: DrafterSite) -> None:
    with CountingVLLM() as engine:
        first = job(site, engine.url)
        result = measured(anew(first))
        assert result["tokens_per_s"]["all"]["plain"] is None
        asked = len(engine.requests)
        assert measured(first) == result and len(engine.requests) == asked
        assert not read_json(first.dir.progress)["changed"]
        measured(job(site, engine.url, max_prompts=4))
        assert len(engine.requests) > asked
    with pytest.raises(Busy, match="does not answer"):
        measured(anew(first))


def test_sglang_is_measured_by_its_counters_and_quoted(site: DrafterSite) -> None:
    with CountingSGLang() as engine:
        result = measured(anew(job(site, engine.url, kind="sglang")))
        url = engine.url
    assert 2 < result["acceptance_length"]["served"] <= 1 + ACCEPTED
    assert result["acceptance_length"]["engine"] is None and result["accepted_share"] is None
    assert result["engine"]["says"] == {url: {"length": 2.9, "rate": 0.63, "mean_length": 3.0}}


def test_several_servers_share_the_prompts_and_their_counters_add_up(site: DrafterSite) -> None:
    with CountingVLLM() as one, CountingVLLM() as other:
        result = measured(anew(job(site, one.url, other.url)))
        assert min(len(one.requests), len(other.requests)) > 1
    assert result["acceptance_length"]["engine"] == 1 + ACCEPTED


def test_an_answer_that_is_not_the_targets_is_counted(site: DrafterSite) -> None:
    with CountingVLLM(wrong=frozenset({2, 5})) as engine:  # the first request is a look
        result = measured(anew(job(site, engine.url)))
    assert result["counts"]["differing"] == 2


def test_a_server_that_drafts_otherwise_is_refused_with_the_flags(site: DrafterSite) -> None:
    exports = {kind: site.run.export(kind) for kind in ("vllm", "sglang")}
    with CountingVLLM(drafted=0) as engine:
        with pytest.raises(RecipeError) as error:
            measured(anew(job(site, engine.url)))
        assert len(engine.requests) == 1
    told = str(error.value)
    assert told.startswith(f"evaluate.served: {engine.url} does not draft: start it with")
    config = json.loads(told.split("--speculative-config '")[1].removesuffix("'"))
    assert config == {
        "method": "eagle3", "model": str(exports["vllm"]), "num_speculative_tokens": 3,
    }  # fmt: skip
    for drafted in (2, 5):
        with (
            CountingVLLM(drafted) as engine,
            pytest.raises(RecipeError, match=f"drafts {drafted}.0"),
        ):
            measured(anew(job(site, engine.url)))
    with CountingSGLang(drafts=False) as engine, pytest.raises(RecipeError) as error:
        measured(anew(job(site, engine.url, kind="sglang")))
    assert str(error.value).endswith(
        "does not draft: start it with --speculative-algorithm EAGLE3"
        f" --speculative-draft-model-path {exports['sglang']} --speculative-num-steps 3"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )


def test_a_server_without_metrics_is_refused_with_the_flag(site: DrafterSite) -> None:
    with CountingVLLM() as engine, pytest.raises(RecipeError, match="without --disable-log-stats"):
        engine.has_metrics = False
        measured(anew(job(site, engine.url)))
    with FakeEngine() as engine, pytest.raises(RecipeError, match="with --enable-metrics"):
        measured(anew(job(site, engine.url, kind="sglang")))


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (lambda written, asked: written + 7 * (asked > 1), "counted .* tokens while"),
        (lambda written, asked: written - 7 * (asked > 1), "not a balancer in front"),
        (lambda written, asked: written * (asked <= 1), "started anew"),
    ],
    ids=["others ask too", "another server answers", "a restart"],
)
def test_counters_about_other_requests_are_not_believed(
    site: DrafterSite, monkeypatch: pytest.MonkeyPatch, tamper: Any, told: str
) -> None:
    monkeypatch.setattr(measurement, "SETTLE_S", 0.0)
    with CountingVLLM() as engine:
        engine.tamper = tamper
        with pytest.raises(Busy, match=told):
            measured(anew(job(site, engine.url)))


def test_a_text_that_has_the_tokens_and_not_yet_the_drafts_is_read_again(site: DrafterSite) -> None:
    with CountingVLLM() as engine:
        prompt = measured(anew(job(site, engine.url)))
    with CountingVLLM() as engine:
        engine.is_late = True
        assert measured(anew(job(site, engine.url)))["counts"] == prompt["counts"]


def test_a_prompt_without_an_answer_ends_the_measurement(site: DrafterSite) -> None:
    class Refusing(CountingVLLM):
        def _answer(self, request: dict[str, Any], number: int, again: int) -> Reply:
            return Reply(400, {"error": "no"}) if number == 4 else super()._answer(
                request, number, again
            )  # fmt: skip

    with Refusing() as engine, pytest.raises(RecipeError, match=r"1 of 16 .* \(permanent"):
        measured(anew(job(site, engine.url)))


def test_it_waits_for_the_export_and_needs_the_section(tmp_path: Path) -> None:
    site = DrafterSite(tmp_path, train={"steps": 0, "no_states_baseline": False})
    with pytest.raises(DataError, match="has not finished, run it first"):
        measured(job(site, "http://127.0.0.1:9"))
    with pytest.raises(RecipeError, match=r"add \[evaluate.served\]"):
        served.compare(site.job(served.PHASE), FAMILY)
    write_json(site.workspace.recipe, site.recipe.as_json())
    with pytest.raises(RecipeError, match=r"add \[evaluate.served\]"):
        cli.main(["served", "--workspace", str(site.workspace.root)])


def test_one_server_cannot_be_both_with_and_without_a_drafter(site: DrafterSite) -> None:
    with pytest.raises(RecipeError, match="both with and without a drafter"):
        job(site, "http://a", plain="http://a")


def test_evaluate_does_not_depend_on_servers_asked_later(site: DrafterSite) -> None:
    assert job(site, "http://a").recipe.evaluate.rules() == site.recipe.evaluate.rules()
