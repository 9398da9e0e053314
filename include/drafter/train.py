"""Phase train: one drafter from the states of every dataset.

Reads every dataset's shards, or a spool that another job fills meanwhile (batch_source.py). Writes
``drafter/<run>/``: checkpoints, of which the best by held-out loss is kept (checkpoint.py),
metrics.jsonl (one line per step) with curves and a TensorBoard made of it (metrics.py), and the
manifest's section ``train``. Killed at any moment it continues from its last checkpoint, and its
losses and weights are those of a run that was never killed, bit for bit on the same machine. With
``train.no_states_baseline`` the same drafter is then trained on the same batches with the target's
states zeroed, in ``no_states/``. On a machine of several GPUs the job starts a process for each
(distributed.py), which meet in :func:`run` again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from drafter import plan
from drafter.errors import DataError, RecipeError
from drafter.files import file_record, write_section
from drafter.job import Job
from drafter.layout import DrafterRun
from drafter.recipe import Recipe
from drafter.target_head import TargetHead, text_config
from drafter.training import (
    batch_source,
    checkpoint,
    corpus,
    curves,
    distributed,
    held_out_rows,
    metrics,
    starting_point,
    vocabulary,
)
from drafter.training.corpus import Corpus
from drafter.training.distributed import Group
from drafter.training.entries import Entry
from drafter.training.metrics import Progress
from drafter.training.model import Drafter, new_drafter, shape_for
from drafter.training.trainer import Trainer


def run(job: Job) -> None:
    """Train, or continue to train, the run that the extracted data and the recipe name."""
    if distributed.is_launched():
        with distributed.joined() as group:
            _train(job, group)
        return
    size = distributed.processes(job.recipe.train.processes)
    with batch_source.held(job):
        if size == 1:
            _train(job, Group())
        else:
            print(f"{size} processes share each batch", flush=True)
            distributed.launch(job, size)


def _train(job: Job, group: Group) -> None:
    try:
        _fit(job, group)
    except torch.OutOfMemoryError:
        raise RecipeError(
            f"a batch of {job.recipe.train.batch_tokens} tokens does not fit the GPU: lower "
            "train.batch_tokens, set train.recompute_activations, or free the GPU"
        ) from None


def _fit(job: Job, group: Group) -> None:
    recipe, workspace = job.recipe, job.workspace
    inputs = plan.inputs("train", job.dataset, workspace, recipe)
    states = workspace.drafter(plan.run_name(workspace, recipe))
    runs = [states] + [checkpoint.no_states(states)] * recipe.train.no_states_baseline
    progress = Progress(job, recipe.train.steps * len(runs))
    rows, batches = batch_source.read(job, moves=group.is_main)
    head = corpus.read_head(recipe, rows)
    looked = held_out_rows.chosen(rows, recipe.train.held_out_share)
    if recipe.train.export == "best" and not looked:
        raise DataError(
            "no row with states is held out, so no checkpoint can be the best: raise "
            f"train.held_out_share ({recipe.train.held_out_share}), or set train.export to last"
        )
    for each in runs:
        see_states = each is states
        trainer = Trainer(recipe.train, head, held_out=looked, group=group, see_states=see_states)
        trainer.fit(each, partial(untrained, recipe, rows, head), batches, progress)
    if group.is_main:
        _finish(job, inputs, rows, runs, progress)


def untrained(recipe: Recipe, rows: Corpus[Entry], head: TargetHead) -> Drafter:
    """The drafter before its first step: that of train.start_from, or a new one, seeded, with its
    vocabulary by frequency and its shape from the target."""
    target = Path(recipe.target.path)
    aux_layers = tuple(rows.identity["aux_layers"])
    if recipe.train.start_from:
        return starting_point.drafter(recipe.train, text_config(target), aux_layers, head)
    responses = (e.input_ids()[e.prompt_tokens :] for e in rows.trained)
    counts = vocabulary.token_counts(responses, len(head.lm_head))
    control = vocabulary.control_ids(target)
    d2t, t2d = vocabulary.select(counts, recipe.train.new_draft_vocab_size, control)
    shape = shape_for(text_config(target), aux_layers, len(d2t), recipe.train.intermediate_size)
    return new_drafter(shape, head, d2t, t2d, recipe.train.seed)


def _finish(
    job: Job,
    inputs: dict[str, Any],
    rows: Corpus[Entry],
    runs: list[DrafterRun],
    progress: Progress,
) -> None:
    """Write the manifest's section and tell what was done."""
    states, results = runs[0], [_result(each) for each in runs]
    counts = results[0]
    kept = {job.recipe.train.steps, counts["best_step"]} - {None}
    weights = [states.checkpoint(step) / checkpoint.WEIGHTS for step in sorted(kept)]
    section = {
        "inputs": inputs,
        "identity": rows.identity,
        "counts": {
            **counts,
            "trained_rows": len(rows.trained),
            "held_out_rows": len(rows.held_out),
            "left_out": rows.left_out,
        },
        "no_states": results[1] if len(results) > 1 else None,
        "files": {str(path.relative_to(states.root)): file_record(path) for path in weights},
    }
    changed = write_section(states.manifest, "train", section)
    line = f"{counts['steps']} steps over {counts['tokens']} tokens of {len(rows.trained)} rows"
    if counts["steps"]:
        line += f", loss {counts['first_loss']:.3f} -> {counts['last_loss']:.3f}"
    if counts["best_step"] is not None:
        line += f", held out {counts['best_held_out_loss']:.3f} at best, step {counts['best_step']}"
    job.report(
        done=True,
        changed=changed,
        line=line,
        step=progress.steps,
        steps=progress.steps,
        curves=str(states.curves),
        numbers=curves.text(metrics.lines(states)),
    )
    print(line, flush=True)


def _result(run_: DrafterRun) -> dict[str, Any]:
    best = checkpoint.best(run_)
    return {
        **metrics.summary(run_),
        "best_step": best and best.step,
        "best_held_out_loss": best and best.held_out_loss,
    }
