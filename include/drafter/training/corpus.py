"""The rows that a drafter learns from: of all datasets, as one list, split, ordered and packed.

They lie in the shards that extract stored or, where the recipe spools, in the tokenized files: the
same rows either way, in the same order, so that both train on the same batches.

Which row is held out depends on its sample id alone, so it stays held out over every extraction,
dataset order and seed. Which rows make batch n of an epoch depends on the seed and the epoch alone,
so a resumed training meets the batches it would have met.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

import torch

from drafter import plan
from drafter.errors import DataError
from drafter.extraction import states
from drafter.extraction.shard_plan import index_rows
from drafter.extraction.shards import Row, read_shard, shard_paths
from drafter.files import file_record, read_section
from drafter.layout import ALL, Workspace
from drafter.recipe import Recipe
from drafter.target_head import TargetHead, load_head
from drafter.training.alignment import num_starts
from drafter.training.entries import Entry, Stored, Tokenized, stored_entries

TOO_SHORT, TOO_LONG = "response too short", "longer than extract.max_length"

_HEAD_ROWS, _HEAD_TOKENS = 64, 1024
"""Rows of the corpus, and tokens of all of them, on which head and states are compared."""

_HEAD_SLACK = 0.1
"""A thousand tokens of a share of 0.5 lie within 0.05; other weights miss by far more."""


E = TypeVar("E", bound=Entry)
E_co = TypeVar("E_co", bound=Entry, covariant=True)


@dataclass(frozen=True)
class Split(Generic[E]):
    """Rows that are trained on, rows that never are, and how many are neither, by reason."""

    trained: list[E]
    held_out: list[E]
    left_out: dict[str, int]


@dataclass(frozen=True)
class Corpus(Generic[E_co]):
    """All rows of a recipe that drafts can start in."""

    identity: dict[str, Any]
    """What decided the states of all of them; see drafter.extraction.states."""
    trained: Sequence[E_co]
    held_out: Sequence[E_co]
    left_out: dict[str, int]
    """Rows in neither, by reason."""
    witnesses: Sequence[Row]
    """Some rows with their states."""
    argmax_share: float
    """Of written tokens that were the target's most likely ones, as extraction measured it."""


def is_held_out(sample_id: str, share: float) -> bool:
    """Whether a sample is kept for evaluation: the same answer everywhere, for ``share`` of ids."""
    first = hashlib.sha256(sample_id.encode()).digest()[:8]
    return int.from_bytes(first) < share * 2**64


def collect(workspace: Workspace, recipe: Recipe) -> Corpus[Entry]:
    """Find every row, wherever the recipe has its states. Raises DataError as the two below."""
    if recipe.spools:
        return spooled(workspace, recipe, tokenized(workspace, recipe))
    return stored(workspace, recipe)


def stored(workspace: Workspace, recipe: Recipe) -> Corpus[Stored]:
    """Every extracted row.

    Raises DataError when a dataset is not extracted, is empty, was extracted under another identity
    than the first one, or when nothing is left to train on.
    """
    sections = _sections(workspace, recipe)
    identity = _common_identity(sections)
    entries: list[Stored] = []
    for dataset in recipe.dataset_names:
        paths = shard_paths(workspace.hidden_states(dataset))
        found = [entry for path in paths for entry in stored_entries(path)]
        if not found:
            raise DataError(
                f"{dataset} has no extracted rows: look at its rejected.jsonl, or take it out of "
                "the recipe"
            )
        entries += found
    split = _split(entries, recipe, {})
    gates = [section["gates"] for section in sections.values()]
    tokens = sum(gate["response_tokens"] for gate in gates)
    matches = sum(gate["argmax_share"] * gate["response_tokens"] for gate in gates)
    stride = len(split.trained) // _HEAD_ROWS + 1
    return Corpus(
        identity=identity,
        trained=split.trained,
        held_out=split.held_out,
        left_out=split.left_out,
        witnesses=[entry.read() for entry in split.trained[::stride]],
        argmax_share=matches / tokens,
    )


def tokenized(workspace: Workspace, recipe: Recipe) -> Split[Tokenized]:
    """Every row that extract would make states of, without any.

    Raises DataError when a dataset is not validated or is empty, or when nothing is left to train
    on.
    """
    plan.inputs("spool", ALL, workspace, recipe)
    entries: list[Tokenized] = []
    too_long = 0
    for dataset in recipe.dataset_names:
        rows = index_rows(workspace.prepared(dataset).tokenized, recipe.extract.max_length)
        if not rows.lengths:
            raise DataError(
                f"{dataset} has no rows within extract.max_length ({recipe.extract.max_length}): "
                "look at its rejected.jsonl, or take it out of the recipe"
            )
        too_long += rows.left_out
        for row, tokens in enumerate(rows.lengths):
            sample = rows.sample(row)
            entries.append(Tokenized(sample.sample_id, rows, row, tokens, sample.prompt_tokens))
    return _split(entries, recipe, {TOO_LONG: too_long} if too_long else {})


