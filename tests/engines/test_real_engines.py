"""Generation as it is, against a real SGLang and a real vLLM; greedily, beside the embedded engine.

``make test-engines`` installs the two and runs this. Each engine is started once, by the recipe's
own command, and stopped by the CLI at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engines import reference
from engines.real_site import HALTED, IN_FLIGHT, LARGE, REAL, TARGET, RealSite
from unit.host import until
from unit.random_targets import one_thread

from drafter import jobs, template
from drafter.engines.client import Client
from drafter.evaluation import greedy
from drafter.files import read_section
from drafter.job import load_job
from drafter.rows import Family
from drafter.sources.prompt import Prompt
from drafter.validation.structure import verdict

MIN_ROWS = 200
MAX_MARGIN = 1e-4
"""In float64, between the two likeliest tokens: float32 of another order may swap them."""
MAX_DIFFERING_SHARE = 0.02

Say = Callable[[str], None]
real = pytest.mark.parametrize("site", REAL, indirect=True)
every = pytest.mark.parametrize("site", ["embedded", *REAL], indirect=True)


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, say: Say
) -> Iterator[RealSite]:
    """A workspace with prompts and an engine that serves. Nothing of it lives on."""
    site = RealSite(tmp_path_factory.mktemp(request.param), request.param)
    try:
        site.start_engine()
        site.finish(site.begin("prepare", "all"))
        say(f"{site.kind}: ready after {site.await_engine():.0f} s")
        yield site
        assert '"outcome":"stopped"' in site.drafter("engine", "stop")
    finally:
        jobs.stop_all(site.workspace.root)
    assert site.processes() == []


@pytest.fixture(scope="module")
def family() -> Family:
    return template.family(TARGET)


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, list[int]]]:
    """Greedy output ids by sample id, of transformers and of each engine that was asked."""
    return {}


@real
def test_a_job_stopped_in_mid_run_resumes_without_losing_a_row_or_paying_for_one_twice(
    site: RealSite,
) -> None:
    # One at a time: all of them take several times as long as the command that stops the job.
    job = site.begin("generate", HALTED, in_flight=1)
    until(lambda: len(site.rows(HALTED)) >= 3, 120)
    site.drafter("stop", "--job", str(job.dir.root))
    assert jobs.live(job.dir) is None
    stored = site.prepared(HALTED).responses.read_bytes()
    kept, prompts = site.rows(HALTED), site.prompt_ids(HALTED)
    assert 3 <= len(kept) < len(prompts)
    progress = site.finish(site.begin("generate", HALTED))
    assert site.prepared(HALTED).responses.read_bytes().startswith(stored)
    assert sorted(row["sample_id"] for row in site.rows(HALTED)) == sorted(prompts)
    assert sum(progress["answers"].values()) == len(prompts) - len(kept)


@real
def test_every_row_of_the_eight_sets_is_of_the_prompt_as_stored_and_validates(
    site: RealSite, family: Family, say: Say
) -> None:
    site.run_all("generate")  # ends with 65 where the canary alarms
    validated = site.run_all("validate")
    total = sound = 0
    for dataset in site.recipe.dataset_names:
        prompts, rows = site.prompt_ids(dataset), site.rows(dataset)
        assert sorted(row["sample_id"] for row in rows) == sorted(prompts), dataset
        for row in rows:
            assert row["prompt_tokens"] == len(prompts[row["sample_id"]]), row["sample_id"]
            sound += verdict(row, family, thinking=True)[0] == "sound"
        counts = validated[dataset]
        assert counts["accepted"] + counts["rejected"] == len(rows), dataset
        section = read_section(site.prepared(dataset).manifest, "generate") or {}
        assert section["stop_reason"] == "quota", dataset
        total += len(rows)
    accepted = sum(counts["accepted"] for counts in validated.values())
    assert len(validated) == 8 and total >= MIN_ROWS
    assert sound >= 0.95 * total and accepted >= 0.95 * total
    say(f"{site.kind}: {total} rows, each of its stored prompt's length, {accepted} accepted")


@real
def test_a_person_can_ask_it_one_prompt(site: RealSite) -> None:
    assert "class: ok" in site.drafter("probe", "--dataset", LARGE)


@every
def test_greedy_answers_are_those_of_transformers_and_of_the_other_engines(
    site: RealSite,
    family: Family,
    answers: dict[str, dict[str, list[int]]],
    say: Say,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = {
        sample_id: ids
        for dataset in site.recipe.dataset_names
        for sample_id, ids in site.prompt_ids(dataset).items()
    }
    assert len(prompts) >= MIN_ROWS
    limit = site.recipe.evaluate.max_new_tokens
    if "transformers" not in answers:
        with one_thread():
            model = reference.load(TARGET, torch.float32)
            answers["transformers"] = reference.greedy(model, prompts, limit)
    count = InFlight(monkeypatch)
    job = load_job(site.workspace.job("prepare", "all").root)
    log_begin = site.engine.log.stat().st_size
    assert greedy.ask(job, family, tmp_path / "greedy.jsonl", prompts) == {}
    answers[site.kind] = greedy.answers(tmp_path / "greedy.jsonl", limit)
    assert count.most == IN_FLIGHT
    if site.kind in REAL:
        # What it has taken in and not yet answered is a little less than what was sent.
        running = site.most_running(log_begin)
        assert running > 0.6 * IN_FLIGHT
        say(f"{site.kind}: {count.most} requests in flight, {running} running at once")
    for name in answers.keys() - {site.kind}:
        margins = differing(prompts, answers[name], answers[site.kind])
        say(f"{site.kind} and {name}: {len(margins)} of {len(prompts)} greedy answers differ")
        assert all(value < MAX_MARGIN for value in margins.values()), margins
        assert len(margins) <= MAX_DIFFERING_SHARE * len(prompts), margins


def test_an_answer_of_another_model_would_be_seen() -> None:
    prompt = template.render(
        template.load_tokenizer(TARGET), Prompt([{"role": "user", "content": "trace oak"}]), True
    )
    with one_thread():
        right = reference.greedy(reference.load(TARGET, torch.float32), {"a": prompt}, 16)
        wrong = {"a": [*right["a"][:5], right["a"][5] - 1, *right["a"][6:]]}
        margins = differing({"a": prompt}, right, wrong)
        assert differing({"a": prompt}, right, right) == {}
    assert margins["a"] > MAX_MARGIN


def differing(
    prompts: dict[str, list[int]], one: dict[str, list[int]], other: dict[str, list[int]]
) -> dict[str, float]:
    """Sample ids of which the two differ, with the margin where they begin to."""
    assert one.keys() == other.keys() == prompts.keys()
    different = [sample_id for sample_id in prompts if one[sample_id] != other[sample_id]]
    model = reference.load(TARGET, torch.float64) if different else None
    margins = {}
    for sample_id in different:
        begin = reference.first_difference(one[sample_id], other[sample_id])
        margins[sample_id] = reference.margin(model, prompts[sample_id] + one[sample_id][:begin])
    return margins


class InFlight:
    """Counts the requests that the client has sent and not got an answer to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.now = 0
        post = Client._post

        async def counted(client, base, body, max_bytes):
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await post(client, base, body, max_bytes)
            finally:
                self.now -= 1

        monkeypatch.setattr(Client, "_post", counted)
