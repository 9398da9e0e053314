"""Pairing what the drafter reads with what it must predict. Pure tensor functions.

Six tokens, of which the target wrote the last three::

    position t       0      1      2      3      4      5
    token x[t]       How    far    ?      two    miles  <end>
    written by       user   user   user   target target target

    slot t reads x[t+1] beside the target's aux[t], and predicts x[t+2] as the target did: from
    final[t+1], the state in which the target had just read x[t+1]

    slot 0           reads far      a key for later slots, nothing to predict
    slot 1           reads ?        the same: the target itself writes "two", in prefill
    slot 2           reads two      predicts miles    <- supervised, a draft starts here
    slot 3           reads miles    predicts <end>    <- supervised, a draft starts here
    slot 4           reads <end>    no such slot: nothing is ever drafted after the end

So a slot is supervised when the token it reads was written by the target and a token follows it.
Draft step i of the draft that starts in slot t reads x[t+1+i] beside the drafter's own state and
predicts x[t+2+i]: here the draft of slot 2 has one later step, that of slot 3 has none.

The n-th start of a row reads the n-th written token and is judged by the state at that token. Step
i of a draft is judged like step 0 of the start i places further on, so the arrays of all steps are
one array, shifted: that is why :class:`Batch` holds one array per kind and ``left``.

Letters: T = tokens of a row, S = slots and Q = starts of all rows together, A = aux layers,
H = D = hidden size of the target. Source: EAGLE-3, arXiv:2503.01840, section 3; the supervised set
is what SGLang and vLLM draft in service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafter.extraction.shards import Row


@dataclass(frozen=True)
class Span:
    """Where one row lies: slots begin:end, whose last ones (from ``first`` on) are its starts."""

    begin: int
    first: int
    end: int
    starts: int
    """Where its starts begin among all starts; there are ``end - first`` of them."""


@dataclass(frozen=True)
class Batch:
    """Rows one after another, cut into slots. Rows never see each other."""

    read_S: Tensor
    """int64: token that the slot reads."""
    aux_SAH: Tensor
    """The target's states beside it."""
    position_S: Tensor
    """int64: slot number within the row, from 0."""
    start_Q: Tensor
    """int64: slots in which drafts start."""
    next_Q: Tensor
    """int64: token that follows what step 0 of each start reads. Step 1 reads it."""
    final_QH: Tensor
    """Target state, as stored, that judges step 0 of each start."""
    left_Q: Tensor
    """int64: starts from here to the end of the row; step i is supervised where left > i."""
    spans: tuple[Span, ...]

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On ``device``, states in ``dtype``."""
        # Converted where they arrive: states are stored in half the bytes.
        return Batch(
            read_S=self.read_S.to(device),
            aux_SAH=self.aux_SAH.to(device).to(dtype),
            position_S=self.position_S.to(device),
            start_Q=self.start_Q.to(device),
            next_Q=self.next_Q.to(device),
            final_QH=self.final_QH.to(device).to(dtype),
            left_Q=self.left_Q.to(device),
            spans=self.spans,
        )

    def without_states(self) -> Batch:
        """The same tokens with nothing of the target to see beside them."""
        return replace(self, aux_SAH=torch.zeros_like(self.aux_SAH))


def num_starts(tokens: int, prompt_tokens: int) -> int:
    """Drafts that start in a row: one per written token that another one follows."""
    return max(tokens - prompt_tokens - 1, 0)


def packed(rows: Sequence[Row], batch_tokens: int) -> list[list[Row]]:
    """In order, in batches of at most so many tokens or one longer row."""
    batches: list[list[Row]] = []
    room = 0
    for row in rows:
        if not batches or len(row.input_ids_T) > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(row)
        room -= len(row.input_ids_T)
    return batches


def align(rows: Sequence[Row]) -> Batch:
    """Cut rows into slots.

    Raises ValueError when a row's states are not one per token (they came from other tokens), when
    it has no prompt, or when no draft starts in it.
    """
    spans: list[Span] = []
    slots = starts = 0
    for row in rows:
        _check(row)
        count = num_starts(len(row.input_ids_T), row.prompt_tokens)
        begin, slots = slots, slots + len(row.input_ids_T) - 2
        spans.append(Span(begin=begin, first=slots - count, end=slots, starts=starts))
        starts += count
    return Batch(
        read_S=torch.cat([row.input_ids_T[1:-1] for row in rows]),
        aux_SAH=torch.cat([row.aux_TAD[:-2] for row in rows]),
        position_S=torch.cat([torch.arange(span.end - span.begin) for span in spans]),
        start_Q=torch.cat([torch.arange(span.first, span.end) for span in spans]),
        next_Q=torch.cat([row.input_ids_T[row.prompt_tokens + 1 :] for row in rows]),
        final_QH=torch.cat([row.final_TD[row.prompt_tokens : -1] for row in rows]),
        left_Q=torch.cat([torch.arange(span.end - span.first, 0, -1) for span in spans]),
        spans=tuple(spans),
    )


def _check(row: Row) -> None:
    lengths = len(row.input_ids_T), len(row.aux_TAD), len(row.final_TD)
    if len(set(lengths)) != 1:
        raise ValueError(
            f"{row.sample_id}: one length expected, got input_ids {lengths[0]}, aux {lengths[1]}, "
            f"final {lengths[2]}: the states came from other tokens"
        )
    if row.prompt_tokens < 1 or num_starts(lengths[0], row.prompt_tokens) == 0:
        raise ValueError(
            f"{row.sample_id}: {lengths[0]} tokens of which {row.prompt_tokens} are the prompt's; "
            "a draft needs a prompt and two written tokens"
        )
