"""Does stop mean stop? Every act on every kind of job, on a real Airflow over a real sshd.

``python -m integration.kill_matrix`` prints a table: act, variant, seconds from the act to the
death of the last process, survivors, live copies seen at once (a look every 0.2 s). It ends with 1
when a row misses: more than 10 s, a survivor, two copies, or the wrong state afterwards.
``--short`` does the acts of users on deferred tasks only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from integration.kill_stack import LOOK_S, Clicks, airflow, kill_part, launch, settled, wait
from unit.host import NOISY, QUIET, STUBBORN

from demo.stack import Stack
from drafter.files import read_json
from drafter.layout import Workspace
from drafter.processes import MARKER

VARIANTS = {"quiet": QUIET, "noisy": NOISY, "stubborn": STUBBORN}
LIMIT_S = 10.0

TICKS = ["bash", "-c", "for i in $(seq 45); do echo tick $i; sleep 1; done"]
FLOOD = ["bash", "-c", "sleep 8; seq 1000000 1199999"]


@dataclass(frozen=True)
class Row:
    act: str
    variant: str
    seconds: float | None
    survivors: int
    copies: int
    fault: str = ""

    @property
    def missed(self) -> str:
        if self.survivors:
            return f"{self.survivors} survivors"
        if self.copies > 1:
            return f"{self.copies} copies at once"
        if self.seconds is not None and self.seconds > LIMIT_S:
            return f"took {self.seconds:.1f} s"
        return self.fault


class Watcher(threading.Thread):
    """Looks at all processes of the workspace's jobs, by dataset and start id."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__(daemon=True)
        self._jobs = str(workspace.root / "jobs")
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], float] = {}
        self._copies: dict[str, int] = {}

    def run(self) -> None:
        while True:
            found = self.look()
            with self._lock:
                for dataset, starts in found.items():
                    for start_id in starts:
                        self._last[dataset, start_id] = time.monotonic()
                    working = sum(any(kinds) for kinds in starts.values())
                    self._copies[dataset] = max(self._copies.get(dataset, 0), working)
            time.sleep(LOOK_S)

    def look(self) -> dict[str, dict[str, list[bool]]]:
        """{dataset: {start id: [is it more than a watching process?, ...]}}."""
        found: dict[str, dict[str, list[bool]]] = {}
        for proc in Path("/proc").iterdir():
            if not proc.name.isdigit():
                continue
            try:
                environ = (proc / "environ").read_bytes().split(b"\0")
                command = (proc / "cmdline").read_bytes().decode(errors="replace")
                where = os.readlink(proc / "cwd")
            except OSError:
                continue
            marks = [e.decode() for e in environ if e.startswith(f"{MARKER}=".encode())]
            watching = "drafter.supervisor" in command
            if watching:
                where = command.rstrip("\0").rpartition("\0")[2]
            if marks and where.startswith(self._jobs):
                start_id = marks[0].partition("=")[2]
                found.setdefault(Path(where).name, {}).setdefault(start_id, []).append(not watching)
        return found

    def fresh(self, dataset: str) -> None:
        """Forget what was seen of a dataset, but for the one copy that works now."""
        with self._lock:
            self._copies[dataset] = 1

    def copies(self, dataset: str) -> int:
        """Most that worked at once since :meth:`fresh`."""
        with self._lock:
            return self._copies.get(dataset, 0)

    def live(self, dataset: str) -> str | None:
        """Start id of the copy that works now."""
        starts = self.look().get(dataset, {})
        return next((start_id for start_id, kinds in starts.items() if any(kinds)), None)

    def row(self, act: str, dataset: str, start_id: str, acted: float) -> Row:
        """Wait for the death of a start."""
        while time.monotonic() - acted < LIMIT_S * 3 and start_id in self.look().get(dataset, {}):
            time.sleep(LOOK_S)
        time.sleep(2 * LOOK_S)
        left = len(self.look().get(dataset, {}).get(start_id, []))
        with self._lock:
            seconds = max(0.0, self._last.get((dataset, start_id), acted) - acted)
        return Row(act, dataset, seconds, left, self.copies(dataset))


ACTS: dict[str, Callable[[Clicks, str, str], None]] = {
    "mark failed": lambda api, dataset, run: api.mark(dataset, run, "failed"),
    "mark success": lambda api, dataset, run: api.mark(dataset, run, "success"),
    "run marked failed": lambda api, dataset, run: api.fail_run(dataset, run),
    "clear": lambda api, dataset, run: api.clear(dataset, run, ["job"]),
}


