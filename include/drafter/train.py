"""Phase train: one drafter from the states of every dataset.

Reads every dataset's shards, or a spool that another job fills meanwhile (batch_source.py). Writes
``drafter/<run>/``: checkpoints, metrics.jsonl (one line per step) and the manifest's section
``train``. Killed at any moment it continues from its last checkpoint, and its losses and weights
are those of a run that was never killed, bit for bit on the same machine. With
``train.no_states_baseline`` the same drafter is then trained on the same batches with the target's
states zeroed, in ``no_states/``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from drafter import batch_source, checkpoint, corpus, jsonl, plan, starting_point, vocabulary
from drafter.alignment import align
from drafter.batch_source import Batches
from drafter.corpus import Corpus
from drafter.entries import Entry
from drafter.errors import DataError
from drafter.files import clear_partial, file_record, whole_file, write_section
from drafter.job import Job
from drafter.layout import DrafterRun
from drafter.loss import Judge, soft_cross_entropy
from drafter.model import Drafter, new_drafter, shape_for
from drafter.recipe import Recipe
from drafter.sections import Train
from drafter.shards import Row
from drafter.target_head import TargetHead, text_config

_REPORT_SECONDS = 1.0
_LOG_SECONDS = 20.0
_NAMED_SAMPLES = 8


def run(job: Job) -> None:
    """Train, or continue to train, the run that the extracted data and the recipe name."""
    recipe, workspace = job.recipe, job.workspace
    inputs = plan.inputs("train", job.dataset, workspace, recipe)
    states = workspace.drafter(plan.run_name(workspace, recipe))
    runs = [states] + [checkpoint.no_states(states)] * recipe.train.no_states_baseline
    progress = _Progress(job, recipe.train.steps * len(runs))
    results = []
    with batch_source.opened(job) as (rows, batches):
        head = corpus.read_head(recipe, rows)
        for each in runs:
            trainer = Trainer(recipe.train, head, see_states=each is states)
            trainer.fit(each, untrained(recipe, rows, head), batches, progress)
            results.append(_summary(each))
    weights = states.checkpoint(recipe.train.steps) / checkpoint.WEIGHTS
    section = {
        "inputs": inputs,
        "identity": rows.identity,
        "counts": {
            **results[0],
            "trained_rows": len(rows.trained),
            "held_out_rows": len(rows.held_out),
            "left_out": rows.left_out,
        },
        "no_states": results[1] if len(results) > 1 else None,
        "files": {str(weights.relative_to(states.root)): file_record(weights)},
    }
    changed = write_section(states.manifest, "train", section)
    counts = results[0]
    line = f"{counts['steps']} steps over {counts['tokens']} tokens of {len(rows.trained)} rows"
    if counts["steps"]:
        line += f", loss {counts['first_loss']:.3f} -> {counts['last_loss']:.3f}"
    job.report(done=True, changed=changed, line=line, step=progress.steps, steps=progress.steps)
    print(line, flush=True)


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


def learning_rate(done: int, train: Train) -> float:
    """Of the step after ``done`` steps: linear warm-up, then half a cosine down to zero."""
    warmup = round(train.warmup_share * train.steps)
    if done < warmup:
        return train.learning_rate * (done + 1) / warmup
    share = (done - warmup) / (train.steps - warmup)
    return train.learning_rate * (1 + math.cos(math.pi * share)) / 2


class Trainer:
    """The loop over one run directory. Float32 on a CPU, bfloat16 matrix products on a GPU."""

    def __init__(self, options: Train, head: TargetHead, *, see_states: bool = True) -> None:
        self.options, self.see_states = options, see_states
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.head = head.to(self.device, torch.float32)

    def fit(
        self, run_: DrafterRun, drafter: Drafter, batches: Batches, progress: _Progress
    ) -> None:
        """Train ``drafter``, or what the last checkpoint of ``run_`` made of it, to the end."""
        options = self.options
        checkpoint.clear_partial(run_)
        saved = checkpoint.steps(run_)
        done = saved[-1] if saved else 0
        if saved:
            drafter = checkpoint.load_drafter(run_.checkpoint(done), self.head)
        drafter = drafter.to(self.device)
        optimizer = torch.optim.AdamW(
            drafter.parameters(), weight_decay=options.weight_decay, fused=True
        )
        if saved:
            checkpoint.load_optimizer(run_.checkpoint(done), drafter, optimizer)
        elif options.steps == 0:
            checkpoint.save(run_, 0, drafter, optimizer)
        kind = "with" if self.see_states else "without"
        print(f"{kind} the target's states: from step {done} to {options.steps}", flush=True)
        progress.skip(done)
        judge = self.head.lm_head[drafter.draft_ids]
        _keep_metrics(run_.metrics, done)
        with jsonl.Appender(run_.metrics) as metrics:
            for step, rows in batches.after(done):
                numbers = self.step(step, rows, drafter, optimizer, judge)
                metrics.append(numbers)
                progress.step(numbers)
                if step % options.checkpoint_every_steps == 0 or step == options.steps:
                    metrics.sync()
                    checkpoint.save(run_, step, drafter, optimizer)

    def step(
        self,
        step: int,
        rows: Sequence[Row],
        drafter: Drafter,
        optimizer: torch.optim.Optimizer,
        judge_DH: Tensor,
    ) -> dict[str, Any]:
        """One optimiser step, ``step`` from 1; returns its line of metrics.jsonl.

        Raises DataError naming the samples when loss or gradient is not finite, before anything
        is updated.
        """
        began = time.perf_counter()
        options = self.options
        batch = align(rows).to(self.device, torch.float32)
        if not self.see_states:
            batch = batch.without_states()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            states = drafter.train_states(batch, options.ttt_steps)
            judge = Judge(self.head.normed(batch.final_QH), judge_DH, batch.left_Q)
            losses = soft_cross_entropy(states, drafter.lm_head.weight, judge, options.step_decay)
        losses.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), options.clip_norm, foreach=True)
        measured = torch.cat([losses.total[None], norm[None], losses.mean, losses.accuracy])
        total, norm_, *per_step = measured.tolist()
        if not math.isfinite(total) or not math.isfinite(norm_):
            raise DataError(_not_finite(step, total, norm_, rows))
        rate = learning_rate(step - 1, options)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        tokens = sum(len(row.input_ids_T) for row in rows)
        steps = range(options.ttt_steps)
        return {
            "step": step,
            "loss": total,
            **{f"loss_{i}": per_step[i] for i in steps},
            **{f"acc_{i}": per_step[options.ttt_steps + i] for i in steps},
            "grad_norm": norm_,
            "lr": rate,
            "tokens": tokens,
            "tokens_per_s": round(tokens / (time.perf_counter() - began)),
        }


class _Progress:
    """Numbers for ``progress.json`` about once a second, a line for the log less often."""

    def __init__(self, job: Job, steps: int) -> None:
        self.job, self.steps, self.done = job, steps, 0
        self._reported = self._logged = self._began = time.monotonic()
        self._first = self._tokens = 0

    def skip(self, steps: int) -> None:
        """``steps`` were done by an earlier process."""
        self.done += steps
        self._first += steps

    def step(self, numbers: dict[str, Any]) -> None:
        self.done += 1
        self._tokens += numbers["tokens"]
        now = time.monotonic()
        if now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        spent = now - self._began
        seen = {
            "step": self.done,
            "steps": self.steps,
            "loss": round(numbers["loss"], 4),
            "acc": round(numbers["acc_0"], 4),
            "tokens_per_s": round(self._tokens / spent),
            "eta_s": round(spent * (self.steps - self.done) / (self.done - self._first)),
        }
        self.job.report(**seen)
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            print(" ".join(f"{name} {value}" for name, value in seen.items()), flush=True)


def _keep_metrics(path: Path, done: int) -> None:
    """Forget the steps after the checkpoint: they are about to be taken again."""
    lines = [line.value for line in jsonl.rows(path) if line.value["step"] <= done]
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_partial(path.parent, path.name)
    with whole_file(path) as partial:
        partial.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def _summary(run_: DrafterRun) -> dict[str, Any]:
    lines = [line.value for line in jsonl.rows(run_.metrics)]
    return {
        "steps": len(lines),
        "tokens": sum(line["tokens"] for line in lines),
        "first_loss": lines[0]["loss"] if lines else None,
        "last_loss": lines[-1]["loss"] if lines else None,
    }


def _not_finite(step: int, loss: float, norm: float, rows: Sequence[Row]) -> str:
    def damaged(row: Row) -> bool:
        return not (row.aux_TAD.isfinite().all() and row.final_TD.isfinite().all())

    guilty = [row for row in rows if damaged(row)]
    named = guilty or list(rows)
    names = ", ".join(row.sample_id for row in named[:_NAMED_SAMPLES])
    if len(named) > _NAMED_SAMPLES:
        names += f" and {len(named) - _NAMED_SAMPLES} more"
    if guilty:
        return (
            f"step {step}: loss {loss}, gradient norm {norm}: the states of {names} are not "
            "finite, extract their datasets anew"
        )
    return (
        f"step {step}: loss {loss}, gradient norm {norm} with finite states, in a batch of "
        f"{names}: lower train.learning_rate"
    )
