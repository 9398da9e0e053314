"""The draft vocabulary: which target tokens a drafter can propose, and the two maps between them.

d2t int64 [D] holds *offsets*: the target id of draft id i is i + d2t[i]. t2d bool [V] marks the
target ids that have one. Draft ids are in ascending order of target id, so either map determines
the other; that redundancy is checked wherever a map is read, because a wrong one loads without an
error and only shows as a drafter that is never right. Source: checkpoints of SafeAILab, SpecForge
and speculators, as SGLang and vLLM read them.

Letters: D = draft vocabulary, V = target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from drafter.errors import DataError
from drafter.files import read_json


def token_counts(responses: Iterable[Tensor], vocab_size: int) -> Tensor:
    """int64 [V]: how often the target wrote each token. DataError on an id outside V."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in responses:
        seen = torch.bincount(ids, minlength=vocab_size)
        if len(seen) > vocab_size:
            raise DataError(
                f"a response holds token {len(seen) - 1}, but the target has {vocab_size}: the "
                "states belong to another model, extract them anew"
            )
        counts += seen
    return counts


def select(counts: Tensor, size: int, control_ids: Iterable[int]) -> tuple[Tensor, Tensor]:
    """The ``size`` most frequent ids (all of them when V is smaller) as (d2t [D], t2d [V]).

    Control tokens that were seen come first whatever their count: ends and tool markers are rare,
    and a drafter that cannot say them stops short at every one. Ties go to the lower id.
    """
    size = min(size, len(counts))
    rank = counts.clone()
    for token in control_ids:
        if token < len(counts) and counts[token]:
            rank[token] = torch.iinfo(torch.int64).max
    chosen = rank.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(size), t2d


def check(d2t: Tensor, t2d: Tensor, origin: str) -> None:
    """Raise DataError naming ``origin`` unless the maps are one order-keeping bijection."""
    target = d2t + torch.arange(len(d2t))
    marked = t2d.nonzero().flatten()
    if not torch.equal(target, marked):
        raise DataError(
            f"{origin}: d2t names {len(target)} target ids and t2d marks {len(marked)}, not the "
            "same in ascending order: d2t must hold offsets (target id minus draft id), restore it"
        )


def control_ids(target_dir: Path) -> list[int]:
    """Ids that the target's tokenizer lists as added tokens, ascending; may be none."""
    ids: set[int] = set()
    if (fast := target_dir / "tokenizer.json").exists():
        ids |= {token["id"] for token in read_json(fast).get("added_tokens", [])}
    if (slow := target_dir / "tokenizer_config.json").exists():
        ids |= {int(token) for token in read_json(slow).get("added_tokens_decoder", {})}
    return sorted(ids)
