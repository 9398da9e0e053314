"""Hidden-state shards: what extraction writes and training reads.

``hidden_states/<dataset>/shard-00000.safetensors ...``: each file holds whole rows, consecutive in
the order of tokenized_data.jsonl, and at most ``extract.shard_tokens`` tokens unless it is one
longer row. With N rows, T tokens over all rows, A auxiliary layers and D hidden size::

    input_ids      [T]        int64  prompt, then response, as the target wrote them
    offsets        [N + 1]    int64  row i is input_ids[offsets[i] : offsets[i + 1]]
    prompt_tokens  [N]        int64  of each row
    aux            [T, A, D]  dtype  aux[t, a] is HF hidden_states[aux_layers[a]] at token t
    final          [T, D]     dtype  after the last decoder layer, before or after the last norm

The state at t has read input_ids up to and including t of its row: ``lm_head(norm(final[t]))`` is
the distribution of input_ids[t + 1]. Extraction stores ``final`` before the norm. States of systems
that keep it after the norm (drafter.interchange) stay as they are, since no norm can be undone:
:class:`drafter.target_head.TargetHead` is the one place that knows the difference.

Layer ids are indices into HF ``hidden_states``: k is the input of decoder layer k, which is the
output of layer k - 1; 0 is the embeddings. SpecForge and SGLang count outputs, one less.

Metadata, all strings::

    sample_ids        JSON list of N
    aux_layers        JSON list of A
    norm              "before" | "after": where final stands
    dtype             "float32" | "bfloat16"
    tokenized_sha256  of the tokenized_data.jsonl that the rows come from, or of imported files
    extract_sha256    of everything else that decides the bytes (drafter.extract)
    gates             JSON object: numbers that the gates measured on this shard

A shard appears whole or not at all, holds no pickle, and is the same bytes for the same tensors:
the header is written here with sorted keys, as ``safetensors.save_file`` orders metadata at random.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from drafter.errors import DataError, DrafterError
from drafter.files import read_section, whole_file
from drafter.layout import HiddenStates

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NORMS = ("before", "after")
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class Features:
    """What the target thought of one row: aux_TAD and final_TD, in the stored dtype."""

    aux_TAD: torch.Tensor
    final_TD: torch.Tensor
    low_TD: torch.Tensor | None = None
    """States of ``Backend.low_layer``, where it gives them: for a gate, not stored."""

    returned_ids: Sequence[int] | None = None
    """The tokens that a server says these are the states of."""


@dataclass(frozen=True)
class Row:
    """One sample of a shard; tensors are views into the file."""

    sample_id: str
    input_ids_T: torch.Tensor
    prompt_tokens: int
    aux_TAD: torch.Tensor
    final_TD: torch.Tensor


@dataclass(frozen=True)
class ShardHeader:
    """The metadata of one shard."""

    sample_ids: tuple[str, ...]
    aux_layers: tuple[int, ...]
    dtype: str
    tokenized_sha256: str
    extract_sha256: str
    gates: dict[str, float]
    norm: str = "before"


@dataclass(frozen=True)
class Shard:
    """One shard; T counts the tokens of all N rows."""

    header: ShardHeader
    input_ids_T: torch.Tensor
    offsets_N1: torch.Tensor
    prompt_tokens_N: torch.Tensor
    aux_TAD: torch.Tensor
    final_TD: torch.Tensor

    def __len__(self) -> int:
        return len(self.header.sample_ids)

    def row(self, index: int) -> Row:
        start, stop = int(self.offsets_N1[index]), int(self.offsets_N1[index + 1])
        return Row(
            sample_id=self.header.sample_ids[index],
            input_ids_T=self.input_ids_T[start:stop],
            prompt_tokens=int(self.prompt_tokens_N[index]),
            aux_TAD=self.aux_TAD[start:stop],
            final_TD=self.final_TD[start:stop],
        )

    def rows(self) -> Iterator[Row]:
        return map(self.row, range(len(self)))


def write_shard(path: Path, shard: Shard) -> dict[str, Any]:
    """Write ``shard`` whole; returns its ``{bytes, sha256}`` without reading it back.

    Raises DrafterError when the disk is full.
    """
    header = shard.header
    tensors = {
        "input_ids": shard.input_ids_T,
        "offsets": shard.offsets_N1,
        "prompt_tokens": shard.prompt_tokens_N,
        "aux": shard.aux_TAD,
        "final": shard.final_TD,
    }
    head = _header_bytes(tensors, header)
    sha256 = hashlib.sha256(head)
    size = len(head)
    try:
        # Beside each other, to the disk's last word: hashing is hardly faster than a good one.
        with (
            ThreadPoolExecutor(1) as hasher,
            whole_file(path) as partial,
            open(partial, "wb") as file,
        ):
            file.write(head)
            for block in _blocks(tensors.values()):
                hasher.submit(sha256.update, block)
                file.write(block)
                size += len(block)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DrafterError(
            f"no room for {path} ({size} bytes so far): free disk space, then run it again; shards "
            "already written are kept"
        ) from None
    return {"bytes": size, "sha256": sha256.hexdigest()}


def read_header(path: Path) -> ShardHeader:
    """Metadata of a complete shard. Raises DataError when it is torn or is not one of ours."""
    try:
        with safe_open(path, framework="pt") as file:
            return _parse_header(path, file.metadata())
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): run extract again to replace it"
        ) from None


def read_shard(path: Path) -> Shard:
    """Open one shard; tensors are mapped from the file, so only the rows that are used are read.

    Raises DataError when the file is torn, is not a shard, or its parts do not fit together.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = _parse_header(path, file.metadata())
            shard = Shard(
                header=header,
                input_ids_T=file.get_tensor("input_ids"),
                offsets_N1=file.get_tensor("offsets"),
                prompt_tokens_N=file.get_tensor("prompt_tokens"),
                aux_TAD=file.get_tensor("aux"),
                final_TD=file.get_tensor("final"),
            )
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): run extract again to replace it"
        ) from None
    tokens, rows = len(shard.input_ids_T), len(shard)
    fits = (
        shard.offsets_N1.shape == (rows + 1,)
        and shard.prompt_tokens_N.shape == (rows,)
        and int(shard.offsets_N1[-1]) == tokens
        and shard.final_TD.shape[0] == tokens
        and shard.aux_TAD.shape == (tokens, len(header.aux_layers), shard.final_TD.shape[1])
        and shard.aux_TAD.dtype == shard.final_TD.dtype == DTYPES[header.dtype]
    )
    if not fits:
        raise DataError(
            f"{path}: {rows} rows, {tokens} ids, final {list(shard.final_TD.shape)} and aux "
            f"{list(shard.aux_TAD.shape)} do not fit together: run extract again to replace it"
        )
    return shard


