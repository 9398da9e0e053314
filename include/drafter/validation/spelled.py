"""Finds a control string that is written out in ids as ordinary text, where its id should stand.

An answer that went through text and was encoded again may hold ``</think>`` in any number of
pieces: ``</`` ``think`` ``>``, or ``.</th`` ``ink>\\n``. To decode every answer would take longer
than all else that validate does, so it is learnt once of each id how it begins and ends, and only a
few ids around a place where pieces fit together are decoded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drafter.rows import Family, IdArray

_UNKNOWN = 1 << 31
"""Of an id that was not met before."""


class Spelled:
    """One control string of one family."""

    def __init__(self, text: str, family: Family, decode: Callable[[list[int]], str]) -> None:
        self._text = text
        self._decode = decode
        # Bit k: with this id the first k letters are written; on this id the others go on.
        self._left = np.full(family.vocab_size, _UNKNOWN, dtype=np.uint32)
        self._left[[i for i in family.controls if i < family.vocab_size]] = 0
        self._entered = np.zeros(family.vocab_size, dtype=np.uint32)

    def is_in(self, ids: IdArray) -> bool:
        at = self._left.take(ids).nonzero()[0]
        for token in set(ids[at].tolist()):
            if self._left[token] == _UNKNOWN:
                self._learn(token)
        left = self._left[ids[at]]
        if (left >> len(self._text)).any():
            return True
        # Behind the last id nothing goes on: it counts as followed by itself.
        fits = left & self._entered[ids[np.minimum(at + 1, len(ids) - 1)]]
        return any(self._text in self._around(ids, where) for where in at[fits > 0].tolist())

    def _learn(self, token: int) -> None:
        word, text = self._decode([token]), self._text
        lengths, left, entered = range(1, len(text)), 0, 0
        # Few ids get further than these two questions.
        if text[0] in word:
            left = sum(word.endswith(text[:k]) << k for k in lengths)
            left |= (text in word) << len(text)
        if text[-1] in word or (word and word in text):
            entered = sum(
                (text[k:].startswith(word) or word.startswith(text[k:])) << k for k in lengths
            )
        self._left[token], self._entered[token] = left, entered

    def _around(self, ids: IdArray, at: int) -> str:
        # Each id has one letter of it at least.
        return self._decode(ids[at : at + len(self._text) + 1].tolist())
