"""The plan as people read it: what drafter.plan decides, and what only the rows can tell.

Runs on the host, where rows can be read and the target's tokenizer can be loaded. Adds to a plan
for generate the tokens that are stored, what a start would refuse and why, and what an adoption
would find. Never writes.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafter import template
from drafter.errors import DataError, RecipeError
from drafter.files import count_lines, read_section
from drafter.generation import adoption, approval
from drafter.generation.sessions import refuse_other_identity
from drafter.identity import generation_identity
from drafter.jsonl import damage, rows
from drafter.layout import Prepared, Workspace
from drafter.plan import MISSING_BYTES, Plan, decide, run_name
from drafter.recipe import Recipe
from drafter.rows import Family, key_fault


def foresee(
    phase: str,
    dataset: str,
    workspace: Workspace,
    recipe: Recipe,
    *,
    token_budget: int | None = None,
    mode: str = "resume",
    run_id: str = "",
) -> Plan:
    """:func:`drafter.plan.decide`, looked at more closely. Action "refuse" carries the error."""
    plan = decide(
        phase, dataset, workspace, recipe, token_budget=token_budget, mode=mode, run_id=run_id
    )
    spools = recipe.spools and phase in ("spool", "train") and plan.action == "start"
    if not spools and (phase != "generate" or plan.action in ("done", "restart")):
        return plan
    try:
        if spools:
            return replace(plan, reason=f"{plan.reason}; {_spool(workspace, recipe)}")
        return look(plan, workspace.prepared(dataset), recipe, token_budget, mode)
    except (RecipeError, DataError) as error:
        return _refused(plan, error)


def foresee_extraction(plans: list[Plan], workspace: Workspace, recipe: Recipe) -> list[Plan]:
    """Plans for extract with bytes and hours; all that would start are refused when the disk
    cannot take them together, for which of them to leave out is nobody's guess.

    Such a refusal is of all datasets, and says in its counts how many bytes are missing; any other
    is of its own dataset alone.
    """
    from drafter.extraction import forecast

    wanted, foreseen = {}, []
    for plan in plans:
        line = plan
        if plan.action == "start":
            try:
                found = forecast.forecast(plan.dataset, workspace, recipe)
            except DataError as error:
                line = _refused(plan, error)
            else:
                wanted[plan.dataset] = found
                story = f"{plan.reason}; {found.line()}"
                line = replace(plan, reason=story, counts=found.counts())
        foreseen.append(line)
    short = forecast.shortage(workspace, recipe, list(wanted.values())) if wanted else None
    if short is None:
        return foreseen
    missing = {MISSING_BYTES: short.missing_bytes}
    return [
        replace(_refused(line, RecipeError(short.reason)), counts={**line.counts, **missing})
        if line.dataset in wanted
        else line
        for line in foreseen
    ]


def _refused(plan: Plan, error: RecipeError | DataError) -> Plan:
    return replace(plan, action="refuse", reason=str(error), exit_code=error.exit_code)


def look(
    plan: Plan, prepared: Prepared, recipe: Recipe, token_budget: int | None, mode: str
) -> Plan:
    """A plan for generate that is neither done nor a restart, with what the rows tell.

    Raises RecipeError or DataError where a start would be refused.
    """
    limit = recipe.dataset(plan.dataset).token_budget if token_budget is None else token_budget
    if mode == "adopt" and adoption.has_unknown_responses(prepared):
        return _adopt(plan, prepared, recipe, limit)
    if adoption.has_unknown_responses(prepared):
        raise RecipeError(adoption.UNKNOWN)
    identity = generation_identity(recipe)
    refuse_other_identity(prepared, identity)
    counts = _state(prepared)
    if plan.action == "wait":
        after = ", after prepare" if counts["prompts"] else ": prepare writes them first"
        pilot = "; a pilot first" if _is_unapproved(prepared, recipe, identity) else ""
        reason = f"{counts['prompts']:,} prompts{after}{pilot}"
        plan = replace(plan, action="start", reason=reason)
    if plan.action == "resume":
        stored = _stored(counts["responses"], counts["completion_tokens"], limit)
        plan = replace(plan, reason=f"from {stored}")
    return replace(plan, counts=counts)


def _adopt(plan: Plan, prepared: Prepared, recipe: Recipe, limit: int | None) -> Plan:
    if read_section(prepared.manifest, "prepare") is None:
        tokenizer, family = _target(recipe.target.path)
        render = functools.partial(template.render, tokenizer, thinking=recipe.target.thinking)
        _, found = adoption.check(prepared, recipe, render, family)
    else:
        _, family = _target(recipe.target.path)
        found = adoption.check_responses(
            prepared, recipe, adoption.num_prompt_tokens(prepared), family
        )
    words = [_stored(found.responses, found.completion_tokens, limit)]
    if _is_unapproved(prepared, recipe, generation_identity(recipe)):
        words.append("a person's approval")
    counts = _state(prepared)
    if limit is not None and found.completion_tokens >= limit:
        words.append("budget met, nothing is generated")
    elif found.responses == counts["prompts"]:
        words.append("all prompts are answered")
    else:
        words.append(f"resume from {found.responses:,}")
    if found.untokenized:
        count = len(found.untokenized)
        words.append(f"validate tokenizes {count:,} more: {adoption.named(found.untokenized)}")
    return replace(plan, action="adopt", reason="; then ".join(words), counts=counts)


def _spool(workspace: Workspace, recipe: Recipe) -> str:
    """What it will take. Raises RecipeError when the disk lacks room."""
    from drafter.training import corpus, spool_plan, spool_store

    planned = spool_plan.plan_spool(corpus.tokenized(workspace, recipe), recipe)
    run = workspace.spool(run_name(workspace, recipe))
    planned.check_room(spool_store.room_bytes(workspace, run))
    return planned.story


def _is_unapproved(prepared: Prepared, recipe: Recipe, identity: dict[str, Any]) -> bool:
    return recipe.pilot is not None and not approval.given(prepared, identity)


def _stored(responses: int, tokens: int, limit: int | None) -> str:
    of = "" if limit is None else f" of {limit:,}"
    return f"{responses:,} responses, {tokens:,}{of} tokens"


def _state(prepared: Prepared) -> dict[str, Any]:
    responses = tokens = 0
    for line in rows(prepared.responses):
        if fault := key_fault(line.value):
            raise damage(prepared.responses, line._replace(fault=fault))
        responses += 1
        tokens += line.value["completion_tokens"]
    return {
        "prompts": count_lines(prepared.prompts),
        "responses": responses,
        "completion_tokens": tokens,
        "tokenized": count_lines(prepared.tokenized),
    }


@functools.cache
def _target(path: str) -> tuple[Any, Family]:
    """Tokenizer and control tokens: loading them takes seconds."""
    return template.load_tokenizer(Path(path)), template.family(Path(path))
