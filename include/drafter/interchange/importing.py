"""Makes shards of another system's directory, so that training takes them as if extracted here.

Rows keep their order. A row that does not describe one prompt and its response, or does not fit the
target, is left out with a reason and a count. What other systems' faults leave in states stops the
import as it stops extraction: see proof.py.

Shards are made in ``hidden_states/.importing/<dataset>`` and become ``hidden_states/<dataset>`` by
one rename, manifest included. A killed import reads the source again and makes only the shards that
are missing; so does one that finds its dataset imported already. Memory holds one shard and a
number per row.

Manifest section ``extract``: as extraction writes it, but inputs {imported: system, source: sha256
of all that was read}, and gates without alone_error, and without reference_error where there was
nothing to compare with.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drafter.errors import DataError, RecipeError
from drafter.extract import TOO_LONG
from drafter.extraction import gates
from drafter.extraction.shards import DTYPES, Shard, ShardHeader, read_header, write_shard
from drafter.extraction.states import choose_aux_layers
from drafter.files import clear_partial, digest, file_record, fsync_dir, read_section, write_section
from drafter.interchange import Found, Sample, Source, prompt_tokens
from drafter.interchange.proof import Proof
from drafter.layout import Workspace
from drafter.recipe import Recipe
from drafter.target_head import text_config


@dataclass(frozen=True)
class Wanted:
    """What the states of a dataset must be."""

    system: str
    dataset: str
    identity: dict[str, Any]
    vocab_size: int
    max_length: int
    shard_tokens: int
    min_argmax_share: float

    def fault(self, sample: Sample) -> str | None:
        """Why a row cannot be taken; None when it can."""
        ids, mask, aux, final = sample[1:]
        if not len(ids) == len(mask) == len(aux) == len(final):
            return "ids, loss mask and states differ in number"
        needed = self.identity["hidden_size"]
        if final.shape[-1] != needed:
            return f"states are {final.shape[-1]} wide, the target's {needed}"
        layers = len(self.identity["aux_layers"])
        if aux.shape[1] != layers:
            return f"states of {aux.shape[1]} auxiliary layers, {layers} are named"
        dtype = DTYPES[self.identity["dtype"]]
        if not aux.dtype == final.dtype == dtype:
            return f"states in {_name(aux)} and {_name(final)}, extract.dtype is {_name(dtype)}"
        if ids.dtype.is_floating_point or not len(ids):
            return "no token ids"
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            return "token ids outside the target's vocabulary"
        if len(ids) > self.max_length:
            return TOO_LONG
        prompt = prompt_tokens(mask)
        return prompt if isinstance(prompt, str) else None


def run(
    workspace: Workspace,
    recipe: Recipe,
    system: str,
    dataset: str,
    source: Source,
    aux_layers: Sequence[int] | None,
) -> None:
    """Import ``source``. The caller holds the dataset's lock.

    ``aux_layers`` are HF ``hidden_states`` indices, None for the recipe's. Raises DataError when a
    gate fails, when no row is left or when the dataset has other states; RecipeError when the
    target does not say what it is.
    """
    wanted = _wanted(recipe, system, dataset, source.norm, aux_layers)
    hidden, staging = workspace.hidden_states(dataset), workspace.importing(dataset)
    there = read_section(hidden.manifest, "extract")
    if there is None or "imported" not in there["inputs"]:
        if hidden.root.exists() and any(hidden.root.iterdir()):
            raise DataError(
                f"{hidden.root} holds states that were extracted here: move it away, then import"
            )
        there = None
    place = staging if there is None else hidden
    place.root.mkdir(parents=True, exist_ok=True)
    clear_partial(place.root)
    proof = Proof(Path(recipe.target.path), wanted.identity)
    shards = _Shards(wanted, proof, place.shard, there and there["files"])
    total = source.total
    for number, found in enumerate(source.rows(), start=1):
        shards.take(found, f"{number:,} of {total:,} rows read")
    shards.close(f"all {total:,} rows read")
    section = shards.section()
    if there is None:
        for path in sorted(set(staging.root.glob("shard-*")) - set(shards.paths)):
            path.unlink()
    elif there["inputs"] != section["inputs"]:
        raise DataError(
            f"{hidden.root} was imported from other files than these: move it away, then import"
        )
    changed = write_section(place.manifest, "extract", section)
    if there is None:
        os.rename(staging.root, hidden.root)
        fsync_dir(hidden.root.parent)
    _say(dataset, section, changed)


def _wanted(
    recipe: Recipe, system: str, dataset: str, norm: str, aux_layers: Sequence[int] | None
) -> Wanted:
    target = Path(recipe.target.path)
    config = text_config(target)
    absent = {"num_hidden_layers", "hidden_size", "vocab_size"} - config.keys()
    if absent:
        raise RecipeError(f"{target}/config.json does not give {', '.join(sorted(absent))}: add it")
    layers = choose_aux_layers(config["num_hidden_layers"], aux_layers or recipe.extract.aux_layers)
    return Wanted(
        system=system,
        dataset=dataset,
        identity={
            "target": recipe.target.path,
            "revision": recipe.target.revision,
            "aux_layers": list(layers),
            "dtype": recipe.extract.dtype,
            "norm": norm,
            "hidden_size": config["hidden_size"],
        },
        vocab_size=config["vocab_size"],
        max_length=recipe.extract.max_length,
        shard_tokens=recipe.extract.shard_tokens,
        min_argmax_share=recipe.extract.min_argmax_share,
    )


class _Shards:
    """Rows in, shards out. ``known``: the files of a finished import, whose shards nothing else may
    replace; None while there is none."""

    def __init__(
        self,
        wanted: Wanted,
        proof: Proof,
        path: Callable[[int], Path],
        known: dict[str, Any] | None,
    ) -> None:
        self._wanted, self._proof, self._path, self._known = wanted, proof, path, known
        self._rows: list[tuple[Found, Sample]] = []
        self._seen: set[int] = set()
        self._left_out: Counter[str] = Counter()
        self._source = hashlib.sha256()
        self._counts = {"rows": 0, "tokens": 0}
        self._tokens = 0
        self._measured: list[dict[str, float]] = []
        self._files: dict[str, Any] = {}
        self.paths: list[Path] = []

    def take(self, found: Found, progress: str) -> None:
        """One more row of the source."""
        self._source.update(f"{found.name}\0{found.sha256}\n".encode())
        sample = found.sample
        fault = sample if isinstance(sample, str) else self._wanted.fault(sample)
        if isinstance(sample, str) or fault is not None:
            self._left_out[fault or ""] += 1
            return
        if (known := hash(sample.sample_id)) in self._seen:
            self._left_out["sample id of an earlier row"] += 1
            return
        self._seen.add(known)
        if self._rows and self._tokens + len(sample.input_ids_L) > self._wanted.shard_tokens:
            self.close(progress)
        self._rows.append((found, sample))
        self._tokens += len(sample.input_ids_L)

    def close(self, progress: str) -> None:
        """Write the rows that wait, unless they are on disk."""
        if not self._rows:
            return
        path = self._path(len(self.paths))
        shard = _packed(self._wanted, self._rows)
        kept = self._on_disk(path, shard.header)
        if kept is None:
            numbers = self._proof.measure(
                shard, self._wanted.min_argmax_share, is_first=not self.paths
            )
            made = replace(shard, header=replace(shard.header, gates=numbers))
            self._files[path.name] = write_shard(path, made)
        else:
            numbers, self._files[path.name] = kept
        print(
            f"{self._wanted.dataset}: {path.name}: {len(shard)} rows, "
            f"{len(shard.input_ids_T):,} tokens, argmax share {_share([numbers]):.1%}, "
            f"{'kept' if kept else 'written'}, {progress}",
            flush=True,
        )
        self.paths.append(path)
        self._measured.append(numbers)
        self._counts["rows"] += len(shard)
        self._counts["tokens"] += self._tokens
        self._rows, self._tokens = [], 0

    def section(self) -> dict[str, Any]:
        """Of the manifest. DataError when every row was left out."""
        left_out = dict(sorted(self._left_out.items()))
        if not self.paths:
            reasons = ", ".join(f"{n:,} rows: {why}" for why, n in left_out.items())
            raise DataError(
                f"{self._wanted.dataset}: nothing to import, {reasons or 'the directory is empty'}:"
                f" is it a directory of {self._wanted.system}, of this target?"
            )
        errors = [n["reference_error"] for n in self._measured if "reference_error" in n]
        return {
            "inputs": {"imported": self._wanted.system, "source": self._source.hexdigest()},
            "identity": self._wanted.identity,
            "counts": {**self._counts, "shards": len(self.paths), "left_out": left_out},
            "gates": {
                **({"reference_error": max(errors)} if errors else {}),
                "argmax_share": _share(self._measured),
                "response_tokens": sum(n["response_tokens"] for n in self._measured),
            },
            "files": self._files,
        }

    def _on_disk(
        self, path: Path, header: ShardHeader
    ) -> tuple[dict[str, float], dict[str, Any]] | None:
        """This very shard's numbers and file record; None when it must be made."""
        try:
            found = read_header(path)
        except DataError:
            return None
        if replace(found, gates={}) != header:
            if self._known is None:
                return None
            raise DataError(
                f"{path} was imported from other files, or for another recipe: move its directory "
                "away, then import again"
            )
        numbers, bound = found.gates, self._wanted.min_argmax_share
        if gates.share_too_low(numbers["argmax_matches"], numbers["response_tokens"], bound):
            return None
        record = file_record(path)
        if self._known is not None and self._known.get(path.name) != record:
            return None
        return numbers, record


