"""prompts.jsonl and prompt_ids.jsonl of a dataset: in order, only grown once it has responses.

Once there are responses, prompts keep their order: new ids are appended, and vanished ones stay in
prompts.jsonl with ``retired: true``. A retired prompt stays in prompt_ids.jsonl if it has a
response (its paid-for row must remain valid), marked there too, so that it is not answered again
if that row goes; it leaves it if it has none.

Prompts of an adopted workspace (``adopted: true``, see adoption.py) are never retired: they
stay as they are, under the ids they have, and a prompt of the recipe with the same content is taken
to be the same prompt.

A sample id is by the content that the target is asked, so one that prepare shortens has that of the
shorter content: under another cap it is another prompt, and what is paid for stays beside its own.
"""

from __future__ import annotations

import filecmp
import re
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from drafter import files, jsonl
from drafter.files import digest
from drafter.layout import Prepared
from drafter.preparation.row_store import RowStore, json_line
from drafter.sources.prompt import Prompt, prompt_fault

Render = Callable[[Prompt], list[int]]


class Written(NamedTuple):
    retired: int
    adopted: int
    surplus: int
    """Of ``selected``, left out because adopted prompts fill ``max_samples``."""


class Selected:
    """The prompts of a dataset in their order, 16 bytes each: millions fit into memory."""

    def __init__(self, dataset: str) -> None:
        self._pattern = re.compile(re.escape(dataset) + r"-([0-9a-f]{16})")
        self._contents = array("Q")
        self._addresses = array("Q")

    def __len__(self) -> int:
        return len(self._contents)

    def add(self, content: int, address: int) -> None:
        """``content``: the first 8 bytes of its hash, as in the sample id; ``address`` in a row
        store: of its line for prompts.jsonl, and behind it that for prompt_ids.jsonl."""
        self._contents.append(content)
        self._addresses.append(address)

    def left(self) -> Left:
        return Left(self._pattern, self._contents, self._addresses)


class Left:
    """Those of :class:`Selected` that are not taken yet."""

    def __init__(
        self, pattern: re.Pattern[str], contents: array[int], addresses: array[int]
    ) -> None:
        self._pattern = pattern
        self._addresses = addresses
        self._is_taken = bytearray(len(contents))
        by_number = numpy.frombuffer(contents, numpy.uint64)
        self._order = numpy.argsort(by_number)
        self._ascending = by_number[self._order]

    def __len__(self) -> int:
        return self._is_taken.count(0)

    def __iter__(self) -> Iterator[int]:
        """Their addresses, in order."""
        taken = zip(self._addresses, self._is_taken, strict=True)
        return (address for address, is_taken in taken if not is_taken)

    def take(self, sample_id: str) -> int | None:
        """The address of ``sample_id``; None when it was not selected, or is taken."""
        match = self._pattern.fullmatch(sample_id)
        if match is None:
            return None
        content = numpy.uint64(int(match[1], 16))
        place = numpy.searchsorted(self._ascending, content)
        if place == len(self._ascending) or self._ascending[place] != content:
            return None
        index = int(self._order[place])
        if self._is_taken[index]:
            return None
        self._is_taken[index] = 1
        return self._addresses[index]


def sample_id(dataset: str, content_sha256: str) -> str:
    """By the content {messages, tools} as canonical JSON, so that no shuffle or limit moves it."""
    return f"{dataset}-{content_sha256[:16]}"


def write(
    prepared: Prepared,
    selected: Selected,
    store: RowStore,
    render: Render,
    *,
    adopt: bool = False,
    max_samples: int | None = None,
) -> Written:
    """Bring both files up to date, touching neither when its bytes stay.

    With ``adopt`` every prompt that is there is marked as adopted. The caller holds the dataset's
    lock. Raises DataError naming file and line for a damaged prompts.jsonl.
    """
    left = selected.left()
    num_retired = num_adopted = 0
    with (
        _partial(prepared.prompts) as prompts,
        _partial(prepared.prompt_ids) as prompt_ids,
    ):

        def put(address: int) -> None:
            prompt, ids = store.lines(address, 2)
            prompts.write(prompt)
            prompt_ids.write(ids)

        if adopt or has_responses(prepared) or has_adopted(prepared):
            answered = _answered(prepared.responses)
            for line in jsonl.rows(prepared.prompts):
                row = line.value
                if fault := prompt_fault(row):
                    raise jsonl.damage(prepared.prompts, line._replace(fault=fault))
                identity = row["sample_id"]
                if adopt or row.get("adopted"):
                    num_adopted += 1
                    prompt = Prompt(row["messages"], row.get("tools"))
                    left.take(sample_id(prepared.root.name, digest(prompt.content)))
                    prompts.write(json_line({**row, "adopted": True}))
                    prompt_ids.write(
                        json_line({"sample_id": identity, "input_ids": render(prompt)})
                    )
                    continue
                if (address := left.take(identity)) is not None:
                    put(address)
                    continue
                num_retired += 1
                prompts.write(json_line({**row, "retired": True}))
                if identity in answered:
                    ids = render(Prompt(row["messages"], row.get("tools")))
                    kept = {"sample_id": identity, "input_ids": ids, "retired": True}
                    prompt_ids.write(json_line(kept))
        num_left = room = len(left)
        if num_adopted and max_samples is not None:
            room = max(max_samples - num_adopted, 0)
        for address in islice(left, room):
            put(address)
        _replace(prepared.prompts, prompts)
        _replace(prepared.prompt_ids, prompt_ids)
    return Written(num_retired, num_adopted, max(num_left - room, 0))


def has_responses(prepared: Prepared) -> bool:
    return prepared.responses.exists() and prepared.responses.stat().st_size > 0


def has_adopted(prepared: Prepared) -> bool:
    """Adopted prompts stand first and all together."""
    first = next(iter(jsonl.scan(prepared.prompts)), None)
    return first is not None and isinstance(first.value, dict) and bool(first.value.get("adopted"))


def paid(prepared: Prepared) -> NDArray[numpy.uint64]:
    """Hash of the content of every prompt that has an answer, as in its sample id."""
    pattern = re.compile(re.escape(prepared.root.name) + "-([0-9a-f]{16})")
    # Adopted prompts have ids of their own.
    found = (pattern.fullmatch(name) for name in _answered(prepared.responses))
    return numpy.array([int(match[1], 16) for match in found if match], numpy.uint64)


def _answered(responses: Path) -> set[str]:
    """Sample ids with a response. Damaged lines are for generate to complain about."""
    rows = (line.value for line in jsonl.scan(responses))
    return {row["sample_id"] for row in rows if isinstance(row, dict) and "sample_id" in row}


def _partial(path: Path) -> Any:
    """A temporary file beside ``path``, of a name that files.clear_partial knows."""
    return tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")


def _replace(path: Path, new: Any) -> None:
    new.flush()
    if path.exists() and filecmp.cmp(path, new.name, shallow=False):
        return
    new.seek(0)
    with files.whole_file(path) as partial, open(partial, "wb") as file:
        shutil.copyfileobj(new, file)
