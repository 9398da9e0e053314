"""Phase generate: let the target answer a dataset's prompts until its token budget is met.

Prompts go out in prompt order, only those without a stored answer, so holes that a killed job left
come first; those that failed, but not for good, go out once more at the end. Every answer is
appended to ``raw_responses.jsonl`` the moment it arrives; killing the job at any moment loses what
was in flight and nothing else. What becomes of each kind of answer is the table in
drafter.engines.sglang; when to stop sending, drafter.budget; when to stop all, drafter.canary.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from drafter import plan, template
from drafter.budget import Budget
from drafter.canary import Canary, archive_tail
from drafter.engines.sglang import (
    MAX_RUNS,
    Client,
    Endpoints,
    EngineInfo,
    check_engine,
    tls_context,
)
from drafter.errors import Busy, DataError, RecipeError
from drafter.job import Job
from drafter.layout import clear_partial, file_record, write_section
from drafter.responses import Responses, Tainted, count_failures
from drafter.rows import Family
from drafter.sessions import (
    Sessions,
    archive_previous,
    refuse_other_identity,
    refuse_other_prompts,
)
from drafter.workers import Workers

REPORT_S = 1.0
LOG_S = 10.0
MARK_S = 60.0
RATE_WINDOW = 30
"""Reports that tokens/s is taken over."""


def run(job: Job) -> None:
    generate(job, template.family(Path(job.recipe.target.path)))


def generate(job: Job, family: Family) -> None:
    """Raises RecipeError when stored responses were made with something else, DataError when the
    prompts are not those of prepare or the canary alarms, Busy when the budget is not met and
    prompts are left that may still be answered, and what :class:`drafter.workers.Workers`
    raises."""
    prepared = job.workspace.prepared(job.dataset)
    clear_partial(prepared.root)
    inputs = plan.inputs("generate", job.dataset, job.workspace, job.recipe)
    if job.recipe.target.thinking and family.think_close is None:
        raise RecipeError(
            f"{job.recipe.target.path} has no token that ends thinking: set target.thinking = false"
        )
    refuse_other_prompts(prepared, plan.target_identity(job.recipe))
    if job.mode == "restart" and archive_previous(prepared, job.run_id):
        _say(job, f"restart, earlier files are in {prepared.archive(job.run_id)}")
    refuse_other_identity(prepared, inputs["identity"])
    begun = time.monotonic()
    try:
        with _open_responses(job, family) as responses:
            asyncio.run(_answer(job, family, responses, inputs["identity"]))
    except Tainted as tainted:
        archive = prepared.archive(job.run_id)
        moved = archive_tail(prepared.responses, tainted.alarm.offset, archive)
        raise DataError(
            f"{job.dataset}: {tainted.alarm.reason}; {plan.count_lines(moved)} rows are now in"
            f" {moved}: read them, mend engine or recipe, then clear this task"
        ) from None
    _refuse_to_end_early(job, responses)
    _finish(job, responses, inputs, time.monotonic() - begun)


def _refuse_to_end_early(job: Job, responses: Responses) -> None:
    if not responses.unsettled or responses.budget_met:
        return
    kinds = Counter(responses.unsettled.values())
    reasons = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    raise Busy(
        f"{job.dataset}: some prompts got no answer this time ({reasons}), {responses.num_new} new"
        " rows are stored: look at the engine and run again, a prompt that fails in"
        f" {MAX_RUNS} runs is given up"
    )


def _open_responses(job: Job, family: Family) -> Responses:
    settings, dataset = job.recipe.generate, job.recipe.dataset(job.dataset)
    limit = dataset.token_budget if job.token_budget is None else job.token_budget
    responses = Responses(
        job.workspace.prepared(job.dataset),
        Budget(limit, settings.max_new_tokens),
        Canary(family, settings.canary_window, settings.canary_share)
        if job.recipe.target.thinking
        else None,
        dataset.max_samples,
    )
    if responses.num_torn:
        _say(job, f"{responses.num_torn} torn last lines are now in files named *.torn")
    return responses


async def _answer(job: Job, family: Family, responses: Responses, identity: dict[str, Any]) -> None:
    """Send prompts until the budget is met or none is left. No engine is needed for nothing."""
    if not responses.budget.admits(time.monotonic()) or not responses.has_prompts():
        return
    engine = check_engine(job.recipe.engine, job.recipe.target.path)
    sessions = Sessions(job.workspace.prepared(job.dataset).sessions)
    about = {"urls": job.recipe.engine.urls, **engine._asdict()}
    sessions.start(job, responses.end, identity, about)
    workers = Workers(_clients(job, family, engine), responses)
    tasks = [
        asyncio.create_task(workers.run()),
        asyncio.create_task(_tick(job, responses, sessions)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sessions.close()


def _clients(job: Job, family: Family, engine: EngineInfo) -> list[Client]:
    recipe = job.recipe
    endpoints, tls = Endpoints(recipe.engine), tls_context(recipe.engine)
    return [
        Client(recipe.engine, recipe.generate, family, engine.context, endpoints, tls)
        for _ in range(job.in_flight)
    ]


async def _tick(job: Job, responses: Responses, sessions: Sessions) -> None:
    """Tell how it goes: each second to the sensors, less often to the log and sessions.jsonl."""
    begun = logged = marked = time.monotonic()
    recent = deque([(begun, responses.budget.tokens, responses.num_stored)], maxlen=RATE_WINDOW)
    while True:
        await asyncio.sleep(REPORT_S)
        now = time.monotonic()
        then, tokens, stored = recent[0]
        recent.append((now, responses.budget.tokens, responses.num_stored))
        tokens_per_s = (responses.budget.tokens - tokens) / (now - then)
        rows_per_s = (responses.num_stored - stored) / (now - then)
        eta_s = _eta_s(responses, tokens_per_s, rows_per_s)
        in_flight = responses.budget.in_flight
        job.report(
            **_numbers(responses),
            tokens_per_s=round(tokens_per_s, 1),
            in_flight=in_flight,
            eta_s=eta_s,
        )
        if now - logged >= LOG_S:
            logged = now
            left = "" if eta_s is None else f", about {eta_s / 60:,.1f} min left"
            _say(job, f"{_story(responses, tokens_per_s)}, {in_flight} in flight{left}")
        if now - marked >= MARK_S:
            marked = now
            responses.sync()
            sessions.mark(responses.end)


def _numbers(responses: Responses) -> dict[str, Any]:
    return {
        "prompts": responses.num_prompts,
        "responses": responses.num_stored,
        "completion_tokens": responses.budget.tokens,
        "token_budget": responses.budget.budget,
    }


def _story(responses: Responses, tokens_per_s: float) -> str:
    budget = responses.budget
    of = "" if budget.budget is None else f" of {budget.budget:,}"
    return (
        f"{responses.num_stored:,} responses, {budget.tokens:,}{of} tokens,"
        f" {tokens_per_s:,.0f} tokens/s"
    )


def _eta_s(responses: Responses, tokens_per_s: float, rows_per_s: float) -> int | None:
    """Until the budget is met or the prompts run out, whichever comes first."""
    left = []
    if responses.budget.budget is not None and tokens_per_s > 0:
        left.append((responses.budget.budget - responses.budget.tokens) / tokens_per_s)
    if rows_per_s > 0:
        left.append((responses.num_prompts - responses.num_stored) / rows_per_s)
    return max(round(min(left)), 0) if left else None


def _finish(job: Job, responses: Responses, inputs: dict[str, Any], seconds: float) -> None:
    prepared, budget = job.workspace.prepared(job.dataset), responses.budget
    failed = count_failures(prepared)
    counts = {
        "prompts": responses.num_prompts,
        "responses": responses.num_stored,
        "completion_tokens": budget.tokens,
        "failed": failed,
    }
    section = {
        "inputs": inputs,
        "identity": inputs["identity"],
        "counts": counts,
        "stop_reason": _stop_reason(job, responses),
        "token_budget": budget.budget,
        "files": {path.name: file_record(path) for path in (prepared.responses, prepared.failed)},
    }
    changed = write_section(prepared.manifest, "generate", section)
    tokens_per_s = responses.num_new_tokens / seconds
    story = f"{_story(responses, tokens_per_s)}, stop reason: {section['stop_reason']}"
    line = f"{story}, {sum(failed.values())} failed" if failed else story
    job.report(
        **_numbers(responses),
        tokens_per_s=round(tokens_per_s, 1),
        in_flight=0,
        eta_s=0,
        failed=failed,
        stop_reason=section["stop_reason"],
        done=True,
        changed=changed,
        line=line,
    )
    _say(job, line)


def _stop_reason(job: Job, responses: Responses) -> str:
    max_samples = job.recipe.dataset(job.dataset).max_samples
    if responses.budget_met:
        return "budget"
    # prepare keeps max_samples prompts at most, so fewer means that the source ran out.
    if max_samples is not None and responses.num_prompts >= max_samples:
        return "quota"
    return "prompts exhausted"


def _say(job: Job, text: str) -> None:
    print(f"{job.dataset}: {text}", flush=True)
