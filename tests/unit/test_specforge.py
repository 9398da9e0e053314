"""SpecForge's files come in and go out to the bit; what is wrong with them is found before."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.random_targets import AUX_LAYERS, greedy_rows, one_thread, save_target
from unit.states_site import (
    StatesSite,
    load_specforge,
    save_gzipped,
    save_specforge,
    specforge_path,
    specforge_row,
)

from drafter.errors import DataError, RecipeError
from drafter.target_head import load_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Target:
    directory: Path
    model: Any
    rows: list[dict[str, Any]]

    def files(self, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
        return [specforge_row(self.model, row, dtype) for row in self.rows]

    def site(self, root: Path, **settings: Any) -> StatesSite:
        return StatesSite(root, self.directory, self.rows, **settings)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(directory)
        yield Target(directory, model, greedy_rows(model, 12))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )


# There and back.


@pytest.mark.parametrize("dtype", DTYPES)
def test_their_files_become_shards_and_the_same_files_again(
    tmp_path: Path, target: Target, dtype: str
) -> None:
    theirs, site = tmp_path / "theirs", target.site(tmp_path / "w", dtype=dtype)
    save_specforge(theirs, target.files(DTYPES[dtype]))
    site.states("import", "specforge", theirs)
    assert site.section["identity"]["norm"] == "after"
    assert site.section["counts"]["rows"] == len(target.rows)
    assert site.section["counts"]["shards"] > 1
    assert site.section["gates"]["reference_error"] < 0.01
    site.states("export", "specforge", tmp_path / "again")
    before, after = load_specforge(theirs), load_specforge(tmp_path / "again")
    assert list(before) == list(after) and len(after) == len(target.rows)
    assert all(equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_states_come_back_with_their_ids_and_the_norm_applied(
    tmp_path: Path, target: Target, dtype: str
) -> None:
    ours, back = (target.site(tmp_path / name, dtype=dtype) for name in "ab")
    ours.extract()
    ours.states("export", "specforge", tmp_path / "files")
    back.states("import", "specforge", tmp_path / "files")
    head = load_head(target.directory).to("cpu", torch.float32)
    for one, other in zip(ours.rows(), back.rows(), strict=True):
        assert (one.sample_id, one.prompt_tokens) == (other.sample_id, other.prompt_tokens)
        assert torch.equal(one.input_ids_T, other.input_ids_T)
        assert torch.equal(one.aux_TAD, other.aux_TAD)
        assert torch.equal(other.final_TD, head.normed(one.final_TD).to(DTYPES[dtype]))


def test_the_files_are_what_specforge_itself_would_have_written(
    tmp_path: Path, target: Target
) -> None:
    site = target.site(tmp_path / "w")
    site.extract()
    site.states("export", "specforge", tmp_path / "files")
    close = {"rtol": 1e-4, "atol": 1e-4}
    for index, want in enumerate(target.files()):
        got = torch.load(specforge_path(tmp_path / "files", index), weights_only=True)
        assert list(got) == list(want)
        for name in want:
            assert got[name].shape == want[name].shape and got[name].dtype == want[name].dtype
            torch.testing.assert_close(got[name], want[name], **close)


def test_gzipped_files_are_the_same_rows(tmp_path: Path, target: Target) -> None:
    plain, mixed = (target.site(tmp_path / name) for name in "ab")
    files = target.files()
    for directory in ("plain", "mixed"):
        save_specforge(tmp_path / directory, files)
    for index in range(0, len(files), 2):
        save_gzipped(specforge_path(tmp_path / "mixed", index), files[index])
    plain.states("import", "specforge", tmp_path / "plain")
    mixed.states("import", "specforge", tmp_path / "mixed")
    assert [row.sample_id for row in mixed.rows()] == [f"B1-{i}" for i in range(len(files))]
    for one, other in zip(plain.rows(), mixed.rows(), strict=True):
        assert one.sample_id == other.sample_id and torch.equal(one.final_TD, other.final_TD)


def save_old(path: Path, tensors: Any) -> None:
    """As before PyTorch 1.6, and as some still write it."""
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def test_files_in_the_format_before_zip_are_the_same_rows(tmp_path: Path, target: Target) -> None:
    new, old = (target.site(tmp_path / name) for name in "ab")
    files = target.files()
    for directory in ("new", "old"):
        save_specforge(tmp_path / directory, files)
    for index in range(1, len(files), 2):
        save_old(specforge_path(tmp_path / "old", index), files[index])
    new.states("import", "specforge", tmp_path / "new")
    old.states("import", "specforge", tmp_path / "old")
    assert old.section["counts"]["left_out"] == {}
    for one, other in zip(new.rows(), old.rows(), strict=True):
        assert one.sample_id == other.sample_id and torch.equal(one.final_TD, other.final_TD)


def test_rows_stand_in_the_order_of_their_numbers(tmp_path: Path, target: Target) -> None:
    numbers = [0, 2, 10, 1999, 2000, 10_000]
    for number, tensors in zip(numbers, target.files(), strict=False):
        torch.save(tensors, specforge_path(tmp_path / "theirs", number))
    torch.save(target.files()[6], tmp_path / "theirs" / "odd.ckpt")
    site = target.site(tmp_path / "w")
    site.states("import", "specforge", tmp_path / "theirs")
    ids = [row.sample_id for row in site.rows()]
    assert ids == ["B1-odd", *(f"B1-{number}" for number in numbers)]


def test_rows_keep_their_ids_when_a_file_of_an_export_is_lost(
    tmp_path: Path, target: Target
) -> None:
    ours, back = (target.site(tmp_path / name) for name in "ab")
    ours.extract()
    ours.states("export", "specforge", tmp_path / "files")
    specforge_path(tmp_path / "files", 3).unlink()
    save_gzipped(tmp_path / "twice.ckpt", target.files()[5])
    (tmp_path / "twice.ckpt.gz").rename(
        specforge_path(tmp_path / "files", 5).with_suffix(".ckpt.gz")
    )
    back.states("import", "specforge", tmp_path / "files")
    kept = [row["sample_id"] for i, row in enumerate(target.rows) if i != 3]
    assert [row.sample_id for row in back.rows()] == [*kept[:5], "B1-5", *kept[5:]]
    (tmp_path / "files" / "sample_ids.jsonl").write_text('"B1-0000"\n3\n')
    other = target.site(tmp_path / "c")
    with pytest.raises(DataError, match=r"sample_ids\.jsonl:2 is no JSON string"):
        other.states("import", "specforge", tmp_path / "files")


# What is left out.


def set_to(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Path, Any], None]:
    def spoil(path: Path, tensors: dict[str, Tensor]) -> None:
        torch.save({**tensors, name: value(tensors[name])}, path)

    return spoil


def torn(path: Path, _: Any) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path, _: Any) -> None:
    path.write_bytes(b"")


def torn_gzip(path: Path, tensors: Any) -> None:
    save_gzipped(path, tensors)
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(packed.read_bytes()[:-100])


def bare_pickle(path: Path, _: Any) -> None:
    path.write_bytes(pickle.dumps([1, 2, 3]))


def pipe(path: Path, _: Any) -> None:
    path.unlink()
    os.mkfifo(path)


def lost_link(path: Path, _: Any) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def torn_old(path: Path, tensors: Any) -> None:
    save_old(path, tensors)
    path.write_bytes(path.read_bytes()[:-100])


def no_aux(path: Path, tensors: dict[str, Tensor]) -> None:
    torch.save({k: v for k, v in tensors.items() if k != "aux_hidden_state"}, path)


def two_turns(mask_L: Tensor) -> Tensor:
    return torch.cat([mask_L[:-3], torch.tensor([0, 0, 1])])


LEFT_OUT = {
    "torn": (torn, "unreadable file"),
    "empty": (empty, "unreadable file"),
    "torn gzip": (torn_gzip, "unreadable file"),
    "torn old file": (torn_old, "unreadable file"),
    "pipe": (pipe, "not a regular file"),
    "lost link": (lost_link, "not a regular file"),
    "bare pickle": (bare_pickle, "unreadable file"),
    "no aux": (no_aux, "no dict of the tensors"),
    "two turns": (set_to("loss_mask", two_turns), "not one prompt and one response"),
    "no number": (set_to("loss_mask", lambda m: m * 2), "not one prompt and one response"),
    "all prompt": (set_to("loss_mask", lambda m: m * 0), "loss mask has no response"),
    "all response": (set_to("loss_mask", lambda m: m * 0 + 1), "loss mask has no prompt"),
    "short mask": (set_to("loss_mask", lambda m: m[1:]), "differ in number"),
    "short final": (set_to("hidden_state", lambda f: f[:, 1:]), "differ in number"),
    "narrow": (set_to("hidden_state", lambda f: f[..., ::2]), "states are 16 wide, the target's"),
    "one layer less": (set_to("aux_hidden_state", lambda a: a[..., 32:]), "2 auxiliary layers"),
    "half a layer": (set_to("aux_hidden_state", lambda a: a[..., 7:]), "whole number of layers"),
    "no batch": (set_to("hidden_state", lambda f: f[0]), "states are not [1, L, H]"),
    "mixed dtypes": (set_to("hidden_state", lambda f: f.half()), "float32 and float16"),
    "foreign id": (set_to("input_ids", lambda ids: ids + 90), "outside the target's vocabulary"),
}


@pytest.mark.parametrize(("spoil", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_row_that_does_not_fit_is_left_out_with_reason_and_count(
    tmp_path: Path,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path, Any], None],
    reason: str,
) -> None:
    theirs, site = tmp_path / "theirs", target.site(tmp_path / "w")
    files = target.files()
    save_specforge(theirs, files)
    spoil(specforge_path(theirs, 3), files[3])
    site.states("import", "specforge", theirs)
    ((told, number),) = site.section["counts"]["left_out"].items()
    assert reason in told and number == 1
    assert f"left out 1: {told}" in capsys.readouterr().out
    numbers = [i for i in range(len(files)) if i != 3]
    assert [row.sample_id for row in site.rows()] == [f"B1-{i}" for i in numbers]


def test_long_rows_are_left_out_as_extraction_does(tmp_path: Path, target: Target) -> None:
    save_specforge(tmp_path / "theirs", target.files())
    ours, imported = (target.site(tmp_path / name, max_length=30) for name in "ab")
    ours.extract()
    imported.states("import", "specforge", tmp_path / "theirs")
    for key in ("rows", "tokens", "left_out"):
        assert imported.section["counts"][key] == ours.section["counts"][key]
    assert imported.section["counts"]["left_out"]


def test_nothing_that_fits_is_refused_with_the_reasons(tmp_path: Path, target: Target) -> None:
    save_specforge(tmp_path / "theirs", target.files())
    site = target.site(tmp_path / "w", dtype="bfloat16")
    sentence = "12 rows: states in float32 and float32, extract.dtype is bfloat16"
    with pytest.raises(DataError, match=re.escape(sentence)):
        site.states("import", "specforge", tmp_path / "theirs")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="nothing to import, the directory is empty"):
        site.states("import", "specforge", tmp_path / "none")
    assert not site.hidden.root.exists()


class Payload:
    """A pickle that runs code when it is loaded without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("kind", ["plain", "gzip", "old"])
