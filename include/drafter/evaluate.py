"""Phase evaluate: the acceptance length of a run on the held-out prompts of one dataset.

The target answers the prompts greedily (greedy.py), extraction gives its states over prompt and
answer, and four drafters replay the answers (replay.py): the trained one, the same before its first
step, the same trained without the target's states, and tables of n-grams. Only a drafter that beats
the last two has learnt something from the target's states.

Writes ``drafter/<run>/evaluation/<dataset>.json``::

    inputs              what it depends on (plan.inputs)
    acceptance_length   {untrained, ngram, no_states, trained}; null where there is none
    sums                {name: {generated, verifications}}; add them up for several datasets
    ngram_order         of the best table, whose numbers stand under "ngram"
    counts              {prompts, tokens, failed: {class: n}}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drafter import checkpoint, corpus, greedy, held_out, ngram, plan, starting_point, template
from drafter.backends import Backend, OpenBackend, opener
from drafter.files import clear_partial, read_json, write_json
from drafter.job import Job
from drafter.layout import DrafterRun
from drafter.model import Drafter, new_drafter
from drafter.recipe import Recipe
from drafter.replay import Tally, replay
from drafter.rows import Family
from drafter.shards import DTYPES, Row
from drafter.target_head import TargetHead, text_config


def run(job: Job) -> None:
    """The phase. DataError when training has not finished or no prompt is held out."""
    family = template.family(Path(job.recipe.target.path))
    evaluate(job, family, opener(job.recipe.extract))


def evaluate(job: Job, family: Family, open_backend: OpenBackend) -> None:
    """``run`` with the target's control tokens and the maker of states given."""
    recipe, workspace = job.recipe, job.workspace
    inputs = plan.inputs("evaluate", job.dataset, workspace, recipe)
    run_ = workspace.drafter(plan.run_name(workspace, recipe))
    prompts = held_out.prompts(workspace, recipe, job.dataset)
    clear_partial(run_.evaluation(job.dataset).parent, run_.evaluation(job.dataset).name)
    store = run_.greedy(job.dataset)
    failed = greedy.ask(job, family, store, prompts)
    answers = greedy.answers(store, recipe.evaluate.max_new_tokens)
    answered = {sample_id: ids for sample_id, ids in prompts.items() if sample_id in answers}
    print(
        f"{job.dataset}: {len(answered)} greedy answers, {sum(failed.values())} failed", flush=True
    )

    everything = corpus.collect(workspace, recipe)
    head = corpus.read_head(recipe, everything)
    trained = checkpoint.load_drafter(run_.checkpoint(recipe.train.steps), head)
    backend = open_backend(
        Path(recipe.target.path), DTYPES[recipe.extract.dtype], trained.shape.aux_layers
    )
    draft = recipe.evaluate.draft_tokens
    untrained = _untrained(recipe, trained, head)
    drafters = {"untrained": _placed(untrained), "trained": _placed(trained)}
    blind = checkpoint.no_states(run_).checkpoint(recipe.train.steps)
    if blind.exists():
        drafters["no_states"] = _placed(checkpoint.load_drafter(blind, head))
    tallies: dict[str, Tally | None] = {"untrained": None, "no_states": None, "trained": None}
    tallies |= dict.fromkeys(drafters, Tally())
    asked = []
    for rows in _batches(backend, answered, answers, recipe.extract.batch_tokens):
        for name, drafter in drafters.items():
            counted = replay(drafter, rows, draft, states=name != "no_states")
            tallies[name] = (tallies[name] or Tally()) + counted
        asked += [(row.input_ids_T.numpy(), row.prompt_tokens) for row in rows]
        job.report(prompts=len(prompts), answers=len(answered), replayed=len(asked))
    taught = [(e.input_ids().numpy(), e.prompt_tokens) for e in everything.trained]
    tables = {order: ngram.replay(ngram.fit(taught, order), asked, draft) for order in ngram.ORDERS}
    order = max(tables, key=lambda order: (tables[order].acceptance_length or 0, -order))
    tallies["ngram"] = tables[order]
    result = {
        "inputs": inputs,
        "acceptance_length": {n: t and t.acceptance_length for n, t in tallies.items()},
        "sums": {n: t and t.as_json() for n, t in tallies.items()},
        "ngram_order": order,
        "counts": {
            "prompts": len(answered),
            "tokens": sum(len(answers[sample_id]) for sample_id in answered),
            "failed": failed,
        },
    }
    _finish(job, run_, result)


def _untrained(recipe: Recipe, trained: Drafter, head: TargetHead) -> Drafter:
    """What training began with."""
    if recipe.train.start_from is None:
        return new_drafter(trained.shape, head, trained.d2t, trained.t2d, recipe.train.seed)
    target = text_config(Path(recipe.target.path))
    return starting_point.drafter(recipe.train, target, trained.shape.aux_layers, head)


def _batches(
    backend: Backend,
    prompts: dict[str, list[int]],
    answers: dict[str, list[int]],
    batch_tokens: int,
) -> Iterator[list[Row]]:
    """Prompts with their answers and the target's states, the shortest first: the states of all
    would fill memory."""
    texts = sorted(
        ((sample_id, ids + answers[sample_id]) for sample_id, ids in prompts.items()),
        key=lambda text: (len(text[1]), text[0]),
    )
    while texts:
        size = 1
        while size < len(texts) and (size + 1) * len(texts[size][1]) <= batch_tokens:
            size += 1
        batch, texts = texts[:size], texts[size:]
        rows = []
        features = backend.features([ids for _, ids in batch])
        for (sample_id, ids), each in zip(batch, features, strict=True):
            prompt_tokens = len(prompts[sample_id])
            aux, final = each.aux_TAD.cpu(), each.final_TD.cpu()
            rows.append(Row(sample_id, torch.tensor(ids), prompt_tokens, aux, final))
        yield rows


def _placed(drafter: Drafter) -> Drafter:
    """On the GPU, where there is one."""
    placed: Drafter = drafter.to("cuda" if torch.cuda.is_available() else "cpu")
    return placed


def _finish(job: Job, run_: DrafterRun, result: dict[str, Any]) -> None:
    path = run_.evaluation(job.dataset)
    changed = not path.exists() or read_json(path) != result
    if changed:
        write_json(path, result)
    lengths = ", ".join(
        f"{name} {length:.2f}" for name, length in result["acceptance_length"].items() if length
    )
    line = f"acceptance length over {result['counts']['prompts']} held-out prompts: {lengths}"
    job.report(done=True, changed=changed, line=line, **result["acceptance_length"])
    print(f"{job.dataset}: {line}", flush=True)
