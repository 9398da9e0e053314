"""The target's greedy answers to held-out prompts: asked once, kept in the run's directory.

Greedy, so that an answer does not depend on when it was asked, and a shorter limit is a cut of a
longer one. A row holds what raw_responses.jsonl holds, and the limit it was asked under.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from drafter import jsonl
from drafter.engines.client import Client, connected
from drafter.engines.connection import check_engine
from drafter.engines.outcomes import RULES, Kind, Outcome
from drafter.errors import Busy
from drafter.job import Job
from drafter.rows import Family
from drafter.sections import Generate

_REPORT_SECONDS = 1.0


def ask(job: Job, family: Family, store: Path, prompts: Mapping[str, list[int]]) -> dict[str, int]:
    """Append to ``store`` an answer to each of ``prompts`` (by sample id) that has none yet.

    Returns prompts that the engine will never answer, counted by class. Raises Busy when it could
    not answer others now; the answers that came are kept.
    """
    limit = job.recipe.evaluate.max_new_tokens
    known = answers(store, limit)
    missing = {sample_id: ids for sample_id, ids in prompts.items() if sample_id not in known}
    if not missing:
        return {}
    settings = job.recipe.generate.model_copy(
        update={"temperature": 0.0, "top_p": 1.0, "max_new_tokens": limit}
    )
    store.parent.mkdir(parents=True, exist_ok=True)
    with jsonl.Appender(store) as appender:
        reported = time.monotonic()
        asked = 0

        def keep(outcome: Outcome) -> None:
            nonlocal reported, asked
            asked += 1
            if outcome.row is not None:
                appender.append({**outcome.row, "max_new_tokens": limit})
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                job.report(asked=asked, prompts=len(missing))

        outcomes = asyncio.run(_ask_all(job, settings, family, missing, keep))
    failed = [outcome for outcome in outcomes if outcome.row is None]
    if later := [outcome for outcome in failed if not RULES[outcome.kind].final]:
        raise Busy(
            f"{len(later)} of {len(missing)} held-out prompts got no answer ({later[0].kind}: "
            f"{later[0].reason}): start again when the engine is well, the other answers are kept"
        )
    kinds = sorted(outcome.kind for outcome in failed)
    return {kind: kinds.count(kind) for kind in kinds}


def answers(store: Path, max_new_tokens: int) -> dict[str, list[int]]:
    """Output ids by sample id, cut to ``max_new_tokens``; without those asked under less."""
    return {
        line.value["sample_id"]: line.value["output_ids"][:max_new_tokens]
        for line in jsonl.rows(store)
        if line.value["finish_reason"] == "stop" or line.value["max_new_tokens"] >= max_new_tokens
    }


async def _ask_all(
    job: Job,
    settings: Generate,
    family: Family,
    prompts: Mapping[str, list[int]],
    keep: Callable[[Outcome], None],
) -> list[Outcome]:
    waiting = iter(prompts.items())
    outcomes: list[Outcome] = []

    async def work(client: Client) -> None:
        for sample_id, ids in waiting:
            outcome = await client.complete(sample_id, ids)
            outcomes.append(outcome)
            keep(outcome)

    engine, target = job.recipe.engine, job.recipe.target.path
    info = await check_engine(engine, target)
    number = min(job.in_flight, len(prompts))
    async with connected(
        engine, target, info, settings, family, number, Counter[Kind]()
    ) as clients:
        tasks = [asyncio.create_task(work(client)) for client in clients]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes
