"""What an extraction will take, in bytes and hours, before anything runs.

Bytes follow from token counts and the target's shape. Hours follow from the rate of the last
extraction in this workspace, else from the arithmetic of the target's forward pass at
``extract.forecast_tflops``: twice the active parameters per token; attention scores, a few per cent
at 8,192 tokens, are left out. Kimi-K2.5 has 32 billion active ones, 64 GFLOP per token.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.errors import DataError
from drafter.extraction.shard_plan import (
    SPARE,
    fitting_length,
    gib,
    index_rows,
    plan_shards,
)
from drafter.extraction.states import footprint
from drafter.files import read_json
from drafter.layout import Workspace
from drafter.recipe import Recipe
from drafter.target_head import text_config

_FEWEST_SPOOLED = 2


@dataclass(frozen=True)
class Forecast:
    """Of one dataset, whatever is on disk already."""

    dataset: str
    lengths: Sequence[int]
    """Tokens of each row that will be extracted."""
    left_out: int
    num_shards: int
    num_present: int
    """Shards that are there, of this extraction or of an earlier one."""
    needed_bytes: int
    present_bytes: int
    hours: float | None
    """For all rows; None when nothing tells them."""
    hours_told: str
    """For people, or why they are unknown."""

    def line(self) -> str:
        left_out = f", {self.left_out:,} rows left out as too long" if self.left_out else ""
        present = f", {self.num_present:,} shards are there" if self.num_present else ""
        return (
            f"{len(self.lengths):,} rows, {sum(self.lengths):,} tokens in {self.num_shards:,} "
            f"shards, {gib(self.needed_bytes)}, {self.hours_told}{left_out}{present}"
        )

    def counts(self) -> dict[str, Any]:
        return {
            "rows": len(self.lengths),
            "tokens": sum(self.lengths),
            "shards": self.num_shards,
            "bytes": self.needed_bytes,
            "hours": None if self.hours is None else round(self.hours, 3),
        }


def forecast(dataset: str, workspace: Workspace, recipe: Recipe) -> Forecast:
    """Read the row lengths of a validated dataset. DataError naming a line that is no row."""
    settings = recipe.extract
    index = index_rows(workspace.prepared(dataset).tokenized, settings.max_length)
    num_shards = len(plan_shards(index.lengths, settings.shard_tokens))
    present = list(workspace.hidden_states(dataset).root.glob("shard-*"))
    num_tokens = sum(index.lengths)
    hours, told = hours_for(num_tokens, workspace, recipe)
    return Forecast(
        dataset=dataset,
        lengths=index.lengths,
        left_out=index.left_out,
        num_shards=num_shards,
        num_present=len(present),
        needed_bytes=footprint(recipe).bytes(num_shards, len(index.lengths), num_tokens),
        present_bytes=sum(path.stat().st_size for path in present),
        hours=hours,
        hours_told=told,
    )


def hours_for(num_tokens: int, workspace: Workspace, recipe: Recipe) -> tuple[float | None, str]:
    """Hours that the states of so many tokens take, and the same for people; None and the reason
    when nothing tells them."""
    rate = tokens_per_s(workspace, recipe)
    if rate is None:
        absent = absent_fields(text_config(Path(recipe.target.path)))
        return None, f"hours unknown: config.json has no {', '.join(absent)}"
    hours = num_tokens / rate / 3600
    return hours, f"about {duration(hours)}"


def tokens_per_s(workspace: Workspace, recipe: Recipe) -> float | None:
    """As last measured here, else by arithmetic; None when config.json says too little for that."""
    measured = [
        (progress["time"], progress["tokens_per_second"])
        for progress in map(_progress, _extractions(workspace, recipe))
        if progress.get("tokens_per_second")
    ]
    if measured:
        return float(max(measured)[1])
    config = text_config(Path(recipe.target.path))
    if absent_fields(config):
        return None
    return recipe.extract.forecast_tflops * 1e12 / (2 * active_parameters(config))


def absent_fields(config: dict[str, Any]) -> list[str]:
    """What ``active_parameters`` needs and the text model's config.json does not have."""
    needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    if config.get("kv_lora_rank"):
        needed += ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    has_experts = config.get("num_experts_per_tok") and config.get("moe_intermediate_size")
    if config.get("first_k_dense_replace") or not has_experts:
        needed.append("intermediate_size")
    return [name for name in needed if not config.get(name)]


