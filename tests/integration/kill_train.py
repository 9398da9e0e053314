"""Does training end in the same bits wherever it is killed? -9 at random moments.

``python -m integration.kill_train --kills 20 --seed 1`` trains with real processes, kills each at a
moment drawn over the whole of its life (imports, verification, steps, looks, checkpoints), lets the
last one finish, and compares weights, optimizer, the mark of the best checkpoint, metrics and
curves with those of a run that nobody disturbed. Of a job of several ``--processes`` one is drawn
each time, and the others must end with it. Training goes on from where it was, so whenever it has
ended its directory is removed and it begins anew. It ends with 1 when anything differs, when
something is left lying, or when too few kills hit a running job or too few starts resumed in the
middle: a process that ended before its moment does not count as a kill.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
from unit.drafter_site import DrafterSite

from drafter.layout import DrafterRun
from drafter.processes import look, send
from drafter.training import checkpoint

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "steps": 240, "checkpoint_every_steps": 7, "evaluate_every_steps": 3, "export": "best",
}  # fmt: skip
MOST_TRIES = 4
"""Per kill: a process that ended before its moment does not count, what is left of a resumed
training being short."""

ENDS_WITHIN_S = 10.0
FEWEST_RESUMES = 0.3
"""Per kill, starts that continue from a step above 0."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kill_train")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    dice = random.Random(options.seed)
    home = Path(tempfile.mkdtemp(prefix="kill-train-"))
    told = {**OPTIONS, "processes": options.processes}
    try:
        calm, disturbed = (DrafterSite(home / name, train=told) for name in ("calm", "disturbed"))
        started = time.monotonic()
        assert start(calm, home / "calm.log").wait() == 0
        life_s = time.monotonic() - started
        log, hits, tries = home / "log", 0, 0
        while hits < options.kills and tries < MOST_TRIES * options.kills:
            tries += 1
            if disturbed.run.manifest.exists():
                shutil.rmtree(disturbed.run.root)
            process = start(disturbed, log)
            time.sleep(dice.uniform(0.2, 0.9) * life_s)
            started = [] if process.poll() is not None else [process.pid, *children(process.pid)]
            hits += bool(started) and kill(dice.choice(started))
            process.wait()
            if alive := outliving(started):
                print(f"processes {alive} of a killed job live on")
                return 1
        assert start(disturbed, log).wait() == 0
        steps = [int(step) for step in re.findall(r"from step (\d+) to", log.read_text())]
        resumes = sum(0 < step < OPTIONS["steps"] for step in steps)
        wanted, found = left_by(calm), left_by(disturbed)
        differing = sorted(n for n in wanted | found if wanted.get(n) != found.get(n))
        litter = [str(path) for path in disturbed.run.root.rglob("*.partial")]
        verdict = f"DIFFERENT: {', '.join(differing)}" if differing else "the same"
        lying = f"; left lying: {', '.join(litter)}" if litter else ""
        print(
            f"{hits} kills of a live job, {resumes} resumes from a step above 0: weights, "
            f"optimizer, best mark, metrics and curves are {verdict}{lying}"
        )
        enough = hits == options.kills and resumes >= FEWEST_RESUMES * options.kills
        return 0 if enough and not differing and not litter else 1
    finally:
        shutil.rmtree(home)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill(pid: int) -> bool:
    """-9; False when it had ended before."""
    if (process := look(pid)) is None:
        return False
    return send(process, signal.SIGKILL)


def outliving(pids: list[int]) -> list[int]:
    """Those that still live a while after the job's own process has ended."""
    give_up = time.monotonic() + ENDS_WITHIN_S
    while (alive := [pid for pid in pids if look(pid)]) and time.monotonic() < give_up:
        time.sleep(0.01)
    return alive


def start(site: DrafterSite, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "include"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-m", "drafter", "run", str(site.job("train").dir.root)]
    with open(log, "ab") as out:
        return subprocess.Popen(command, env=environment, stdout=out)


def left_by(site: DrafterSite) -> dict[str, Any]:
    """Every file of a training but TensorBoard's, which hold the time; metrics without it."""
    left: dict[str, Any] = {}
    for run in (site.run, checkpoint.no_states(site.run)):
        for path in (*run.root.glob("step-*/*"), run.curves):
            left[str(path.relative_to(site.run.root))] = path.read_bytes()
        left[f"{run.metrics.relative_to(site.run.root)}"] = metrics(run)
        left[f"best of {run.root.relative_to(site.run.root)}"] = checkpoint.best(run)
    left["manifest"] = site.run.manifest.read_bytes()
    return left


def metrics(run: DrafterRun) -> list[dict[str, Any]]:
    lines = [orjson.loads(line) for line in run.metrics.read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