def test_a_pickle_with_code_is_refused_and_not_run(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, site = tmp_path / "theirs", target.site(tmp_path / "w")
    files: list[Any] = [*target.files(), {"input_ids": Payload()}]
    save_specforge(theirs, files)
    if kind != "plain":
        save = save_gzipped if kind == "gzip" else save_old
        save(specforge_path(theirs, 12), files[12])
    with pytest.raises(DataError, match=r"data_12\.ckpt.* holds something else than tensors"):
        site.states("import", "specforge", theirs)
    assert not Path("ran").exists() and not site.hidden.root.exists()


# States that are wrong.


def shifted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    states = ("hidden_state", "aux_hidden_state")
    return {k: v.roll(1, 1) if k in states else v for k, v in tensors.items()}


def not_finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    final = tensors["hidden_state"].clone()
    final[0, 4, 0] = torch.nan
    return {**tensors, "hidden_state": final}


def without_norm(target: Target, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    entering: list[Tensor] = []
    norm = target.model.model.norm
    hook = norm.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    target.model(input_ids=tensors["input_ids"][None])
    hook.remove()
    return {**tensors, "hidden_state": entering[0]}


def norm_twice(target: Target, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "hidden_state": target.model.model.norm(tensors["hidden_state"])}


WRONG: dict[str, tuple[Callable[[Target, dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "shifted": (lambda _, t: shifted(t), "position t holds the state of t - 1"),
    "not finite": (lambda _, t: not_finite(t), "is not finite at 1 of"),
    "norm missing": (without_norm, "the last norm is not applied yet"),
    "norm twice": (norm_twice, "the last norm is applied twice"),
}


@pytest.mark.parametrize(("spoil", "cause"), WRONG.values(), ids=WRONG)
def test_wrong_states_are_stopped_with_the_cause(
    tmp_path: Path,
    target: Target,
    spoil: Callable[[Target, dict[str, Tensor]], dict[str, Tensor]],
    cause: str,
) -> None:
    save_specforge(tmp_path / "theirs", [spoil(target, tensors) for tensors in target.files()])
    site = target.site(tmp_path / "w")
    with pytest.raises(DataError, match=re.escape(cause)):
        site.states("import", "specforge", tmp_path / "theirs")
    assert not site.hidden.root.exists()


def test_layers_are_those_that_are_named(tmp_path: Path, target: Target) -> None:
    above = [k + 1 for k in AUX_LAYERS]
    files = [specforge_row(target.model, r, torch.float32, above) for r in target.rows]
    save_specforge(tmp_path / "theirs", files)
    site = target.site(tmp_path / "w")
    with pytest.raises(DataError, match=r"layer off by \+1"):
        site.states("import", "specforge", tmp_path / "theirs")
    with pytest.raises(RecipeError, match="three different ids"):
        site.states("import", "specforge", tmp_path / "theirs", "--aux-layers", "1,2")
    named = ",".join(map(str, above))
    site.states("import", "specforge", tmp_path / "theirs", "--aux-layers", named)
    assert site.section["identity"]["aux_layers"] == above
