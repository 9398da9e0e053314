"""Does extraction end in the same bytes wherever it is killed? -9 at random moments.

``python -m integration.kill_extract --kills 50 --seed 1`` extracts with real processes, kills each
at a moment drawn over the whole of its life (imports, loading, probe, shards, manifest), lets the
last one finish, and compares every file with those of a run that nobody disturbed. It ends with 1
when one differs, when something is left lying, or when too few kills hit a running job.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
from unit.random_targets import greedy_rows, one_thread, save_target, validated_job

from drafter.job import Job

ROOT = Path(__file__).resolve().parents[2]
ROWS = 160
SHARD_TOKENS = 60
FEWEST_HITS = 0.8
"""Share of kills that must find a live process."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kill_extract")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    dice = random.Random(options.seed)
    home = Path(tempfile.mkdtemp(prefix="kill-extract-"))
    try:
        with one_thread():
            rows = greedy_rows(save_target(home / "target"), ROWS)
        calm, disturbed = (
            job(validated_job(home / name, home / "target", rows, shard_tokens=SHARD_TOKENS))
            for name in ("calm", "disturbed")
        )
        started = time.monotonic()
        assert start(calm).wait() == 0
        life_s = time.monotonic() - started
        hits, shards = 0, []
        for _ in range(options.kills):
            if manifest(disturbed).exists():
                shutil.rmtree(manifest(disturbed).parent)
            process = start(disturbed)
            time.sleep(dice.uniform(0.3, 1.0) * life_s)
            hits += process.poll() is None
            process.kill()
            process.wait()
            shards.append(len(list(manifest(disturbed).parent.glob("shard-*"))))
        assert start(disturbed).wait() == 0
        same = digests(calm) == digests(disturbed)
        print(
            f"{options.kills} kills, {hits} of a live job, after {min(shards)} to {max(shards)} "
            f"shards of {len(digests(calm)) - 1}: files are {'the same' if same else 'DIFFERENT'}"
        )
        return 0 if same and hits >= FEWEST_HITS * options.kills else 1
    finally:
        shutil.rmtree(home)


def job(made: Job) -> Job:
    """With its job.json on disk, for a process of its own."""
    spec = {
        "phase": "extract", "dataset": made.dataset, "recipe": made.recipe.as_json(),
        "start_id": "s", "code": "c", "run_id": "r", "mode": "resume", "token_budget": None,
        "in_flight": 1,
    }  # fmt: skip
    made.dir.job.write_bytes(orjson.dumps(spec))
    return made


def start(job: Job) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "include"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "drafter", "run", str(job.dir.root)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def manifest(job: Job) -> Path:
    return job.workspace.hidden_states(job.dataset).manifest


def digests(job: Job) -> dict[str, str]:
    files = sorted(manifest(job).parent.iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
