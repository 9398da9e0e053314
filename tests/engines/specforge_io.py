"""Runs in the venv of speculators: SpecForge's own code reads a directory of its files.

specforge_io.py DIRECTORY OUT   every row as its EAGLE-3 trainer gets it, by file name, into OUT
                                (safetensors)
"""

import sys
from pathlib import Path

from safetensors.torch import save_file
from specforge.algorithms.eagle3.data import build_offline_normalizer, build_offline_reader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore


def read(directory: Path, out: Path) -> None:
    reader = build_offline_reader(str(directory), run_id="test", ttt_length=7, max_len=8192)
    reader.validate_files = True
    normalize, store = build_offline_normalizer(8192), LocalFeatureStore()
    kept = {}
    for ref in reader:
        path = Path(ref.feature_store_uri.removeprefix("file://"))
        tensors, handle = store.get(ref)
        row = normalize(tensors)
        kept |= {f"{path.stem}.{name}": tensor.clone() for name, tensor in row.items()}
        store.release(handle)
    save_file(kept, out)


if __name__ == "__main__":
    read(*map(Path, sys.argv[1:]))
