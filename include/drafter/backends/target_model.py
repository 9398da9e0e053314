"""The target as a transformers model, whole or its first layers, and its plain forward pass.

Model types that transformers knows are run by its own code, whatever the checkpoint brings. One
that it does not know is run by the code in the checkpoint's own directory, which ``auto_map`` of
its config.json names: the user fetched and pinned that directory, and its tokenizer's code runs
already (drafter.template).

T = tokens of one row, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from drafter.errors import RecipeError
from drafter.extraction.gates import Reference
from drafter.files import read_json

_REFERENCE_LOGITS = 64
"""Last tokens of a reference row whose logits are made: enough to judge a head of any size."""
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
"""What can generate text, in the order in which a checkpoint with its own code is asked."""
STUMBLED = (
    OSError, ValueError, ImportError, SafetensorError, LookupError, TypeError, AttributeError,
    RuntimeError, NameError, SyntaxError,
)  # fmt: skip
"""What loading and running run into: damaged files, and a checkpoint's code for another
transformers."""


def load_target(
    target_dir: Path, dtype: torch.dtype, gpus: int, num_layers: int | None = None
) -> Any:
    """The model, ready to run: whole, or its first ``num_layers`` without a last norm.

    On the CPU with ``gpus`` 0, spread over all of them with more than one. Raises RecipeError when
    it cannot be loaded or a weight is missing, which would be random without a word.
    """
    if gpus > 1 and importlib.util.find_spec("accelerate") is None:
        raise RecipeError(
            f"{gpus} GPUs share a target through the package accelerate, which is not installed: "
            "pip install accelerate, or leave one GPU visible in CUDA_VISIBLE_DEVICES"
        )
    transformers.utils.logging.disable_progress_bar()
    own_code = _own_code(target_dir)
    try:
        config = transformers.AutoConfig.from_pretrained(
            target_dir, local_files_only=True, trust_remote_code=bool(own_code)
        )
        if num_layers is not None:
            _shorten(config, num_layers)
        with _without_report(wanted=num_layers is None):
            model, info = _auto_class(target_dir, config, own_code).from_pretrained(
                target_dir,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=bool(own_code),
                output_loading_info=True,
                device_map="auto" if gpus > 1 else None,
            )
    except STUMBLED as error:
        raise stumbled(error, target_dir, "loaded") from None
    missing = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if missing:
        raise RecipeError(
            f"target {target_dir} lacks {len(missing)} weights, first {missing[0]}: complete the "
            "checkpoint"
        )
    if num_layers is not None:
        text_decoder(model, target_dir).norm = nn.Identity()
    model.eval().requires_grad_(False)
    return model.to("cuda") if gpus == 1 else model


def stumbled(error: Exception, target_dir: Path, what: str) -> RecipeError:
    """One sentence of one of ``STUMBLED``: the target could not be ``what``."""
    sentence = (str(error).strip() or type(error).__name__).splitlines()[0]
    whose = ", by its own code" if _own_code(target_dir) else ""
    return RecipeError(
        f"target {target_dir} cannot be {what}{whose} ({sentence}): correct target.path, or "
        "extract through a server of the target"
    )


def text_decoder(model: Any, target_dir: Path) -> Any:
    """The text decoder, inside a multimodal model too: embeddings, ``layers``, ``norm``.

    Raises RecipeError when the model has no such parts.
    """
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers") and hasattr(decoder, "get_decoder"):
        # Kimi's own code keeps a whole causal model as its language_model.
        decoder = decoder.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(
        decoder, "norm"
    ):
        raise RecipeError(
            f"target {target_dir} is a {type(model).__name__} without decoder layers and a last "
            "norm by those names: extract through a server of the target"
        )
    return decoder


def plain_forward(model: Any, input_ids: list[int], target_dir: Path) -> Reference:
    """One row through the whole model as transformers itself runs it; on the CPU in float32.

    Raises RecipeError when the checkpoint's own code cannot do that.
    """
    # A checkpoint's own code may be older than this argument, which spares V numbers per token.
    known = "logits_to_keep" in inspect.signature(model.forward).parameters
    try:
        output = model(
            input_ids=torch.tensor([input_ids], device=model.get_input_embeddings().weight.device),
            output_hidden_states=True,
            use_cache=False,
            **({"logits_to_keep": _REFERENCE_LOGITS} if known else {}),
        )
        states = [layer[0].float().cpu() for layer in output.hidden_states]
        logits_LV = output.logits[0, -_REFERENCE_LOGITS:].float().cpu()
    except STUMBLED as error:
        raise stumbled(error, target_dir, "run") from None
    return Reference(layers=states[:-1], normed_TD=states[-1], logits_LV=logits_LV)


def _own_code(target_dir: Path) -> dict[str, str]:
    """``auto_map`` of a model type that transformers does not know; else nothing."""
    path = target_dir / "config.json"
    if not path.exists():
        raise RecipeError(
            f"target {target_dir} has no config.json: point target.path at a checkpoint"
        )
    config = read_json(path)
    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING:
        return {}
    named: dict[str, Any] = config.get("auto_map") or {}
    auto_map = {name: code for name, code in named.items() if isinstance(code, str)}
    if not auto_map:
        raise RecipeError(
            f"target {target_dir} is a {model_type!r}, which transformers "
            f"{transformers.__version__} does not know, and its config.json names no code of its "
            "own in auto_map: correct target.path, or extract through a server of the target"
        )
    elsewhere = next((name for name in auto_map.values() if "--" in name), None)
    if elsewhere is not None:
        raise RecipeError(
            f"target {target_dir} names code outside its directory, {elsewhere}, in auto_map of "
            "its config.json: copy that code there, or extract through a server of the target"
        )
    return auto_map


def _auto_class(target_dir: Path, config: Any, own_code: dict[str, str]) -> Any:
    """What loads a model that generates text."""
    if not own_code:
        causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        return getattr(transformers, _AUTO_CLASSES[0 if causal else 1])
    offered = next((name for name in _AUTO_CLASSES if name in own_code), None)
    if offered is None:
        raise RecipeError(
            f"target {target_dir} brings its own code, but auto_map in its config.json has none of "
            f"{', '.join(_AUTO_CLASSES)}: extract through a server of the target"
        )
    return getattr(transformers, offered)


def _shorten(config: Any, num_layers: int) -> None:
    """Describe a text decoder of the first layers only: their weights are all that is read.

    They are stored unquantised (drafter.backends.reference), whatever the layers after them are.
    """
    text = config.get_text_config()
    for part in (config, text):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    whole = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers


@contextlib.contextmanager
def _without_report(*, wanted: bool) -> Iterator[None]:
    """Unless ``wanted``, no table of the weights that are left unread on purpose."""
    level = transformers.utils.logging.get_verbosity()
    if not wanted:
        transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)
