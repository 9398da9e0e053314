"""The gates of extraction, as far as they apply to states that somebody else made.

    every row         finite, varied, of the right shape (gates.check_form)
    every shard       the states predict the response (gates.check_next_tokens)
    the first row     of the first shard: every layer and the head equal a plain forward of the
                      target, where it fits in memory (gates.check_reference)

So wrong layers, shifted rows, and a last norm that is missing or applied twice are found before
anything is stored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drafter import gates, machine
from drafter.errors import RecipeError
from drafter.shards import DTYPES, Features, Row, Shard
from drafter.target_head import TargetHead, load_head

_LOGITS_AT_ONCE = 1 << 28
"""Elements of one block of logits: 1 GiB in float32."""
_CPU_FLOP, _GPU_FLOP = 2e12, 2e15
"""Of one shard's logits at most, seconds of work: of larger shards some rows are drawn."""
_NEIGHBOURS = 3


class Proof:
    """Measures shards of states that ``identity`` describes."""

    def __init__(self, target: Path, identity: dict[str, Any], vocab_size: int) -> None:
        self._target, self._identity, self._vocab_size = target, identity, vocab_size
        self._head: TargetHead | None = None

    def measure(self, shard: Shard, min_argmax_share: float, *, is_first: bool) -> dict[str, float]:
        """What the gates measured on ``shard``. DataError when one fails."""
        rows = list(shard.rows())
        for row in rows:
            gates.check_form(
                row.sample_id,
                row.input_ids_T.tolist(),
                Features(row.aux_TAD, row.final_TD),
                self._identity["aux_layers"],
                self._identity["hidden_size"],
                DTYPES[self._identity["dtype"]],
            )
        head = self._head or self._load_head()
        reference = self._compare(rows, head.to("cpu", torch.float32)) if is_first else {}
        drawn = self._drawn(shard.header.tokenized_sha256, rows)
        matches = [_matches(row, head) for row in drawn]
        gates.check_next_tokens(
            drawn, matches, min_argmax_share, lambda: head.to("cpu", torch.float32)
        )
        return {
            **reference,
            "argmax_matches": sum(matches),
            "response_tokens": sum(map(gates.response_tokens, drawn)),
        }

    def _load_head(self) -> TargetHead:
        head = load_head(self._target).reading(self._identity["norm"])
        self._head = head.to("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
        return self._head

    def _drawn(self, seed: str, rows: list[Row]) -> list[Row]:
        """Rows in an order drawn by seed, until their logits take as long as they may."""
        flop = _GPU_FLOP if torch.cuda.is_available() else _CPU_FLOP
        room = flop / (2 * self._vocab_size * self._identity["hidden_size"])
        drawn: list[Row] = []
        for row in random.Random(seed).sample(rows, len(rows)):
            if drawn and room <= 0:
                break
            drawn.append(row)
            room -= gates.response_tokens(row)
        return drawn

    def _compare(self, rows: list[Row], head: TargetHead) -> dict[str, float]:
        """The first of ``rows`` with a plain forward; nothing where there can be none."""
        lacking = _lacking(self._target)
        if lacking is not None:
            print(f"no forward of the target to compare with: {lacking}", flush=True)
            return {}
        from drafter.backends.transformers import TransformersBackend

        dtype = DTYPES[self._identity["dtype"]]
        layers = tuple(self._identity["aux_layers"])
        try:
            backend = TransformersBackend(self._target, dtype, layers)
        except RecipeError as error:
            print(f"no forward of the target to compare with: {error}", flush=True)
            return {}

        def reference(row: Row) -> gates.Reference:
            return backend.reference(row.input_ids_T.tolist())

        def neighbours() -> Iterator[tuple[str, gates.Reference]]:
            for row in rows[1 : 1 + _NEIGHBOURS]:
                yield row.sample_id, reference(row)

        first = rows[0]
        got = Features(first.aux_TAD, first.final_TD)
        worst = gates.check_reference(
            first.sample_id, got, layers, reference(first), head, neighbours()
        )
        return {"reference_error": worst}


def _matches(row: Row, head: TargetHead) -> int:
    """Response tokens that are the argmax of the state before them."""
    begin = max(row.prompt_tokens, 1)
    before = row.final_TD[begin - 1 : -1].to(head.lm_head.device)
    block = max(1, _LOGITS_AT_ONCE // len(head.lm_head))
    predicted = [head.logits(part).argmax(-1).cpu() for part in before.split(block)]
    return int((torch.cat(predicted) == row.input_ids_T[begin:]).sum())


def _lacking(target: Path) -> str | None:
    """Why the target cannot be loaded beside what runs already; None when it can."""
    stored_gb = sum(path.stat().st_size for path in target.glob("*.safetensors")) / 1e9
    gpus = torch.cuda.device_count()
    # On a CPU it is computed in float32, and checkpoints are stored in 16 bits.
    needed_gb = stored_gb * (1.1 if gpus else 2.2)
    there_gb = machine.available_gb()
    if gpus:
        there_gb = sum(torch.cuda.mem_get_info(gpu)[0] for gpu in range(gpus)) / 1e9
    if needed_gb <= there_gb:
        return None
    return f"it takes {needed_gb:,.0f} GB of memory, {there_gb:,.0f} are free"
