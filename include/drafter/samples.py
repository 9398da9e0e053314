"""Which samples of a dataset a person looks at, and what its files hold of each.

What stands in the files may be torn, damaged, of another shape or without a prompt: it is found as
it is, or counted.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from drafter import jsonl
from drafter.errors import DataError, RecipeError
from drafter.layout import Prepared

SHOWN_BYTES = 2000
"""Of a damaged line."""

_FIRST_KEY = re.compile(rb'\{"sample_id": ?"((?:[^"\\]|\\.)*)"')


class Choice(NamedTuple):
    """Which samples: of one id, at random, or the last ones."""

    sample_id: str | None = None
    random: int | None = None
    last: int = 3
    rejected: bool = False
    """Only those that validate did not accept."""


class Place(NamedTuple):
    """Of a line in raw_responses.jsonl."""

    line: int
    offset: int


@dataclass
class Sample:
    """What the files hold of one sample id; ``row`` and ``line`` are None without a response."""

    sample_id: str
    line: int | None = None
    row: dict[str, Any] | None = None
    damaged: str | None = None
    """The line's beginning, where it holds no object."""

    prompt: dict[str, Any] | None = None
    prompt_ids: list[int] | None = None
    remarks: list[str] = field(default_factory=list)
    """Why it was rejected, or failed."""


def find(prepared: Prepared, choice: Choice) -> tuple[list[Sample], list[str]]:
    """(samples in file order, remarks on the files). RecipeError when there is no such sample."""
    rejected = _rejected(prepared) if prepared.rejected.exists() else {}
    if choice.rejected and not prepared.rejected.exists():
        raise DataError(f"{prepared.rejected} is missing: run validate first")
    places: list[Place] = []
    notes, num_damaged = [], 0
    for line in jsonl.scan(prepared.responses):
        if line.torn:
            notes.append(f"{prepared.responses}:{line.number} is torn, the next job sets it aside")
        elif not isinstance(line.value, dict):
            num_damaged += 1
        elif choice.sample_id in (None, line.value.get("sample_id")) and (
            not choice.rejected or _id(line.value) in rejected
        ):
            places.append(Place(line.number, line.offset))
    if num_damaged:
        notes.append(f"{num_damaged:,} damaged lines: see `drafter repair {prepared.root.name}`")
    samples = read(prepared, _chosen(places, choice))
    if choice.sample_id is not None and not samples:
        samples = [Sample(choice.sample_id)]
        add_prompts(prepared, samples)
    _add_remarks(prepared, samples, rejected)
    if samples and samples[0] == Sample(samples[0].sample_id):
        raise RecipeError(f"no sample {choice.sample_id!r} in {prepared.root}: see prompts.jsonl")
    return samples, notes


def read(prepared: Prepared, places: Iterable[Place]) -> list[Sample]:
    """What stands at ``places``, and the prompts."""
    samples = [_sample(prepared.responses, place) for place in places]
    add_prompts(prepared, samples)
    return samples


def _sample(responses: Path, place: Place) -> Sample:
    with open(responses, "rb") as file:
        file.seek(place.offset)
        raw = file.readline(jsonl.MAX_LINE_BYTES + 1)
    row, _ = jsonl.parse(raw)
    if isinstance(row, dict):
        return Sample(_id(row), place.line, row)
    begin = raw[:SHOWN_BYTES].decode(errors="backslashreplace")
    return Sample(f"line {place.line}", place.line, damaged=begin)


def add_prompts(prepared: Prepared, samples: Sequence[Sample]) -> None:
    wanted = {sample.sample_id for sample in samples}
    prompts = {_id(row): row for row in _rows_of(prepared.prompts, wanted)}
    ids = {_id(row): row.get("input_ids") for row in _rows_of(prepared.prompt_ids, wanted)}
    for sample in samples:
        sample.prompt = prompts.get(sample.sample_id)
        sample.prompt_ids = ids.get(sample.sample_id)


def _rows_of(path: Path, wanted: Collection[str]) -> Iterator[dict[str, Any]]:
    """Objects of these ids. Lines that begin with another one are not parsed: prompts of 20,000
    tokens take longer than all else that a look at some samples does."""
    if not wanted or not path.exists():
        return
    spelled = {orjson.dumps(sample_id)[1:-1] for sample_id in wanted}
    with open(path, "rb") as file:
        while raw := file.readline(jsonl.MAX_LINE_BYTES + 1):
            first = _FIRST_KEY.match(raw)
            # What holds a backslash may be spelled in other ways too.
            if first and first[1] not in spelled and b"\\" not in first[1]:
                continue
            row, _ = jsonl.parse(raw)
            if isinstance(row, dict) and _id(row) in wanted:
                yield row


def _chosen(places: list[Place], choice: Choice) -> Iterable[Place]:
    if choice.sample_id is not None:
        return places
    if choice.random is not None:
        return sorted(random.sample(places, min(choice.random, len(places))))
    return deque(places, maxlen=choice.last)


def _id(row: dict[str, Any]) -> str:
    return str(row.get("sample_id"))


def _rejected(prepared: Prepared) -> dict[str, str]:
    return {
        _id(line.value): str(line.value.get("reason")) for line in jsonl.rows(prepared.rejected)
    }


def _add_remarks(prepared: Prepared, samples: list[Sample], rejected: dict[str, str]) -> None:
    wanted = {sample.sample_id: sample for sample in samples}
    for sample in samples:
        if reason := rejected.get(sample.sample_id):
            sample.remarks.append(f"rejected: {reason}")
    for line in jsonl.scan(prepared.failed):
        failure = line.value
        if isinstance(failure, dict) and (failed := wanted.get(_id(failure))):
            failed.remarks.append(f"failed: {failure.get('class')}, {failure.get('reason')}")
