"""Does generation lose or repeat a row when it is killed? -9 at random moments, 150 in flight.

``python -m integration.kill_generate --kills 200 --seed 1`` starts generation again and again
against a real HTTP engine, kills it at moments drawn from MOMENTS, lets it finish, and prints a
report. One request in twenty fails, so that kills come while failures are pending and while they
are asked again, and one prompt in a hundred is refused for good. It ends with 1 when a sample is
missing or twice, a row is not the answer to its prompt or not in the shape of all others, a line
does not parse, a torn line is not accounted for, a prompt is given up that was not refused or the
other way round, or more was asked than rows, faults and what the kills had in flight.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from unit.fake_engine import DATASET, FAMILY, FakeEngine, Reply, Site, sound, thoughtful

from drafter.engines.outcomes import MAX_RUNS
from drafter.errors import Busy
from drafter.files import file_record, read_section
from drafter.jsonl import scan
from drafter.rows import check_row

IN_FLIGHT = 150
PROMPTS_PER_KILL = 200
BUDGET_STEP = 12_000
"""Tokens a start may add, about 550 rows: so ends, too, come often."""

GIVE_UP_S = 60.0

CHILD = """
import sys
from pathlib import Path
from drafter.generation import workers
from drafter.errors import Busy
from drafter.generate import generate
from drafter.job import load_job
from unit.fake_engine import FAMILY
workers.PAUSE_S = 0.1
job = load_job(Path(sys.argv[1]))
print("opening", flush=True)
try:
    generate(job, FAMILY)
except Busy as busy:
    print(busy)
    sys.exit(busy.exit_code)
"""

FAULT_SHARE = 0.05
"""Of the prompts, whose first request fails, or the first two."""


def refused(prompt_ids: list[int]) -> bool:
    """Does the engine refuse it whenever it is asked?"""
    return prompt_ids[-2:] == [3, 7]


class Unreliable:
    """A behaviour: slow; a share of the prompts fails once or twice, some are refused for good."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.faults = 0

    def __call__(self, request: dict[str, Any], number: int, again: int) -> Reply:
        delay_s = self._dice.uniform(0.02, 0.3)
        prompt = request["input_ids"]
        # Never as often as a prompt is given up after.
        often = int(random.Random(str(prompt)).random() < FAULT_SHARE) * (1 + prompt[-1] % 2)
        if not refused(prompt) and again >= often:
            return Reply(body=sound(request, number, again).body, delay_s=delay_s)
        self.faults += 1
        return Reply(400 if refused(prompt) else 500, {"error": "by a test"}, delay_s=delay_s)


@dataclass
class Torture:
    """One dataset, killed over and over; counts what was done to it."""

    site: Site
    engine: FakeEngine
    unreliable: Unreliable
    """How the engine behaves."""
    dice: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    pending: int = 0
    """Kills that came when a request of theirs had failed, so that its prompt was held back."""
    finished: int = 0
    """Starts that ended by themselves before they could be killed."""
    tails: list[bytes] = field(default_factory=list)
    """Last lines without an end that a kill, or we, left behind."""
    partials: int = 0
    """Half-written manifests that a kill left behind."""

    def kill_once(self) -> None:
        """Start, wait for a moment, kill."""
        moment = self.dice.choice(list(MOMENTS))
        stored = sum(row["completion_tokens"] for row in self._rows())
        asked, before = len(self.engine.requests), self._size()
        faults = self.unreliable.faults
        if moment == "second pass":
            # Only where prompts run out are those that failed asked again.
            self.site.dataset = {"max_samples": self._settled() + 300}
            child = self._start()
            self.site.dataset = {"unbounded": True}
        else:
            child = self._start(token_budget=stored + BUDGET_STEP)
        assert child.stdout is not None
        assert child.stdout.readline() == b"opening\n"
        waits: dict[str, Callable[[], bool]] = {
            "opening": lambda: True,
            "first write": lambda: self._size() > before,
            "middle": lambda: self._size() > before,
            "torn": lambda: self._size() > before,
            "second pass": lambda: self._asks_again(asked),
            "end": lambda: (
                len(self.engine.requests) > asked + IN_FLIGHT and not self.engine.in_flight
            ),
        }
        give_up = time.monotonic() + GIVE_UP_S
        while not waits[moment]() and child.poll() is None:
            assert time.monotonic() < give_up, f"no moment to kill: {moment}"
            time.sleep(0.001)
        time.sleep(self.dice.uniform(0, MOMENTS[moment]))
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        if child.wait() in (0, Busy.exit_code):
            self.finished += 1
            return
        assert child.returncode == -signal.SIGKILL, f"ended by itself with {child.returncode}"
        self.kills[moment] += 1
        self.pending += self.unreliable.faults > faults
        self._look_at_the_end(tear=moment == "torn")

    def finish(self) -> None:
        for _ in range(MAX_RUNS):
            child = self._start()
            child.communicate(timeout=GIVE_UP_S * 10)
            if child.returncode == 0:
                return
            assert child.returncode == Busy.exit_code
        raise AssertionError(f"unfinished after {MAX_RUNS} runs")

    def _start(self, **told: Any) -> subprocess.Popen[bytes]:
        tests = Path(__file__).parents[1]
        path = os.pathsep.join([str(tests), str(tests.parent / "include")])
        job = self.site.job(**told)
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(job.dir.root)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
        )

    def _look_at_the_end(self, tear: bool) -> None:
        """A kill hardly ever tears a line, as a power cut does: so some lines are torn here."""
        prepared = self.site.prepared
        self.partials += len(list(prepared.root.glob(".manifest.json.*.partial")))
        data = prepared.responses.read_bytes() if prepared.responses.exists() else b""
        tail = data[data.rfind(b"\n", 0, -1) + 1 :]
        if tear and tail:
            tail = tail[: self.dice.randrange(1, len(tail) - 1)]
            os.truncate(prepared.responses, data.rfind(b"\n", 0, -1) + 1 + len(tail))
        if tail and not tail.endswith(b"\n") and not _parses(tail):
            self.tails.append(tail)

    def _settled(self) -> int:
        """Position behind the last prompt with an answer."""
        return max(
            (int(row["sample_id"].rpartition("-")[2]) + 1 for row in self._rows()), default=0
        )

    def _asks_again(self, asked: int) -> bool:
        prompts = [str(request["input_ids"]) for request in self.engine.requests[asked:]]
        return len(set(prompts)) < len(prompts)

    def _rows(self) -> list[dict[str, Any]]:
        return [line.value for line in scan(self.site.prepared.responses) if not line.fault]

    def _size(self) -> int:
        path = self.site.prepared.responses
        return path.stat().st_size if path.exists() else 0


