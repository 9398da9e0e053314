"""Checks that hidden states must pass before they are stored. Pure: tensors in, numbers out.

A drafter trained on misaligned states has a fine loss and is useless when served, so a fault here
is never a warning. A gate that fails raises DataError naming the sample and the likely cause, found
by trying the alternatives: the fault that would have produced exactly these numbers.

    check_form          every row: rows equal tokens, shape, dtype, finite, not constant or repeated
    check_reference     before the first shard: every stored layer equals a plain forward of the
                        target, and the head that training reads gives the target's own logits
    check_alone         every shard: a row computed in a batch equals the same row computed alone,
                        for one drawn row and for the one that predicts its response worst
    check_next_tokens   every shard: lm_head(norm(final[t])) predicts the token that follows

T = tokens of one row, A = auxiliary layers, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from drafter.errors import DataError
from drafter.shards import Features, Row
from drafter.target_head import TargetHead

_DEVIATIONS = 3
"""Standard deviations by which a share may miss its bound: few tokens prove little."""
_EXPLAINED_TOKENS = 256
"""Response tokens on which causes are tried: enough to tell, cheap with any vocabulary."""


class _Tolerance(NamedTuple):
    """Relative error |got - want| / |want| of a token's state."""

    typical: float
    """Bound on the median token: a shifted row or another layer moves every token far beyond it."""

    worst: float
    """Bound on every token: a missing or foreign state is near 1; an expert that rounding made a
    mixture model choose differently stays well below."""


_TOLERANCES = {
    torch.float32: _Tolerance(1e-3, 1e-2),
    torch.bfloat16: _Tolerance(0.05, 0.5),
}


_NORMS = {
    "after": "the last norm is already applied, whoever reads it would norm twice",
    "before": "the last norm is not applied yet, whoever reads it would miss it",
}
"""Where ``final`` really stands, when it does not stand where it is said to."""


@dataclass(frozen=True)
class Reference:
    """One row through the target's plain forward, unpadded and alone."""

    layers: Sequence[torch.Tensor]
    """[T, D] for each id below the number of layers: HF ``hidden_states[k]``."""

    normed_TD: torch.Tensor
    """After the last norm: the last of HF ``hidden_states``."""

    logits_LV: torch.Tensor
    """Of the last L tokens."""


def check_form(
    sample_id: str,
    input_ids: Sequence[int],
    got: Features,
    aux_layers: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
) -> None:
    """One row's states have the right count, shape and type, and no value that cannot be."""
    tokens, aux, final = len(input_ids), got.aux_TAD, got.final_TD
    states = min(len(aux), len(final))
    if states != tokens:
        raise DataError(
            f"{sample_id}: {states} states for {tokens} tokens, one each is needed: likely cause: "
            "a prefix-cache hit or chunked prefill returned the last rows only, switch both off"
        )
    if final.shape != (tokens, hidden_size) or aux.shape != (tokens, len(aux_layers), hidden_size):
        raise DataError(
            f"{sample_id}: final is {list(final.shape)} and aux {list(aux.shape)}, needed are "
            f"layers {list(aux_layers)} of size {hidden_size}: likely cause: the engine was "
            "started for other layers"
        )
    if final.dtype != dtype or aux.dtype != dtype:
        raise DataError(
            f"{sample_id}: states are {final.dtype} and {aux.dtype}, needed {dtype}: set "
            "extract.dtype to what the engine returns"
        )
    ids_T = torch.tensor(input_ids, device=final.device)
    for name, states_TD in _named(got, aux_layers):
        fault = _impossible(states_TD, ids_T)
        if fault is not None:
            raise DataError(f"{sample_id}: {name} {fault}")


