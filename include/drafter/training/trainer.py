"""The loop of a training and one step of it, in one process or in several that share each batch.

Every process knows the rows of the whole batch: it computes those that are its own, losses are
means over the supervised starts of all, and sums of losses and gradients over the processes are
those of the batch. So every process updates the same weights by the same numbers, and only the main
one writes anything.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafter.errors import DataError
from drafter.extraction.shards import Row
from drafter.layout import DrafterRun
from drafter.sections import Train
from drafter.target_head import TargetHead
from drafter.training import checkpoint
from drafter.training.alignment import align, num_starts, packed
from drafter.training.batch_source import Batches
from drafter.training.checkpoint import Best
from drafter.training.distributed import Group
from drafter.training.loss import Judge, soft_cross_entropy
from drafter.training.metrics import Metrics, Progress
from drafter.training.model import Drafter

_NAMED_SAMPLES = 8


def learning_rate(done: int, train: Train) -> float:
    """Of the step after ``done`` steps: linear warm-up, then half a cosine down to zero."""
    warmup = round(train.warmup_share * train.steps)
    if done < warmup:
        return train.learning_rate * (done + 1) / warmup
    share = (done - warmup) / (train.steps - warmup)
    return train.learning_rate * (1 + math.cos(math.pi * share)) / 2


class Trainer:
    """The loop over one run directory. Float32 on a CPU, bfloat16 matrix products on a GPU.

    ``held_out``: rows whose loss is taken now and then; their states are read again each time.
    """

    def __init__(
        self,
        options: Train,
        head: TargetHead,
        *,
        held_out: Sequence[Row] = (),
        group: Group | None = None,
        see_states: bool = True,
    ) -> None:
        self.options, self.held_out, self.see_states = options, held_out, see_states
        self.group = group or Group()
        self.device = self.group.device
        # Matrices of a large target take gigabytes: they stay as they are stored, where they are.
        weight = head.norm_weight.to(self.device, torch.float32)
        self.head = replace(head, norm_weight=weight)

    def fit(
        self,
        run_: DrafterRun,
        untrained: Callable[[], Drafter],
        batches: Batches,
        progress: Progress,
    ) -> None:
        """Train what the last checkpoint of ``run_`` holds to the end; without one, ``untrained``,
        for whose vocabulary all responses are counted."""
        options, is_main = self.options, self.group.is_main
        if is_main:
            checkpoint.clear_partial(run_)
        saved = checkpoint.steps(run_)
        done = saved[-1] if saved else 0
        drafter = (
            checkpoint.load_drafter(run_.checkpoint(done), self.head) if saved else untrained()
        )
        judge = self.head.lm_head[drafter.draft_ids].to(self.device, torch.float32)
        drafter = drafter.to(self.device)
        optimizer = torch.optim.AdamW(
            drafter.parameters(), weight_decay=options.weight_decay, fused=True
        )
        if saved:
            checkpoint.load_optimizer(run_.checkpoint(done), drafter, optimizer)
        best = checkpoint.best(run_)
        kind = "with" if self.see_states else "without"
        print(f"{kind} the target's states: from step {done} to {options.steps}", flush=True)
        progress.skip(done)
        if options.steps == 0 and not saved:
            best = _better(best, 0, self.look(0, drafter, judge))
            if is_main:
                checkpoint.save(run_, 0, drafter, optimizer, best)
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(Metrics(run_, done)) if is_main else None
            for step, rows in batches.after(done):
                numbers = self.step(step, rows, drafter, optimizer, judge)
                saves = step % options.checkpoint_every_steps == 0 or step == options.steps
                if saves or step % (options.evaluate_every_steps or step + 1) == 0:
                    numbers |= self.look(step, drafter, judge)
                if saves:
                    best = _better(best, step, numbers)
                if metrics is None:
                    continue
                metrics.append(numbers)
                progress.step(numbers)
                if saves:
                    metrics.sync()
                    checkpoint.save(run_, step, drafter, optimizer, best)
                    metrics.draw()
            if metrics is not None:
                metrics.draw()

    def step(
        self,
        step: int,
        rows: Sequence[Row],
        drafter: Drafter,
        optimizer: torch.optim.Optimizer,
        judge_DH: Tensor,
    ) -> dict[str, Any]:
        """One optimiser step, ``step`` from 1, over ``rows`` of all processes together; returns its
        line of metrics.jsonl.

        Raises DataError naming the samples when loss or gradient is not finite, before anything
        is updated.
        """
        began = time.perf_counter()
        options = self.options
        parameters = list(drafter.parameters())
        measured = torch.zeros(1 + 2 * options.ttt_steps, device=self.device)
        if own := [rows[i] for i in self.group.share([len(row.input_ids_T) for row in rows])]:
            total, measured = self._losses(own, self._counts(rows), drafter, judge_DH)
            total.backward()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.group.add_up([measured, *(parameter.grad for parameter in parameters)])
        norm = torch.nn.utils.clip_grad_norm_(parameters, options.clip_norm, foreach=True)
        norm_, *values = torch.cat([norm[None], measured]).tolist()
        if not math.isfinite(values[0]) or not math.isfinite(norm_):
            raise DataError(
                _not_finite(f"step {step}: loss {values[0]}, gradient norm {norm_}", rows)
            )
        rate = learning_rate(step - 1, options)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        tokens = sum(len(row.input_ids_T) for row in rows)
        return {
            "step": step,
            **_named(values),
            "grad_norm": norm_,
            "lr": rate,
            "tokens": tokens,
            "tokens_per_s": round(tokens / (time.perf_counter() - began)),
        }

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def look(self, step: int, drafter: Drafter, judge_DH: Tensor) -> dict[str, float]:
        """Losses and accuracies over the held-out rows, after ``step``; nothing where none is.

        Raises DataError naming the samples when the loss is not finite.
        """
        rows = self.held_out
        if not rows:
            return {}
        measured = torch.zeros(1 + 2 * self.options.ttt_steps, device=self.device)
        counts = self._counts(rows)
        own = [rows[i] for i in self.group.share([len(row.input_ids_T) for row in rows])]
        for batch in packed(own, self.options.batch_tokens):
            measured += self._losses(batch, counts, drafter, judge_DH)[1]
        self.group.add_up([measured])
        values = measured.tolist()
        if not math.isfinite(values[0]):
            raise DataError(_not_finite(f"after step {step}: held-out loss {values[0]}", rows))
        return {f"held_out_{name}": value for name, value in _named(values).items()}

    def _losses(
        self, rows: Sequence[Row], counts: Tensor, drafter: Drafter, judge_DH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of ``rows`` as a part of the ``counts`` supervised starts, and [1 + 2 K]: the
        same, the losses and the accuracies of each step."""
        options, learns = self.options, torch.is_grad_enabled()
        batch = align(rows).to(self.device, torch.float32)
        if not self.see_states:
            batch = batch.without_states()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            states = drafter.train_states(
                batch, options.ttt_steps, learns and options.recompute_activations
            )
            judge = Judge(self.head.normed(batch.final_QH), judge_DH, batch.left_Q, counts)
            weight = drafter.lm_head.weight
            weight = weight if learns else weight.detach()
            losses = soft_cross_entropy(states, weight, judge, options.step_decay)
        measured = torch.cat([losses.total.detach()[None], losses.mean, losses.accuracy])
        return losses.total, measured

    def _counts(self, rows: Sequence[Row]) -> Tensor:
        """float32 [K]: starts of ``rows`` that are supervised at each step."""
        starts = [num_starts(len(row.input_ids_T), row.prompt_tokens) for row in rows]
        counts = [sum(max(n - i, 0) for n in starts) for i in range(self.options.ttt_steps)]
        return torch.tensor(counts, dtype=torch.float32).to(self.device, non_blocking=True)