MOMENTS = {
    "opening": 0.4,
    "first write": 0.01,
    "middle": 0.5,
    "torn": 0.3,
    "second pass": 0.3,
    "end": 0.1,
}
"""Moment -> seconds after it within which the kill comes."""


def faults(torture: Torture) -> list[str]:
    """What is wrong with the files at the end; empty when nothing is."""
    site, prepared = torture.site, torture.site.prepared
    prompts = {row["sample_id"]: row["input_ids"] for row in site.read(prepared.prompt_ids)}
    lines = list(scan(prepared.responses))
    rows = [line.value for line in lines if not line.fault]
    times = Counter(row["sample_id"] for row in rows)
    torn = prepared.responses.with_name(prepared.responses.name + ".torn")
    aside = torn.read_bytes().splitlines() if torn.exists() else []
    sessions = [line for line in scan(prepared.sessions) if line.fault]
    failures = list(scan(prepared.failed))
    times_failed = Counter(line.value["sample_id"] for line in failures if not line.fault)
    given_up = {
        line.value["sample_id"] for line in failures if line.value["class"] == "permanent"
    } | {sample_id for sample_id, number in times_failed.items() if number >= MAX_RUNS}
    to_give_up = {sample_id for sample_id, ids in prompts.items() if refused(ids)}
    most = (
        len(prompts)
        + torture.unreliable.faults
        + (torture.kills.total() + torture.finished) * IN_FLIGHT
    )
    section = read_section(prepared.manifest, "generate") or {}
    checks = {
        "missing": len(prompts.keys() - times.keys() - to_give_up),
        "given up although not refused": len(given_up - to_give_up),
        "refused and not given up": len(to_give_up - given_up),
        "given up and answered": len(given_up & times.keys()),
        "unknown": len(times.keys() - prompts.keys()),
        "twice": sum(number > 1 for number in times.values()),
        "lines that do not parse": len(lines)
        - len(rows)
        + len(sessions)
        + sum(line.fault is not None for line in failures),
        "shapes besides the first": len({tuple(row) for row in rows}) - 1,
        "invalid": sum(
            check_row(row, FAMILY, len(prompts[row["sample_id"]])) is not None for row in rows
        ),
        "not the answer": sum(
            row["output_ids"] != thoughtful({"input_ids": prompts[row["sample_id"]]})
            for row in rows
        ),
        "torn lines unaccounted for": len(set(aside) ^ set(torture.tails)),
        "failed more often than runs": sum(n > MAX_RUNS for n in times_failed.values()),
        "requests too many": max(len(torture.engine.requests) - most, 0),
        "half files left": len(list(prepared.root.glob("*.partial"))),
        "not as the manifest says": section.get("files", {}).get(prepared.responses.name)
        != file_record(prepared.responses),
    }
    return [f"{number} {what}" for what, number in checks.items() if number]


def run(root: Path, kills: int, seed: int) -> tuple[list[str], str]:
    """(faults, report) of a dataset killed ``kills`` times."""
    begun = time.monotonic()
    with FakeEngine(unreliable := Unreliable(seed)) as engine:
        site = Site(
            root,
            num_prompts=kills * PROMPTS_PER_KILL,
            urls=(engine.url,),
            in_flight=IN_FLIGHT,
            settings={"attempts": 1},
        )
        torture = Torture(site, engine, unreliable, random.Random(seed))
        while torture.kills.total() < kills:
            torture.kill_once()
        stored = sum(1 for _ in scan(site.prepared.responses))
        torture.finish()
        found = faults(torture)
        report = (
            f"{kills} kills at {IN_FLIGHT} in flight (seed {seed}): "
            + ", ".join(f"{number} {moment}" for moment, number in sorted(torture.kills.items()))
            + f"\n{torture.finished} starts ended before the kill; {torture.partials} kills left"
            f" half a manifest; {len(set(torture.tails))} torn lines set aside\n"
            f"{torture.pending} kills with failures pending, {unreliable.faults:,} faults in all\n"
            f"{stored:,} rows when the kills were done, {site.num_prompts:,} at the end;"
            f" {len(engine.requests):,} requests, {engine.most_in_flight} at once;"
            f" {time.monotonic() - begun:.0f} s\n"
            + ("; ".join(found) if found else "0 missing, 0 twice, every row in one shape")
        )
    return found, report


def _parses(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix=f"kill-{DATASET}-"))
    try:
        found, report = run(root, arguments.kills, arguments.seed)
    finally:
        shutil.rmtree(root)
    print(report)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
