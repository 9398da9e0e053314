"""Comparisons that hidden states must pass before they are stored. Pure: tensors in, numbers out.

A drafter trained on misaligned states has a fine loss and is useless when served, so a fault here
is never a warning. A gate that fails raises DataError naming the sample and the likely cause
(causes.py). Each gate, these and those of a batch (batch_gates.py), stops faults that no
other one sees.

    check_low_layer     before the first shard: layer 0 is the embedding of the ids, or a low layer
                        that of a plain forward of the first layers; where layer 0 is the plain
                        embedding, of every row
    check_reference     before the first shard: every stored layer equals a plain forward of the
                        target, and the head that training reads gives the target's own logits
    check_alone         every shard: a row computed in a batch equals the same row computed alone,
                        for one drawn row and for the one that predicts its response worst
    check_again         every shard, of every server, and of one that comes back: a row whose states
                        were compared with the target still has them
    check_next_tokens   every shard: lm_head(norm(final[t])) predicts the token that follows

T = tokens of one row, A = auxiliary layers, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from drafter.errors import DataError
from drafter.extraction import causes
from drafter.extraction.causes import Cause, Tolerance
from drafter.extraction.shards import Features, Row
from drafter.target_head import TargetHead

_DEVIATIONS = 3
"""Standard deviations by which a share may miss its bound: few tokens prove little."""

_TOLERANCES = {
    torch.float32: Tolerance(1e-3, 1e-2),
    torch.bfloat16: Tolerance(0.05, 0.5),
}


@dataclass(frozen=True)
class Reference:
    """One row through the target's plain forward, unpadded and alone."""

    layers: Sequence[torch.Tensor]
    """[T, D] for each id from 0, below the number of layers that were run: ``hidden_states[k]``."""

    normed_TD: torch.Tensor | None = None
    """After the last norm: the last of HF ``hidden_states``. None when only first layers ran."""

    logits_LV: torch.Tensor | None = None
    """Of the last L tokens; None when only first layers ran."""


def check_low_layer(
    sample_id: str,
    low_TD: torch.Tensor,
    low_layer: int,
    layers: Sequence[torch.Tensor],
    neighbours: Iterable[tuple[str, torch.Tensor]],
) -> float:
    """``low_TD`` is ``layers[low_layer]``, layer 0 up to the rounding of its dtype; returns the
    median error.

    ``layers`` are those of a plain forward, or only the embedding rows of the ids where there is
    none. ``neighbours`` are the same layer of others of the batch, taken from the iterable only to
    name a cause.
    """
    want_TD = layers[low_layer]

    def tried() -> Iterator[Cause]:
        yield from causes.shifts(low_TD, want_TD)
        if low_layer == 0:
            yield from causes.other_embedding(low_TD, want_TD)
        yield from causes.other_layers(low_TD, low_layer, layers)
        for name, other_TD in neighbours:
            yield causes.neighbours_rows(low_TD, name, other_TD)

    # Twice: where embeddings are scaled, the factor is rounded and then the product.
    rounding = 2 * torch.finfo(low_TD.dtype).eps
    of = "the embedding of its ids" if low_layer == 0 else "a plain forward of the target"
    return _compare(
        f"{sample_id}: layer {low_layer} differs from {of}",
        low_TD,
        want_TD,
        tried(),
        Tolerance(rounding, rounding) if low_layer == 0 else _TOLERANCES[low_TD.dtype],
    )