def acceptance_length(accuracies: Sequence[float]) -> float:
    """Draft tokens that are accepted per verification, were each step's accuracy independent of the
    ones before: the sum of cumulative products, which SpecForge and TorchSpec call simulated."""
    return sum(math.prod(accuracies[: i + 1]) for i in range(len(accuracies)))


def _named(values: Sequence[float]) -> dict[str, float]:
    """``values``: total, then losses and accuracies of each step."""
    total, *per_step = values
    steps = len(per_step) // 2
    accuracies = per_step[steps:]
    return {
        "loss": total,
        **{f"loss_{i}": per_step[i] for i in range(steps)},
        **{f"acc_{i}": accuracies[i] for i in range(steps)},
        "acc_len": acceptance_length(accuracies),
    }


def _better(best: Best | None, step: int, numbers: dict[str, Any]) -> Best | None:
    loss = numbers.get("held_out_loss")
    if loss is None or (best is not None and best.held_out_loss <= loss):
        return best
    return Best(step, loss)


def _not_finite(what: str, rows: Sequence[Row]) -> str:
    def damaged(row: Row) -> bool:
        return not (row.aux_TAD.isfinite().all() and row.final_TD.isfinite().all())

    guilty = [row for row in rows if damaged(row)]
    named = guilty or list(rows)
    names = ", ".join(row.sample_id for row in named[:_NAMED_SAMPLES])
    if len(named) > _NAMED_SAMPLES:
        names += f" and {len(named) - _NAMED_SAMPLES} more"
    if guilty:
        return f"{what}: the states of {names} are not finite, extract their datasets anew"
    return f"{what} with finite states, in a batch of {names}: lower train.learning_rate"
