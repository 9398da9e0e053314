"""What config.json says of a drafter that training starts from: its shape, or why it cannot.

Two families are told apart. *Plain* configurations come from SafeAILab, SpecForge and SGLang: flat,
ids in ``eagle_config``, counted as SGLang counts. Those of *speculators* hold the layer's part in
``transformer_layer_config`` and ids as inputs of layers. What model.py does not compute (another
place of a norm, latent attention, biases, rescaled rope, windows) is refused by field and reason.
Source: models/llama_eagle3.py of sglang 0.5.23 and of vllm 0.32.0, configs/speculators/algos.py of
the latter, speculators 0.9.0, SpecForge 0.2.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from drafter.errors import DataError, RecipeError
from drafter.extraction import layer_ids
from drafter.files import read_json
from drafter.recipe import Recipe
from drafter.target_head import TargetHead, text_config
from drafter.training import start_files
from drafter.training.model import Shape

_ACTIVATIONS = ("silu", "swish")
_OBJECTS = ("transformer_layer_config", "eagle_config", "rope_scaling", "rope_parameters")
_ELSEWHERE = {
    "norm_before_residual": "the residual would carry the normed state",
    "norm_before_fc": "the target's states would be normed first",
    "fc_norm": "each of the target's states would be normed first",
    "norm_output": "each draft step would read the normed state of the one before (SpecForge alone "
    "means something else: set it to false in a drafter of SpecForge)",
}
"""Switches of speculators that are off in what is trained here."""


def check_for(recipe: Recipe, aux_layers: Sequence[int]) -> None:
    """Before states of these layers are made: can training start from them as the recipe says?"""
    if recipe.train.start_from is not None:
        target = text_config(Path(recipe.target.path))
        check(Path(recipe.train.start_from), target, aux_layers)


def check(directory: Path, target: dict[str, Any], aux_layers: Sequence[int]) -> None:
    """Raise what config.json alone tells of a drafter that cannot start from these layers' states.

    Cheap: no weight is read.
    """
    start_files.weight_files(directory)
    whole = read(directory)
    found = _aux_layers(directory, whole, target)
    if found != list(aux_layers):
        raise RecipeError(
            f"train.start_from {directory} reads layers {found} (HF hidden_states), the states are "
            f"of {list(aux_layers)}: set extract.aux_layers = {found} and extract anew, or start "
            "from another drafter"
        )


def read(directory: Path) -> dict[str, Any]:
    """config.json, whose nested parts are objects and which asks for nothing unsupported."""
    path = directory / start_files.CONFIG
    try:
        whole = read_json(path)
    except DataError as error:
        fault = str(error).partition(": restore")[0]
        raise DataError(f"train.start_from: {fault}: fetch the drafter anew") from None
    layer = whole.get("transformer_layer_config")
    for part in (whole, layer if isinstance(layer, dict) else {}):
        for name in _OBJECTS:
            if not isinstance(part.get(name), dict | None):
                raise DataError(
                    f"{path}: {name} is {part[name]!r:.60}, needed is an object: fetch the drafter "
                    "anew"
                )
    for reason in _unsupported(whole, layer or whole):
        refuse(directory, reason)
    return whole


def shape_of(
    directory: Path, whole: dict[str, Any], target: dict[str, Any], head: TargetHead
) -> Shape:
    """The drafter's shape by what :func:`read` gave; RecipeError where it is not the target's."""
    layer = whole.get("transformer_layer_config") or whole

    def number(name: str, kind: type = int, default: Any = None, place: Any = layer) -> Any:
        value = default if place.get(name) is None else place[name]
        if type(value) not in (int, kind) or value <= 0:
            refuse(directory, f"{name} in its config.json is {value!r}, needed is a number")
        return value

    rope = layer.get("rope_parameters") or {}
    thetas = [
        number("rope_theta", float, place=place)
        for place in (layer, rope)
        if place.get("rope_theta") is not None
    ]
    if len(set(thetas)) > 1:
        refuse(directory, f"rope_theta is {thetas[0]} and {thetas[1]} at once")
    heads, hidden, vocab = map(number, ("num_attention_heads", "hidden_size", "vocab_size"))
    shape = Shape(
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        norm_eps=number("rms_norm_eps", float),
        rope_theta=float(thetas[0]) if thetas else 10_000.0,
        max_positions=number("max_position_embeddings"),
        vocab_size=vocab,
        draft_vocab_size=number("draft_vocab_size", default=vocab, place=whole),
        aux_layers=tuple(_aux_layers(directory, whole, target)),
    )
    target_vocab, target_hidden = head.embed.shape
    for name, has, needed in (
        ("hidden_size", hidden, target_hidden),
        ("target_hidden_size", whole.get("target_hidden_size") or hidden, target_hidden),
        ("vocab_size", vocab, target_vocab),
    ):
        if has != needed:
            refuse(directory, f"{name} is {has}, the target's is {needed}")
    return shape


def refuse(directory: Path, reason: str) -> NoReturn:
    """One sentence: which field of which start, and why."""
    raise RecipeError(f"train.start_from {directory}: {reason}: start from another drafter")


def _unsupported(whole: dict[str, Any], layer: dict[str, Any]) -> Iterator[str]:
    """What the configuration asks for and model.py does not compute."""
    is_speculators = whole is not layer or "speculators_model_type" in whole
    if is_speculators and whole.get("speculators_model_type") != "eagle3":
        yield f"speculators_model_type is {whole.get('speculators_model_type')!r}, not 'eagle3'"
    if "deepseek" in str(whole.get("architectures")).lower():
        yield f"architectures {whole['architectures']} means latent attention (MLA)"
    if layer.get("kv_lora_rank"):
        yield f"kv_lora_rank = {layer['kv_lora_rank']} means latent attention (MLA)"
    if layer.get("model_type", "llama") != "llama":
        yield f"model_type {layer['model_type']!r} is no Llama layer"
    if layer.get("num_hidden_layers", 1) != 1:
        yield f"num_hidden_layers = {layer['num_hidden_layers']}, needed is 1"
    if layer.get("use_aux_norm"):
        yield "use_aux_norm is true, an older name of fc_norm"
    for name, effect in _ELSEWHERE.items():
        # What vLLM takes for granted where a config of speculators does not say.
        if whole.get(name, is_speculators and name == "norm_before_residual"):
            yield f"{name} is true, {effect}"
    for name in ("attention_bias", "mlp_bias", "bias"):
        if layer.get(name):
            yield f"{name} is true, the layer here has none"
    if layer.get("hidden_act", "silu") not in _ACTIVATIONS:
        yield f"hidden_act {layer['hidden_act']!r} is not 'silu'"
    for name in ("rope_scaling", "rope_parameters"):
        kind = _rope_kind(layer.get(name))
        if kind != "default":
            yield f"{name} is {kind!r}, positions here are not rescaled"
    for part in (layer, layer.get("rope_parameters") or {}):
        if part.get("partial_rotary_factor") not in (None, 1):
            yield f"partial_rotary_factor is {part['partial_rotary_factor']}, needed is 1"
    for name, usual in (("num_aux_hidden_states", 3), ("logit_scale", 1)):
        if layer.get(name) not in (None, usual):
            yield f"{name} is {layer[name]}, needed is {usual}"
    if layer.get("layer_types") not in (None, [], ["full_attention"]):
        yield f"layer_types {layer['layer_types']}: attention here sees everything"
    is_windowed = "layer_types" not in layer and layer.get("use_sliding_window", True)
    if is_windowed and layer.get("sliding_window"):
        yield f"sliding_window = {layer['sliding_window']}, attention here sees everything"
    eagle = whole.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state", True) is not True:
        yield "eagle_config.use_aux_hidden_state is false, so it is no EAGLE-3 drafter"
    for name in ("use_mtp_layernorm", "norm_before_fc"):
        if eagle.get(name):
            yield f"eagle_config.{name} is true, states here are fused without a norm"


def _rope_kind(rope: dict[str, Any] | None) -> str:
    kind: str = (rope or {}).get("rope_type") or (rope or {}).get("type") or "default"
    return kind


def _aux_layers(directory: Path, whole: dict[str, Any], target: dict[str, Any]) -> list[int]:
    """HF indices, by the convention of whoever reads the field that names them."""
    name = "eagle_aux_hidden_state_layer_ids"
    as_outputs, as_inputs = (whole.get("eagle_config") or {}).get(name), whole.get(name)
    for ids in filter(None, (as_outputs, as_inputs)):
        if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
            refuse(directory, f"{name} {ids} are no layer ids")
    found = [as_inputs] if as_inputs else []
    if as_outputs:
        found.append(layer_ids.read_by_sglang(as_outputs, target))
    if len(found) == 2 and found[0] != found[1]:
        refuse(directory, f"{name} means {found[0]} at the top and {found[1]} in eagle_config")
    layers = found[0] if found else layer_ids.default(target)
    if len(layers) != 3:
        refuse(directory, f"{name} names {len(layers)} layers, needed are 3")
    return layers
