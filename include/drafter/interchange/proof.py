"""The gates of extraction, as far as they apply to states that somebody else made.

    every row         of the right shape, finite, varied (drafter.extraction.batch_gates)
    every shard       the states predict the response (gates.check_next_tokens)
    the first row     of the first shard: every layer and the head equal a plain forward of the
                      target, as far as its layers fit in memory (gates.check_reference)

So wrong layers, shifted rows, and a last norm that is missing or applied twice are found before
anything is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drafter.backends.reference import PlainForward
from drafter.extraction import batch_gates, gates
from drafter.extraction.shard_maker import checked_tokens
from drafter.extraction.shard_plan import Sample
from drafter.extraction.shards import DTYPES, Features, Row, Shard
from drafter.target_head import TargetHead, load_head

_CHECKED_TOKENS = 4096
"""Of one shard, whose logits are made: on a CPU all of them would take longer than importing."""
_LOGITS_AT_ONCE = 1 << 28
"""Elements of one block of logits: 1 GiB in float32."""
_NEIGHBOURS = 3


class Proof:
    """Measures shards of states that ``identity`` describes."""

    def __init__(self, target: Path, identity: dict[str, Any]) -> None:
        self._target, self._identity = target, identity
        self._head: TargetHead | None = None

    def measure(self, shard: Shard, min_argmax_share: float, *, is_first: bool) -> dict[str, float]:
        """What the gates measured on ``shard``. DataError when one fails."""
        identity = self._identity
        rows = list(shard.rows())
        samples = [Sample(r.sample_id, r.input_ids_T.tolist(), r.prompt_tokens) for r in rows]
        states = [Features(row.aux_TAD, row.final_TD) for row in rows]
        layers = identity["aux_layers"]
        dtype = DTYPES[identity["dtype"]]
        batch_gates.check_rows(samples, states, layers, identity["hidden_size"], dtype)
        batch_gates.check_values(samples, states, layers)
        head = self._head or self._load_head()
        reference = self._compare(samples, states[0]) if is_first else {}
        checked = checked_tokens(samples, _CHECKED_TOKENS)
        matches = [_matches(row, at, head) for row, at in zip(rows, checked, strict=True)]
        compared = list(map(len, checked))
        gates.check_next_tokens(rows, matches, compared, min_argmax_share, self._on_cpu)
        numbers = {"argmax_matches": sum(matches), "response_tokens": sum(compared)}
        return {**reference, **numbers}

    def _load_head(self) -> TargetHead:
        head = load_head(self._target).reading(self._identity["norm"])
        self._head = head.to("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
        return self._head

    def _on_cpu(self) -> TargetHead:
        return (self._head or self._load_head()).to("cpu", torch.float32)

    def _compare(self, samples: list[Sample], first: Features) -> dict[str, float]:
        """The first of ``samples`` with a plain forward; nothing where there can be none."""
        layers = self._identity["aux_layers"]
        plain = PlainForward(self._target, min(filter(None, layers)))

        def neighbours() -> Iterator[tuple[str, gates.Reference]]:
            for sample in samples[1 : 1 + _NEIGHBOURS]:
                if (other := plain(sample.input_ids)) is not None:
                    yield sample.sample_id, other

        want = plain(samples[0].input_ids)
        if want is None:
            return {}
        name = samples[0].sample_id
        worst = gates.check_reference(name, first, layers, want, self._on_cpu, neighbours())
        return {"reference_error": worst}


def _matches(row: Row, checked: range, head: TargetHead) -> int:
    """How many of the tokens at ``checked`` are the argmax of the state before."""
    if not checked:
        return 0
    before = row.final_TD[checked.start - 1 : checked.stop - 1 : checked.step]
    block = max(1, _LOGITS_AT_ONCE // len(head.lm_head))
    predicted = [
        head.logits(part.to(head.lm_head.device)).argmax(-1).cpu() for part in before.split(block)
    ]
    wanted = row.input_ids_T[checked.start : checked.stop : checked.step]
    return int((torch.cat(predicted) == wanted).sum())
