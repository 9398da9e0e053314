"""Why wrong hidden states are wrong: the fault under which exactly these numbers would come out.

A gate (gates.py) knows only that two tensors differ. Here the alternatives are tried: states a
position late, another layer's, a neighbour's, normed twice. Pure: tensors in, a sentence out.

T = tokens of one row, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from drafter.extraction.shards import Row
from drafter.target_head import TargetHead

UNKNOWN = "none of the known faults fits"
_NORMS = {
    "after": "the last norm is already applied, whoever reads it would norm twice",
    "before": "the last norm is not applied yet, whoever reads it would miss it",
}
"""Where ``final`` really stands, when it does not stand where it is said to."""

_RIGHT_TOKENS = 4
"""Leading tokens that are right by more than chance."""

_EXPLAINED_TOKENS = 256
"""Response tokens on which causes are tried: enough to tell, cheap with any vocabulary."""


class Tolerance(NamedTuple):
    """Relative error |got - want| / |want| of a token's state."""

    typical: float
    """Bound on the median token: a shifted row or another layer moves every token far beyond it."""

    worst: float
    """Bound on every token: a missing or foreign state is near 1; an expert that rounding made a
    mixture model choose differently stays well below."""


class Errors(NamedTuple):
    """Median and largest relative error over the tokens of a row."""

    typical: float
    worst: float

    def within(self, allowed: Tolerance) -> bool:
        return self.typical <= allowed.typical and self.worst <= allowed.worst


class Cause(NamedTuple):
    """A fault, and the two tensors [T, D] that agree when it is the one."""

    text: str
    got: torch.Tensor
    want: torch.Tensor


def errors(got: torch.Tensor, want: torch.Tensor) -> Errors:
    """Over the tokens that both have, wherever the tensors are; infinite without any."""
    error_T = _error(got, want)
    if len(error_T) == 0:
        return Errors(math.inf, math.inf)
    return Errors(float(error_T.median()), float(error_T.max()))


def likely(causes: Iterable[Cause], allowed: Tolerance) -> str:
    """The first cause that fits."""
    fitting = (c.text for c in causes if errors(c.got, c.want).within(allowed))
    return next(fitting, UNKNOWN)


def begins_late(got_TD: torch.Tensor, want_TD: torch.Tensor, allowed: Tolerance) -> str:
    """What is said of a row that is right at first; UNKNOWN where its first tokens are not."""
    right = int((_error(got_TD, want_TD) <= allowed.typical).long().cumprod(0).sum())
    if right < _RIGHT_TOKENS:
        return UNKNOWN
    return (
        f"its first {right} tokens are right and {UNKNOWN} the rest: a second chunk of prefill, a "
        "cached prefix, a window that slides, or positions that begin anew"
    )


def _error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative, of each token that both have."""
    common = min(len(got), len(want))
    wanted = want[:common].to(got.device).float()
    return (got[:common].float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-12)


def shifts(got: torch.Tensor, want: torch.Tensor) -> Iterator[Cause]:
    yield Cause("row off by one, position t holds the state of t - 1", got[1:], want[:-1])
    yield Cause("row off by one, position t holds the state of t + 1", got[:-1], want[1:])


def other_layers(
    got_TD: torch.Tensor, wanted: int, layers: Sequence[torch.Tensor]
) -> Iterator[Cause]:
    """``layers[j]`` is HF ``hidden_states[j]``."""
    for j, layer_TD in enumerate(layers):
        if j != wanted:
            yield Cause(f"layer off by {j - wanted:+d}, it is hidden_states[{j}]", got_TD, layer_TD)


def neighbours_rows(got_TD: torch.Tensor, name: str, other_TD: torch.Tensor) -> Cause:
    return Cause(f"these are the rows of its neighbour {name}", got_TD, other_TD)


def other_side_of_norm(head: TargetHead, final_TD: torch.Tensor, normed_TD: torch.Tensor) -> Cause:
    """``final`` stands before the last norm and is read as if after it, or the other way round."""
    misread = _misread(head)
    return Cause(_NORMS[misread.norm], misread.normed(final_TD), normed_TD)


def other_embedding(got_TD: torch.Tensor, want_TD: torch.Tensor) -> Iterator[Cause]:
    """Layer 0 that belongs to these ids and is no plain copy of their embedding rows."""
    got, want = got_TD.double(), want_TD.double().to(got_TD.device)
    factor = float((got * want).sum() / want.square().sum())
    yield Cause(
        f"the target scales its embeddings by {factor:.4g}, which only a plain forward of it can "
        "confirm: extract where its weights fit into memory",
        got_TD,
        factor * want,
    )
    yield Cause(
        "the engine computes in bfloat16, set extract.dtype to that", got_TD, want_TD.bfloat16()
    )


def unpredicted(row: Row, head: TargetHead, neighbours: Iterable[Row]) -> str:
    """The reading under which ``row.final_TD`` does predict a response."""
    start = max(row.prompt_tokens - 1, 0)
    stop = start + _EXPLAINED_TOKENS
    final_TD, ids_T = row.final_TD[: stop + 2], row.input_ids_T
    read_T = head.logits(final_TD).argmax(-1)
    misread = _misread(head)
    misread_T = misread.logits(final_TD).argmax(-1)
    as_read = _share(read_T[start:], ids_T[start + 1 :])
    shares = {
        "the states are right, but the engine's own logits miss the last norm": as_read,
        _NORMS[misread.norm]: _share(misread_T[start:], ids_T[start + 1 :]),
        "row off by one, position t holds the state of t - 1": _share(
            read_T[start + 1 :], ids_T[start + 1 :]
        ),
        "row off by one, position t holds the state of t + 1": _share(
            read_T[start:], ids_T[start + 2 :]
        ),
    }
    for other in neighbours:
        begin = max(other.prompt_tokens - 1, 0)
        shares[f"these are the rows of its neighbour {other.sample_id}"] = _share(
            read_T[begin:], other.input_ids_T[begin + 1 :]
        )
    best = max(shares, key=lambda cause: shares[cause])
    if shares[best] >= 0.5:
        return f"{best}; so read, {shares[best]:.0%} fit"
    return (
        "no norm, shift or neighbour explains it: an earlier layer was taken as final, or the "
        "responses come from other weights or hotter sampling; check target.revision, then lower "
        "extract.min_argmax_share"
    )


def _misread(head: TargetHead) -> TargetHead:
    """Reads rows as if they stood on the other side of the last norm."""
    return head.reading("before" if head.norm == "after" else "after")


def _share(predicted_T: torch.Tensor, following_T: torch.Tensor) -> float:
    common = min(len(predicted_T), len(following_T))
    if common == 0:
        return 0.0
    return float((predicted_T[:common] == following_T[:common]).float().mean())
