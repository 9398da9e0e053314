"""speculators and SpecForge themselves read what we write, and we what they write, to the bit.

``make test-engines`` installs them in a venv of their own, in which their code runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.real_site import VENVS
from safetensors.torch import load_file, save_file
from unit.random_targets import greedy_rows, one_thread, save_target
from unit.states_site import StatesSite, mask, save_specforge, specforge_row, speculators_states

from drafter.extraction.shards import Row
from drafter.target_head import load_head
from drafter.training.alignment import align

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class Target:
    directory: Path
    model: Any
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    with one_thread():
        model = save_target(directory)
        yield Target(directory, model, greedy_rows(model, 12))


def run(home: Path, script: str, *arguments: object) -> None:
    """A script beside this file, in the venv of both."""
    python = VENVS / "speculators" / "bin" / "python"
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [python, "-W", "ignore", path, *map(str, arguments)],
        env={**os.environ, **OFFLINE, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Exported:
    """Our rows, and what speculators makes of their export."""

    rows: list[Row]
    read: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=DTYPES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, target: Target
) -> Exported:
    root = tmp_path_factory.mktemp("exported")
    site = StatesSite(root / "w", target.directory, target.rows, dtype=request.param)
    site.extract()
    site.states("export", "speculators", root / "files")
    run(root, "speculators_io.py", "read", root / "files", root / "read.safetensors")
    return Exported(site.rows(), load_file(root / "read.safetensors"))


def test_speculators_reads_what_we_write(exported: Exported, target: Target) -> None:
    read = exported.read
    assert sum(name.endswith(".lengths") for name in read) == 2 * len(exported.rows)
    for i, (row, source) in enumerate(zip(exported.rows, target.rows, strict=True)):
        assert torch.equal(read[f"{i}.input_ids"], row.input_ids_T)
        assert torch.equal(read[f"{i}.loss_mask"], mask(source))
        assert torch.equal(read[f"{i}.hidden_states"], row.aux_TAD.flatten(1))
        assert torch.equal(read[f"{i}.verifier_last_hidden_states"], row.final_TD)


def test_both_supervise_the_same_slots_but_the_one_behind_the_end(exported: Exported) -> None:
    for i, row in enumerate(exported.rows):
        ours = align([row])
        kept = {
            name: exported.read[f"{i}.shifted.{name}"][:-1]
            for name in ("loss_mask", "input_ids", "hidden_states", "verifier_last_hidden_states")
        }
        # Theirs also supervises the slot that reads the last token, after which nothing is drafted.
        supervised = kept["loss_mask"].bool()
        assert torch.equal(supervised.nonzero()[:, 0], ours.start_Q)
        assert torch.equal(kept["input_ids"], ours.read_S)
        assert torch.equal(kept["hidden_states"], ours.aux_SAH.flatten(1))
        assert torch.equal(kept["verifier_last_hidden_states"][supervised], ours.final_QH)


def test_we_read_what_speculators_writes(tmp_path: Path, target: Target) -> None:
    stored = [speculators_states(target.model, row, torch.bfloat16) for row in target.rows]
    rows = [{"input_ids": row["input_ids"], "loss_mask": mask(row).tolist()} for row in target.rows]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    states = {str(i): tensors["hidden_states"] for i, tensors in enumerate(stored)}
    save_file(states, tmp_path / "states.safetensors")
    theirs = tmp_path / "theirs"
    made = ("write", tmp_path / "rows.json", tmp_path / "states.safetensors", theirs)
    run(tmp_path, "speculators_io.py", *made)
    site = StatesSite(tmp_path / "w", target.directory, target.rows, dtype="bfloat16")
    site.states("import", "speculators", theirs)
    assert site.section["counts"]["left_out"] == {}
    for row, tensors, source in zip(site.rows(), stored, target.rows, strict=True):
        assert torch.equal(row.input_ids_T, tensors["token_ids"])
        assert row.prompt_tokens == source["prompt_tokens"]
        assert torch.equal(row.aux_TAD, tensors["hidden_states"][:, :-1])
        assert torch.equal(row.final_TD, tensors["hidden_states"][:, -1])
    site.states("export", "speculators", tmp_path / "again")
    outs = [tmp_path / f"{name}.safetensors" for name in ("before", "after")]
    run(tmp_path, "speculators_io.py", "read", theirs, outs[0], tmp_path / "again", outs[1])
    before, after = map(load_file, outs)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_specforge_reads_what_we_write(tmp_path: Path, target: Target, dtype: str) -> None:
    site = StatesSite(tmp_path / "w", target.directory, target.rows, dtype=dtype)
    site.extract()
    site.states("export", "specforge", tmp_path / "files")
    run(tmp_path, "specforge_io.py", tmp_path / "files", tmp_path / "read.safetensors")
    read = load_file(tmp_path / "read.safetensors")
    assert len(read) == 5 * len(target.rows)
    head = load_head(target.directory).to("cpu", torch.float32)
    for i, (row, source) in enumerate(zip(site.rows(), target.rows, strict=True)):
        got = {
            name: read[f"data_{i}.{name}"][0] for name in ("input_ids", "hidden_state", "target")
        }
        assert torch.equal(got["input_ids"], row.input_ids_T)
        assert torch.equal(got["hidden_state"], row.aux_TAD.flatten(1))
        assert torch.equal(got["target"], head.normed(row.final_TD).to(DTYPES[dtype]))
        # It takes the last token out of the loss itself.
        assert torch.equal(read[f"data_{i}.loss_mask"][0, :-1], mask(source)[:-1])


def test_we_read_what_specforge_reads(tmp_path: Path, target: Target) -> None:
    save_specforge(
        tmp_path / "theirs",
        [specforge_row(target.model, row, torch.bfloat16) for row in target.rows],
    )
    site = StatesSite(tmp_path / "w", target.directory, target.rows, dtype="bfloat16")
    site.states("import", "specforge", tmp_path / "theirs")
    site.states("export", "specforge", tmp_path / "again")
    outs = [tmp_path / f"{name}.safetensors" for name in ("theirs", "again")]
    for out in outs:
        run(tmp_path, "specforge_io.py", tmp_path / out.stem, out)
    before, after = map(load_file, outs)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
