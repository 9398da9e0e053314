"""SpecForge's offline files (``specforge_hidden_states_v1``), read and written.

``rows_0-2000/data_0.ckpt ...``: 2000 rows per folder, one ``torch.save`` of a dict per row, or the
same gzipped as ``.ckpt.gz``::

    input_ids         [L]        int64
    loss_mask         [L]        int64
    hidden_state      [1, L, H]  dtype  final, AFTER the last norm
    aux_hidden_state  [1, L, A * H]  dtype  the layers side by side

Source: SpecForge 0.2.0, scripts/prepare_hidden_states.py and runtime/data_plane, which takes every
.ckpt below a directory. The files have no room for sample ids: an export leaves them in
``sample_ids.jsonl``, and rows of other origin are called ``<dataset>-<number of the file>``.

Files are read with ``weights_only``: one that holds anything but tensors is refused, and no code in
it is run.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import torch

from drafter.errors import DataError
from drafter.extraction.shards import Row
from drafter.files import digest, file_record, whole_file
from drafter.interchange import NO_FILE, SAMPLE_IDS, Found, Sample, loss_mask
from drafter.target_head import TargetHead

_FOLDER_ROWS = 2000
_SUFFIXES = (".ckpt", ".ckpt.gz")
_KEYS = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
_BEFORE_ZIP = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""How files begin that PyTorch wrote before 1.6, or writes without its zip format: its
torch/serialization.py, MAGIC_NUMBER."""
_STANDARD = re.compile(r"rows_\d+-\d+/data_(\d+)\.ckpt(\.gz)?")


class SpecForgeSource:
    """The directory that SpecForge's prepare_hidden_states.py wrote, or an export."""

    norm = "after"

    def __init__(self, directory: Path, dataset: str) -> None:
        self._directory = directory
        self._dataset = dataset

    @property
    def total(self) -> int:
        return sum(1 for _ in _files(self._directory))

    def rows(self) -> Iterator[Found]:
        """The id of a row is part of its hash: shards hold it."""
        sample_ids = _SampleIds(self._directory / SAMPLE_IDS)
        for path in _files(self._directory):
            name = path.relative_to(self._directory).as_posix()
            standard = _STANDARD.fullmatch(name)
            stem = standard[1] if standard else name.removesuffix(".gz").removesuffix(".ckpt")
            known = sample_ids.of(int(standard[1])) if standard else None
            sample_id = known or f"{self._dataset}-{stem}"
            if not path.is_file():
                # A pipe would be waited for, for ever.
                yield Found(name, digest([name, NO_FILE]), NO_FILE)
                continue
            sha256 = file_record(path)["sha256"]
            yield Found(name, digest([sha256, sample_id]), _read(path, sample_id))


class SpecForgeWriter:
    """Fills ``directory``. ``head`` reads ``final`` as the shards hold it."""

    def __init__(self, directory: Path, head: TargetHead) -> None:
        self._directory = directory
        self._head = head

    def path(self, index: int) -> Path:
        begin = index - index % _FOLDER_ROWS
        return self._directory / f"rows_{begin}-{begin + _FOLDER_ROWS}" / f"data_{index}.ckpt"

    def write(self, path: Path, row: Row) -> None:
        # Tensors are copied: torch.save writes all of the storage that a view belongs to.
        data = {
            "input_ids": row.input_ids_T.clone(),
            "loss_mask": loss_mask(len(row.input_ids_T), row.prompt_tokens),
            "hidden_state": self._head.normed(row.final_TD).to(row.final_TD.dtype)[None].clone(),
            "aux_hidden_state": row.aux_TAD.flatten(1)[None].clone(),
        }
        with whole_file(path) as partial:
            torch.save(data, partial)

    def finish(self, rows: Iterator[Row]) -> None:
        with whole_file(self._directory / SAMPLE_IDS) as partial, open(partial, "wb") as file:
            for row in rows:
                file.write(orjson.dumps(row.sample_id) + b"\n")


def _files(directory: Path) -> Iterator[Path]:
    """Every feature file, folders and names in the order of their numbers."""
    for root, folders, names in os.walk(directory):
        folders.sort(key=_by_number)
        for name in sorted(names, key=_by_number):
            if name.endswith(_SUFFIXES) and not name.startswith("."):
                yield Path(root) / name


def _by_number(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


class _SampleIds:
    """The ids that an export left beside its files, one line in memory; none of other files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = enumerate(_lines(path) if path.is_file() else [])
        self._last = -1

    def of(self, number: int) -> str | None:
        """The id of file ``number``. None for the second file of a number: the rest keep theirs."""
        if number <= self._last:
            return None
        for index, line in self._lines:
            if index < number:
                continue
            self._last = index
            try:
                sample_id = orjson.loads(line)
            except orjson.JSONDecodeError:
                sample_id = None
            if not isinstance(sample_id, str):
                raise DataError(
                    f"{self._path}:{index + 1} is no JSON string: export the rows again, or remove "
                    "the file to have them named anew"
                )
            return sample_id
        return None


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def _read(path: Path, sample_id: str) -> Sample | str:
    try:
        data = _load(path)
    except pickle.UnpicklingError:
        raise DataError(
            f"{path} holds something else than tensors, code perhaps, and was not loaded: move it "
            "away, or ask whoever wrote it for tensors alone"
        ) from None
    except (RuntimeError, EOFError, OSError, zlib.error):
        return "unreadable file"
    if not isinstance(data, dict) or not all(_is_dense(data.get(key)) for key in _KEYS):
        return f"no dict of the tensors {', '.join(_KEYS)}"
    ids, mask, final, aux = (data[key].detach() for key in _KEYS)
    width = final.shape[-1] if final.dim() == 3 else 0
    if final.dim() != 3 or aux.dim() != 3 or len(final) != 1 or len(aux) != 1 or not width:
        return "states are not [1, L, H] and [1, L, A * H]"
    if aux.shape[-1] % width:
        return "auxiliary states are no whole number of layers wide"
    aux_LAH = aux[0].unflatten(-1, (-1, width))
    return Sample(sample_id, ids.reshape(-1), mask.reshape(-1), aux_LAH, final[0])


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _load(path: Path) -> Any:
    """RuntimeError or the like when it is torn or nothing of torch's."""
    if path.suffix == ".gz":
        with gzip.open(path) as file:
            return torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
    with open(path, "rb") as file:
        is_old = file.read(len(_BEFORE_ZIP)) == _BEFORE_ZIP
    # What PyTorch wrote before 1.6 cannot be mapped.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=not is_old)
