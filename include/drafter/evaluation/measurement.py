"""What servers answer and count: the same prompts, greedily, with a drafter and without.

Every number is about exactly these prompts: a server that counted other tokens meanwhile is refused
(``counted``), and so is one that drafts otherwise than the replay it is compared with.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from drafter import plan
from drafter.engines.api import get_object
from drafter.engines.client import Client, connected
from drafter.engines.connection import (
    EngineInfo,
    api_of,
    base_urls,
    check_engine,
    open_http,
    tls_context,
)
from drafter.engines.outcomes import RULES, Kind, Outcome
from drafter.errors import Busy, RecipeError
from drafter.evaluation import acceptance
from drafter.evaluation.acceptance import Counts
from drafter.job import Job
from drafter.recipe import Recipe
from drafter.rows import Family
from drafter.sections import Engine

ONE_BY_ONE = 8
"""Prompts of the single stream: of a thousand tokens each, a few minutes."""

SETTLE_S = 10.0
"""An engine counts a moment after it answers."""

_LOOK_S = 0.2
_REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Asked:
    """Answers by sample id, and how long they took together."""

    answers: dict[str, list[int]]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers.values()))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Measured:
    all: Asked
    """At ``in_flight``."""

    one: Asked
    """A few, one after another."""

    in_flight: int
    counts: Counts | None
    """Over ``all``; None of servers without a drafter."""

    says: dict[str, Any]
    """Of SGLang: acceptance.sglang_says, by URL."""


async def measure(
    job: Job, family: Family, prompts: Mapping[str, list[int]], longest: str, *, drafts: bool
) -> Measured:
    """Ask the servers of [evaluate.served] everything at once, then a few one by one.

    ``drafts``: those that draft, whose counters are read; else those that do not. ``longest`` names
    the prompt with the longest answer, which every server is asked first: whether it drafts shows
    there. Raises as drafter.served.run.
    """
    engine = _engine(job.recipe, drafts)
    info = await check_engine(engine, job.recipe.target.path)
    if info.down:
        raise Busy("; ".join(info.down.values()))
    ask = functools.partial(_ask, job, family, info)
    for url in engine.urls:
        alone = engine.model_copy(update={"urls": (url,)})
        before = await _read(alone) if drafts else []
        asked = await ask(alone, {longest: prompts[longest]}, 1)
        if drafts:
            _refuse_other_drafts(job, url, await _counted(alone, before, asked.tokens))
    in_flight = min(job.in_flight, len(prompts))
    before = await _read(engine) if drafts else []
    asked = await ask(engine, prompts, in_flight)
    counts = await _counted(engine, before, asked.tokens) if drafts else None
    says = await _sglang_says(engine) if drafts and engine.kind == "sglang" else {}
    every = -(-len(prompts) // ONE_BY_ONE)
    one = await ask(engine, dict(list(prompts.items())[::every]), 1)
    return Measured(asked, one, in_flight, counts, says)


def _engine(recipe: Recipe, drafts: bool) -> Engine:
    """The server as one that can be asked; patience and timeouts are those of [engine]."""
    served = recipe.evaluate.served
    assert served
    told = {
        "kind": served.kind,
        "urls": served.urls if drafts else served.plain_urls,
        "api_key_env": served.api_key_env,
        "start": None,
    }
    return recipe.engine.model_copy(update=told)


async def _ask(
    job: Job,
    family: Family,
    info: EngineInfo,
    engine: Engine,
    prompts: Mapping[str, list[int]],
    in_flight: int,
) -> Asked:
    """Greedy answers to all of ``prompts``. Busy or RecipeError when one gets none."""
    limit = job.recipe.evaluate.max_new_tokens
    settings = job.recipe.generate.model_copy(
        update={"temperature": 0.0, "top_p": 1.0, "max_new_tokens": limit}
    )
    target = job.recipe.target.path
    waiting = iter(prompts.items())
    outcomes: dict[str, Outcome] = {}

    reported = time.monotonic()

    async def work(client: Client) -> None:
        nonlocal reported
        for sample_id, ids in waiting:
            outcomes[sample_id] = await client.complete(sample_id, ids)
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                job.report(asked=len(outcomes), prompts=len(prompts), urls=engine.urls)

    answers = Counter[Kind]()
    async with connected(engine, target, info, settings, family, in_flight, answers) as clients:
        begun = time.monotonic()
        tasks = [asyncio.create_task(work(client)) for client in clients]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        seconds = time.monotonic() - begun
    if failed := [outcome for outcome in outcomes.values() if outcome.row is None]:
        kind = RecipeError if RULES[failed[0].kind].final else Busy
        raise kind(
            f"{len(failed)} of {len(prompts)} held-out prompts got no answer ({failed[0].kind}: "
            f"{failed[0].reason}), the target answered them for evaluate: see to the server, then "
            "measure again"
        )
    rows = {name: outcome.row for name, outcome in outcomes.items() if outcome.row}
    return Asked({name: row["output_ids"] for name, row in rows.items()}, seconds)


async def _read(engine: Engine) -> list[Counts]:
    """The counters of each URL."""
    async with open_http(engine, tls_context(engine)) as http:
        return [
            acceptance.read(engine.kind, await _metrics(http, url), url)
            for url in base_urls(engine)
        ]


async def _metrics(http: httpx.AsyncClient, url: str) -> str:
    """Empty where the server has none."""
    try:
        response = await http.get(url + acceptance.METRICS)
    except httpx.RequestError as error:
        raise Busy(
            f"{url}{acceptance.METRICS} does not answer ({error or type(error).__name__}): see to"
            " the server, then measure again"
        ) from None
    return response.text if response.status_code == 200 else ""


async def _counted(engine: Engine, before: Sequence[Counts], tokens: int) -> Counts:
    """What the servers counted since ``before``, once that is all of ``tokens``.

    Two readings must agree: vLLM writes its metrics in one thread while it counts in another, so
    that one text may have the tokens of a step and not yet its drafts.
    Raises Busy when it is not: their counters are then about other requests too, or not theirs.
    """
    give_up = time.monotonic() + SETTLE_S
    urls = base_urls(engine)
    last: list[Counts] = []
    while True:
        after = await _read(engine)
        each = map(acceptance.between, before, after, urls)
        counts = functools.reduce(operator.add, each)
        if (counts.written >= tokens and after == last) or time.monotonic() > give_up:
            break
        last = after
        await asyncio.sleep(_LOOK_S)
    if counts.written != tokens:
        raise Busy(
            f"{', '.join(urls)} counted {counts.written:,} tokens while {tokens:,} were answered:"
            " let nobody else ask these servers meanwhile, and name the servers themselves, not a"
            " balancer in front of them"
        )
    return counts


async def _sglang_says(engine: Engine) -> dict[str, Any]:
    """By URL."""
    api = api_of(engine)
    async with open_http(engine, tls_context(engine)) as http:
        return {
            url: acceptance.sglang_says(
                await _metrics(http, url),
                await get_object(api, http, url, "/server_info"),
            )
            for url in base_urls(engine)
        }


def _refuse_other_drafts(job: Job, url: str, counts: Counts) -> None:
    """RecipeError for a server that does not draft, or drafts as evaluate did not."""
    recipe = job.recipe
    assert recipe.evaluate.served
    kind, drafted = recipe.evaluate.served.kind, recipe.evaluate.draft_tokens
    run_ = job.workspace.drafter(plan.run_name(job.workspace, recipe))
    flags = {
        "vllm": f'--speculative-config \'{{"method": "eagle3", "model": "{run_.export("vllm")}",'
        f' "num_speculative_tokens": {drafted}}}\'',
        "sglang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path"
        f" {run_.export('sglang')} --speculative-num-steps {drafted} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {drafted + 1}",
    }[kind]
    if counts.verifications == 0:
        raise RecipeError(f"{url} does not draft: start it with {flags}")
    each = drafted if counts.drafted is None else counts.drafted / counts.verifications
    if round(each) != drafted:  # near the end of the context an engine drafts fewer
        raise RecipeError(
            f"{url} drafts {each:.1f} tokens at a time, evaluate.draft_tokens is {drafted}: start"
            f" it with {flags}, or change evaluate.draft_tokens"
        )
