"""One row of a corpus, wherever it lies: in a shard with its states, or as tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from drafter.extraction.shard_plan import RowIndex, Sample
from drafter.extraction.shards import Row, Shard, read_shard


class Entry(Protocol):
    """One row: how long it is, and its ids."""

    @property
    def sample_id(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    def input_ids(self) -> Tensor:
        """int64 [tokens]: prompt, then response."""


@dataclass(frozen=True)
class Stored:
    """A row in a shard, with its states."""

    sample_id: str
    shard: Shard
    """Mapped from its file: a row costs memory while it is used."""
    index: int
    tokens: int
    prompt_tokens: int

    def read(self) -> Row:
        return self.shard.row(self.index)

    def input_ids(self) -> Tensor:
        return self.read().input_ids_T


@dataclass(frozen=True)
class Tokenized:
    """A row in a tokenized_data.jsonl: its states are made when they are needed."""

    sample_id: str
    rows: RowIndex
    row: int
    tokens: int
    prompt_tokens: int

    def sample(self) -> Sample:
        return self.rows.sample(self.row)

    def input_ids(self) -> Tensor:
        return torch.tensor(self.sample().input_ids)


def stored_entries(path: Path) -> list[Stored]:
    """All rows of a shard. Raises DataError as read_shard does."""
    shard = read_shard(path)
    lengths = shard.offsets_N1.diff().tolist()
    prompts = shard.prompt_tokens_N.tolist()
    columns = zip(shard.header.sample_ids, lengths, prompts, strict=True)
    return [
        Stored(sample_id, shard, index, tokens, prompt)
        for index, (sample_id, tokens, prompt) in enumerate(columns)
    ]
