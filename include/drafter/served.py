"""Phase served: what an exported drafter is worth in a real engine, beside the same without it.

The held-out prompts that evaluate replayed are asked greedily of a server that drafts with the
export and, where there is one, of a server of the target alone: all of them at ``in_flight``, then
some one after another. The engine's own counters give the acceptance length of exactly these
answers (acceptance.py); they are compared with the replayed one, and the answers with those that
the target gave for evaluate. The servers are somebody else's: nothing is started here.

Writes ``drafter/<run>/served.json``::

    inputs              what it depends on (plan.inputs)
    acceptance_length   {served, replayed, engine}; engine is 1 + accepted / verifications, null for
                        SGLang
    accepted_share      [of the verifications, by position in the draft]; null for SGLang
    engine              {kind, urls, ...} and, of SGLang, what it says itself
    tokens_per_s        {one, all: {in_flight, served, plain, ratio}}; null without plain_urls
    counts              {prompts, tokens, verifications, drafted, accepted, differing,
                        differing_plain}: answers that are not the target's of evaluate
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter import plan, template
from drafter.errors import DataError, DrafterError
from drafter.evaluation import greedy, held_out, replay
from drafter.evaluation.measurement import Asked, Measured, measure
from drafter.files import clear_partial, read_json, write_json
from drafter.job import Job
from drafter.layout import DrafterRun, Workspace
from drafter.recipe import Recipe
from drafter.rows import Family

PHASE = "served"
_NOTABLE = 0.05
"""Share by which an engine may accept less than the replay before that is said."""


def run(job: Job) -> None:
    """The phase. RecipeError when the recipe names no server or the server does not draft, Busy
    when it is not there or works for others, DataError when nothing is exported yet."""
    plan.inputs(
        PHASE, job.dataset, job.workspace, job.recipe
    )  # complains before a tokenizer is loaded
    compare(job, template.family(Path(job.recipe.target.path)))


def compare(job: Job, family: Family) -> None:
    """``run`` with the target's control tokens given."""
    recipe, workspace = job.recipe, job.workspace
    wanted = plan.inputs(PHASE, job.dataset, workspace, recipe)
    run_ = workspace.drafter(plan.run_name(workspace, recipe))
    clear_partial(run_.root, run_.served.name)
    if job.mode == "resume" and run_.served.exists():
        before = read_json(run_.served)
        if before["inputs"] == wanted:
            _report(job, before, changed=False)
            return
    expected = _expected(workspace, recipe, run_)
    ask = functools.partial(measure, job, family, expected.prompts, expected.longest)
    with _named():
        served = asyncio.run(ask(drafts=True))
        has_plain = recipe.evaluate.served and recipe.evaluate.served.plain_urls
        plain = asyncio.run(ask(drafts=False)) if has_plain else None
    result = {"inputs": wanted, **_result(recipe, run_, expected, served, plain)}
    write_json(run_.served, result)
    _report(job, result, changed=True)


@dataclass(frozen=True)
class _Expected:
    """Prompt and greedy answer of the target, by sample id."""

    prompts: dict[str, list[int]]
    answers: dict[str, list[int]]

    @property
    def longest(self) -> str:
        return max(self.prompts, key=lambda sample_id: len(self.answers[sample_id]))


def _expected(workspace: Workspace, recipe: Recipe, run_: DrafterRun) -> _Expected:
    prompts: dict[str, list[int]] = {}
    answers: dict[str, list[int]] = {}
    for dataset in recipe.dataset_names:
        known = greedy.answers(run_.greedy(dataset), recipe.evaluate.max_new_tokens)
        asked = held_out.prompts(workspace, recipe, dataset)
        asked = held_out.replayed(asked, known, recipe.extract.max_length)
        prompts |= asked
        answers |= {sample_id: known[sample_id] for sample_id in asked}
    if not prompts:
        raise DataError(
            f"{run_.root}: evaluate kept no greedy answer within extract.max_length "
            f"({recipe.extract.max_length}): run it again, or raise that"
        )
    return _Expected(prompts, answers)


def _result(
    recipe: Recipe,
    run_: DrafterRun,
    expected: _Expected,
    served: Measured,
    plain: Measured | None,
) -> dict[str, Any]:
    counts = served.counts
    assert counts and recipe.evaluate.served
    evaluations = [read_json(run_.evaluation(dataset)) for dataset in recipe.dataset_names]

    def differing(asked: Asked) -> int:
        return sum(asked.answers[name] != ids for name, ids in expected.answers.items())

    return {
        "acceptance_length": {
            "served": counts.length(len(expected.prompts)),
            "replayed": replay.overall(evaluations)["trained"],
            "engine": counts.engine_length,
        },
        "accepted_share": counts.accepted_share_K,
        "engine": {
            "kind": recipe.evaluate.served.kind,
            "urls": list(recipe.evaluate.served.urls),
            "says": served.says,
        },
        "tokens_per_s": {
            "one": _rates(1, served.one, plain.one if plain else None),
            "all": _rates(served.in_flight, served.all, plain.all if plain else None),
        },
        "counts": {
            "prompts": len(expected.prompts),
            "tokens": served.all.tokens,
            "verifications": counts.verifications,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "differing": differing(served.all),
            "differing_plain": differing(plain.all) if plain else None,
        },
    }


def _rates(in_flight: int, served: Asked, plain: Asked | None) -> dict[str, Any]:
    return {
        "in_flight": in_flight,
        "served": served.tokens_per_s,
        "plain": plain.tokens_per_s if plain else None,
        "ratio": served.tokens_per_s / plain.tokens_per_s if plain else None,
    }


def _report(job: Job, result: dict[str, Any], *, changed: bool) -> None:
    length, counts = result["acceptance_length"], result["counts"]
    replayed = length["replayed"] or 1.0
    line = f"acceptance length served {length['served']:.2f}, replayed {replayed:.2f}"
    ratios = {name: rates["ratio"] for name, rates in result["tokens_per_s"].items()}
    if all(ratios.values()):
        in_flight = result["tokens_per_s"]["all"]["in_flight"]
        line += f", speed x {ratios['one']:.2f} alone and x {ratios['all']:.2f} at {in_flight}"
    line += f", {counts['differing']} of {counts['prompts']} answers differ from the target's"
    job.report(done=True, changed=changed, line=line, **length)
    print(line, flush=True)
    if length["served"] < (1 - _NOTABLE) * replayed:
        print(
            "the engine accepts less than the replay: look whether it serves this export, with the"
            " layers that its config.json names, and computes in the target's dtype",
            flush=True,
        )


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Complaints about an engine say whose."""
    try:
        yield
    except DrafterError as error:
        raise type(error)(f"evaluate.served: {error}") from None
