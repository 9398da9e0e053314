"""The stored answers of one dataset while it is being generated: files, and the counts over them.

Opening mends what a killed job left, counts what is there and finds what is still to do, so that in
memory and on disk stands the same at any moment.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drafter import rewrite
from drafter.engines.outcomes import MAX_RUNS, RULES, Kind, Outcome, failure_fault
from drafter.files import count_lines
from drafter.generation.budget import Budget, killed_in_flight
from drafter.generation.canary import Alarm, Canary
from drafter.jsonl import Appender, Line, damage, row_at, rows, tail
from drafter.layout import Prepared
from drafter.rows import key_fault

_GIVEN_OUT = -1
"""In place of the index of its row: a prompt that is not to be given out again."""


class Tainted(Exception):
    """The canary alarmed: the files must be closed before its rows can be moved."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(alarm.reason)
        self.alarm = alarm


class Responses:
    """Appends to raw_responses.jsonl and failed.jsonl; one object, one writer.

    Final failures are held back until a success shows that the engine was not to blame: an engine
    that answers 400 to everything must not have every prompt marked as failed for good. Those that
    no success followed, and those that are not final, are held back to the end: each counts once
    per run, and not when the run breaks off.
    """

    def __init__(
        self,
        prepared: Prepared,
        budget: Budget,
        canary: Canary,
        max_samples: int | None,
        max_rows: int | None = None,
    ) -> None:
        """``max_rows``: of a pilot, which stores no more rows than these, earlier ones included."""
        self.budget = budget
        self.max_rows = max_rows
        self.num_stored = 0
        self.num_new = self.num_new_tokens = 0
        self.streak = 0
        """Prompts that ended without a row since the last that gave one; of those that failed
        before, which say nothing about the engine, only the ones that it refuses for good now."""
        self.unsettled: dict[str, Kind] = {}
        """By sample id, what this run could not answer and the next one may."""
        self._prompt_ids = prepared.prompt_ids
        num_prompts = count_lines(prepared.prompt_ids)
        self.num_prompts = num_prompts if max_samples is None else min(num_prompts, max_samples)
        self._canary = canary
        self._held: list[dict[str, Any]] = []
        self._num_failed = Counter[str]()
        self._later: dict[str, dict[str, Any]] = {}
        with ExitStack() as files:
            self._rows = files.enter_context(Appender(prepared.responses))
            self._failed = files.enter_context(Appender(prepared.failed))
            self.num_torn = sum(bool(file.torn_bytes) for file in (self._rows, self._failed))
            self._todo = self._find_todo(prepared, self._count_failures(prepared))
            self._first = next(self._todo, None)
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    @property
    def end(self) -> int:
        """Bytes of raw_responses.jsonl."""
        return self._rows.end

    @property
    def budget_met(self) -> bool:
        budget = self.budget
        return budget.budget is not None and budget.tokens >= budget.budget

    @property
    def rows_met(self) -> bool:
        return self.max_rows is not None and self.num_stored >= self.max_rows

    @property
    def num_wanted(self) -> int:
        """Rows that all prompts together would give, as far as this run goes."""
        return self.num_prompts if self.max_rows is None else min(self.num_prompts, self.max_rows)

    def admits(self, now: float) -> bool:
        """May another prompt be sent?"""
        coming = self.num_stored + self.budget.in_flight
        return (self.max_rows is None or coming < self.max_rows) and self.budget.admits(now)

    @property
    def num_doubtful(self) -> int:
        """Prompts refused for good since the last row: by an engine that may be to blame."""
        return sum(_doubtful(failure) for failure in self._held)

    def has_prompts(self) -> bool:
        """Is there a prompt without an answer?"""
        return self._first is not None

    def next_prompt(self) -> tuple[str, list[int]] | None:
        """(sample_id, prompt ids) of the next prompt without an answer, in prompt order."""
        prompt = self._first
        self._first = next(self._todo, None)
        return prompt

    def store(self, row: dict[str, Any], now: float) -> None:
        """Raises Tainted when the window of the canary has gone bad; the row is stored then too."""
        offset = self._rows.append(row)
        self.budget.finish(row["sample_id"], row["completion_tokens"], now)
        self.num_stored += 1
        self.num_new += 1
        self.num_new_tokens += row["completion_tokens"]
        self._later.pop(row["sample_id"], None)
        self._write_held()
        if alarm := self._canary.see(row, offset):
            raise Tainted(alarm)

    def fail(self, sample_id: str, outcome: Outcome) -> None:
        self.budget.fail(sample_id)
        failure = {"sample_id": sample_id, "class": outcome.kind, "reason": outcome.reason}
        if RULES[outcome.kind].final:
            self.streak += _doubtful(failure)
            self._later.pop(sample_id, None)
            self._held.append(failure)
        else:
            self.streak += sample_id not in self._later and sample_id not in self._num_failed
            self._later[sample_id] = failure

    def ask_again(self) -> bool:
        """Give out once more what failed, but not for good. Is there any?"""
        self._todo = _among(self._prompt_ids, self.num_prompts, set(self._later))
        self._first = next(self._todo, None)
        return self.has_prompts()

    def settle(self) -> None:
        """The run is over: write down every failure, and which of them the next run asks."""
        for failure in self._held:
            if _doubtful(failure):
                self._later[failure["sample_id"]] = {**failure, "final": False}
            else:
                self._failed.append(failure)
        self._held.clear()
        for sample_id, failure in self._later.items():
            self._failed.append(failure)
            self._num_failed[sample_id] += 1
            if self._num_failed[sample_id] < MAX_RUNS:
                self.unsettled[sample_id] = failure["class"]
        self._later.clear()

    def _write_held(self) -> None:
        for failure in self._held:
            self._failed.append(failure)
        self._held.clear()
        self.streak = 0

    def sync(self) -> None:
        self._rows.sync()

    def _count_failures(self, prepared: Prepared) -> set[str]:
        """Gives the prompts that have failed for good."""
        given_up: set[str] = set()
        for failure in _failures(prepared):
            sample_id = failure["sample_id"]
            self._num_failed[sample_id] += 1
            final = RULES[failure["class"]].final and failure.get("final", True)
            if final or self._num_failed[sample_id] >= MAX_RUNS:
                given_up.add(sample_id)
        return given_up

    def _find_todo(self, prepared: Prepared, given_up: set[str]) -> Iterator[tuple[str, list[int]]]:
        """Read what is stored, and the prompts up to the last one answered; gives those to send:
        first the holes between answered ones, then the rest."""
        known, tokens, session_starts = self._count(prepared)
        positions = array("i", [-1]) * len(tokens)
        prompts = islice(rows(prepared.prompt_ids), self.num_prompts)
        holes: dict[int, tuple[str, int]] = {}
        num_left = len(known)
        position = 0
        """In the order of sending: prompts that are never sent have none."""
        for line in prompts if num_left else ():
            sample_id = line.value["sample_id"]
            index = known.get(sample_id)
            known[sample_id] = _GIVEN_OUT
            if index == _GIVEN_OUT or (index is None and line.value.get("retired")):
                continue
            if index is None:
                holes[position] = sample_id, line.offset
            else:
                positions[index] = position
                num_left -= 1
            position += 1
            if not num_left:
                break
        for position, written in killed_in_flight(positions, tokens, session_starts).items():
            sample_id, _ = holes[position]
            if sample_id not in self._num_failed:
                self.budget.killed(sample_id, written)
        offsets = [offset for sample_id, offset in holes.values() if sample_id not in given_up]
        known.update(dict.fromkeys(given_up, _GIVEN_OUT))
        return chain(_at(prepared.prompt_ids, offsets), _not_in(known, prompts))

    def _count(self, prepared: Prepared) -> tuple[dict[str, int], array[int], list[int]]:
        """Read every stored row; gives {sample id: index of the row}, their tokens and the indices
        that sessions began at. The canary sees the last rows again."""
        path = prepared.responses
        known: dict[str, int] = {}
        tokens = array("q")
        session_starts = [0]
        offsets = deque(_session_offsets(prepared, self.end))
        watched = tail(path, self._canary.lookback)
        alarm: Alarm | None = None
        for line in rows(path):
            while offsets and offsets[0] <= line.offset:
                offsets.popleft()
                session_starts.append(len(tokens))
            sample_id, num_tokens = _key_facts(path, line)
            known[sample_id] = len(tokens)
            tokens.append(num_tokens)
            if line.offset >= watched and not alarm:
                alarm = self._canary.see(line.value, line.offset)
        if alarm:
            raise Tainted(alarm)
        self.budget.found(tokens)
        self.num_stored = len(tokens)
        return known, tokens, session_starts


