"""Phase generate: let the target answer a dataset's prompts until its token budget is met.

Prompts go out in prompt order, only those without a stored answer, so holes that a killed job left
come first; those that failed, but not for good, go out once more at the end. Every answer is
appended to ``raw_responses.jsonl`` the moment it arrives; killing the job at any moment loses what
was in flight and nothing else. What becomes of each kind of answer is the table in
drafter.engines.outcomes; when to stop sending, budget.py; when to stop all, canary.py.
Where the recipe asks for a pilot, a job generates that and leaves no section in the manifest, and
no other job does anything until a person has approved it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafter import behaviour, plan, rewrite, template
from drafter.behaviour import Fingerprint
from drafter.engines.client import connected
from drafter.engines.connection import check_engine
from drafter.engines.outcomes import MAX_RUNS, Kind
from drafter.errors import Busy, DataError
from drafter.files import count_lines, drop_sections, file_record, write_section
from drafter.generation import adoption, approval, progress
from drafter.generation.budget import Budget
from drafter.generation.canary import Canary, archive_tail
from drafter.generation.responses import Responses, Tainted, count_failures
from drafter.generation.sessions import (
    Sessions,
    archive_previous,
    refuse_other_identity,
    refuse_other_prompts,
)
from drafter.generation.workers import Workers
from drafter.identity import target_identity
from drafter.job import Job
from drafter.rows import Family


def run(job: Job) -> None:
    target = Path(job.recipe.target.path)
    tokenizer = template.load_tokenizer(target)
    family = template.family(target, tokenizer)
    generate(job, family, behaviour.fingerprint(target, tokenizer))


def generate(job: Job, family: Family, tokenizer: Fingerprint | None = None) -> None:
    """``tokenizer`` is kept beside the responses, for validate to compare.

    Raises RecipeError when stored responses were made with something else, DataError when the
    prompts are not those of prepare, the pilot is not approved or the canary alarms, Busy when the
    budget is not met and prompts are left that may still be answered, and what
    :class:`drafter.generation.workers.Workers` raises."""
    prepared = job.workspace.prepared(job.dataset)
    rewrite.finish(prepared)
    inputs = plan.inputs("generate", job.dataset, job.workspace, job.recipe)
    template.require_thinking(job.recipe.target, family)
    made_by = {"tokenizer": tokenizer} if tokenizer else {}
    if job.mode == "adopt":
        _adopt(job, family, inputs["identity"], made_by)
    refuse_other_prompts(prepared, target_identity(job.recipe))
    if job.mode == "restart" and archive_previous(prepared, job.run_id):
        _say(job, f"restart, earlier files are in {prepared.archive(job.run_id)}")
    if tokenizer:
        behaviour.refuse_change(prepared, tokenizer)
    refuse_other_identity(prepared, inputs["identity"])
    if job.pilot_rows is None:
        _refuse_unapproved(job, inputs["identity"])
    begun = time.monotonic()
    answers = Counter[Kind]()
    try:
        with open_responses(job, family) as responses:
            asyncio.run(_answer(job, family, responses, inputs["identity"], made_by, answers))
    except Tainted as tainted:
        archive = prepared.archive(job.run_id)
        drop_sections(prepared.manifest, ("generate", "validate", approval.SECTION))
        moved = archive_tail(prepared.responses, tainted.alarm.offset, archive)
        if job.recipe.pilot:
            approval.take_back(prepared, count_lines(prepared.responses))
        task = "its pilot task" if job.recipe.pilot else "this task"
        raise DataError(
            f"{job.dataset}: {tainted.alarm.reason}; {count_lines(moved)} rows are now in"
            f" {moved}: read them, mend engine or recipe, then clear {task}"
        ) from None
    _refuse_to_end_early(job, responses)
    _finish(job, responses, inputs, answers, time.monotonic() - begun)


def _refuse_unapproved(job: Job, identity: dict[str, Any]) -> None:
    pilot = approval.pending_of(job.dataset, job.workspace, job.recipe, identity)
    if pilot:
        raise DataError(f"{job.dataset}: {pilot.reason}: {approval.REMEDY}")


def _adopt(job: Job, family: Family, identity: dict[str, Any], made_by: Mapping[str, Any]) -> None:
    """Take over responses that an older run left, once: drafter.generation.adoption."""
    prepared = job.workspace.prepared(job.dataset)
    if not adoption.has_unknown_responses(prepared):
        return
    lengths = adoption.num_prompt_tokens(prepared)
    stored = adoption.check_responses(prepared, job.recipe, lengths, family)
    counts = {"responses": stored.responses, "completion_tokens": stored.completion_tokens}
    sessions = Sessions(prepared.sessions)
    sessions.start(job, 0, identity, adopted=counts, **made_by)
    sessions.close()
    _say(job, f"{stored.responses:,} responses adopted, {stored.completion_tokens:,} tokens")


def _refuse_to_end_early(job: Job, responses: Responses) -> None:
    if not responses.unsettled or responses.budget_met or responses.rows_met:
        return
    kinds = Counter(responses.unsettled.values())
    reasons = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    raise Busy(
        f"{job.dataset}: some prompts got no answer this time ({reasons}), {responses.num_new} new"
        " rows are stored: look at the engine and run again, a prompt that fails in"
        f" {MAX_RUNS} runs is given up"
    )


def open_responses(job: Job, family: Family) -> Responses:
    settings, dataset = job.recipe.generate, job.recipe.dataset(job.dataset)
    prepared = job.workspace.prepared(job.dataset)
    limit = dataset.token_budget if job.token_budget is None else job.token_budget
    max_rows = None
    if job.pilot_rows is not None:
        first = approval.begins_at(prepared, count_lines(prepared.responses))
        max_rows = first + job.pilot_rows
    responses = Responses(
        prepared,
        Budget(limit, settings.max_new_tokens),
        Canary(family, job.recipe.target.thinking, settings.canary_window, settings.canary_share),
        dataset.max_samples,
        max_rows,
    )
    if responses.num_torn:
        _say(job, f"{responses.num_torn} torn last lines are now in files named *.torn")
    return responses


async def _answer(
    job: Job,
    family: Family,
    responses: Responses,
    identity: dict[str, Any],
    made_by: Mapping[str, Any],
    answers: Counter[Kind],
) -> None:
    """Send prompts until the budget is met or none is left. No engine is needed for nothing."""
    if not responses.admits(time.monotonic()) or not responses.has_prompts():
        return
    recipe = job.recipe
    engine, target = recipe.engine, recipe.target.path
    info = await check_engine(engine, target)
    about = {"kind": engine.kind, "urls": engine.urls, **info._asdict()}
    async with contextlib.AsyncExitStack() as stack:
        sessions = stack.enter_context(
            contextlib.closing(Sessions(job.workspace.prepared(job.dataset).sessions))
        )
        sessions.start(job, responses.end, identity, engine=about, **made_by)
        clients = await stack.enter_async_context(
            connected(engine, target, info, recipe.generate, family, job.in_flight, answers)
        )
        tasks = [
            asyncio.create_task(Workers(clients, responses).run()),
            asyncio.create_task(progress.tell(job, responses, sessions, answers)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _finish(
    job: Job,
    responses: Responses,
    inputs: dict[str, Any],
    answers: Counter[Kind],
    seconds: float,
) -> None:
    prepared, budget = job.workspace.prepared(job.dataset), responses.budget
    failed = count_failures(prepared)
    counts = {
        "prompts": responses.num_prompts,
        "responses": responses.num_stored,
        "completion_tokens": budget.tokens,
        "failed": failed,
    }
    stop_reason = _stop_reason(job, responses)
    section = {
        "inputs": inputs,
        "identity": inputs["identity"],
        "counts": counts,
        "stop_reason": stop_reason,
        "token_budget": budget.budget,
        "files": {path.name: file_record(path) for path in (prepared.responses, prepared.failed)},
    }
    # Who reads the section takes the dataset for generated.
    is_pilot = job.pilot_rows is not None
    changed = not is_pilot and write_section(prepared.manifest, "generate", section)
    last = progress.at_end(responses, seconds)
    story = f"{last.story()}, stop reason: {stop_reason}"
    line = f"{story}, {sum(failed.values())} failed" if failed else story
    job.report(
        **{**last.numbers(), "eta_s": 0},
        failed=failed,
        answers=dict(answers),
        stop_reason=stop_reason,
        done=True,
        changed=changed,
        line=line,
    )
    _say(job, line)


def _stop_reason(job: Job, responses: Responses) -> str:
    max_samples = job.recipe.dataset(job.dataset).max_samples
    if responses.rows_met:
        return "pilot"
    if responses.budget_met:
        return "budget"
    # prepare keeps max_samples prompts at most, so fewer means that the source ran out.
    if max_samples is not None and responses.num_prompts >= max_samples:
        return "quota"
    return "prompts exhausted"


def _say(job: Job, text: str) -> None:
    print(f"{job.dataset}: {text}", flush=True)
