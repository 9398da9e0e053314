"""What a table of n-grams would accept: the baseline that a drafter must beat to be worth its GPU.

For each order, the most frequent next token after every context of that many tokens in the training
rows' responses; drafting is greedy lookup, and a context never seen ends the draft.

Contexts are compared by a 64-bit hash: at 80 million tokens two contexts share one with a
probability below one in a thousand. Letters: N = tokens, K = drafted tokens, Q = starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from drafter.evaluation.replay import Tally, tally
from drafter.training.alignment import num_starts

ORDERS = (1, 2, 3, 4)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, bits well mixed: 2**64 divided by the golden ratio."""
_NONE = -1
"""Stands before the first token of a row, and for "nothing to propose"."""

Ids = NDArray[np.int64]
Response = tuple[Ids, int]
"""Token ids of a row, and how many of them are the prompt's."""


@dataclass(frozen=True)
class Table:
    """Next token by context of ``order`` tokens."""

    order: int
    contexts: NDArray[np.uint64]
    """Hashes, ascending."""
    tokens: Ids

    def lookup(self, contexts: NDArray[np.uint64]) -> Ids:
        """The token to propose after each context; -1 after one never seen."""
        place = np.searchsorted(self.contexts, contexts).clip(max=len(self.contexts) - 1)
        return np.where(self.contexts[place] == contexts, self.tokens[place], _NONE)


def fit(responses: Sequence[Response], order: int) -> Table:
    """Count what the target wrote after each context. Ties go to the lower token id."""
    contexts = np.concatenate(
        [_hashes(_windows(ids, prompt, len(ids), order)) for ids, prompt in responses]
    )
    tokens = np.concatenate([ids[prompt:] for ids, prompt in responses])
    by_pair = np.lexsort((tokens, contexts))
    contexts, tokens = contexts[by_pair], tokens[by_pair]
    new = np.ones(len(tokens), dtype=bool)
    new[1:] = (contexts[1:] != contexts[:-1]) | (tokens[1:] != tokens[:-1])
    begin = np.flatnonzero(new)
    counts = np.diff(begin, append=len(tokens))
    contexts, tokens = contexts[begin], tokens[begin]
    best = np.lexsort((tokens, -counts, contexts))
    contexts, tokens = contexts[best], tokens[best]
    first = np.ones(len(tokens), dtype=bool)
    first[1:] = contexts[1:] != contexts[:-1]
    return Table(order, contexts[first], tokens[first])


def replay(table: Table, rows: Sequence[Response], draft_tokens: int) -> Tally:
    """Replay greedy rows, drafting from a table."""
    rows = [(ids, prompt) for ids, prompt in rows if num_starts(len(ids), prompt)]
    if not rows:
        return Tally()
    windows = np.concatenate(
        [_windows(ids, prompt + 1, len(ids), table.order) for ids, prompt in rows]
    )
    drafted = []
    for _ in range(draft_tokens):
        drafted.append(table.lookup(_hashes(windows)))
        windows = np.concatenate([windows[:, 1:], drafted[-1][:, None]], 1)
    following = np.concatenate([ids[prompt + 1 :] for ids, prompt in rows])
    left = np.concatenate([np.arange(len(ids) - prompt - 1, 0, -1) for ids, prompt in rows])
    return tally(
        torch.from_numpy(np.stack(drafted)), torch.from_numpy(following), torch.from_numpy(left)
    )


def _windows(ids: Ids, begin: int, end: int, order: int) -> Ids:
    """[end - begin, order]: the tokens before each position of begin:end."""
    padded = np.concatenate([np.full(order, _NONE), ids])
    return np.lib.stride_tricks.sliding_window_view(padded, order)[begin:end]


def _hashes(windows: Ids) -> NDArray[np.uint64]:
    """One number per window [N, order]."""
    total = np.zeros(len(windows), dtype=np.uint64)
    for column in windows.T:
        total = (total + column.astype(np.uint64) + np.uint64(2)) * _FACTOR
        total ^= total >> np.uint64(29)
    return total
