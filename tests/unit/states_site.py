"""A workspace with one dataset on a made-up target, the commands on its states, and the files that
the other systems would have written of it: the states of a plain forward of the model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from unit.random_targets import AUX_LAYERS, validated_job

from drafter import cli, extract
from drafter.extraction.shards import Row, read_rows
from drafter.files import digest, read_section, write_json
from drafter.layout import HiddenStates

Files = dict[str, dict[str, Tensor]]


class StatesSite:
    """``rows`` are validated; nothing is extracted yet."""

    def __init__(
        self, root: Path, target: Path, rows: Sequence[dict[str, Any]], **settings: Any
    ) -> None:
        self.job = validated_job(root, target, rows, **settings)
        self.workspace, self.recipe = self.job.workspace, self.job.recipe
        write_json(self.workspace.recipe, self.recipe.as_json())

    @property
    def hidden(self) -> HiddenStates:
        return self.workspace.hidden_states("B1")

    @property
    def section(self) -> dict[str, Any]:
        section = read_section(self.hidden.manifest, "extract")
        assert section is not None
        return section

    def extract(self) -> None:
        extract.run(self.job)

    def states(self, direction: str, system: str, directory: Path, *options: str) -> None:
        """``drafter states``."""
        where = ("B1", str(directory), "--workspace", str(self.workspace.root))
        assert cli.main(["states", direction, system, *where, *options]) == 0

    def rows(self) -> list[Row]:
        return list(read_rows(self.hidden))

    def digests(self) -> dict[str, str]:
        return contents(self.hidden.root)


def contents(directory: Path) -> dict[str, str]:
    """Every file below ``directory`` by a hash of its bytes."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(f.relative_to(directory)): digest(f.read_bytes().hex()) for f in files}


def specforge_row(
    model: Any, row: dict[str, Any], dtype: torch.dtype, layers: Sequence[int] = AUX_LAYERS
) -> dict[str, Tensor]:
    """What SpecForge stores of a row: its final is the model's own, after the last norm."""
    ids = torch.tensor(row["input_ids"])
    states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    return {
        "input_ids": ids,
        "loss_mask": mask(row),
        "hidden_state": states[-1].to(dtype),
        "aux_hidden_state": torch.cat([states[k] for k in layers], dim=-1).to(dtype),
    }


def mask(row: dict[str, Any]) -> Tensor:
    written = torch.ones(len(row["input_ids"]), dtype=torch.int64)
    written[: row["prompt_tokens"]] = 0
    return written


def specforge_path(directory: Path, index: int) -> Path:
    path = directory / f"rows_{index // 2000 * 2000}-{index // 2000 * 2000 + 2000}"
    path.mkdir(parents=True, exist_ok=True)
    return path / f"data_{index}.ckpt"


def save_specforge(directory: Path, files: Sequence[dict[str, Tensor]]) -> None:
    for index, tensors in enumerate(files):
        torch.save(tensors, specforge_path(directory, index))


def save_gzipped(path: Path, tensors: dict[str, Tensor]) -> None:
    path.unlink(missing_ok=True)
    with gzip.open(path.with_name(f"{path.name}.gz"), "wb") as file:
        torch.save(tensors, file)


def load_specforge(directory: Path) -> Files:
    paths = sorted(directory.rglob("*.ckpt"))
    return {str(p.relative_to(directory)): torch.load(p, weights_only=True) for p in paths}


def speculators_states(
    model: Any, row: dict[str, Any], dtype: torch.dtype, layers: Sequence[int] = AUX_LAYERS
) -> dict[str, Tensor]:
    """What speculators stores of a row: its final is what enters the last norm."""
    entering: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    ids = torch.tensor(row["input_ids"])
    states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    stacked = torch.stack([*(states[k][0] for k in layers), entering[-1][0]], dim=1)
    return {"token_ids": ids, "hidden_states": stacked.to(dtype)}


def save_speculators(
    directory: Path, rows: Sequence[dict[str, Any]], states: Sequence[dict[str, Tensor]]
) -> None:
    """As ``datasets.save_to_disk`` writes it, by pyarrow alone; in two files of one batch each."""
    import pyarrow

    directory.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    half = len(rows) // 2
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        table = pyarrow.table(
            {
                "input_ids": [row["input_ids"] for row in part],
                "loss_mask": [row.get("loss_mask", mask(row).tolist()) for row in part],
                "seq_len": [len(row["input_ids"]) for row in part],
            }
        )
        with pyarrow.ipc.new_stream(directory / name, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names]}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "hidden_states").mkdir()
    for index, tensors in enumerate(states):
        save_file(tensors, directory / "hidden_states" / f"hs_{index}.safetensors")