def check_reference(
    sample_id: str,
    got: Features,
    aux_layers: Sequence[int],
    want: Reference,
    head: TargetHead,
    neighbours: Iterable[tuple[str, Reference]],
) -> float:
    """Stored layers and head agree with a plain forward; returns the largest median error.

    ``head`` is in float32 and reads ``final`` as it is stored. ``neighbours`` are other rows of the
    batch, taken from the iterable only to name a cause.
    """
    num_layers = len(want.layers)
    allowed = _TOLERANCES[got.final_TD.dtype]

    def layer_causes(
        states_TD: torch.Tensor,
        k: int,
        seen: Callable[[torch.Tensor], torch.Tensor] = lambda layer_TD: layer_TD,
    ) -> Iterator[_Cause]:
        for j, layer_TD in enumerate(want.layers):
            if j != k:
                yield _Cause(
                    f"layer off by {j - k:+d}, it is hidden_states[{j}]", states_TD, seen(layer_TD)
                )

    def aux_causes(states_TD: torch.Tensor, k: int) -> Iterator[_Cause]:
        yield from _shifts(states_TD, want.layers[k])
        yield from layer_causes(states_TD, k)
        for name, other in neighbours:
            yield _Cause(f"these are the rows of its neighbour {name}", states_TD, other.layers[k])

    def final_causes(normed_TD: torch.Tensor) -> Iterator[_Cause]:
        misread = _misread(head)
        norm = head.reading("before").normed
        yield _Cause(_NORMS[misread.norm], misread.normed(got.final_TD), want.normed_TD)
        yield _Cause("the last norm was applied twice", normed_TD, norm(want.normed_TD))
        yield from _shifts(normed_TD, want.normed_TD)
        yield from layer_causes(normed_TD, num_layers, norm)
        for name, other in neighbours:
            yield _Cause(f"these are the rows of its neighbour {name}", normed_TD, other.normed_TD)

    plain = "differs from a plain forward of the target"
    errors = [
        _compare(
            f"{sample_id}: aux layer {k} {plain}",
            got.aux_TAD[:, a],
            want.layers[k],
            aux_causes(got.aux_TAD[:, a], k),
            allowed,
        )
        for a, k in enumerate(aux_layers)
    ]
    normed_TD = head.normed(got.final_TD)
    errors.append(
        _compare(
            f"{sample_id}: norm(final) {plain}",
            normed_TD,
            want.normed_TD,
            final_causes(normed_TD),
            allowed,
        )
    )
    logits_LV = head.logits(got.final_TD[-len(want.logits_LV) :])
    foreign = "the target's head is more than RMS norm and one matrix, choose another target"
    errors.append(
        _compare(
            f"{sample_id}: lm_head(norm(final)) {plain}",
            logits_LV,
            want.logits_LV,
            [_Cause(foreign, normed_TD, want.normed_TD)],
            allowed,
        )
    )
    return max(errors)


def check_alone(
    sample_id: str,
    got: Features,
    alone: Features,
    aux_layers: Sequence[int],
    neighbours: Iterable[tuple[str, Features]],
) -> float:
    """A row from a batch equals the same row computed alone; returns the largest median error.

    ``neighbours`` are other rows, alone too, taken from the iterable only to name a cause.
    """
    wanted = _named(alone, aux_layers)

    def causes(index: int, states_TD: torch.Tensor) -> Iterator[_Cause]:
        yield from _shifts(states_TD, wanted[index][1])
        for name, want_TD in wanted:
            yield _Cause(f"it is {name} instead", states_TD, want_TD)
        for name, other in neighbours:
            other_TD = _named(other, aux_layers)[index][1]
            yield _Cause(f"these are the rows of its neighbour {name}", states_TD, other_TD)

    return max(
        _compare(
            f"{sample_id}: {name} differs from the same row computed alone",
            states_TD,
            wanted[index][1],
            causes(index, states_TD),
            _TOLERANCES[got.final_TD.dtype],
        )
        for index, (name, states_TD) in enumerate(_named(got, aux_layers))
    )


def check_next_tokens(
    rows: Sequence[Row],
    matches: Sequence[int],
    min_share: float,
    load_head: Callable[[], TargetHead],
) -> float:
    """States predict the response tokens of ``rows`` at a share of ``min_share``; returns it.

    ``matches`` counts, per row, how often argmax lm_head(norm(final)) is the token that follows.
    ``load_head`` is called only to name a cause.
    """
    total = sum(map(response_tokens, rows))
    share = sum(matches) / total if total else 1.0
    if not share_too_low(sum(matches), total, min_share):
        return share
    counted = [(m, row) for m, row in zip(matches, rows, strict=True) if response_tokens(row)]
    least, worst = min(counted, key=lambda pair: pair[0] / response_tokens(pair[1]))
    cause = _explain(worst, load_head(), [row for row in rows if row is not worst])
    raise DataError(
        f"{worst.sample_id}: argmax lm_head(norm(final)) is the next token for {least} of its "
        f"{response_tokens(worst)} response tokens and {share:.1%} of its shard's, needed "
        f"{min_share:.1%}: likely cause: {cause}"
    )


