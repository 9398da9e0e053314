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
    wrong = _wrong_kind("d2t", d2t, torch.int64) or _wrong_kind("t2d", t2d, torch.bool)
    if wrong:
        raise DataError(f"{origin}: {wrong}: restore it")
    target = d2t + torch.arange(len(d2t), device=d2t.device)
    marked = t2d.nonzero().flatten()
    if not torch.equal(target, marked):
        raise DataError(
            f"{origin}: d2t names {len(target)} target ids and t2d marks {len(marked)}, not the "
            "same in ascending order: d2t must hold offsets (target id minus draft id), restore it"
        )


def from_others(
    d2t: Tensor, t2d: Tensor | None, vocab_size: int, origin: str
) -> tuple[Tensor, Tensor]:
    """The maps (d2t [D], t2d [V]) of a drafter that was made elsewhere; without t2d it is derived.

    Raises DataError naming ``origin`` unless d2t holds offsets in the order of target ids. One that
    holds target ids is told by t2d, or by rising at every step: offsets do so only in a vocabulary
    without two neighbouring ids.
    """
    wrong = _wrong_kind("d2t", d2t, torch.int64)
    if t2d is not None:
        wrong = wrong or _wrong_kind("t2d", t2d, torch.bool)
        if not wrong and len(t2d) != vocab_size:
            wrong = f"t2d covers {len(t2d)} target ids, the target has {vocab_size}"
    if wrong:
        raise DataError(f"{origin}: {wrong}: take the drafter as its makers published it")
    rises = bool((d2t.diff() > 0).all()) and len(d2t) > 1
    in_range = bool(((d2t >= 0) & (d2t < vocab_size)).all())
    if rises and in_range and (t2d is None or torch.equal(d2t, t2d.nonzero().flatten())):
        found = "without t2d to tell offsets from ids" if t2d is None else "those that t2d marks"
        raise DataError(
            f"{origin}: d2t rises at every step, so it holds target ids ({found}), needed are "
            "offsets: subtract each one's draft id, that is its place"
        )
    target = d2t + torch.arange(len(d2t))
    if bool((target < 0).any() | (target >= vocab_size).any() | (target.diff() <= 0).any()):
        raise DataError(
            f"{origin}: d2t gives target ids from {int(target.min())} to {int(target.max())}, not "
            f"each once, ascending and below {vocab_size}: it is of another target, or damaged"
        )
    derived = torch.zeros(vocab_size, dtype=torch.bool)
    derived[target] = True
    if t2d is not None:
        check(d2t, t2d, origin)
    return d2t, derived


def _wrong_kind(name: str, found: Tensor, dtype: torch.dtype) -> str | None:
    if found.dim() == 1 and len(found) and found.dtype == dtype:
        return None
    kind = str(dtype).removeprefix("torch.")
    return f"{name} is {list(found.shape)} of {found.dtype}, needed is one row of {kind}"


def control_ids(target_dir: Path) -> list[int]:
    """Ids that the target's tokenizer lists as added tokens, ascending; may be none."""
    ids: set[int] = set()
    if (fast := target_dir / "tokenizer.json").exists():
        ids |= {token["id"] for token in read_json(fast).get("added_tokens", [])}
    if (slow := target_dir / "tokenizer_config.json").exists():
        ids |= {int(token) for token in read_json(slow).get("added_tokens_decoder", {})}
    return sorted(ids)
