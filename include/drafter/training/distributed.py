"""Training in several processes, one per GPU: how they start, meet and end together.

The phase's own process launches them and watches: when one ends badly, the others are killed and
the job ends with what that one said. Every process knows the whole batch and computes its share of
the rows; sums over all of them make losses and gradients those of one process, but for rounding.
There is nothing to overlap with backward: unrolled over the draft steps, every gradient but one is
complete only at its end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from drafter.errors import Busy, DataError, DrafterError, RecipeError
from drafter.job import Job
from drafter.processes import MARKER, die_with_parent

_TOLD = "DRAFTER_TRAINING_PROCESS"
"""Environment variable: rank, number of processes, port of the store, pid of the launcher."""

_LEAVES = "leaves {}"
"""Key in the store: the process of that rank needs the others no more."""

_REASON = "reason"
"""Key in the store: exit code and sentence of one that says itself what is wrong."""

_HOST = "127.0.0.1"
_ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo"}
"""Otherwise gloo asks a name server for this host's own name, and may be told of a network that is
not there, or of another one each time."""

_PATIENCE = timedelta(days=1)
"""For each other: the launcher sees who dies, and a checkpoint of another may take long."""

_LOOK_S = 0.05
_GRACE_S = 2.0
"""For the others to say why they end, when one has ended badly."""


_SAID = (RecipeError, DataError, Busy)


@dataclass(frozen=True)
class Group:
    """The processes of a training, as one of them sees them; by default it is alone."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """The one that writes files and reports."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.rank)
        return torch.device("cpu")

    def share(self, lengths: Sequence[int]) -> list[int]:
        """Which rows of a batch are this process's, by their tokens, in the batch's order."""
        return share_out(lengths, self.size)[self.rank]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes.

        Raises DrafterError when one of them is gone.
        """
        if self.size == 1:
            return
        try:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
        except RuntimeError as error:
            raise DrafterError(
                f"process {self.rank + 1} of {self.size} lost another one "
                f"({str(error).splitlines()[0]:.200}): see above why that ended; training "
                "continues from its last checkpoint"
            ) from None


def share_out(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows for each of ``size`` processes: the longest first, each to who has the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        least = tokens.index(min(tokens))
        shares[least].append(row)
        tokens[least] += lengths[row]
    return [sorted(share) for share in shares]


def processes(wanted: int | None) -> int:
    """How many to start: one per GPU unless the recipe says it. RecipeError when GPUs lack."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and wanted is not None and wanted > gpus:
        raise RecipeError(
            f"train.processes is {wanted}, this machine has {gpus} GPUs: lower it, or leave it out"
        )
    return wanted or gpus or 1


def is_launched() -> bool:
    """Whether this process is one that :func:`launch` started."""
    return _TOLD in os.environ


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """Meet the others, for as long as this is open; the process ends with it.

    What is wrong, the launcher says.
    """
    rank, size, port, launcher = map(int, os.environ[_TOLD].split())
    die_with_parent(launcher)
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=_PATIENCE)
    group = Group(rank, size)
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    backend = "nccl" if group.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield group
    except _SAID as error:
        store.set(_REASON, f"{error.exit_code} {error}")
        _end(error.exit_code)
    except DrafterError as error:
        print(f"drafter: {error}", file=sys.stderr)
        _end(error.exit_code)
    except SystemExit as stop:
        _end(int(stop.code or 0))
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
            _end(1)
    store.set(_LEAVES.format(rank), "")
    # Who closes its connections early may cut off what another is still reading.
    store.wait([_LEAVES.format(other) for other in range(size)], _PATIENCE)
    _end(0)


def _end(code: int) -> NoReturn:
    """At once: taken apart by Python, a group with threads at work may abort the process, and to
    destroy it waits for processes that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(job: Job, size: int) -> None:
    """Run the job in ``size`` processes and return when all have ended well.

    Otherwise none is left: what one of them raised that said itself what was wrong, or DrafterError
    when one was killed. What the first one prints is the job's log; of the others, errors.
    """
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    command = [sys.executable, "-m", "drafter", "run", str(job.dir.root)]
    # The launcher holds the lock of the job, as the supervisor does.
    shared = {**os.environ, MARKER: job.start_id}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            told = {_TOLD: f"{rank} {size} {store.port} {os.getpid()}", **_ONE_HOST}
            out = None if rank == 0 else subprocess.DEVNULL
            started.append(subprocess.Popen(command, env={**shared, **told}, stdout=out))
        codes = _wait(started)
        said = store.get(_REASON).decode() if store.check([_REASON]) else ""
    finally:
        for process in started:
            process.kill()
            process.wait()
    _judge(codes, said)


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return codes once all have ended, or a while after one has ended badly; None: it has not."""
    give_up = float("inf")
    while True:
        codes = [process.poll() for process in started]
        if None not in codes or time.monotonic() > give_up:
            return codes
        if any(codes) and give_up == float("inf"):
            give_up = time.monotonic() + _GRACE_S
        time.sleep(_LOOK_S)


def _judge(codes: Sequence[int | None], said: str) -> None:
    """A reason that one gave comes before a kill, that before the complaints of who it left."""
    code, _, sentence = said.partition(" ")
    for kind in _SAID:
        if code == str(kind.exit_code):
            raise kind(sentence)
    killed = [(rank, -code) for rank, code in enumerate(codes, start=1) if code and code < 0]
    if killed:
        rank, number = killed[0]
        raise DrafterError(
            f"process {rank} of {len(codes)} was killed by {signal.Signals(number).name} (out of "
            "memory?): start again, training continues from its last checkpoint"
        )
    if any(codes):
        raise SystemExit(1)
