"""A trained drafter in a real vLLM: it accepts what the replay said, and changes no answer.

An engine drafts from the first token on, which prefill wrote, and counts a verification for every
draft, also for the one in which an answer ends: as the replay does, to the last one.

SGLang does not draft on a CPU; its export is read back by drafter.serving, as SGLang reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import reference
from engines.real_site import TARGET
from engines.trained_site import TrainedSite
from unit.random_targets import one_thread

from drafter import serving, template
from drafter.errors import RecipeError
from drafter.evaluation import greedy, replay
from drafter.files import read_json
from drafter.target_head import text_config
from drafter.training import checkpoint, corpus

MARGIN = 0.5
"""Tokens per verification that the target's states must be good for."""
MAX_SHARE_OFF = 0.01
"""Both count the same verifications; float32 of another order may draft another token."""
MAX_ENGINE_SHARE_OFF = 0.05
"""1 + accepted / drafts, which counts what is accepted behind the end of an answer."""
MAX_MARGIN = 1e-4
"""In float64, between the two likeliest tokens: float32 of another order may swap them."""
MAX_DIFFERING_SHARE = 0.02

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedSite]:
    site = TrainedSite(tmp_path_factory.mktemp("served"))
    site.make()
    with site.serving():
        yield site


@pytest.fixture(scope="module")
def measured(site: TrainedSite) -> dict[str, Any]:
    return site.measure()


def test_the_served_acceptance_length_is_the_replayed_one(
    site: TrainedSite, measured: dict[str, Any], say: Say
) -> None:
    length, counts, rates = (
        measured[name] for name in ("acceptance_length", "counts", "tokens_per_s")
    )
    evaluations = [read_json(site.run.evaluation(n)) for n in site.recipe().dataset_names]
    lengths = replay.overall(evaluations)
    verifications = sum(each["sums"]["trained"]["verifications"] for each in evaluations)
    shares = ", ".join(f"{share:.2f}" for share in measured["accepted_share"])
    say(
        f"served {length['served']:.3f} ({counts['verifications']} verifications), replayed"
        f" {length['replayed']:.3f} ({verifications}), vLLM's own figure {length['engine']:.3f},"
        f" accepted by position {shares}; no states {lengths['no_states']:.3f}, n-grams"
        f" {lengths['ngram']:.3f}, untrained {lengths['untrained']:.3f}"
    )
    for name, rate in rates.items():
        say(
            f"{name}: {rate['served']:,.0f} tokens/s with the drafter at {rate['in_flight']} in"
            f" flight, {rate['plain']:,.0f} without, x {rate['ratio']:.2f}"
        )
    assert length["replayed"] == lengths["trained"]
    assert length["served"] == pytest.approx(length["replayed"], rel=MAX_SHARE_OFF)
    assert length["engine"] == pytest.approx(length["replayed"], rel=MAX_ENGINE_SHARE_OFF)
    assert counts["verifications"] == pytest.approx(verifications, rel=MAX_SHARE_OFF)
    assert length["served"] - lengths["ngram"] > MARGIN
    assert length["served"] - lengths["no_states"] > MARGIN


def test_every_answer_is_the_targets_own(
    site: TrainedSite, measured: dict[str, Any], say: Say, tmp_path: Path
) -> None:
    prompts, limit = site.held_out(), site.recipe().evaluate.max_new_tokens
    job = site.job("evaluate", "B1_glaive")
    engine = job.recipe.engine.model_copy(update={"kind": "vllm", "urls": (site.served_url,)})
    asked = job.recipe.model_copy(update={"engine": engine})
    store = tmp_path / "greedy.jsonl"
    greedy.ask(dataclasses.replace(job, recipe=asked), template.family(TARGET), store, prompts)
    answers = greedy.answers(store, limit)
    different = [name for name in prompts if answers[name] != site.answers[name]]
    counts = measured["counts"]
    say(
        f"{len(different)} of {len(prompts)} answers differ with the drafter"
        f" ({counts['differing']} when measured, {counts['differing_plain']} without it)"
    )
    assert counts["prompts"] == len(prompts) >= 40
    for count in (len(different), counts["differing"], counts["differing_plain"]):
        assert count <= MAX_DIFFERING_SHARE * len(prompts)
    model = reference.load(TARGET, torch.float64) if different else None
    for name in different:
        begin = reference.first_difference(answers[name], site.answers[name])
        margin = reference.margin(model, prompts[name] + answers[name][:begin])
        assert margin < MAX_MARGIN, name


def test_what_is_measured_is_not_measured_again(
    site: TrainedSite, measured: dict[str, Any]
) -> None:
    before = site.run.served.read_bytes()
    assert site.measure() == measured
    assert site.run.served.read_bytes() == before
    assert not read_json(site.job("served").dir.progress)["changed"]


def test_a_server_without_a_drafter_or_with_other_drafts_is_refused(site: TrainedSite) -> None:
    export = site.run.export("vllm")
    with pytest.raises(RecipeError, match=rf"does not draft: start it with .*{export}.*: 3\}}'"):
        site.measure(served={"kind": "vllm", "urls": [site.plain_url]})
    with pytest.raises(RecipeError, match=r"drafts 3.0 tokens at a time, .*draft_tokens is 2"):
        site.measure(draft_tokens=2)


def test_answers_cut_by_the_limit_count_the_same(site: TrainedSite, say: Say) -> None:
    limit, recipe = 12, site.recipe()
    rows = corpus.collect(site.workspace, recipe)
    head = corpus.read_head(recipe, rows)
    drafter = checkpoint.load_drafter(site.run.checkpoint(recipe.train.steps), head)
    cut = []
    for entry in rows.held_out:
        row = entry.read()
        tokens = row.prompt_tokens + limit
        states = {"aux_TAD": row.aux_TAD[:tokens], "final_TD": row.final_TD[:tokens]}
        cut.append(dataclasses.replace(row, input_ids_T=row.input_ids_T[:tokens], **states))
    with one_thread():
        replayed = replay.replay(drafter, cut, recipe.evaluate.draft_tokens)
    asked = {"kind": "vllm", "urls": [site.served_url]}
    counts = site.measure(served=asked, max_new_tokens=limit)["counts"]
    say(
        f"cut after {limit} tokens: {counts['verifications']} verifications, replayed"
        f" {replayed.verifications}"
    )
    assert counts["tokens"] - counts["prompts"] == replayed.generated
    assert counts["verifications"] == pytest.approx(replayed.verifications, rel=MAX_SHARE_OFF)


def test_both_exports_draft_the_same(site: TrainedSite) -> None:
    rows = corpus.collect(site.workspace, site.recipe())
    head = corpus.read_head(site.recipe(), rows)
    config = text_config(TARGET)
    sglang, vllm = (
        serving.read(site.run.export(name), name, config) for name in ("sglang", "vllm")
    )
    assert sglang.aux_layers == vllm.aux_layers == [1, 2, 3]
    assert sglang.weights.keys() == vllm.weights.keys()
    assert all(torch.equal(sglang.weights[name], vllm.weights[name]) for name in vllm.weights)
    with one_thread():
        for entry in rows.held_out[:4]:
            row = entry.read()
            ids, aux = row.input_ids_T[: row.prompt_tokens + 1], row.aux_TAD[: row.prompt_tokens]
            followed = row.input_ids_T[row.prompt_tokens + 1 :][None, :2]
            one, other = (
                serving.drafts(each, ids, aux, head.embed, followed) for each in (sglang, vllm)
            )
            torch.testing.assert_close(one, other)
