"""Which rows make a shard and a batch, and what that takes on disk: known before any work.

Everything here follows from the lengths of the rows and the recipe, so two runs plan the same and a
killed one can be continued. Memory is two numbers per row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from drafter.errors import DataError, RecipeError
from drafter.jsonl import row_at, rows

_HEADER_BYTES = 4096
_ROW_BYTES = 16 + 64
"""offsets and prompt_tokens, and its sample id in the metadata."""
SPARE = 1.02
"""Room beside the shards themselves: manifests, logs, whole blocks."""
_ALIKE = 0.95
"""A batch ends at a row shorter than this share of its longest: bounds what padding costs ..."""
_FULL = 1 / 16
"""... once it has this share of batch_tokens: passes over few tokens leave a GPU idle."""


class Sample(NamedTuple):
    """One row that the target runs over: prompt, then response."""

    sample_id: str
    input_ids: list[int]
    prompt_tokens: int

    @property
    def first_predicted(self) -> int:
        """Position of the first response token that some state of the row predicts."""
        return max(self.prompt_tokens, 1)


class Rows(Protocol):
    """Rows to extract, by number from 0."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each."""

    def sample(self, row: int) -> Sample: ...


@dataclass(frozen=True)
class RowIndex:
    """Rows of a tokenized_data.jsonl that are extracted: where each begins and its tokens."""

    tokenized: Path
    offsets: array[int]
    lengths: array[int]
    left_out: int
    """Rows longer than ``max_length``."""

    def sample(self, row: int) -> Sample:
        value = row_at(self.tokenized, self.offsets[row])
        return Sample(value["sample_id"], value["input_ids"], value["prompt_tokens"])


def index_rows(tokenized: Path, max_length: int) -> RowIndex:
    """Read the file once. Raises DataError naming file and line of a row that is not one."""
    offsets, lengths = array("q"), array("q")
    left_out = 0
    for line in rows(tokenized):
        ids, prompt_tokens = line.value.get("input_ids"), line.value.get("prompt_tokens")
        if not ids or not isinstance(prompt_tokens, int) or not 0 <= prompt_tokens <= len(ids):
            raise DataError(
                f"{tokenized}:{line.number} has no input_ids with prompt_tokens among them: run "
                "validate again"
            )
        if len(ids) > max_length:
            left_out += 1
            continue
        offsets.append(line.offset)
        lengths.append(len(ids))
    return RowIndex(tokenized, offsets, lengths, left_out)


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Consecutive rows per shard: at most ``shard_tokens`` tokens, or one longer row."""
    shards, start, tokens = [], 0, 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > shard_tokens:
            shards.append(range(start, row))
            start, tokens = row, 0
        tokens += length
    return [*shards, range(start, len(lengths))] if len(lengths) else []


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Rows of each pass, longest first: at most ``batch_tokens`` with padding, or one row."""
    batches: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        batch = batches[-1] if batches else []
        padded = (len(batch) + 1) * width
        unlike = lengths[row] < _ALIKE * width and len(batch) * width >= _FULL * batch_tokens
        if not batch or padded > batch_tokens or unlike:
            batches.append([row])
            width = lengths[row]
        else:
            batch.append(row)
    return batches


@dataclass(frozen=True)
class Footprint:
    """What states of one target take on disk."""

    num_aux: int
    hidden_size: int
    state_bytes: int
    """Per stored number."""

    def bytes(self, shards: int, num_rows: int, tokens: int) -> int:
        per_token = (self.num_aux + 1) * self.hidden_size * self.state_bytes + 8
        return shards * _HEADER_BYTES + num_rows * _ROW_BYTES + tokens * per_token


def check_room(
    dataset: str, lengths: Sequence[int], shards: int, footprint: Footprint, room_bytes: int
) -> int:
    """Bytes that all shards of a dataset will take.

    ``room_bytes`` is what is free plus what the dataset's shards take now. Raises RecipeError with
    the numbers, and the limit that would fit, when it is too little.
    """
    needed_bytes = footprint.bytes(shards, len(lengths), sum(lengths))
    if needed_bytes * SPARE <= room_bytes:
        return needed_bytes
    fitting = fitting_length(lengths, room_bytes / SPARE, footprint)
    remedy = f"set extract.max_length to {fitting}" if fitting >= 2 else "no row would fit"
    raise RecipeError(
        f"{dataset}: hidden states of {sum(lengths):,} tokens need {gib(needed_bytes * SPARE)}, "
        f"the disk has {gib(room_bytes)} for them: {remedy}, train without storing them "
        "(train.spool_shards), extract fewer datasets, or use a larger workspace"
    )


def gib(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**30:,.3g} GiB"


def fitting_length(lengths: Sequence[int], room_bytes: float, footprint: Footprint) -> int:
    """The largest cap on row length under which the rows that stay fit."""
    fitting = tokens = 0
    for count, length in enumerate(sorted(lengths), start=1):
        tokens += length
        if footprint.bytes(count, count, tokens) > room_bytes:
            return min(fitting, length - 1)
        fitting = length
    return fitting
