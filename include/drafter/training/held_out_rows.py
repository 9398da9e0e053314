"""How well a drafter does on rows that it never learns from, while it is trained.

The rows are the same at every look, so the numbers can be compared: some of all datasets, by hash.
Where the recipe spools, only the witness has states: its rows that are held out.
"""

from __future__ import annotations

import hashlib

from drafter.extraction.shards import Row
from drafter.training.corpus import Corpus, is_held_out
from drafter.training.entries import Entry, Stored

_MAX_TOKENS = 65_536
"""Of all rows together: a look costs as much as a few steps."""


def chosen(corpus: Corpus[Entry], share: float) -> list[Row]:
    """Rows with states, of ``_MAX_TOKENS`` together or one longer; none where none is held out."""
    entries = [entry for entry in corpus.held_out if isinstance(entry, Stored)]
    if not entries:
        return [row for row in corpus.witnesses if is_held_out(row.sample_id, share)]
    entries.sort(key=lambda entry: hashlib.sha256(entry.sample_id.encode()).digest())
    rows: list[Row] = []
    room = _MAX_TOKENS
    for entry in entries:
        room -= entry.tokens
        if rows and room < 0:
            break
        rows.append(entry.read())
    return rows