def active_parameters(config: dict[str, Any]) -> float:
    """Weights that one token meets: attention and experts of every layer, and the output matrix.

    ``config`` is the text model's config.json: dense or of experts, plain or latent attention. It
    has every field of ``absent_fields``.
    """
    hidden = config["hidden_size"]
    num_layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    if latent := config.get("kv_lora_rank"):
        plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        value = config["v_head_dim"]
        query_rank = config.get("q_lora_rank")
        queries = heads * (plain + rotated)
        query = query_rank * (hidden + queries) if query_rank else hidden * queries
        attention = (
            query
            + hidden * (latent + rotated)
            + latent * heads * (plain + value)
            + heads * value * hidden
        )
    else:
        head_size = config.get("head_dim") or hidden // heads
        key_heads = config.get("num_key_value_heads") or heads
        attention = 2 * hidden * head_size * (heads + key_heads)
    size = config.get("intermediate_size") or 0
    dense = 3 * hidden * size
    experts = config.get("num_experts_per_tok") or 0
    expert = 3 * hidden * (config.get("moe_intermediate_size") or size)
    shared = config.get("n_shared_experts") or 0
    num_dense = min(config.get("first_k_dense_replace") or 0, num_layers) if experts else num_layers
    sparse = (experts + shared) * expert
    mlps = num_dense * dense + (num_layers - num_dense) * sparse
    return float(num_layers * attention + mlps + config["vocab_size"] * hidden)


@dataclass(frozen=True)
class Shortage:
    """Of the disk that all datasets share."""

    reason: str
    missing_bytes: int


def shortage(workspace: Workspace, recipe: Recipe, wanted: Sequence[Forecast]) -> Shortage | None:
    """Why the disk cannot take all of ``wanted``, and each limit that would make it; None when it
    can."""
    room_bytes = _free_bytes(workspace.root) + sum(each.present_bytes for each in wanted)
    needed_bytes = sum(each.needed_bytes for each in wanted)
    if needed_bytes * SPARE <= room_bytes:
        return None
    states = footprint(recipe)
    remedies = []
    lengths = [length for each in wanted for length in each.lengths]
    length = fitting_length(lengths, room_bytes / SPARE, states)
    if length >= 2:
        kept = sum(tokens for tokens in lengths if tokens <= length)
        remedies.append(f"set extract.max_length to {length} (keeps {kept:,} tokens)")
    if len(wanted) > 1 and (names := _fitting_datasets(wanted, room_bytes)):
        remedies.append(f"extract only {', '.join(names)}")
    shard_bytes = states.bytes(1, 1, recipe.extract.shard_tokens)
    spooled = min(int(room_bytes / SPARE / shard_bytes) - 1, sum(e.num_shards for e in wanted))
    if recipe.spools:
        remedies.append("run the train DAG instead, which makes them itself: the recipe spools")
    elif spooled >= _FEWEST_SPOOLED:
        remedies.append(f"set train.spool_shards to {spooled} at most, which keeps no more at once")
    return Shortage(
        f"hidden states of {len(wanted)} datasets, {sum(lengths):,} tokens, need "
        f"{gib(needed_bytes * SPARE)}, the disk has {gib(room_bytes)} for them: "
        f"{'; or '.join([*remedies, 'use a larger workspace'])}",
        int(needed_bytes * SPARE - room_bytes) + 1,
    )


def duration(hours: float) -> str:
    """For people: two digits."""
    if hours * 3600 < 90:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 1.5 else f"{hours:,.1f} h"


def _fitting_datasets(wanted: Sequence[Forecast], room_bytes: float) -> list[str]:
    """The smallest first, as many as fit, in the recipe's order."""
    left_bytes, names = room_bytes / SPARE, set()
    for each in sorted(wanted, key=lambda each: each.needed_bytes):
        left_bytes -= each.needed_bytes
        if left_bytes >= 0:
            names.add(each.dataset)
    return [each.dataset for each in wanted if each.dataset in names]


def _extractions(workspace: Workspace, recipe: Recipe) -> list[Path]:
    paths = (workspace.job("extract", name).progress for name in recipe.dataset_names)
    return [path for path in paths if path.exists()]


def _progress(path: Path) -> dict[str, Any]:
    try:
        progress: dict[str, Any] = read_json(path)
    except DataError:
        return {}
    return progress


def _free_bytes(root: Path) -> int:
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free
