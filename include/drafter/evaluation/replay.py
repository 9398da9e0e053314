"""Acceptance length without an engine: draft, accept a tokens, go a + 1 further.

The rows are the target's own greedy answers, so a drafted token is accepted exactly when it is the
row's next one. After prefill the target has written the first token. Each verification then drafts
``draft_tokens`` tokens, accepts the leading ones that are right, and adds one of the target's own.
Acceptance length = tokens so written / verifications: 1 when nothing is ever accepted, at most
``draft_tokens`` + 1.

In an engine a draft sees true states for what is verified and its own states for what it has
drafted, whose keys are dropped afterwards. So the draft from a position depends on nothing but the
row, and the drafts from *all* positions of many rows are made at once, as in training but reading
the drafter's own tokens; the walk then picks those that an engine would have made.

Letters: K = drafted tokens, Q = starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.extraction.shards import Row
from drafter.training.alignment import align, num_starts, packed
from drafter.training.model import Drafter

_BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Tally:
    """What a replay counted; tallies of several datasets add up."""

    generated: int = 0
    """Tokens written after the first of each row."""

    verifications: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.generated + other.generated, self.verifications + other.verifications)

    def as_json(self) -> dict[str, int]:
        return asdict(self)

    @property
    def acceptance_length(self) -> float | None:
        return self.generated / self.verifications if self.verifications else None


def replay(
    drafter: Drafter, rows: Sequence[Row], draft_tokens: int, *, states: bool = True
) -> Tally:
    """Replay greedy rows with a drafter; ``states=False`` shows it zeros for the target's states.

    Rows in which no draft starts count nothing.
    """
    total = Tally()
    drafted_in = [row for row in rows if num_starts(len(row.input_ids_T), row.prompt_tokens)]
    for batch_rows in packed(drafted_in, _BATCH_TOKENS):
        batch = align(batch_rows).to(drafter.d2t.device, drafter.fc.weight.dtype)
        if not states:
            batch = batch.without_states()
        draft_ids = drafter.draft_ids
        drafted = []
        with torch.inference_mode():
            unroll = drafter.unroll(batch)
            state = unroll.first()
            for _ in range(draft_tokens - 1):
                drafted.append(draft_ids[drafter.logits(state).argmax(-1)])
                state = unroll.next(drafted[-1])
            drafted.append(draft_ids[drafter.logits(state).argmax(-1)])
        total += tally(torch.stack(drafted), batch.next_Q, batch.left_Q)
    return total


def overall(evaluations: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Acceptance lengths by drafter over the ``sums`` of several evaluations.

    Every verification counts the same. None where one of them lacks that drafter.
    """
    lengths: dict[str, float | None] = {}
    for name in evaluations[0]["sums"]:
        sums = [evaluation["sums"][name] for evaluation in evaluations]
        complete = None not in sums
        total = sum((Tally(**each) for each in sums), Tally()) if complete else Tally()
        lengths[name] = total.acceptance_length
    return lengths


def tally(drafted_KQ: Tensor, next_Q: Tensor, left_Q: Tensor) -> Tally:
    """Walk along rows given what would be drafted from each start (alignment.Batch's arrays)."""
    right = torch.stack(
        [(ids == next_Q.roll(-step)) & (left_Q > step) for step, ids in enumerate(drafted_KQ)]
    )
    accepted = right.long().cumprod(0).sum(0).tolist()
    left = left_Q.tolist()
    start = verifications = 0
    while start < len(left):
        verifications += 1
        start += min(accepted[start] + 1, left[start])
    return Tally(len(left), verifications)