class Matrix:
    def __init__(self, stack: Stack, workspace: Workspace, api: Clicks) -> None:
        self.stack = stack
        self.workspace = workspace
        self.api = api
        self.watcher = Watcher(workspace)
        self.watcher.start()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        print(
            f"| {row.act:34} | {row.variant:8} | {seconds:>7} | {row.survivors:9} | {row.copies:6} "
            f"| {row.missed or 'ok'} |",
            flush=True,
        )

    def begin(
        self, state: str, programs: dict[str, list[str]], environ: dict[str, str] | None = None
    ) -> dict[str, tuple[str, str]]:
        """Start one job per dataset and wait for its task's ``state``: {dataset: (run, start)}."""
        wait_s = 60 if state == "running" else 0
        runs = {
            dataset: self.api.start(dataset, program, wait_s, environ)
            for dataset, program in programs.items()
        }
        begun = {}
        for dataset, run in runs.items():
            wait(
                lambda d=dataset, r=run: self.api.job(d, r)["state"] == state, f"{dataset} {state}"
            )
            wait(lambda d=dataset: self.watcher.live(d), f"{dataset} live")
            begun[dataset] = (run, self.watcher.live(dataset) or "")
        time.sleep(1)
        for dataset in begun:
            self.watcher.fresh(dataset)
        return begun

    def users_act(self, act: str, state: str) -> None:
        begun = self.begin(state, VARIANTS)
        acted = {}
        for dataset, (run, _) in begun.items():
            ACTS[act](self.api, dataset, run)
            acted[dataset] = time.monotonic()
        for dataset, (run, start_id) in begun.items():
            row = self.watcher.row(f"{act} ({state})", dataset, start_id, acted[dataset])
            self.add(self._restarted(row, run) if act == "clear" else row)
        if act == "clear":
            self.quiet(begun)

    def _restarted(self, row: Row, run: str) -> Row:
        """After a clear or a failure the new try works on, alone."""
        dataset = row.variant
        wait(lambda: self.watcher.live(dataset), f"{dataset} live again")
        wait(lambda: self.api.job(dataset, run)["state"] in ("deferred", "running"), "the new try")
        time.sleep(5)
        fault = "" if self.watcher.live(dataset) else "the new try's job is gone"
        copies = self.watcher.copies(dataset)
        return Row(row.act, dataset, row.seconds, row.survivors, copies, fault)

    def _ended(self, act: str, dataset: str, variant: str, fault: str) -> Row:
        """A job that ran to its own end: what is left of it, and copies seen meanwhile."""
        survivors = sum(len(kinds) for kinds in self.watcher.look().get(dataset, {}).values())
        return Row(act, variant, None, survivors, self.watcher.copies(dataset), fault)

    def quiet(self, begun: dict[str, tuple[str, str]]) -> None:
        """End what still runs of these."""
        for dataset, (run, _) in begun.items():
            self.api.mark(dataset, run, "failed")
        for dataset in begun:
            wait(lambda d=dataset: not self.watcher.look().get(d), f"{dataset} quiet")

    def hosts_act(self, act: str, do: Callable[[str], None], resumes: bool) -> None:
        """An act on the host: the task fails for good, or its retry starts the job again."""
        begun = self.begin("deferred", VARIANTS)
        acted = {}
        for dataset in begun:
            acted[dataset] = time.monotonic()
            do(dataset)
        for dataset, (run, start_id) in begun.items():
            row = self.watcher.row(act, dataset, start_id, acted[dataset])
            if resumes:
                self.add(self._restarted(row, run))
                continue
            ended = settled(self.api, dataset, run)
            fault = "" if ended == "failed" else f"the task is {ended}"
            self.add(Row(act, dataset, row.seconds, row.survivors, row.copies, fault))
        if resumes:
            self.quiet(begun)

    def drafter_stop(self, dataset: str) -> None:
        assert self.stop(dataset) == "stopped"

    def stop(self, dataset: str) -> str:
        """What `drafter stop` says has come of the dataset's one job."""
        done = subprocess.run(
            [str(self.workspace.launcher), "stop", dataset], capture_output=True, check=True
        )
        (answer,) = json.loads(done.stdout).values()
        return str(answer["outcome"])

    def stop_early_twice_late(self) -> None:
        """In the job's first moments, once more, and after its task's end: nothing else ends."""
        (beside,) = self.begin("deferred", {"stubborn": STUBBORN}).items()
        for dataset in ("quiet", "noisy"):
            run = self.api.start(dataset, VARIANTS[dataset])
            wait(lambda d=dataset: self.watcher.live(d), f"{dataset} live", look_s=0.02)
            self.watcher.fresh(dataset)
            start_id, acted = self.watcher.live(dataset) or "", time.monotonic()
            said = [self.stop(dataset), self.stop(dataset)]
            row = self.watcher.row("drafter stop at once, twice, late", dataset, start_id, acted)
            ended = settled(self.api, dataset, run)
            said.append(self.stop(dataset))
            code = read_json(self.workspace.job("generate", dataset).exit)["code"]
            fault = "" if (ended, code) == ("failed", 143) else f"the task is {ended}, exit {code}"
            fault = fault or ("" if said == ["stopped", *["not running"] * 2] else f"said {said}")
            fault = fault or ("" if self.watcher.live("stubborn") == beside[1][1] else "hit others")
            self.add(Row(row.act, dataset, row.seconds, row.survivors, row.copies, fault))
        self.quiet(dict([beside]))

    def kill(self, who: str) -> Callable[[str], None]:
        def do(dataset: str) -> None:
            state = read_json(self.workspace.job("generate", dataset).state)
            os.kill(state[who][0], signal.SIGKILL)

        return do

    def part_restarts(self, part: str) -> None:
        """After a -9 the job is followed to its end: log complete, started once."""
        begun = self.begin("deferred", {"quiet": TICKS})
        run, start_id = begun["quiet"]
        kill_part(self.stack, part)
        time.sleep(3)
        launch(self.stack, part, [sys.executable, "-m", "airflow", part])
        ended = settled(self.api, "quiet", run, 180)
        seen = set(self.api.log(self.api.job("quiet", run)))
        missing = [n for n in range(1, 46) if f"tick {n}" not in seen]
        last = read_json(self.workspace.job("generate", "quiet").exit)["start_id"]
        fault = "" if ended == "success" else f"the task is {ended}"
        fault = fault or (f"ticks {missing} are not in the log" if missing else "")
        fault = fault or ("" if last == start_id else "it was started twice")
        self.add(self._ended(f"{part} -9, restarted", "quiet", "ticks", fault))

    def triggerer_stays_away(self, act: bool) -> None:
        """Nobody renews the lease: dead within it, whether or not a user acted meanwhile."""
        begun = self.begin("deferred", VARIANTS)
        kill_part(self.stack, "triggerer")
        if act:
            for dataset, (run, _) in begun.items():
                self.api.mark(dataset, run, "failed")
        lease_s = 40.0
        acted = time.monotonic() + lease_s
        time.sleep(lease_s - 5)
        name = "triggerer away" + (", marked failed" if act else "")
        rows = [
            self.watcher.row(name, dataset, start_id, acted)
            for dataset, (_, start_id) in begun.items()
        ]
        launch(self.stack, "triggerer", [sys.executable, "-m", "airflow", "triggerer"])
        for row, (run, _) in zip(rows, begun.values(), strict=True):
            self.add(row if act else self._restarted(row, run))
        if not act:
            self.quiet(begun)

    def flood(self) -> None:
        begun = self.begin("deferred", {"noisy": FLOOD})
        run, _ = begun["noisy"]
        ended = settled(self.api, "noisy", run, 180)
        log = self.workspace.job("generate", "noisy").log
        lines = self.api.log(self.api.job("noisy", run))
        on_host = log.read_text()
        complete = all(f"{n}\n" in on_host for n in (1_000_000, 1_199_999))
        fault = "" if ended == "success" else f"the task is {ended}"
        fault = fault or ("" if complete else "lines are missing on the host")
        fault = fault or ("" if any(f"read {log}" in line for line in lines) else "no hint")
        fault = fault or ("" if "1199999" in lines else "the last line is not shown")
        self.add(self._ended("200,000 lines in the last second", "noisy", "flood", fault))

    def clock_jumps(self) -> None:
        """An hour that did not pass is no reason to end a job."""
        act = "the job's clock jumps an hour"
        if shutil.which("faketime") is None:
            why = "not run: faketime is not installed"
            print(f"| {act:34} | ticks    |         |           |        | {why} |", flush=True)
            return
        offset = self.stack.home / "clock"
        offset.write_text("+0\n")
        begun = self.begin("deferred", {"quiet": TICKS}, faked_clock(offset))
        run, _ = begun["quiet"]
        offset.write_text("+3600\n")
        ended = settled(self.api, "quiet", run, 180)
        stamp = read_json(self.workspace.job("generate", "quiet").exit)["ended"]
        fault = "" if ended == "success" else f"the task is {ended}"
        fault = fault or ("" if stamp > time.time() + 3000 else "the clock did not jump")
        self.add(self._ended(act, "quiet", "ticks", fault))

    def everything(self) -> None:
        for state in ("deferred", "running"):
            for act in ACTS:
                self.users_act(act, state)
        self.hosts_act("drafter stop", self.drafter_stop, resumes=False)
        self.stop_early_twice_late()
        self.hosts_act("supervisor -9", self.kill("supervisor"), resumes=True)
        self.hosts_act("guardian -9", self.kill("guardian"), resumes=True)
        self.part_restarts("triggerer")
        self.part_restarts("scheduler")
        self.triggerer_stays_away(act=False)
        self.triggerer_stays_away(act=True)
        self.flood()
        self.clock_jumps()


def faked_clock(offset: Path) -> dict[str, str]:
    """The environment in which every clock is off by what the file ``offset`` says."""
    command = ["faketime", "-f", "+0", "sh", "-c", 'echo "$LD_PRELOAD"']
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    file = {"FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1"}
    return {"LD_PRELOAD": library, **file}


def main(short: bool) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="kill-matrix-") as home,
        airflow(Path(home)) as (stack, workspace, api),
    ):
        matrix = Matrix(stack, workspace, api)
        print("| act | variant | seconds | survivors | copies | |\n|---|---|---|---|---|---|")
        if short:
            for act in ACTS:
                matrix.users_act(act, "deferred")
        else:
            matrix.everything()
    missed = [row for row in matrix.rows if row.missed]
    print(f"{len(matrix.rows)} rows, {len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    sys.exit(main(parser.parse_args().short))
