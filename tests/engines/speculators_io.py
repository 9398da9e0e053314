"""Runs in the venv of speculators: its own code reads and writes a data directory.

speculators_io.py read DIRECTORY OUT ...        every row as its trainer gets it, before and after
                                                its shift, into OUT (safetensors); several pairs
speculators_io.py write ROWS STATES DIRECTORY   ROWS: JSON rows of input_ids and loss_mask; STATES:
                                                safetensors of them by row number
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from safetensors.torch import load_file, save_file
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)
from speculators.data_generation.preprocessing import build_speculator_training_dataset
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset


def read(directory: Path, out: Path) -> None:
    states = directory / "hidden_states"
    indices = get_existing_hidden_state_indices(states)
    assert find_corrupt_hidden_state_indices(states, indices) == {}
    dataset = ArrowDataset(8192, directory, on_missing="raise", hidden_states_dtype=None)
    assert indices == list(range(len(dataset)))
    kept = {}
    for i in indices:
        loaded = load_file(states / f"hs_{i}.safetensors")
        check_hidden_states(loaded, dataset.data[i]["input_ids"].tolist())
        row = dataset[i]
        assert dataset.approx_lengths[i] == len(row["input_ids"])
        kept |= {f"{i}.{name}": tensor.contiguous() for name, tensor in row.items()}
        shifted = shift_batch(row)
        kept |= {f"{i}.shifted.{n}": tensor.contiguous() for n, tensor in shifted.items()}
    save_file({name: tensor.clone() for name, tensor in kept.items()}, out)


def write(rows: Path, states: Path, directory: Path) -> None:
    columns = Dataset.from_list(json.loads(rows.read_text()))
    dataset = build_speculator_training_dataset(columns, None, max_length=8192, num_proc=1)
    dataset.save_to_disk(directory)
    stored = load_file(states)
    (directory / "hidden_states").mkdir()
    for i in range(len(dataset)):
        tensors = {
            "hidden_states": stored[f"{i}"],
            "token_ids": dataset[i]["input_ids"],
        }
        save_file(tensors, directory / "hidden_states" / f"hs_{i}.safetensors")


if __name__ == "__main__":
    direction, *paths = sys.argv[1], *map(Path, sys.argv[2:])
    if direction == "write":
        write(*paths)
    else:
        for directory, out in zip(paths[::2], paths[1::2], strict=True):
            read(directory, out)
