"""Answers that went round in a loop, measured on ids: the longest stretch that repeats itself."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from drafter.rows import IdArray

ROUNDS = 3
"""A stretch is a loop when it holds its period so often."""

_KEY_TOKENS = 8
"""By which a period is guessed before it is compared."""

SHORTEST = ROUNDS * _KEY_TOKENS
"""No shorter loop can be looked for."""

_ID_BYTES = 4


class Loop(NamedTuple):
    num_tokens: int
    """Of the whole stretch."""

    period: int
    """Tokens of one round."""

    begin: int


def longest_loop(ids: IdArray, min_tokens: int, min_share: float) -> Loop | None:
    """The longest stretch with ``ids[i] == ids[i + period]`` throughout, if it has at least
    ``min_tokens`` tokens (SHORTEST or more), ``min_share`` of all, and ROUNDS rounds.

    The first third of such a stretch holds one of the positions that are looked at, and the second
    third the same _KEY_TOKENS ids a period later, so a few searches over the bytes find every one:
    in a third of the time that parsing the line took.
    """
    least = max(min_tokens, math.ceil(min_share * len(ids)))
    if len(ids) < least:
        return None
    step = least // ROUNDS
    text = ids.tobytes()
    key, reach = _KEY_TOKENS * _ID_BYTES, len(text) // ROUNDS + _KEY_TOKENS * _ID_BYTES
    best: Loop | None = None
    for begin in range(0, (len(ids) - least + step) * _ID_BYTES, step * _ID_BYTES):
        again = text.find(text[begin : begin + key], begin + 1, begin + reach)
        if again < 0 or (best and begin < (best.begin + best.num_tokens) * _ID_BYTES):
            continue
        period = _period(text, begin, again, step * _ID_BYTES, begin + reach)
        if period:
            found = _extended(ids, begin // _ID_BYTES, period)
            enough = max(least, ROUNDS * period, best.num_tokens + 1 if best else 0)
            if found.num_tokens >= enough:
                best = found
    return best


def _period(text: bytes, begin: int, again: int, num_bytes: int, end: int) -> int | None:
    """The shortest distance in ids at which the ``num_bytes`` from ``begin`` on come again before
    ``end``, where the first of them do at ``again``."""
    key = text[begin : begin + _KEY_TOKENS * _ID_BYTES]
    whole = text[begin : begin + num_bytes]
    while again >= 0:
        if again % _ID_BYTES == 0 and text.startswith(whole, again):
            return (again - begin) // _ID_BYTES
        again = text.find(key, again + 1, end)
    return None


def _extended(ids: IdArray, anchor: int, period: int) -> Loop:
    breaks = np.flatnonzero(ids[period:] != ids[:-period])
    after = int(np.searchsorted(breaks, anchor))
    begin = int(breaks[after - 1]) + 1 if after else 0
    end = (int(breaks[after]) if after < len(breaks) else len(ids) - period) + period
    return Loop(end - begin, period, begin)