def count_failures(prepared: Prepared) -> dict[str, int]:
    """{class: prompts} whose last word is a failure."""
    last = {failure["sample_id"]: failure["class"] for failure in _failures(prepared)}
    if last:
        for line in rows(prepared.responses):
            last.pop(line.value["sample_id"], None)
    return dict(sorted(Counter(last.values()).items()))


def _doubtful(failure: dict[str, Any]) -> bool:
    """May the engine be to blame for a final failure? An over-long prompt says nothing of it."""
    return bool(failure["class"] != "prompt too long")


def _failures(prepared: Prepared) -> Iterator[dict[str, Any]]:
    for line in rows(prepared.failed):
        if fault := failure_fault(line.value):
            raise damage(prepared.failed, line._replace(fault=fault))
        yield line.value


def _session_offsets(prepared: Prepared, size: int) -> list[int]:
    """Where in ``size`` bytes of responses each session begins."""
    starts = [event.offset for event in rewrite.events(prepared) if event.is_start]
    return rewrite.true_offsets(starts, size)


def _key_facts(path: Path, line: Line) -> tuple[str, int]:
    """sample_id and completion_tokens of a stored row; the rest is for validate to judge."""
    if fault := key_fault(line.value):
        raise damage(path, line._replace(fault=fault))
    return line.value["sample_id"], line.value["completion_tokens"]


def _among(prompt_ids: Path, num_prompts: int, wanted: set[str]) -> Iterator[tuple[str, list[int]]]:
    for line in islice(rows(prompt_ids), num_prompts):
        if line.value["sample_id"] in wanted:
            yield line.value["sample_id"], line.value["input_ids"]


def _at(prompt_ids: Path, offsets: list[int]) -> Iterator[tuple[str, list[int]]]:
    for offset in offsets:
        prompt = row_at(prompt_ids, offset)
        yield prompt["sample_id"], prompt["input_ids"]


def _not_in(known: dict[str, int], prompts: Iterator[Line]) -> Iterator[tuple[str, list[int]]]:
    for line in prompts:
        sample_id = line.value["sample_id"]
        if sample_id not in known:
            known[sample_id] = _GIVEN_OUT
            if line.value.get("retired"):
                continue
            yield sample_id, line.value["input_ids"]
