"""Hidden states to and from other EAGLE-3 training systems, to the bit.

    specforge     SpecForge 0.2.0: one .ckpt per row, ``final`` AFTER the last norm
    speculators   speculators 0.9.0: an Arrow dataset beside one safetensors file per row, ``final``
                  BEFORE the last norm

Both say with a loss mask what the target wrote. A mask of zeros and then ones is a prompt and its
response; a row with any other mask is left out, never guessed at. ``exporting`` writes a directory
of theirs from our shards, ``importing`` our shards from theirs, past the gates of extraction.

Layer ids are HF ``hidden_states`` indices k, as in shards.py and in speculators. SpecForge
counts outputs of layers: its id i is k = i + 1, its default [1, n//2 - 1, n - 4] is our default
[2, n//2, n - 3].

L = tokens of a row, A = auxiliary layers, H = D = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from drafter.extraction.shards import Row

SAMPLE_IDS = "sample_ids.jsonl"
"""Beside files that have no room for them: row i of the export is line i, a JSON string."""

NO_FILE = "not a regular file"
"""Why a pipe, a socket or a broken link is left out."""

RECORD = "drafter.json"
"""What an exported directory was made of; the other systems do not look at it."""


class Sample(NamedTuple):
    """One row as a foreign file holds it, its shapes not yet believed."""

    sample_id: str
    input_ids_L: torch.Tensor
    loss_mask_L: torch.Tensor
    aux_LAH: torch.Tensor
    final_LH: torch.Tensor


class Found(NamedTuple):
    """One row of a foreign directory."""

    name: str
    """Of its file."""
    sha256: str
    """Of all that was read of it."""
    sample: Sample | str
    """Or why there is none."""


class Source(Protocol):
    """A foreign directory."""

    norm: str
    """Where its ``final`` stands: "before" or "after" the last norm."""

    @property
    def total(self) -> int:
        """Rows, those without states included."""

    def rows(self) -> Iterator[Found]:
        """In a stable order, one in memory. DataError when a file must not be read."""


class Writer(Protocol):
    """A foreign directory being filled."""

    def path(self, index: int) -> Path:
        """The file of row ``index``."""

    def write(self, path: Path, row: Row) -> None:
        """Write one row to ``path``."""

    def finish(self, rows: Iterator[Row]) -> None:
        """Write what covers all rows: ``rows`` are every row once more, states unread."""


def loss_mask(tokens: int, prompt_tokens: int) -> torch.Tensor:
    """int64 [L]: 0 over the prompt, 1 over the response."""
    return (torch.arange(tokens) >= prompt_tokens).to(torch.int64)


def prompt_tokens(mask_L: torch.Tensor) -> int | str:
    """Tokens of the prompt by a loss mask; the reason when it does not say so."""
    ones = int((mask_L == 1).sum())
    prompt = len(mask_L) - ones
    if not bool(((mask_L == 0) | (mask_L == 1)).all()) or bool((mask_L[:prompt] != 0).any()):
        return "loss mask is not one prompt and one response"
    if ones == 0:
        return "loss mask has no response"
    return prompt if prompt else "loss mask has no prompt"