def check_reference(
    sample_id: str,
    got: Features,
    aux_layers: Sequence[int],
    want: Reference,
    load_head: Callable[[], TargetHead],
    neighbours: Iterable[tuple[str, Reference]],
) -> float:
    """Stored layers and head agree with a plain forward; returns the largest median error.

    What the plain forward did not compute is not compared. ``load_head`` gives the head in float32,
    reading ``final`` as it is stored, and is called only where there are normed states to compare.
    ``neighbours`` are other rows of the batch, taken from the iterable only to name a cause.
    """
    allowed = _TOLERANCES[got.final_TD.dtype]
    plain = "differs from a plain forward of the target"

    def aux_causes(states_TD: torch.Tensor, k: int) -> Iterator[Cause]:
        yield from causes.shifts(states_TD, want.layers[k])
        yield from causes.other_layers(states_TD, k, want.layers)
        for name, other in neighbours:
            yield causes.neighbours_rows(states_TD, name, other.layers[k])

    errors = [
        _compare(
            f"{sample_id}: aux layer {k} {plain}",
            got.aux_TAD[:, a],
            want.layers[k],
            aux_causes(got.aux_TAD[:, a], k),
            allowed,
        )
        for a, k in enumerate(aux_layers)
        if k < len(want.layers)
    ]
    if want.normed_TD is None:
        return max(errors, default=0.0)
    head, want_TD = load_head(), want.normed_TD
    normed_TD = head.normed(got.final_TD)

    def final_causes() -> Iterator[Cause]:
        norm = head.reading("before").normed
        yield causes.other_side_of_norm(head, got.final_TD, want_TD)
        yield Cause("the last norm is applied twice", got.final_TD, norm(want_TD))
        yield from causes.shifts(normed_TD, want_TD)
        normed_layers = [norm(layer_TD) for layer_TD in want.layers]
        yield from causes.other_layers(normed_TD, len(want.layers), normed_layers)
        for name, other in neighbours:
            if other.normed_TD is not None:
                yield causes.neighbours_rows(normed_TD, name, other.normed_TD)

    what = f"{sample_id}: norm(final) {plain}"
    errors.append(_compare(what, normed_TD, want_TD, final_causes(), allowed))
    if want.logits_LV is not None:
        foreign = "the target's head is more than RMS norm and one matrix, choose another target"
        errors.append(
            _compare(
                f"{sample_id}: lm_head(norm(final)) {plain}",
                head.logits(got.final_TD[-len(want.logits_LV) :]),
                want.logits_LV,
                [Cause(foreign, normed_TD, want_TD)],
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

    def tried(index: int, states_TD: torch.Tensor) -> Iterator[Cause]:
        yield from causes.shifts(states_TD, wanted[index][1])
        for name, want_TD in wanted:
            yield Cause(f"it is {name} instead", states_TD, want_TD)
        for name, other in neighbours:
            yield causes.neighbours_rows(states_TD, name, _named(other, aux_layers)[index][1])

    return max(
        _compare(
            f"{sample_id}: {name} differs from the same row computed alone",
            states_TD,
            wanted[index][1],
            tried(index, states_TD),
            _TOLERANCES[got.final_TD.dtype],
        )
        for index, (name, states_TD) in enumerate(_named(got, aux_layers))
    )


def check_again(
    sample_id: str, maker: str, got: Features, proven: Features, aux_layers: Sequence[int]
) -> float:
    """``got``, what ``maker`` (a server's URL) makes of a row now, equals the ``proven`` states of
    that row; returns the largest median error."""
    wanted = _named(proven, aux_layers)

    def tried(index: int, states_TD: torch.Tensor) -> Iterator[Cause]:
        for name, want_TD in wanted:
            yield Cause(f"it is {name} instead", states_TD, want_TD)
        yield from causes.shifts(states_TD, wanted[index][1])
        foreign = "this server runs other layers or weights than before, start it as it was"
        yield Cause(foreign, states_TD, states_TD)

    return max(
        _compare(
            f"{sample_id}: {name} of {maker} differs from its proven states",
            states_TD,
            wanted[index][1],
            tried(index, states_TD),
            _TOLERANCES[proven.final_TD.dtype],
        )
        for index, (name, states_TD) in enumerate(_named(got, aux_layers))
    )


def check_next_tokens(
    rows: Sequence[Row],
    matches: Sequence[int],
    compared: Sequence[int],
    min_share: float,
    load_head: Callable[[], TargetHead],
) -> float:
    """States predict the response tokens of ``rows`` at a share of ``min_share``; returns it.

    ``matches`` counts, per row, how often argmax lm_head(norm(final)) is the token that follows,
    of the ``compared`` tokens. ``load_head`` is called only to name a cause.
    """
    total = sum(compared)
    share = sum(matches) / total if total else 1.0
    if not share_too_low(sum(matches), total, min_share):
        return share
    counted = [counts for counts in zip(matches, compared, rows, strict=True) if counts[1]]
    least, of, worst = min(counted, key=lambda counts: counts[0] / counts[1])
    cause = causes.unpredicted(worst, load_head(), [row for row in rows if row is not worst])
    raise DataError(
        f"{worst.sample_id}: argmax lm_head(norm(final)) is the next token for {least} of its "
        f"{of} response tokens and {share:.1%} of its shard's, needed {min_share:.1%}: "
        f"likely cause: {cause}"
    )


def share_too_low(matches: float, total: float, min_share: float) -> bool:
    """Whether ``matches`` of ``total`` miss ``min_share`` by more than chance allows."""
    slack = _DEVIATIONS * math.sqrt(total * min_share * (1 - min_share))
    return matches < min_share * total - slack


def _compare(
    what: str,
    got: torch.Tensor,
    want: torch.Tensor,
    tried: Iterable[Cause],
    allowed: Tolerance,
) -> float:
    """Median error of ``got``. DataError with the first cause that fits when it is too far off."""
    found = causes.errors(got, want)
    if found.within(allowed):
        return found.typical
    cause = causes.likely(tried, allowed)
    if cause == causes.UNKNOWN:
        cause = causes.begins_late(got, want, allowed)
    raise DataError(
        f"{what} by {found.typical:.2g} in the median and {found.worst:.2g} at worst, allowed are "
        f"{allowed.typical:.2g} and {allowed.worst:.2g}: likely cause: {cause}"
    )


def _named(features: Features, aux_layers: Sequence[int]) -> list[tuple[str, torch.Tensor]]:
    aux = [(f"aux layer {k}", features.aux_TAD[:, a]) for a, k in enumerate(aux_layers)]
    return [*aux, ("final", features.final_TD)]