def spooled(workspace: Workspace, recipe: Recipe, split: Split[Tokenized]) -> Corpus[Tokenized]:
    """``split`` with the witnesses that the spool left. Raises DataError when it left none."""
    witness = workspace.drafter(plan.run_name(workspace, recipe)).witness
    if not witness.exists():
        raise DataError(f"{witness} is missing: run the train DAG, whose spool makes it")
    shard = read_shard(witness)
    gates = shard.header.gates
    return Corpus(
        identity=states.identity(recipe),
        trained=split.trained,
        held_out=split.held_out,
        left_out=split.left_out,
        witnesses=list(shard.rows()),
        argmax_share=gates["argmax_matches"] / max(gates["response_tokens"], 1),
    )


def _split(entries: Iterable[E], recipe: Recipe, left_out: dict[str, int]) -> Split[E]:
    split = Split[E]([], [], dict(left_out))
    for entry in entries:
        if num_starts(entry.tokens, entry.prompt_tokens) == 0:
            split.left_out[TOO_SHORT] = split.left_out.get(TOO_SHORT, 0) + 1
        elif is_held_out(entry.sample_id, recipe.train.held_out_share):
            split.held_out.append(entry)
        else:
            split.trained.append(entry)
    if not split.trained:
        raise DataError(
            f"no row to train on: {len(split.held_out)} are held out and "
            f"{split.left_out.get(TOO_SHORT, 0)} too short; generate more, or lower "
            "train.held_out_share"
        )
    return split


def verify(workspace: Workspace, recipe: Recipe) -> None:
    """Compare with the hash of each: every shard that extract left, or every tokenized file where
    the recipe spools. Raises DataError.

    Costs one sequential reading, about a second per GB, of what training reads every epoch.
    """
    if recipe.spools:
        wanted = plan.inputs("spool", ALL, workspace, recipe)["tokenized"]
        for dataset, record in wanted.items():
            path = workspace.prepared(dataset).tokenized
            if not path.exists() or file_record(path) != record:
                raise DataError(f"{path} is not as validate left it: run validate again")
        return
    for dataset, section in _sections(workspace, recipe).items():
        root = workspace.hidden_states(dataset).root
        for name, record in section["files"].items():
            path = root / name
            if not path.exists() or file_record(path) != record:
                raise DataError(
                    f"{path} is not as extraction left it: move it away, extract {dataset} again"
                )


def read_head(recipe: Recipe, corpus: Corpus[Entry]) -> TargetHead:
    """The target\'s head in float32, which reads ``final`` as the corpus holds it.

    Raises DataError when the states are of another revision or size, or when the head does not say
    of them what the target wrote: another model's weights under the same name.
    """
    head = load_head(Path(recipe.target.path)).to("cpu", torch.float32)
    head = head.reading(corpus.identity["norm"])
    found = corpus.identity["revision"], corpus.identity["hidden_size"]
    needed = recipe.target.revision, head.embed.shape[1]
    if found != needed:
        raise DataError(
            f"the states are of revision {found[0]} with hidden size {found[1]}, the recipe's "
            f"target is {needed[0]} with {needed[1]}: extract them anew"
        )
    share = _share_said(head, corpus.witnesses)
    if share < corpus.argmax_share - _HEAD_SLACK:
        raise DataError(
            f"the target's head gives the token that was written for {share:.2f} of the states, "
            f"when they were extracted it was {corpus.argmax_share:.2f}: the weights in "
            f"{recipe.target.path} are not those of the extraction, extract anew"
        )
    return head


def _share_said(head: TargetHead, rows: Sequence[Row]) -> float:
    """Share of written tokens that are the most likely ones by the states before them."""
    said = written = 0
    tokens = _HEAD_TOKENS // len(rows)
    for row in rows:
        stride = (len(row.input_ids_T) - row.prompt_tokens) // tokens + 1
        following = row.input_ids_T[row.prompt_tokens :: stride]
        before = row.final_TD[row.prompt_tokens - 1 : -1 : stride]
        said += int((head.logits(before.float()).argmax(-1) == following).sum())
        written += len(following)
    return said / written


def batches(tokens: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of row numbers: each epoch has every row once, in an order of its own.

    Rows are never cut: a row longer than ``batch_tokens`` is a batch by itself.
    """
    epoch = 0
    while True:
        order = list(range(len(tokens)))
        Random(f"{seed} {epoch}").shuffle(order)
        batch: list[int] = []
        room = batch_tokens
        for row in order:
            if batch and tokens[row] > room:
                yield batch
                batch, room = [], batch_tokens
            batch.append(row)
            room -= tokens[row]
        yield batch
        epoch += 1


def _sections(workspace: Workspace, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What extraction left for every dataset."""
    sections: dict[str, dict[str, Any]] = {}
    for dataset in recipe.dataset_names:
        section = read_section(workspace.hidden_states(dataset).manifest, "extract")
        if section is None:
            raise DataError(f"{dataset} is not extracted yet: run extract on it first")
        sections[dataset] = section
    return sections


def _common_identity(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    identities = ((dataset, section["identity"]) for dataset, section in sections.items())
    first, identity = next(identities)
    for dataset, other in identities:
        if other != identity:
            raise DataError(
                f"{first} and {dataset} were extracted differently "
                f"({_difference(identity, other)}): extract them anew with one recipe"
            )
    return dict(identity)


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    names = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
    return ", ".join(f"{name}: {one.get(name)} and {other.get(name)}" for name in names)
