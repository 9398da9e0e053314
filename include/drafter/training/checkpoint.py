"""Checkpoints of a training: directories that appear whole, and everything that resuming needs.

    step-000500/
      drafter.safetensors     weights in float32, d2t, t2d; metadata: the drafter's shape as JSON
      optimizer.safetensors   <parameter>.<state of AdamW>
      state.json              step; best {step, held_out_loss}: of this checkpoint and all before
                              it the one with the least held-out loss, or null

The two newest are kept, and the best by each of them. The best is marked in the newest's state.json
alone, so that mark and checkpoint appear together.

There is no random state: nothing in training draws a number, and the order of rows is a function of
the seed and the step (corpus.batches). The same step resumed is therefore the same bits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.errors import DataError, DrafterError
from drafter.files import fsync_dir, read_json, write_json
from drafter.layout import DrafterRun
from drafter.sections import Train
from drafter.target_head import TargetHead
from drafter.training import vocabulary
from drafter.training.model import Drafter, Shape

WEIGHTS = "drafter.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "state.json"
_KEPT = 2
"""Newest checkpoints kept: the last, and the one before it in case the last is damaged."""


@dataclass(frozen=True)
class Best:
    """The checkpoint with the least held-out loss so far, the earliest of equals."""

    step: int
    held_out_loss: float


def no_states(run: DrafterRun) -> DrafterRun:
    """Where the same drafter is trained without the target's states."""
    return DrafterRun(run.root / "no_states")


def steps(run: DrafterRun) -> list[int]:
    """Steps of which a complete checkpoint exists, ascending."""
    found = (_step_of(path) for path in run.root.glob("step-*"))
    return sorted(step for step in found if step is not None)


def best(run: DrafterRun) -> Best | None:
    """As the newest checkpoint has it; None where no row is held out, or when it is gone."""
    found = [best_by(run, step) for step in steps(run)[-1:]]
    return next((each for each in found if each and run.checkpoint(each.step).exists()), None)


def best_by(run: DrafterRun, step: int) -> Best | None:
    """As the checkpoint of ``step`` has it. DataError when its state cannot be read."""
    marked = read_json(run.checkpoint(step) / _STATE).get("best")
    return marked and Best(**marked)


def chosen(run: DrafterRun, train: Train) -> Path:
    """The checkpoint that is evaluated and exported, as ``train.export`` says.

    Raises DataError when there is no best one.
    """
    if train.export == "last":
        return run.checkpoint(train.steps)
    if (marked := best(run)) is None:
        raise DataError(
            f"{run.root} has no checkpoint with a held-out loss: set train.export to last, or "
            "train.held_out_share higher"
        )
    return run.checkpoint(marked.step)


def save(
    run: DrafterRun,
    step: int,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    best: Best | None = None,
) -> Path:
    """Write the checkpoint of ``step``, then drop all but the newest and the best.

    Raises DrafterError when the disk is full; checkpoints written before are untouched.
    """
    final = run.checkpoint(step)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        shape = json.dumps(asdict(drafter.shape), sort_keys=True)
        weights = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
        save_file(weights, partial / WEIGHTS, metadata={"shape": shape})
        save_file(_optimizer_state(drafter, optimizer), partial / _OPTIMIZER)
        write_json(partial / _STATE, {"step": step, "best": best and asdict(best)})
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_dir(partial)
        os.replace(partial, final)
        fsync_dir(run.root)
    except (OSError, SafetensorError) as error:
        raise DrafterError(
            f"checkpoint {final} cannot be written ({error}): free disk space and start again, "
            "training continues from the checkpoint before it"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    newest = steps(run)[-_KEPT:]
    bests = (best_by(run, each) for each in newest)
    for old in _but(steps(run), [*newest, *(each.step for each in bests if each)]):
        # Half a directory must not look like a checkpoint, so it loses its name first.
        os.replace(run.checkpoint(old), partial)
        shutil.rmtree(partial)
    return final


def clear_partial(run: DrafterRun) -> None:
    """Remove what a killed writer left. Only one process trains a run at a time."""
    for path in run.root.glob(".step-*.partial"):
        shutil.rmtree(path)


def load_drafter(directory: Path, head: TargetHead) -> Drafter:
    """The drafter of a checkpoint, on the CPU. DataError when a file is damaged or does not fit."""
    path = directory / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            fields = json.loads(file.metadata()["shape"])
        tensors = load_file(path)
        shape = Shape(**{**fields, "aux_layers": tuple(fields["aux_layers"])})
        drafter = Drafter(shape, head, tensors["d2t"], tensors["t2d"])
        drafter.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(directory, path, str(error)) from None
    vocabulary.check(tensors["d2t"], tensors["t2d"], str(path))
    return drafter


def load_optimizer(directory: Path, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
    """Give ``optimizer``, made over ``drafter.parameters()``, the state it was saved with.

    DataError when the file is damaged or holds the state of other parameters: AdamW would begin
    anew, without a word, where its state is missing.
    """
    path = directory / _OPTIMIZER
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(directory, path, str(error)) from None
    named = dict(drafter.named_parameters())
    shapes = {f"{n}.{key}": p.shape for n, p in named.items() for key in ("exp_avg", "exp_avg_sq")}
    shapes |= {f"{n}.step": torch.Size() for n in named}
    found = {name: tensor.shape for name, tensor in saved.items()}
    if _step_of(directory) == 0:
        # Before the first step there is no state.
        shapes = {}
    if found != shapes:
        wrong = min(n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n))
        raise _damaged(directory, path, f"{wrong} is not as AdamW leaves it")
    for name, tensor in saved.items():
        parameter, key = name.rsplit(".", 1)
        optimizer.state[named[parameter]][key] = tensor.to(named[parameter].device)


def _but(found: Iterable[int], kept: Iterable[int]) -> list[int]:
    return sorted(set(found).difference(kept))


def _step_of(directory: Path) -> int | None:
    name = re.fullmatch(r"step-(\d{6,})", directory.name)
    return int(name[1]) if name else None


def _damaged(directory: Path, path: Path, fault: str) -> DataError:
    return DataError(
        f"{path} cannot be read ({' '.join(fault.split())}): remove {directory} and train again, "
        "the checkpoint before it is used"
    )


def _optimizer_state(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.contiguous()
        for name, parameter in drafter.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
