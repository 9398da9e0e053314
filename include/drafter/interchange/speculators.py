"""The data directory of speculators' offline training, read and written.

An Arrow dataset as ``datasets.save_to_disk`` leaves it (dataset_info.json, state.json, stream files
that it names) with a row per sample, beside the states of row i::

    input_ids, loss_mask   list of int
    seq_len                int
    sample_id              string; of exports only, speculators does not look at it

    hidden_states/hs_<i>.safetensors
        token_ids       [L]            int64
        hidden_states   [L, A + 1, H]  dtype  the layers, then final BEFORE the last norm

Source: speculators 0.9.0, train/data.py, and hs-connectors 0.9.0. Rows of other origin are called
``<dataset>-<i>``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import types
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter.errors import DataError
from drafter.extraction.shards import Row
from drafter.files import file_record, read_json, whole_file, write_json
from drafter.interchange import NO_FILE, Found, Sample, loss_mask

_ARROW = "data-00000-of-00001.arrow"
_BATCH_ROWS = 256
_SHOWN = ["input_ids", "loss_mask", "seq_len"]
_FEATURES: dict[str, Any] = {
    "input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"},
    "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "seq_len": {"dtype": "int64", "_type": "Value"},
    "sample_id": {"dtype": "string", "_type": "Value"},
}
_SCHEMA = pyarrow.schema(
    [
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("loss_mask", pyarrow.list_(pyarrow.int64())),
        ("seq_len", pyarrow.int64()),
        ("sample_id", pyarrow.string()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


class SpeculatorsSource:
    """The directory that speculators' prepare-data and generate-offline-data wrote, or an export.

    Raises DataError when it is no such directory.
    """

    norm = "before"

    def __init__(self, directory: Path, dataset: str) -> None:
        self._directory = directory
        self._dataset = dataset
        files = read_json(directory / "state.json").get("_data_files")
        if not isinstance(files, list) or not all(
            isinstance(file, dict) and isinstance(file.get("filename"), str) for file in files
        ):
            raise DataError(f"{directory}/state.json names no _data_files: it is no Arrow dataset")
        self._files = [directory / Path(file["filename"]).name for file in files]

    @property
    def total(self) -> int:
        return sum(batch.num_rows for batch in self._batches())

    def rows(self) -> Iterator[Found]:
        index = 0
        for batch in self._batches():
            for line in range(batch.num_rows):
                yield self._found(index, batch, line)
                index += 1

    def _found(self, index: int, batch: pyarrow.RecordBatch, line: int) -> Found:
        columns = [batch.column(name)[line] for name in _SHOWN]
        ids, mask, seq_len = (column.as_py() for column in columns)
        named = "sample_id" in batch.schema.names and batch.column("sample_id")[line].as_py()
        sample_id = named if named and isinstance(named, str) else f"{self._dataset}-{index}"
        path = _states(self._directory, index)
        sha256 = hashlib.sha256(json.dumps([ids, mask, seq_len, sample_id]).encode())
        sample: Sample | str = NO_FILE if os.path.lexists(path) else "no file of hidden states"
        if path.is_file():
            sha256.update(file_record(path)["sha256"].encode())
            sample = _read(path, sample_id, ids, mask, seq_len)
        return Found(path.name, sha256.hexdigest(), sample)

    def _batches(self) -> Iterator[pyarrow.RecordBatch]:
        for path in self._files:
            if not path.is_file():
                raise DataError(f"{path} is {NO_FILE}: fetch it again")
            try:
                with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
                    _check(path, stream.schema)
                    yield from stream
            except (pyarrow.ArrowInvalid, OSError) as error:
                raise DataError(f"{path} cannot be read ({error}): fetch it again") from None


class SpeculatorsWriter:
    """Fills ``directory`` from shards whose ``final`` is before the last norm."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, index: int) -> Path:
        return _states(self._directory, index)

    def write(self, path: Path, row: Row) -> None:
        states_TAD = torch.cat([row.aux_TAD, row.final_TD[:, None]], dim=1)
        with whole_file(path) as partial:
            save_file({"token_ids": row.input_ids_T, "hidden_states": states_TAD}, partial)

    def finish(self, rows: Iterator[Row]) -> None:
        with (
            whole_file(self._directory / _ARROW) as partial,
            pyarrow.OSFile(str(partial), "wb") as file,
            pyarrow.ipc.new_stream(file, _SCHEMA) as stream,
        ):
            while batch := [_columns(row) for row in islice(rows, _BATCH_ROWS)]:
                stream.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=_SCHEMA))
        sha256 = file_record(self._directory / _ARROW)["sha256"]
        write_json(
            self._directory / "dataset_info.json",
            {
                "citation": "",
                "description": "",
                "features": _FEATURES,
                "homepage": "",
                "license": "",
            },
        )
        write_json(
            self._directory / "state.json",
            {
                "_data_files": [{"filename": _ARROW}],
                "_fingerprint": sha256[:16],
                "_format_columns": _SHOWN,
                "_format_kwargs": {},
                "_format_type": "torch",
                "_output_all_columns": False,
                "_split": None,
            },
        )


def _states(directory: Path, index: int) -> Path:
    return directory / "hidden_states" / f"hs_{index}.safetensors"


def _check(path: Path, schema: pyarrow.Schema) -> None:
    """DataError unless the columns are there and hold lists of whole numbers."""
    absent = [name for name in _SHOWN if name not in schema.names]
    if absent:
        raise DataError(f"{path} has no column {absent[0]}: prepare the data anew")
    for name in ("input_ids", "loss_mask"):
        kind = schema.field(name).type
        is_list = types.is_list(kind) or types.is_large_list(kind)
        if not is_list or not (
            types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)
        ):
            raise DataError(
                f"{path}: column {name} holds {kind}, lists of whole numbers are needed: prepare "
                "the data anew"
            )


def _columns(row: Row) -> dict[str, Any]:
    tokens = len(row.input_ids_T)
    return {
        "input_ids": row.input_ids_T.tolist(),
        "loss_mask": loss_mask(tokens, row.prompt_tokens).tolist(),
        "seq_len": tokens,
        "sample_id": row.sample_id,
    }


def _read(path: Path, sample_id: str, ids: Any, mask: Any, seq_len: Any) -> Sample | str:
    try:
        data = load_file(path)
    except (SafetensorError, OSError):
        return "unreadable file"
    if not {"token_ids", "hidden_states"} <= data.keys():
        return "no tensors token_ids and hidden_states"
    states = data["hidden_states"]
    if states.dim() != 3 or states.shape[1] < 2:
        return "states are not [L, A + 1, H]"
    if ids is None or mask is None or not len(ids) == len(mask) == seq_len:
        return "input_ids, loss_mask and seq_len differ in length"
    if None in mask:
        return "loss mask is not one prompt and one response"
    if data["token_ids"].tolist() != ids:
        return "states are of other tokens than input_ids"
    return Sample(
        sample_id,
        data["token_ids"].reshape(-1),
        torch.tensor(mask),
        states[:, :-1],
        states[:, -1],
    )
