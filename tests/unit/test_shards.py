"""Shards are plain safetensors files: whole, the same bytes every time, and refused otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafter.errors import DataError
from drafter.extraction.shards import (
    NORMS,
    Shard,
    ShardHeader,
    read_header,
    read_rows,
    read_shard,
    shard_paths,
    write_shard,
)
from drafter.files import file_record, write_section
from drafter.layout import HiddenStates

LENGTHS = [5, 1, 7]


def make_shard(seed: int = 0, dtype: str = "bfloat16") -> Shard:
    generator = torch.Generator().manual_seed(seed)
    tokens, kind = sum(LENGTHS), {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    return Shard(
        header=ShardHeader(
            sample_ids=tuple(f"B1-{seed}-é{i}" for i in range(len(LENGTHS))),
            aux_layers=(1, 3),
            dtype=dtype,
            tokenized_sha256="t" * 64,
            extract_sha256="e" * 64,
            gates={"alone_error": 0.125, "argmax_matches": 7},
        ),
        input_ids_T=torch.randint(0, 100, (tokens,), generator=generator),
        offsets_N1=torch.tensor([0, *LENGTHS]).cumsum(0),
        prompt_tokens_N=torch.tensor([2, 1, 3]),
        aux_TAD=torch.randn(tokens, 2, 4, generator=generator).to(kind),
        final_TD=torch.randn(tokens, 4, generator=generator).to(kind),
    )


def tensors(shard: Shard) -> list[torch.Tensor]:
    return [
        shard.input_ids_T,
        shard.offsets_N1,
        shard.prompt_tokens_N,
        shard.aux_TAD,
        shard.final_TD,
    ]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_shard_reads_back_as_it_was_written(tmp_path: Path, dtype: str, norm: str) -> None:
    path, shard = tmp_path / "shard.safetensors", make_shard(dtype=dtype)
    shard = replace(shard, header=replace(shard.header, norm=norm))
    assert write_shard(path, shard) == file_record(path)
    back = read_shard(path)
    assert back.header == shard.header == read_header(path)
    assert all(torch.equal(a, b) for a, b in zip(tensors(back), tensors(shard), strict=True))


def test_the_public_reader_sees_the_documented_names_and_strings(tmp_path: Path) -> None:
    path, shard = tmp_path / "shard.safetensors", make_shard()
    write_shard(path, shard)
    public = load_file(path)
    assert set(public) == {"input_ids", "offsets", "prompt_tokens", "aux", "final"}
    assert torch.equal(public["aux"], shard.aux_TAD)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["sample_ids"] == '["B1-0-é0", "B1-0-é1", "B1-0-é2"]'
    assert (metadata["aux_layers"], metadata["norm"]) == ("[1, 3]", "before")
    assert (metadata["dtype"], metadata["tokenized_sha256"]) == ("bfloat16", "t" * 64)


def test_the_same_shard_is_the_same_bytes(tmp_path: Path) -> None:
    records = [write_shard(tmp_path / f"{i}.safetensors", make_shard()) for i in range(5)]
    assert all(record == records[0] for record in records)


def test_rows_are_cut_at_the_offsets(tmp_path: Path) -> None:
    path, shard = tmp_path / "shard.safetensors", make_shard()
    write_shard(path, shard)
    rows = list(read_shard(path).rows())
    assert [len(row.input_ids_T) for row in rows] == LENGTHS
    assert [row.prompt_tokens for row in rows] == [2, 1, 3]
    assert torch.equal(rows[2].final_TD, shard.final_TD[6:])
    assert torch.equal(rows[1].aux_TAD, shard.aux_TAD[5:6])


def test_a_dataset_is_read_in_the_order_and_number_of_its_manifest(tmp_path: Path) -> None:
    hidden = HiddenStates(tmp_path)
    for index in range(3):
        write_shard(hidden.shard(index), make_shard(seed=index))
    with pytest.raises(DataError, match="is not extracted yet"):
        shard_paths(hidden)
    write_section(hidden.manifest, "extract", {"counts": {"shards": 2}})
    assert [row.sample_id[:4] for row in read_rows(hidden)] == ["B1-0"] * 3 + ["B1-1"] * 3


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    save_file({"a": torch.ones(1)}, path)


def beside_the_norm(path: Path) -> None:
    save_file(load_file(path), path, {**metadata_of(path), "norm": "beside"})


def one_row_short(path: Path) -> None:
    cut = {**load_file(path), "final": load_file(path)["final"][1:].clone()}
    save_file(cut, path, metadata_of(path))


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (torn, "cannot be read"),
        (empty, "cannot be read"),
        (Path.unlink, "cannot be read"),
        (foreign, "it is not a shard"),
        (beside_the_norm, "norm 'beside'"),
        (one_row_short, "do not fit together"),
    ],
)
def test_what_is_no_whole_shard_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], Any], sentence: str
) -> None:
    path = tmp_path / "shard.safetensors"
    write_shard(path, make_shard())
    spoil(path)
    with pytest.raises(DataError, match=sentence) as refused:
        read_shard(path)
    assert str(path) in str(refused.value)


def test_a_shard_replaces_another_whole(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    write_shard(path, make_shard(seed=0))
    mapped = read_shard(path)
    write_shard(path, replace(make_shard(seed=1)))
    assert mapped.header.sample_ids[0] == "B1-0-é0"
    assert torch.equal(mapped.final_TD, make_shard(seed=0).final_TD)
    assert list(tmp_path.iterdir()) == [path]
