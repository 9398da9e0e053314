"""Sets lines aside that no kill of ours produces, when a person says so.

A line of an append-only file is damaged when it is no JSON object, lacks what every reader needs,
or repeats a sample id (the first one stays). It moves to ``<name>.damaged``, bytes as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from drafter import jsonl, rewrite
from drafter.engines.outcomes import failure_fault
from drafter.files import whole_file
from drafter.layout import Prepared, Workspace
from drafter.rewrite import Span, session_fault
from drafter.rows import key_fault
from drafter.sources.prompt import prompt_fault
from drafter.terminal import one_line

LISTED = 20
"""Lines of one file that a person is shown; the rest is a count."""

_SHOWN_BYTES = 60

Check = Callable[[dict[str, Any]], str | None]


class Damage(NamedTuple):
    """One line that would be set aside."""

    path: Path
    number: int
    """From 1."""

    span: Span
    reason: str


def examine(workspace: Workspace, prepared: Prepared) -> Iterator[Damage]:
    """Every damaged line of a dataset's append-only files and of prompts.jsonl; changes nothing.

    A torn last line is no damage: the next job sets it aside.
    """
    for path, check in _checks(workspace, prepared):
        for line in jsonl.scan(path):
            if line.torn:
                break
            fault = jsonl.fault(line) or check(line.value)
            if fault:
                yield Damage(path, line.number, (line.offset, line.num_bytes), fault)


def set_aside(prepared: Prepared, found: list[Damage]) -> None:
    """Move the damaged lines: a copy first, then whole new files. The caller holds the lock.

    Killed in between, the next call moves what is left and copies some lines twice.
    """
    spans: dict[Path, list[Span]] = defaultdict(list)
    for damage in found:
        spans[damage.path].append(damage.span)
    for path, cut in spans.items():
        jsonl.set_aside(path, cut, damaged(path))
    apart = {path: cut for path, cut in spans.items() if path.parent != prepared.root}
    for path, cut in apart.items():
        with whole_file(path) as partial:
            rewrite.copy_without(path, cut, partial)
    rewrite.take_out(prepared, {p: cut for p, cut in spans.items() if p not in apart})


def damaged(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def report(found: list[Damage]) -> Iterator[str]:
    """``file:line  reason  first bytes``, and how many more there are of each file."""
    by_path: dict[Path, list[Damage]] = defaultdict(list)
    for damage in found:
        by_path[damage.path].append(damage)
    for path, lines in by_path.items():
        for damage in lines[:LISTED]:
            yield f"{path}:{damage.number}  {one_line(damage.reason)}  {_first_bytes(damage)}"
        if len(lines) > LISTED:
            yield f"{path}: and {len(lines) - LISTED:,} more lines"


def counts(found: list[Damage]) -> str:
    numbers: dict[Path, int] = defaultdict(int)
    for damage in found:
        numbers[damage.path] += 1
    return ", ".join(f"{number:,} of {path.name}" for path, number in numbers.items())


def _first_bytes(damage: Damage) -> str:
    offset, num_bytes = damage.span
    with open(damage.path, "rb") as file:
        file.seek(offset)
        first = file.read(min(num_bytes, _SHOWN_BYTES)).removesuffix(b"\n")
    more = "..." if num_bytes > _SHOWN_BYTES else ""
    return one_line(first.decode(errors="backslashreplace")) + more


def _checks(workspace: Workspace, prepared: Prepared) -> Iterator[tuple[Path, Check]]:
    yield prepared.prompts, _once(prompt_fault)
    yield prepared.responses, _once(key_fault)
    yield prepared.failed, failure_fault
    yield prepared.sessions, session_fault
    for run in workspace.drafters():
        yield run.greedy(prepared.root.name), _greedy_fault


def _once(check: Check) -> Check:
    """``check``, and no sample id twice."""
    seen: set[str] = set()

    def check_once(row: dict[str, Any]) -> str | None:
        fault = check(row)
        if fault is None and row["sample_id"] in seen:
            fault = f"sample_id {row['sample_id']} stands there twice"
        if fault is None:
            seen.add(row["sample_id"])
        return fault

    return check_once


def _greedy_fault(row: dict[str, Any]) -> str | None:
    for key, kind in (
        ("sample_id", str),
        ("output_ids", list),
        ("finish_reason", str),
        ("max_new_tokens", int),
    ):
        if type(row.get(key)) is not kind:
            return f"{key} is {row.get(key)!r:.60}, needs {kind.__name__}"
    return None
