"""What validate adds to reading: 10,000 rows, 10 M tokens, of which one row in eight calls a tool.

``validate-rows``: fields, ids and structure of every row, over reading the same bytes and parsing
them with orjson. ``validate-phase``: the phase from the hashes of its inputs to its manifest, with
repetition, tool calls and writing, over the same. ``validate-memory``: what a row costs in
memory. ``validate-rerun``: a finished dataset once more, as its job runs it.

The first two are measured in one process on one core, side by side, several times over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import orjson
from bench.measure import Result
from families import KIMI
from unit.fake_engine import DATASET, Site

from drafter import template
from drafter.files import file_record, write_json
from drafter.identity import generation_identity, target_identity
from drafter.jsonl import Appender, scan
from drafter.rows import Family, Marked, read_row
from drafter.validate import validate
from drafter.validation import toolcalls
from drafter.validation.facts import Nobody
from drafter.validation.structure import look, remarks
from drafter.validation.toolcalls import Judge

ROWS, TOKENS = 10_000, 10_000_000
PROMPT_TOKENS = 250
ROUNDS = 7
VOCABULARY = 163_840
CALLS_EVERY = 8


def rows() -> Result:
    return _compared(lambda site, family, _: _judge_rows(site, family), 2.5)


def phase() -> Result:
    return _compared(
        lambda site, family, judge: validate(site.job("validate"), family, judge, Nobody()), 6
    )


def memory() -> Result:
    """At the peak, while ten times the rows pass through, of 1,000 tokens each."""
    few, many = 500, 5_000
    extra = (_peak_bytes(many) - _peak_bytes(few)) / (many - few)
    return Result(extra, "bytes/row", 600, "value", "lower")


def rerun() -> Result:
    with _site(ROWS, TOKENS) as (site, _, _):
        directory = str(site.job("validate").dir.root)
        command = [sys.executable, "-m", "drafter", "run", directory]
        seconds = []
        for _ in range(4):
            started = time.monotonic()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.monotonic() - started)
    return Result(median(seconds[1:]), "s", 2.0, "value", "lower")


def _compared(ours: Callable[[Site, Family, Judge], object], bar: float) -> Result:
    """Of the round whose ratio is the median."""
    pairs = []
    with _site(ROWS, TOKENS) as (site, family, judge), _one_core(), _quiet():
        for _ in range(ROUNDS):
            started = time.perf_counter()
            _parse(site.prepared.responses)
            parsed = time.perf_counter()
            ours(site, family, judge)
            pairs.append((time.perf_counter() - parsed, parsed - started))
    ours_s, parse_s = sorted(pairs, key=lambda pair: pair[0] / pair[1])[ROUNDS // 2]
    return Result(ours_s, "s", bar, "ratio", "lower", parse_s)


def _parse(path: Path) -> None:
    with open(path, "rb", buffering=1 << 20) as file:
        for line in file:
            orjson.loads(line)


def _judge_rows(site: Site, family: Family) -> None:
    known = dict.fromkeys((_sample_id(i) for i in range(ROWS)), PROMPT_TOKENS)
    seen: set[str] = set()
    for line in scan(site.prepared.responses):
        row = line.value
        marked = read_row(row, family, known.get(row["sample_id"]))
        assert isinstance(marked, Marked) and row["sample_id"] not in seen
        seen.add(row["sample_id"])
        shape = look(marked, family, True, row["finish_reason"] == "length")
        assert not list(remarks(shape, marked, row, family, True))


def _peak_bytes(num_rows: int) -> int:
    with _site(num_rows, 1000 * num_rows) as (site, family, judge), _quiet():
        job = site.job("validate")
        tracemalloc.start()
        validate(job, family, judge, Nobody())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


@contextmanager
def _site(num_rows: int, num_tokens: int) -> Iterator[tuple[Site, Family, Judge]]:
    """A dataset of a target of Kimi's family, prepared and answered."""
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        site = Site(Path(home), num_prompts=0)
        target = KIMI.save(Path(home) / "target")
        config = orjson.loads((target / "config.json").read_bytes())
        (target / "config.json").write_bytes(orjson.dumps({**config, "vocab_size": VOCABULARY}))
        tokenizer = template.load_tokenizer(target)
        family = template.family(target, tokenizer)
        spelling = toolcalls.learn(tokenizer, family)
        judge = Judge(family, spelling, lambda ids: template.decode(tokenizer, ids))
        call = template.encode(tokenizer, template.called(tokenizer))
        begin = next(i for i, token in enumerate(call) if token in family.tool_ids)
        _fill(site, family, call[begin:-1], num_rows, num_tokens)
        yield site, family, judge


def _fill(site: Site, family: Family, call: list[int], num_rows: int, num_tokens: int) -> None:
    dice = np.random.default_rng(0)
    lengths = dice.lognormal(0, 1, num_rows)
    lengths = np.maximum(64, lengths * num_tokens / lengths.sum()).astype(int)
    close, stop = family.think_close, min(family.stop_ids)
    assert close is not None

    def text(number: int) -> list[int]:
        # Low ids are frequent, as in text; those of the tiny tokenizer's control tokens are not.
        drawn = VOCABULARY * dice.random(number) ** 3
        ids: list[int] = np.maximum(drawn.astype(int), 400).tolist()
        return ids

    tools = [{"type": "function", "function": {"name": template.PROBE_CALL[0]}}]
    message = {"role": "user", "content": "?" * 4 * PROMPT_TOKENS}
    prepared = site.prepared
    with (
        Appender(prepared.prompts) as prompts,
        Appender(prepared.prompt_ids) as prompt_ids,
        Appender(prepared.responses) as responses,
    ):
        for i, length in enumerate(lengths.tolist()):
            ending = call if i % CALLS_EVERY == 0 else text(len(call))
            body = text(length - 2 - len(call))
            half = len(body) // 2
            ids = [*body[:half], close, *body[half:], *ending, stop]
            sample = {"sample_id": _sample_id(i)}
            counts = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(ids)}
            responses.append({**sample, "output_ids": ids, **counts, "finish_reason": "stop"})
            prompts.append({**sample, "messages": [message], "tools": tools})
            prompt_ids.append({**sample, "input_ids": text(PROMPT_TOKENS)})
    record = {prepared.prompt_ids.name: file_record(prepared.prompt_ids)}
    sections = {
        "prepare": {"identity": target_identity(site.recipe), "files": record},
        "generate": {"identity": generation_identity(site.recipe)},
    }
    write_json(prepared.manifest, sections)


def _sample_id(number: int) -> str:
    return f"{DATASET}-{number:04d}"


@contextmanager
def _one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _quiet() -> Iterator[None]:
    """Standard output is for results."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
