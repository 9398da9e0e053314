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
    counts              {prompts, tokens, failed: {class: n}, left_out: {reason: n}}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter import plan, template
from drafter.backends import Backend, OpenBackend, opener
from drafter.errors import DataError
from drafter.evaluation import greedy, held_out, ngram
from drafter.evaluation.replay import Tally, replay
from drafter.extraction import batch_gates
from drafter.extraction.shard_plan import Sample
from drafter.extraction.shards import DTYPES, Row
from drafter.files import clear_partial, read_json, read_section, write_json
from drafter.job import Job
from drafter.layout import DrafterRun
from drafter.recipe import Recipe
from drafter.rows import Family
from drafter.sections import Extract
from drafter.target_head import TargetHead, text_config
from drafter.training import checkpoint, corpus, starting_point
from drafter.training.corpus import TOO_LONG
from drafter.training.model import Drafter, new_drafter


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
    longest = recipe.extract.max_length
    fitting = held_out.replayed(prompts, answers, longest)
    num_answered = len(prompts.keys() & answers.keys())
    too_long = num_answered - len(fitting)
    print(
        f"{job.dataset}: {num_answered} greedy answers, {sum(failed.values())} failed, {too_long} "
        f"left out, {TOO_LONG} {longest}",
        flush=True,
    )
    if num_answered and not fitting:
        raise DataError(
            f"{job.dataset}: every held-out prompt is with its answer longer than "
            f"extract.max_length ({longest}): raise it, or lower evaluate.max_new_tokens "
            f"({recipe.evaluate.max_new_tokens})"
        )

    everything = corpus.collect(workspace, recipe)
    head = corpus.read_head(recipe, everything)
    trained = checkpoint.load_drafter(checkpoint.chosen(run_, recipe.train), head)
    backend = open_backend(
        Path(recipe.target.path), DTYPES[recipe.extract.dtype], trained.shape.aux_layers
    )
    draft = recipe.evaluate.draft_tokens
    untrained = _untrained(recipe, trained, head)
    embed = head.embed.to("cuda" if torch.cuda.is_available() else "cpu")
    drafters = {"untrained": _placed(untrained, embed), "trained": _placed(trained, embed)}
    blind = checkpoint.no_states(run_)
    section = read_section(run_.manifest, "train")
    # As it was trained: the recipe may ask for it since.
    if section and section["no_states"]:
        chosen = checkpoint.chosen(blind, recipe.train)
        drafters["no_states"] = _placed(checkpoint.load_drafter(chosen, head), embed)
    tallies: dict[str, Tally | None] = {"untrained": None, "no_states": None, "trained": None}
    tallies |= dict.fromkeys(drafters, Tally())
    asked = []
    maker = _Maker(backend, trained.shape.aux_layers, head.embed.shape[1], recipe.extract)
    for rows in _batches(maker, fitting, answers):
        for name, drafter in drafters.items():
            counted = replay(drafter, rows, draft, states=name != "no_states")
            tallies[name] = (tallies[name] or Tally()) + counted
        asked += [(row.input_ids_T.numpy(), row.prompt_tokens) for row in rows]
        job.report(prompts=len(prompts), answers=len(fitting), replayed=len(asked))
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
            "prompts": len(fitting),
            "tokens": sum(len(answers[sample_id]) for sample_id in fitting),
            "failed": failed,
            "left_out": {TOO_LONG: too_long} if too_long else {},
        },
    }
    _finish(job, run_, result)


def _untrained(recipe: Recipe, trained: Drafter, head: TargetHead) -> Drafter:
    """What training began with."""
    if recipe.train.start_from is None:
        return new_drafter(trained.shape, head, trained.d2t, trained.t2d, recipe.train.seed)
    target = text_config(Path(recipe.target.path))
    return starting_point.drafter(recipe.train, target, trained.shape.aux_layers, head)


@dataclass(frozen=True)
class _Maker:
    """States as the drafter was trained on, past the gates that one batch can pass by itself.

    ``final`` stands before the last norm, also where that of imported states stands after it: a
    replay reads none.
    """

    backend: Backend
    aux_layers: Sequence[int]
    hidden_size: int
    settings: Extract

    def rows(self, batch: Sequence[Sample]) -> list[Row]:
        """On the CPU. Raises DataError when a gate fails."""
        computed = self.backend.features([sample.input_ids for sample in batch])
        dtype = DTYPES[self.settings.dtype]
        batch_gates.check_rows(batch, computed, self.aux_layers, self.hidden_size, dtype)
        batch_gates.check_ids(batch, computed)
        batch_gates.check_values(batch, computed, self.aux_layers)
        return [
            Row(
                sample.sample_id,
                torch.tensor(sample.input_ids),
                sample.prompt_tokens,
                got.aux_TAD.cpu(),
                got.final_TD.cpu(),
            )
            for sample, got in zip(batch, computed, strict=True)
        ]


def _batches(
    maker: _Maker, prompts: dict[str, list[int]], answers: dict[str, list[int]]
) -> Iterator[list[Row]]:
    """Prompts with their answers and the target's states, the shortest first: the states of all
    would fill memory."""
    batch_tokens = maker.settings.batch_tokens
    texts = sorted(
        (
            Sample(sample_id, ids + answers[sample_id], len(ids))
            for sample_id, ids in prompts.items()
        ),
        key=lambda text: (len(text.input_ids), text.sample_id),
    )
    while texts:
        size = 1
        while size < len(texts) and (size + 1) * len(texts[size].input_ids) <= batch_tokens:
            size += 1
        batch, texts = texts[:size], texts[size:]
        yield maker.rows(batch)


def _placed(drafter: Drafter, embed: Tensor) -> Drafter:
    """Where ``embed`` is, which drafters share: a large target's takes gigabytes."""
    drafter.embed = embed
    placed: Drafter = drafter.to(embed.device)
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
