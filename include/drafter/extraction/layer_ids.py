"""Which of the target's states a list of layer ids means: engines number the same states apart.

Here, in vLLM and in speculators an id is the *input* of a layer: HF ``hidden_states[id]``. SGLang
and SpecForge mean its *output*, one further on, but SGLang's model files do not all add one.
Sources: sglang 0.5.23 (``set_eagle3_layers_to_capture`` of its models; PR 25454, issue 32334),
vllm, speculators 0.9.0. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafter.errors import RecipeError

_ONE_FIRST = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
)
"""Model types that SGLang serves by deepseek_v2.py or glm4_moe_lite.py, which add one only if the
first id is 1."""


def default(target: dict[str, Any]) -> list[int]:
    """What every reader takes where no ids are named. RecipeError when the target has no depth."""
    if "num_hidden_layers" not in target:
        raise RecipeError(
            "the target's config.json has no num_hidden_layers, which default layer ids are "
            "counted by: complete it"
        )
    layers = target["num_hidden_layers"]
    return [2, layers // 2, layers - 3]


def read_by_sglang(ids: Sequence[int], target: dict[str, Any]) -> list[int]:
    """HF indices of what SGLang gives a drafter that names ``ids``; ``target`` is its config."""
    kind = target.get("model_type")
    if kind in _ONE_FIRST and ids[0] != 1:
        return list(ids)
    if kind == "gpt_oss" and max(ids) == target.get("num_hidden_layers"):
        return list(ids)
    return [layer + 1 for layer in ids]


def for_sglang(aux_layers: Sequence[int], target: dict[str, Any]) -> list[int]:
    """The ids that SGLang reads as these HF indices. RecipeError when no list says so."""
    for ids in ([layer - 1 for layer in aux_layers], list(aux_layers)):
        if read_by_sglang(ids, target) == list(aux_layers):
            return ids
    raise RecipeError(
        f"SGLang cannot be told to read layers {list(aux_layers)} of a {target['model_type']}: set "
        "extract.aux_layers to ids that begin with 2 or more"
    )
