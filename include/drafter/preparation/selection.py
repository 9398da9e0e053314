"""The prompts that a dataset is asked, of those it keeps: rendered, in order, within its limits.

Rendering a long prompt takes a tenth of a second, so processes share the work. Prompts are decided
on in their order all the same, and few more are rendered than are taken.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from drafter.errors import DataError
from drafter.preparation import conversion, parallel
from drafter.preparation.candidates import Candidates, Tick
from drafter.preparation.likeness import hashes
from drafter.preparation.prompts import Render, Selected, sample_id
from drafter.preparation.row_store import RowStore, json_line
from drafter.preparation.tally import Tally
from drafter.sections import Dataset
from drafter.sources import shortening
from drafter.sources.prompt import Prompt

TOO_LONG = "longer than max_prompt_tokens"

_CHUNK = 32
_ALONE = 256
"""So many prompts are rendered before processes are forked."""


class _Outcome(NamedTuple):
    fault: str | None
    content: int = 0
    """As in the sample id."""

    address: int = 0
    """Of the lines for the two files."""

    is_shortened: bool = False


def select(
    source: Dataset,
    candidates: Candidates,
    max_tokens: int,
    store: RowStore,
    render: Render,
    tally: Tally,
    tick: Tick,
) -> Selected:
    """Render ``candidates`` until ``source.max_samples`` of them are selected; count the others."""
    selected = Selected(source.name)
    shortened = set[int]()
    num_candidates = len(candidates.keys)
    chunks = range(0, num_candidates, _CHUNK)
    wanted = min(num_candidates, source.max_samples or num_candidates)
    processes = parallel.num_processes(len(chunks)) if wanted > _ALONE else 0
    work = functools.partial(_rendered, source, candidates, max_tokens, store, render)
    number = 0
    with closing(
        parallel.spread(work, chunks, processes, begin=store.use, ahead=2 * processes)
    ) as answers:
        for outcome in itertools.chain.from_iterable(outcomes for _, outcomes in answers):
            if len(selected) == source.max_samples:
                tally.dropped["beyond max_samples"] += num_candidates - number
                break
            number += 1
            tick(dataset=source.name, rendered=number, prompts=len(selected))
            if outcome.fault:
                tally.dropped[outcome.fault] += 1
            elif not outcome.is_shortened:
                selected.add(outcome.content, outcome.address)
            elif outcome.content in shortened or _is_in(candidates.contents, outcome.content):
                tally.dropped["duplicate once shortened"] += 1
            else:
                shortened.add(outcome.content)
                selected.add(outcome.content, outcome.address)
    tally.prompts, tally.shortened = len(selected), len(shortened)
    return selected


def _rendered(
    source: Dataset,
    candidates: Candidates,
    max_tokens: int,
    store: RowStore,
    render: Render,
    begin: int,
) -> Iterator[list[_Outcome]]:
    """The outcome of each candidate of the chunk at ``begin``."""
    outcomes = []
    for i in range(begin, min(begin + _CHUNK, len(candidates.keys))):
        part = candidates.part_of[i]
        row = conversion.recall(source, candidates.parts[part], candidates.keys[i], store)
        row["source"]["row"] += candidates.rows_before[part]
        outcomes.append(_outcome(source, row, max_tokens, store, render))
    store.flush()
    yield outcomes


def _outcome(
    source: Dataset, row: dict[str, Any], max_tokens: int, store: RowStore, render: Render
) -> _Outcome:
    prompt = Prompt(row["messages"], row["tools"])
    shorter = None
    try:
        input_ids = render(prompt)
        if len(input_ids) > max_tokens and source.format in shortening.FORMATS:
            shorter = shortening.shortened(prompt, len(input_ids), max_tokens, render)
    except DataError:
        return _Outcome("refused by the template")
    if shorter:
        prompt, input_ids = shorter.prompt, shorter.input_ids
        row["messages"] = prompt.messages
        row["shortened"] = {"elided": shorter.num_elided, "cut": shorter.num_cut}
    elif len(input_ids) > max_tokens:
        return _Outcome(TOO_LONG)
    content = hashes(prompt.content)[0][:8]
    identity = sample_id(source.name, content.hex())
    address = store.append(
        json_line({"sample_id": identity, **row}),
        json_line({"sample_id": identity, "input_ids": input_ids}),
    )
    return _Outcome(None, int.from_bytes(content), address, shorter is not None)


def _is_in(ascending: NDArray[Any], value: int) -> bool:
    place = numpy.searchsorted(ascending, numpy.uint64(value))
    return bool(place < len(ascending) and ascending[place] == value)
