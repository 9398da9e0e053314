"""What our client adds to an engine, and what a job start costs: the phase as production runs it.

``engine-saturation``: rows/s of the phase against an engine that decodes at a fixed rate, over
those of a bare asynchronous loop that only sends and receives. ``client-ceiling``: rows/s against
an engine that answers at once, over those of a loop with one shared httpx.AsyncClient.
``resume-scan``: opening a dataset with 10,000 stored rows, over reading and parsing their bytes.
``generate-memory``: what a row costs in memory, generated or found stored, the worse of the two.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
import orjson
from bench.measure import Result
from bench.paced_engine import paced_engine
from unit.fake_engine import CLOSE, DATASET, FAMILY, STOP, TEXT, Site

from drafter.generate import generate, open_responses
from drafter.job import load_job

IN_FLIGHT = 150
PAIRS = 3


def engine_saturation() -> Result:
    """A request decodes 100 tokens/s here, 400 tokens on average: 4 s, four times over."""
    pairs = []
    with paced_engine(100, 400) as url:
        for _ in range(PAIRS):
            ours = _phase_s(url, 4 * IN_FLIGHT)
            pairs.append((ours, _bare_s(url, 4 * IN_FLIGHT)))
    ours_s, bare_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    rows = 4 * IN_FLIGHT
    return Result(rows / ours_s, "rows/s", 0.97, "ratio", "higher", rows / bare_s)


def client_ceiling() -> Result:
    rows, few = 10_000, 2_000
    pairs = []
    with paced_engine(0, 256) as url:
        for _ in range(PAIRS):
            ours = rows / _phase_s(url, rows)
            pairs.append((ours, few / asyncio.run(_shared_client_s(url, few))))
    ours_per_s, shared_per_s = (median(rates) for rates in zip(*pairs, strict=True))
    return Result(ours_per_s, "rows/s", 5, "ratio", "higher", shared_per_s)


def resume_scan() -> Result:
    """10,000 rows, 10 M tokens."""
    with tempfile.TemporaryDirectory() as home:
        site = _answered(Path(home), 10_000, 1000)
        pairs = [(_open_s(site), _parse_s(site)) for _ in range(2 * PAIRS)]
    opened_s, parsed_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    return Result(opened_s, "s", 1.5, "ratio", "lower", parsed_s)


def generate_memory() -> Result:
    few, many = 5_000, 25_000
    generated = _generate_bytes(many) - _generate_bytes(few)
    opened = _open_bytes(many) - _open_bytes(few)
    return Result(max(generated, opened) / (many - few), "bytes/row", 200, "value", "lower")


def _phase_s(url: str, num_prompts: int) -> float:
    with tempfile.TemporaryDirectory() as home:
        site = Site(
            Path(home),
            num_prompts=num_prompts,
            urls=(url,),
            in_flight=IN_FLIGHT,
            settings={"max_new_tokens": 32_768},
        )
        job = site.job()
        started = time.monotonic()
        generate(job, FAMILY)
        return time.monotonic() - started


def _bare_s(url: str, num_prompts: int) -> float:
    """As many connections, each sending its next prompt when its answer is in; keeps nothing."""

    async def loop() -> None:
        prompts = iter(_bodies(num_prompts))
        address = urlsplit(url)

        async def connection() -> None:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            for body in prompts:
                head = f"POST /generate HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                answer = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(answer.split(b"Content-Length: ")[1]))
            writer.close()

        await asyncio.gather(*(connection() for _ in range(IN_FLIGHT)))

    started = time.monotonic()
    asyncio.run(loop())
    return time.monotonic() - started


async def _shared_client_s(url: str, num_prompts: int) -> float:
    """What one writes first: one client, as many tasks, each answer parsed and appended."""
    prompts = iter(_bodies(num_prompts))
    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    started = time.monotonic()
    with tempfile.TemporaryFile("w") as file:
        async with httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as client:

            async def task() -> None:
                for body in prompts:
                    answer = (await client.post(url + "/generate", content=body)).json()
                    file.write(json.dumps(answer["output_ids"]) + "\n")
                    file.flush()

            await asyncio.gather(*(task() for _ in range(IN_FLIGHT)))
    return time.monotonic() - started


def _bodies(num_prompts: int) -> list[bytes]:
    """The prompts of :class:`Site`, as requests."""
    return [
        orjson.dumps({"input_ids": [TEXT, TEXT + 1, *map(int, f"{i:04d}")]})
        for i in range(num_prompts)
    ]


def _answered(root: Path, num_rows: int, mean_tokens: int) -> Site:
    site = Site(root, num_prompts=num_rows)
    dice = random.Random(0)
    with open(site.prepared.responses, "wb") as file:
        for i in range(num_rows):
            ids = dice.choices(range(TEXT, 1000), k=dice.randrange(4, 2 * mean_tokens - 4))
            ids = [*ids[:-3], CLOSE, TEXT, STOP]
            row = {
                "sample_id": f"{DATASET}-{i:04d}",
                "output_ids": ids,
                "prompt_tokens": 6,
                "completion_tokens": len(ids),
                "finish_reason": "stop",
            }
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return site


def _open_s(site: Site) -> float:
    job = site.job()
    gc.collect()
    started = time.perf_counter()
    with open_responses(job, FAMILY):
        return time.perf_counter() - started


def _parse_s(site: Site) -> float:
    gc.collect()
    started = time.perf_counter()
    with open(site.prepared.responses, "rb") as file:
        for line in file:
            orjson.loads(line)
    return time.perf_counter() - started


def _generate_bytes(num_rows: int) -> int:
    """By which a process grows that generates so many rows, when it is largest."""
    with tempfile.TemporaryDirectory() as home, paced_engine(0, 10) as url:
        site = Site(Path(home), num_prompts=0, urls=(url,), in_flight=IN_FLIGHT)
        # Six ids each: the engine says so whatever it was sent.
        site.prepare([[TEXT, *map(int, f"{i:05d}")] for i in range(num_rows)])
        return _grown("generate", str(site.job().dir.root))


def _open_bytes(num_rows: int) -> int:
    """By which a process grows that opens so many stored rows."""
    with tempfile.TemporaryDirectory() as home:
        return _grown("open", str(_answered(Path(home), num_rows, 10).job().dir.root))


def _grown(*arguments: str) -> int:
    command = [sys.executable, "-m", "bench.generation", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return int(done.stdout.split()[-1])


def _resident_bytes(most: bool) -> int:
    """Now, or at ``most`` so far."""
    status = Path("/proc/self/status").read_text()
    key = "VmHWM:" if most else "VmRSS:"
    return int(status.partition(key)[2].split()[0]) << 10


def _measured(what: str, job_dir: Path) -> None:
    job = load_job(job_dir)
    before = _resident_bytes(most=False)
    if what == "generate":
        generate(job, FAMILY)
        print(_resident_bytes(most=True) - before)
    else:
        with open_responses(job, FAMILY):
            print(_resident_bytes(most=False) - before)


if __name__ == "__main__":
    _measured(sys.argv[1], Path(sys.argv[2]))