def _packed(wanted: Wanted, rows: Sequence[tuple[Found, Sample]]) -> Shard:
    samples = [sample for _, sample in rows]
    read = [[found.name, found.sha256] for found, _ in rows]
    return Shard(
        header=ShardHeader(
            sample_ids=tuple(sample.sample_id for sample in samples),
            aux_layers=tuple(wanted.identity["aux_layers"]),
            dtype=wanted.identity["dtype"],
            tokenized_sha256=digest(read),
            extract_sha256=digest({"imported": wanted.system, "identity": wanted.identity}),
            gates={},
            norm=wanted.identity["norm"],
        ),
        input_ids_T=torch.cat([sample.input_ids_L for sample in samples]).to(torch.int64),
        offsets_N1=torch.tensor([0, *(len(s.input_ids_L) for s in samples)]).cumsum(0),
        prompt_tokens_N=torch.tensor([prompt_tokens(s.loss_mask_L) for s in samples]),
        aux_TAD=torch.cat([sample.aux_LAH for sample in samples]),
        final_TD=torch.cat([sample.final_LH for sample in samples]),
    )


def _share(measured: Sequence[dict[str, float]]) -> float:
    total = sum(numbers["response_tokens"] for numbers in measured)
    return sum(n["argmax_matches"] for n in measured) / total if total else 1.0


def _name(states: torch.Tensor | torch.dtype) -> str:
    dtype = states.dtype if isinstance(states, torch.Tensor) else states
    return str(dtype).removeprefix("torch.")


def _say(dataset: str, section: dict[str, Any], changed: bool) -> None:
    counts = section["counts"]
    left_out = sum(counts["left_out"].values())
    print(
        f"{dataset}: {counts['rows']:,} rows, {counts['tokens']:,} tokens in {counts['shards']} "
        f"shards, argmax share {section['gates']['argmax_share']:.1%}, {left_out:,} rows left out"
        f"{'' if changed else ', unchanged'}",
        flush=True,
    )
    if "reference_error" not in section["gates"]:
        print(
            f"{dataset}: no plain forward of the target fits here: its states are judged by their "
            "form and by the tokens that they predict, not by comparison",
            flush=True,
        )
    for reason, number in counts["left_out"].items():
        print(f"{dataset}: left out {number:,}: {reason}", flush=True)
