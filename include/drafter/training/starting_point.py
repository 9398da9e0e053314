"""An existing drafter as the start of training: read whole, or refused with the field and why.

start_config.py judges its configuration; here are its tensors. The layer is ``midlayer.*``
(SafeAILab, SpecForge, SGLang) or ``layers.0.*`` (speculators, vLLM), with or without ``model.``
before every name; d2t holds offsets; an embedding may be there and must be the target's. A tensor
that is missing or not known is refused: a drafter that is half loaded trains, and looks like a bad
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafter.errors import DataError, RecipeError
from drafter.sections import Train
from drafter.target_head import TargetHead
from drafter.training import start_config, start_files, vocabulary
from drafter.training.model import Drafter, Shape
from drafter.training.start_config import refuse

_EMBED, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def drafter(
    options: Train, target: dict[str, Any], aux_layers: Sequence[int], head: TargetHead
) -> Drafter:
    """The drafter of ``train.start_from`` in float32 on the CPU, fit for these states.

    ``target`` is the target's text config. Raises RecipeError when it is of a kind that is not
    trained here, of another target, or not what the recipe says; DataError when it is damaged.
    """
    directory = Path(options.start_from or "")
    start_config.check(directory, target, aux_layers)
    made = read(directory, target, head)
    for field in ("draft_vocab_size", "intermediate_size"):
        wanted, has = getattr(options, field), getattr(made.shape, field)
        if wanted not in (None, has):
            raise RecipeError(
                f"train.{field} is {wanted}, train.start_from {directory} has {has}: take the field"
                " out of the recipe"
            )
    return made


def read(directory: Path, target: dict[str, Any], head: TargetHead) -> Drafter:
    """The drafter that a directory holds, whichever layers it reads. Raises as :func:`drafter`."""
    files = start_files.weight_files(directory)
    config = start_config.read(directory)
    tensors = _tensors(files)
    shape = start_config.shape_of(directory, config, target, head)
    d2t, t2d = _maps(directory, tensors, shape)
    _settle_embedding(directory, tensors, head)
    _settle_output(directory, tensors, config, head)
    made = Drafter(shape, head, d2t, t2d)
    _check_complete(directory, tensors, made)
    made.load_state_dict({**tensors, "d2t": d2t, "t2d": t2d})
    return made


def _tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Every tensor under the name that model.py has for it."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        for stored, tensor in _load(path).items():
            name = stored.removeprefix("model.")
            if name.startswith("layers.0."):
                name = f"midlayer.{name.removeprefix('layers.0.')}"
            if name in tensors:
                raise DataError(f"{path} holds {name} twice, now as {stored}: fetch it anew")
            tensors[name] = tensor
    return tensors


def _load(path: Path) -> dict[str, Tensor]:
    try:
        pickled = path.suffix == ".bin"
        loaded = torch.load(path, "cpu", weights_only=True) if pickled else load_file(path)
    except (OSError, SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read ({said}): fetch the drafter anew") from None
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise DataError(f"{path} is no table of tensors: fetch the drafter anew")
    return loaded


def _maps(directory: Path, tensors: dict[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    draft, vocab = shape.draft_vocab_size, shape.vocab_size
    if d2t is None and draft == vocab:
        d2t = torch.zeros(vocab, dtype=torch.int64)
        if t2d is None:
            return d2t, torch.ones(vocab, dtype=torch.bool)
    if d2t is None:
        refuse(directory, f"it has no d2t, and its {draft} draft ids are not all {vocab} targets'")
    if d2t.numel() != draft:
        refuse(directory, f"d2t has {d2t.numel()} entries, draft_vocab_size is {draft}")
    return vocabulary.from_others(d2t, t2d, vocab, f"train.start_from {directory}")


def _settle_embedding(directory: Path, tensors: dict[str, Tensor], head: TargetHead) -> None:
    """Its own embedding may be there if it is the target's, which is not trained."""
    embed = tensors.pop(_EMBED, None)
    if embed is not None and not _is_copy(embed, head.embed):
        refuse(directory, f"{_EMBED} is not the target's, which is what is read here")


def _settle_output(
    directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], head: TargetHead
) -> None:
    """The output matrix where the configuration says that it is another one's."""
    if config.get("tie_word_embeddings"):
        field, shared = "tie_word_embeddings is true", head.embed
    elif config.get("draft_vocab_size") is None:
        field, shared = "draft_vocab_size is null", head.lm_head
    else:
        return
    output = tensors.setdefault(_OUTPUT, shared)
    if not _is_copy(output, shared):
        refuse(directory, f"{field}, which means the target's matrix, but {_OUTPUT} is another")


def _is_copy(tensor: Tensor, of: Tensor) -> bool:
    return tensor.shape == of.shape and bool((tensor == of.to(tensor.dtype)).all())


def _check_complete(directory: Path, tensors: dict[str, Tensor], made: Drafter) -> None:
    """Every tensor is known, there, of the right shape, and numbers."""
    expected = {name: tuple(p.shape) for name, p in made.named_parameters()}
    unknown, missing = sorted(tensors.keys() - expected), sorted(expected.keys() - tensors)
    if unknown or missing:
        lists = [f"unknown are {', '.join(unknown)}"] * bool(unknown)
        lists += [f"missing are {', '.join(missing)}"] * bool(missing)
        refuse(directory, f"of its tensors {'; '.join(lists)}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            refuse(
                directory,
                f"{name} is {list(tensor.shape)}, its config.json says {list(expected[name])}",
            )
        if tensor.dtype not in _FLOATS:
            refuse(directory, f"{name} is {tensor.dtype}, which is not what training stores")
        if not tensor.isfinite().all():
            raise DataError(f"train.start_from {directory}: {name} is not finite: fetch it anew")