def shard_paths(hidden: HiddenStates) -> list[Path]:
    """Shards of a finished extraction, in tokenized order. DataError when it is not finished."""
    section = read_section(hidden.manifest, "extract")
    if section is None:
        raise DataError(f"{hidden.root} is not extracted yet: run extract first")
    return [hidden.shard(index) for index in range(section["counts"]["shards"])]


def read_rows(hidden: HiddenStates) -> Iterator[Row]:
    """Every row of a dataset in tokenized order, one open shard at a time."""
    for path in shard_paths(hidden):
        yield from read_shard(path).rows()


def _blocks(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        flat = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        for start in range(0, len(flat), _BLOCK_BYTES):
            yield flat[start : start + _BLOCK_BYTES]


def _header_bytes(tensors: dict[str, torch.Tensor], header: ShardHeader) -> bytes:
    """The safetensors header: length (8 bytes, little endian), JSON padded with spaces to 8."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "sample_ids": json.dumps(list(header.sample_ids), ensure_ascii=False),
            "aux_layers": json.dumps(list(header.aux_layers)),
            "norm": header.norm,
            "dtype": header.dtype,
            "tokenized_sha256": header.tokenized_sha256,
            "extract_sha256": header.extract_sha256,
            "gates": json.dumps(header.gates, sort_keys=True),
        }
    }
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse_header(path: Path, metadata: dict[str, str] | None) -> ShardHeader:
    try:
        found = metadata or {}
        header = ShardHeader(
            sample_ids=tuple(json.loads(found["sample_ids"])),
            aux_layers=tuple(json.loads(found["aux_layers"])),
            dtype=found["dtype"],
            tokenized_sha256=found["tokenized_sha256"],
            extract_sha256=found["extract_sha256"],
            gates=json.loads(found["gates"]),
            norm=found["norm"],
        )
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{path} has no readable metadata {error}: it is not a shard, move it away"
        ) from None
    if header.norm not in NORMS or header.dtype not in DTYPES:
        raise DataError(
            f"{path} has norm {header.norm!r} and dtype {header.dtype!r}; shards hold states "
            f"{' or '.join(NORMS)} the last norm as {' or '.join(DTYPES)}: move it away and run "
            "extract again"
        )
    return header
