"""speculators' directories come in and go out to the bit; what is wrong is found before."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from unit.random_targets import greedy_rows, one_thread, save_target
from unit.states_site import StatesSite, mask, save_specforge, save_speculators, specforge_row
from unit.states_site import speculators_states as states_of

from drafter.errors import DataError, RecipeError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Target:
    directory: Path
    model: Any
    rows: list[dict[str, Any]]

    def states(self, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
        return [states_of(self.model, row, dtype) for row in self.rows]

    def site(self, root: Path, **settings: Any) -> StatesSite:
        return StatesSite(root, self.directory, self.rows, **settings)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(directory)
        yield Target(directory, model, greedy_rows(model, 12))


def table(directory: Path) -> list[dict[str, Any]]:
    """Rows of the Arrow dataset."""
    rows = []
    for path in sorted(directory.glob("*.arrow")):
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            rows += stream.read_all().to_pylist()
    return rows


def states(directory: Path) -> list[dict[str, Tensor]]:
    count = len(list(directory.glob("hidden_states/hs_*.safetensors")))
    return [load_file(directory / f"hidden_states/hs_{i}.safetensors") for i in range(count)]


def equal(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys()
        and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(one, other, strict=True)
    )


# There and back.


@pytest.mark.parametrize("dtype", DTYPES)
def test_their_directory_becomes_shards_and_the_same_directory_again(
    tmp_path: Path, target: Target, dtype: str
) -> None:
    theirs, site = tmp_path / "theirs", target.site(tmp_path / "w", dtype=dtype)
    save_speculators(theirs, target.rows, target.states(DTYPES[dtype]))
    site.states("import", "speculators", theirs)
    assert site.section["identity"]["norm"] == "before"
    assert site.section["counts"]["shards"] > 1
    assert site.section["gates"]["reference_error"] < 0.01
    assert [row.sample_id for row in site.rows()] == [f"B1-{i}" for i in range(12)]
    site.states("export", "speculators", tmp_path / "again")
    assert equal(states(theirs), states(tmp_path / "again"))
    again = table(tmp_path / "again")
    assert [{**row, "sample_id": f"B1-{i}"} for i, row in enumerate(table(theirs))] == again


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_states_come_back_bit_for_bit(tmp_path: Path, target: Target, dtype: str) -> None:
    ours, back = (target.site(tmp_path / name, dtype=dtype) for name in "ab")
    ours.extract()
    ours.states("export", "speculators", tmp_path / "files")
    back.states("import", "speculators", tmp_path / "files")
    assert back.section["identity"] == ours.section["identity"]
    for one, other in zip(ours.rows(), back.rows(), strict=True):
        assert (one.sample_id, one.prompt_tokens) == (other.sample_id, other.prompt_tokens)
        assert torch.equal(one.input_ids_T, other.input_ids_T)
        assert torch.equal(one.aux_TAD, other.aux_TAD)
        assert torch.equal(one.final_TD, other.final_TD)


def test_the_directory_holds_what_speculators_itself_would_have_stored(
    tmp_path: Path, target: Target
) -> None:
    site = target.site(tmp_path / "w")
    site.extract()
    site.states("export", "speculators", tmp_path / "files")
    for got, want in zip(states(tmp_path / "files"), target.states(), strict=True):
        assert torch.equal(got["token_ids"], want["token_ids"])
        torch.testing.assert_close(got["hidden_states"], want["hidden_states"], atol=1e-4, rtol=0)
    for got_row, row in zip(table(tmp_path / "files"), target.rows, strict=True):
        tokens = len(row["input_ids"])
        assert got_row == {
            "input_ids": row["input_ids"],
            "loss_mask": mask(row).tolist(),
            "seq_len": tokens,
            "sample_id": row["sample_id"],
        }


def test_states_after_the_norm_cannot_go_to_speculators(tmp_path: Path, target: Target) -> None:
    files = [specforge_row(target.model, row, torch.float32) for row in target.rows]
    save_specforge(tmp_path / "theirs", files)
    site = target.site(tmp_path / "w")
    site.states("import", "specforge", tmp_path / "theirs")
    with pytest.raises(RecipeError, match="after the last norm, which cannot be undone"):
        site.states("export", "speculators", tmp_path / "files")
    assert not (tmp_path / "files").exists()


# What is left out.


Rows, States = list[dict[str, Any]], list[dict[str, Tensor]]


def masked(change: Callable[[list[int]], list[Any]]) -> Callable[[Rows, States], None]:
    def spoil(rows: Rows, _: States) -> None:
        rows[3]["loss_mask"] = change(mask(rows[3]).tolist())

    return spoil


def stated(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Rows, States], None]:
    def spoil(_: Rows, stored: States) -> None:
        stored[3] = {**stored[3], name: change(stored[3][name]).contiguous()}

    return spoil


def renamed(_: Rows, stored: States) -> None:
    stored[3] = {"tokens": stored[3]["token_ids"]}


LEFT_OUT = {
    "two turns": (masked(lambda m: [*m[:-2], 0, 1]), "not one prompt and one response"),
    "all prompt": (masked(lambda m: [0] * len(m)), "loss mask has no response"),
    "all response": (masked(lambda m: [1] * len(m)), "loss mask has no prompt"),
    "gap in the mask": (masked(lambda m: [*m[:-1], None]), "not one prompt and one response"),
    "short mask": (masked(lambda m: m[1:]), "differ in length"),
    "other tokens": (stated("token_ids", lambda ids: ids + 1), "of other tokens than input_ids"),
    "fewer tokens": (stated("token_ids", lambda ids: ids[1:]), "of other tokens than input_ids"),
    "fewer states": (stated("hidden_states", lambda s: s[1:]), "differ in number"),
    "narrow": (stated("hidden_states", lambda s: s[..., ::2]), "states are 16 wide, the target's"),
    "one layer less": (stated("hidden_states", lambda s: s[:, 1:]), "2 auxiliary layers"),
    "flat": (stated("hidden_states", lambda s: s.flatten(1)), "states are not [L, A + 1, H]"),
    "mixed dtypes": (stated("hidden_states", lambda s: s.half()), "states in float16 and float16"),
    "other names": (renamed, "no tensors token_ids and hidden_states"),
}


@pytest.mark.parametrize(("spoil", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_row_that_does_not_fit_is_left_out_with_reason_and_count(
    tmp_path: Path, target: Target, spoil: Callable[[Rows, States], None], reason: str
) -> None:
    rows, stored = [dict(row) for row in target.rows], target.states()
    spoil(rows, stored)
    save_speculators(tmp_path / "theirs", rows, stored)
    site = target.site(tmp_path / "w")
    site.states("import", "speculators", tmp_path / "theirs")
    ((told, number),) = site.section["counts"]["left_out"].items()
    assert reason in told and number == 1
    assert [row.sample_id for row in site.rows()] == [f"B1-{i}" for i in range(12) if i != 3]


@pytest.mark.parametrize("left", [b"", b"torn", None], ids=["empty", "torn", "absent"])
def test_rows_without_whole_states_are_left_out(
    tmp_path: Path, target: Target, left: bytes | None
) -> None:
    save_speculators(tmp_path / "theirs", target.rows, target.states())
    path = tmp_path / "theirs" / "hidden_states" / "hs_7.safetensors"
    path.unlink() if left is None else path.write_bytes(left)
    site = target.site(tmp_path / "w")
    site.states("import", "speculators", tmp_path / "theirs")
    reason = "no file of hidden states" if left is None else "unreadable file"
    assert site.section["counts"]["left_out"] == {reason: 1}


def test_a_pipe_is_left_out_as_states_and_refused_as_a_dataset(
    tmp_path: Path, target: Target
) -> None:
    save_speculators(tmp_path / "theirs", target.rows, target.states())
    path = tmp_path / "theirs" / "hidden_states" / "hs_7.safetensors"
    path.unlink()
    os.mkfifo(path)
    site = target.site(tmp_path / "w")
    site.states("import", "speculators", tmp_path / "theirs")
    assert site.section["counts"]["left_out"] == {"not a regular file": 1}
    arrow = tmp_path / "theirs" / "data-00001-of-00002.arrow"
    arrow.unlink()
    os.mkfifo(arrow)
    with pytest.raises(DataError, match=r"data-00001.* is not a regular file: fetch it again"):
        site.states("import", "speculators", tmp_path / "theirs")


def test_two_rows_of_one_name_are_one(tmp_path: Path, target: Target) -> None:
    ours, back = (target.site(tmp_path / name) for name in "ab")
    ours.extract()
    ours.states("export", "speculators", tmp_path / "files")
    path = tmp_path / "files" / "data-00000-of-00001.arrow"
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        read = stream.read_all()
    names = ["B1-0000"] * 2 + read.column("sample_id").to_pylist()[2:]
    path.unlink()
    changed = read.set_column(3, "sample_id", pyarrow.array(names))
    with pyarrow.ipc.new_stream(path, changed.schema) as out:
        out.write_table(changed)
    back.states("import", "speculators", tmp_path / "files")
    assert back.section["counts"]["left_out"] == {"sample id of an earlier row": 1}


# What is refused.


def no_state(directory: Path) -> None:
    (directory / "state.json").unlink()


def no_files(directory: Path) -> None:
    (directory / "state.json").write_text("{}")


def torn_arrow(directory: Path) -> None:
    path = directory / "data-00001-of-00002.arrow"
    path.write_bytes(path.read_bytes()[:100])


def no_mask(directory: Path) -> None:
    path = directory / "data-00001-of-00002.arrow"
    without = pyarrow.table({"input_ids": [[1, 2]], "seq_len": [2]})
    with pyarrow.ipc.new_stream(path, without.schema) as stream:
        stream.write_table(without)


def text_mask(directory: Path) -> None:
    path = directory / "data-00001-of-00002.arrow"
    texts = pyarrow.table({"input_ids": [[1, 2]], "loss_mask": [["a", "b"]], "seq_len": [2]})
    with pyarrow.ipc.new_stream(path, texts.schema) as stream:
        stream.write_table(texts)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (text_mask, "column loss_mask holds list<item: string>"),
        (no_state, "state.json is missing"),
        (no_files, "names no _data_files"),
        (torn_arrow, "data-00001-of-00002.arrow cannot be read"),
        (no_mask, "data-00001-of-00002.arrow has no column loss_mask"),
    ],
)
def test_what_is_no_dataset_is_refused(
    tmp_path: Path, target: Target, spoil: Callable[[Path], None], sentence: str
) -> None:
    save_speculators(tmp_path / "theirs", target.rows, target.states())
    spoil(tmp_path / "theirs")
    site = target.site(tmp_path / "w")
    with pytest.raises(DataError, match=re.escape(sentence)):
        site.states("import", "speculators", tmp_path / "theirs")
    assert not site.hidden.root.exists()


def late(_: Target, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**stored, "hidden_states": stored["hidden_states"].roll(1, 0)}


def normed(target: Target, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    states_TAD = stored["hidden_states"].clone()
    states_TAD[:, -1] = target.model.model.norm(states_TAD[:, -1])
    return {**stored, "hidden_states": states_TAD}


def layers_swapped(_: Target, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**stored, "hidden_states": stored["hidden_states"][:, [1, 0, 2, 3]].contiguous()}


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (late, "position t holds the state of t - 1"),
        (normed, "the last norm is already applied"),
        (layers_swapped, r"layer off by \+2"),
    ],
)
def test_wrong_states_are_stopped_with_the_cause(
    tmp_path: Path,
    target: Target,
    spoil: Callable[[Target, dict[str, Tensor]], dict[str, Tensor]],
    cause: str,
) -> None:
    stored = [spoil(target, tensors) for tensors in target.states()]
    save_speculators(tmp_path / "theirs", target.rows, stored)
    site = target.site(tmp_path / "w")
    with pytest.raises(DataError, match=cause):
        site.states("import", "speculators", tmp_path / "theirs")