def share_too_low(matches: float, total: float, min_share: float) -> bool:
    """Whether ``matches`` of ``total`` miss ``min_share`` by more than chance allows."""
    slack = _DEVIATIONS * math.sqrt(total * min_share * (1 - min_share))
    return matches < min_share * total - slack


def response_tokens(row: Row) -> int:
    """Tokens that some state of the row predicts: the response, without a first token."""
    return len(row.input_ids_T) - max(row.prompt_tokens, 1)


class _Cause(NamedTuple):
    """A fault, and the two tensors that agree when it is the one."""

    text: str
    got: torch.Tensor
    want: torch.Tensor


def _compare(
    what: str,
    got: torch.Tensor,
    want: torch.Tensor,
    causes: Iterable[_Cause],
    allowed: _Tolerance,
) -> float:
    """Median error of ``got``. DataError with the first cause that fits when it is too far off."""
    typical, worst = _errors(got, want)
    if _within((typical, worst), allowed):
        return typical
    fitting = (c.text for c in causes if _within(_errors(c.got, c.want), allowed))
    raise DataError(
        f"{what} by {typical:.2g} in the median and {worst:.2g} at worst, allowed are "
        f"{allowed.typical} and {allowed.worst}: likely cause: "
        f"{next(fitting, 'none of the known faults fits')}"
    )


def _within(errors: tuple[float, float], allowed: _Tolerance) -> bool:
    return errors[0] <= allowed.typical and errors[1] <= allowed.worst


def _errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Median and largest relative error over the tokens that both have; infinite without any."""
    common = min(len(got), len(want))
    if common == 0:
        return math.inf, math.inf
    wanted = want[:common].to(got.device).float()
    error = (got[:common].float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-12)
    return float(error.median()), float(error.max())


def _shifts(got: torch.Tensor, want: torch.Tensor) -> Iterator[_Cause]:
    yield _Cause("row off by one, position t holds the state of t - 1", got[1:], want[:-1])
    yield _Cause("row off by one, position t holds the state of t + 1", got[:-1], want[1:])


def _named(features: Features, aux_layers: Sequence[int]) -> list[tuple[str, torch.Tensor]]:
    aux = [(f"aux layer {k}", features.aux_TAD[:, a]) for a, k in enumerate(aux_layers)]
    return [*aux, ("final", features.final_TD)]


def _impossible(states_TD: torch.Tensor, ids_T: torch.Tensor) -> str | None:
    """Why these states cannot be a target's; None when they can."""
    bad = ~torch.isfinite(states_TD).all(-1)
    if bad.any():
        return (
            f"is not finite at {int(bad.sum())} of {len(bad)} tokens, first at {_first(bad)}: "
            "likely cause: an overflow in the target, extract in another dtype"
        )
    flat = states_TD.amax(-1) == states_TD.amin(-1)
    if flat.any():
        return (
            f"is constant at {int(flat.sum())} of {len(flat)} tokens, first at {_first(flat)}: "
            "likely cause: a buffer that the engine never filled"
        )
    # With the same id at both places, low layers may well hold equal states.
    twice = (states_TD[1:] == states_TD[:-1]).all(-1) & (ids_T[1:] != ids_T[:-1])
    if twice.any():
        return (
            f"repeats its state at {int(twice.sum())} of {len(flat)} tokens, first at "
            f"{_first(twice) + 1}, under another id: likely cause: one row was copied over several"
        )
    return None


def _first(mask_T: torch.Tensor) -> int:
    return int(mask_T.nonzero()[0])


def _explain(row: Row, head: TargetHead, neighbours: Iterable[Row]) -> str:
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
