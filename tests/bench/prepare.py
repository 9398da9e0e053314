"""What prepare costs: time against reading its source, and memory for two million rows.

``prepare-rate``: rows/s of the whole phase (reading, converting, hashing, deduplicating, ordering,
rendering and writing what is selected, in as many processes as it takes) over those of a loop that
only reads and parses the same file with orjson. The source is made like OpenCodeInstruct: 3.5 KB a
row, of which the prompt is a sixth, and one row in 450 is selected, as 11,000 of five million are.
Loading the tokenizer's libraries, some seconds for any source, is not counted. ``prepare-memory``:
the most that the process tree of a job holds at once (pages that processes share count once), over
two million short rows: as JSON lines, and packed, where no row can be found again in place.
"""

from __future__ import annotations

import gzip
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import orjson
from bench.measure import Result
from families import KIMI
from unit.test_prepare import INCLUDE, Site

from drafter import files, prepare, template

PAIRS = 3
RATE_ROWS = 800_000
MEMORY_ROWS = 2_000_000
SELECTED = 450


def prepare_rate() -> Result:
    pairs = []
    with _site(RATE_ROWS, num_words=90, num_unread=2900) as (site, path):
        template.load_tokenizer(site.target)
        for _ in range(PAIRS):
            pairs.append((_prepare_s(site), _parse_s(path)))
    ours_s, parsed_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    return Result(RATE_ROWS / ours_s, "rows/s", 0.5, "ratio", "higher", RATE_ROWS / parsed_s)


def prepare_memory() -> Result:
    with _site(MEMORY_ROWS, num_words=15, num_unread=150) as (site, path):
        plain = _job_bytes(site)
        packed = path.with_suffix(".gz")
        with open(path, "rb") as rows, gzip.open(packed, "wb", compresslevel=1) as file:
            shutil.copyfileobj(rows, file, 1 << 20)
        site.datasets[0]["path"] = str(packed)
        most = max(plain, _job_bytes(site))
    return Result(most / 1e9, "GB", 1.0, "value", "lower")


def _job_bytes(site: Site) -> int:
    """The most that a job of its own holds while it prepares ``site``."""
    job_dir = site.job().dir
    job = subprocess.Popen(
        [sys.executable, "-m", "drafter", "run", str(job_dir.root)],
        env={**os.environ, "PYTHONPATH": str(INCLUDE)},
        stdout=subprocess.DEVNULL,
    )
    most = 0
    while job.poll() is None:
        most = max(most, _tree_bytes(job.pid))
        time.sleep(0.02)
    report = files.read_json(job_dir.progress)
    if job.returncode or report.get("source_rows") != MEMORY_ROWS:
        raise RuntimeError(f"prepare ended with {job.returncode}: {report}")
    return most


@contextmanager
def _site(num_rows: int, num_words: int, num_unread: int) -> Iterator[tuple[Site, Path]]:
    """A workspace whose one source has prompts of ``num_words`` and bytes that nobody reads."""
    dice = random.Random(0)
    words = ["".join(dice.choices("etaoinshrdlu", k=dice.randint(2, 9))) for _ in range(5000)]
    pieces = [" ".join(dice.choices(words, k=5)) for _ in range(20_000)]
    unread = " ".join(dice.choices(words, k=num_unread))[: num_unread // 2]
    rest = orjson.dumps({"output": unread, "unit_tests": unread, "average_test_score": "1"})
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        site = Site(Path(home))
        KIMI.save(site.target)
        site.generate = {}
        path = site.root / "rows.jsonl"
        with open(path, "wb") as file:
            for i in range(num_rows):
                text = " ".join(dice.choices(pieces, k=num_words // 5))
                begin = f'{{"id":"{i:032x}","input":"Write {text}",'
                file.write(begin.encode() + rest[1:] + b"\n")
        limit = {"max_samples": num_rows // SELECTED}
        entry = {"name": "B2", "format": "opencodeinstruct", "path": str(path), **limit}
        site.datasets = [entry]
        yield site, path


def _prepare_s(site: Site) -> float:
    job = site.job()
    started = time.monotonic()
    prepare.run(job)
    seconds = time.monotonic() - started
    shutil.rmtree(site.prepared("B2").root)
    return seconds


def _parse_s(path: Path) -> float:
    started = time.monotonic()
    with open(path, "rb") as file:
        for line in file:
            orjson.loads(line)
    return time.monotonic() - started


def _tree_bytes(pid: int) -> int:
    """Of a process and all below it, as much as would be free without them."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    (kib,) = (line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(kib) * 1024 + sum(map(_tree_bytes, map(int, children)))
