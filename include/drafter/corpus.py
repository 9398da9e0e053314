"""The rows that a drafter learns from: all datasets' shards as one list, split, ordered and packed.

Which row is held out depends on its sample id alone, so it stays held out over every extraction,
dataset order and seed. Which rows make batch n of an epoch depends on the seed and the epoch alone,
so a resumed training meets the batches it would have met.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from drafter.alignment import num_starts
from drafter.errors import DataError
from drafter.files import file_record, read_section
from drafter.layout import Workspace
from drafter.recipe import Recipe
from drafter.shards import Row, Shard, read_shard, shard_paths
from drafter.target_head import TargetHead, load_head

_HEAD_ROWS, _HEAD_TOKENS = 64, 16
"""Rows of the corpus, and tokens of each, on which head and states are compared."""

_HEAD_SLACK = 0.1
"""A thousand tokens of a share of 0.5 lie within 0.05; other weights miss by far more."""


@dataclass(frozen=True)
class Entry:
    """Where one row lies, and how long it is."""

    sample_id: str
    shard: Shard
    """Mapped from its file: a row costs memory while it is used."""
    index: int
    tokens: int
    prompt_tokens: int

    def read(self) -> Row:
        return self.shard.row(self.index)


@dataclass(frozen=True)
class Corpus:
    """All rows of a recipe that drafts can start in."""

    identity: dict[str, Any]
    """The one that all datasets were extracted under."""
    trained: list[Entry]
    held_out: list[Entry]
    left_out: dict[str, int]
    """Rows in neither, by reason."""
    argmax_share: float
    """Of written tokens that were the target's most likely ones, as extraction measured it."""


def is_held_out(sample_id: str, share: float) -> bool:
    """Whether a sample is kept for evaluation: the same answer everywhere, for ``share`` of ids."""
    first = hashlib.sha256(sample_id.encode()).digest()[:8]
    return int.from_bytes(first) < share * 2**64


def collect(workspace: Workspace, recipe: Recipe) -> Corpus:
    """Find every extracted row.

    Raises DataError when a dataset is not extracted, is empty, was extracted under another identity
    than the first one, or when nothing is left to train on.
    """
    sections = _sections(workspace, recipe)
    identity = _common_identity(sections)
    trained: list[Entry] = []
    held_out: list[Entry] = []
    left_out: dict[str, int] = {}
    for dataset in recipe.dataset_names:
        entries = [
            entry
            for path in shard_paths(workspace.hidden_states(dataset))
            for entry in _entries(path)
        ]
        if not entries:
            raise DataError(
                f"{dataset} has no extracted rows: look at its rejected.jsonl, or take it out of "
                "the recipe"
            )
        for entry in entries:
            if num_starts(entry.tokens, entry.prompt_tokens) == 0:
                left_out["response too short"] = left_out.get("response too short", 0) + 1
            elif is_held_out(entry.sample_id, recipe.train.held_out_share):
                held_out.append(entry)
            else:
                trained.append(entry)
    if not trained:
        raise DataError(
            f"no row to train on: {len(held_out)} are held out and {sum(left_out.values())} too "
            "short; generate more, or lower train.held_out_share"
        )
    gates = [section["gates"] for section in sections.values()]
    tokens = sum(gate["response_tokens"] for gate in gates)
    matches = sum(gate["argmax_share"] * gate["response_tokens"] for gate in gates)
    return Corpus(identity, trained, held_out, left_out, matches / tokens)


def verify(workspace: Workspace, recipe: Recipe) -> None:
    """Compare every shard with the hash that extraction left of it. Raises DataError.

    Costs one sequential reading, about a second per GB, of what training reads every epoch.
    """
    for dataset, section in _sections(workspace, recipe).items():
        root = workspace.hidden_states(dataset).root
        for name, record in section["files"].items():
            path = root / name
            if not path.exists() or file_record(path) != record:
                raise DataError(
                    f"{path} is not as extraction left it: move it away, extract {dataset} again"
                )


def read_head(recipe: Recipe, corpus: Corpus) -> TargetHead:
    """The target's head in float32, which reads ``final`` as the corpus holds it.

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
    share = _share_said(head, corpus.trained[:: len(corpus.trained) // _HEAD_ROWS + 1])
    if share < corpus.argmax_share - _HEAD_SLACK:
        raise DataError(
            f"the target's head gives the token that was written for {share:.2f} of the states, "
            f"when they were extracted it was {corpus.argmax_share:.2f}: the weights in "
            f"{recipe.target.path} are not those of the extraction, extract anew"
        )
    return head


def _share_said(head: TargetHead, entries: Sequence[Entry]) -> float:
    """Share of written tokens that are the most likely ones by the states before them."""
    said = written = 0
    for row in (entry.read() for entry in entries):
        stride = (len(row.input_ids_T) - row.prompt_tokens) // _HEAD_TOKENS + 1
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


def _entries(path: Path) -> list[Entry]:
    shard = read_shard(path)
    lengths = shard.offsets_N1.diff().tolist()
    prompts = shard.prompt_tokens_N.tolist()
    columns = zip(shard.header.sample_ids, lengths, prompts, strict=True)
    return [
        Entry(sample_id, shard, index, tokens, prompt)
        for index, (sample_id, tokens, prompt) in enumerate(columns)
    ]


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
