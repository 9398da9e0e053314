"""The numbers of a training: metrics.jsonl, and what is made of it for people to look at.

``metrics.jsonl`` is the truth: a line per step, those of a resumed training as if it had never been
killed. ``tensorboard/`` follows it while it grows, ``curves.html`` at every checkpoint.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from drafter import jsonl
from drafter.files import clear_partial, whole_file
from drafter.job import Job
from drafter.layout import DrafterRun
from drafter.training import curves

_REPORT_SECONDS = 1.0
_LOG_SECONDS = 20.0


class Metrics:
    """The one writer of a run's numbers. Opening it forgets the steps after ``done``: they are
    about to be taken again."""

    def __init__(self, run_: DrafterRun, done: int) -> None:
        self._run = run_
        _keep(run_.metrics, done)
        self._lines = jsonl.Appender(run_.metrics)
        # Made anew: of several files TensorBoard reads those in the order of names, which hold
        # seconds and process ids, and one that was torn by a kill may hide what follows.
        for path in run_.tensorboard.glob("events.out.tfevents.*"):
            path.unlink()
        self._board = SummaryWriter(str(run_.tensorboard))
        for line in lines(run_):
            self._draw_step(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._board.close()
        self._lines.close()

    def append(self, numbers: dict[str, Any]) -> None:
        self._lines.append(numbers)
        self._draw_step(numbers)

    def _draw_step(self, numbers: dict[str, Any]) -> None:
        values = [
            Summary.Value(tag=_tag(name), simple_value=value)
            for name, value in numbers.items()
            if name != "step"
        ]
        # All of a step as one record: sixteen times as fast as one record each.
        self._board.file_writer.add_summary(Summary(value=values), numbers["step"])

    def sync(self) -> None:
        """What was appended survives a reboot; a checkpoint follows."""
        self._lines.sync()
        self._board.flush()

    def draw(self) -> None:
        """Write the curves anew."""
        clear_partial(self._run.root, self._run.curves.name)
        page = curves.page(self._run.root.name, lines(self._run))
        with whole_file(self._run.curves) as partial:
            partial.write_text(page, encoding="utf-8")


def lines(run_: DrafterRun) -> list[dict[str, Any]]:
    """Of every step that was taken."""
    return [line.value for line in jsonl.rows(run_.metrics)]


def summary(run_: DrafterRun) -> dict[str, Any]:
    """{steps, tokens, first_loss, last_loss}"""
    taken = lines(run_)
    return {
        "steps": len(taken),
        "tokens": sum(line["tokens"] for line in taken),
        "first_loss": taken[0]["loss"] if taken else None,
        "last_loss": taken[-1]["loss"] if taken else None,
    }


class Progress:
    """Numbers for ``progress.json`` about once a second, a line for the log less often."""

    def __init__(self, job: Job, steps: int) -> None:
        self.job, self.steps, self.done = job, steps, 0
        self._reported = self._logged = self._began = time.monotonic()
        self._first = self._tokens = 0
        self._held_out: dict[str, float] = {}

    def skip(self, steps: int) -> None:
        """``steps`` were done by an earlier process."""
        self.done += steps
        self._first += steps

    def step(self, numbers: dict[str, Any]) -> None:
        self.done += 1
        self._tokens += numbers["tokens"]
        if "held_out_loss" in numbers:
            self._held_out = {
                "held_out_loss": round(numbers["held_out_loss"], 4),
                "held_out_acc": round(numbers["held_out_acc_0"], 4),
            }
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
            **self._held_out,
            "tokens_per_s": round(self._tokens / spent),
            "eta_s": round(spent * (self.steps - self.done) / (self.done - self._first)),
        }
        self.job.report(**seen)
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            print(" ".join(f"{name} {value}" for name, value in seen.items()), flush=True)


def _tag(name: str) -> str:
    """TensorBoard shows the numbers of all draft steps together: loss_3 as loss/3."""
    return re.sub(r"_(\d+)$", r"/\1", name)


def _keep(path: Path, done: int) -> None:
    kept = [line.value for line in jsonl.rows(path) if line.value["step"] <= done]
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_partial(path.parent, path.name)
    with whole_file(path) as partial:
        partial.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in kept))
