"""Bytes and hours are foretold from token counts and the target's shape; a disk that cannot take
them is refused, with every limit that would fit."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.random_targets import SHAPE, write_tokenized

from drafter.errors import DataError, RecipeError
from drafter.extraction import forecast
from drafter.files import write_json
from drafter.foresee import foresee_extraction
from drafter.layout import Workspace
from drafter.plan import MISSING_BYTES, Plan, decide
from drafter.recipe import Recipe, parse_recipe

KIMI = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 163_840,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128_256,
}  # fmt: skip
QWEN3_30B_A3B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "vocab_size": 151_936,
}  # fmt: skip
NAMES = ("B1", "B2", "B3")
TOKENS = {"B1": [100, 200], "B2": [400] * 5, "B3": [50, 700]}
PER_TOKEN = 4 * 32 * 4 + 8
"""Bytes: four states of 32 float32 numbers, and the id."""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**SHAPE, "rms_norm_eps": 1e-6}))
    (target / "tokenizer.json").write_text("{}")
    recipe = parse_recipe(
        {
            "name": "tiny",
            "target": {"path": str(target), "revision": "1"},
            "engine": {"urls": ["http://127.0.0.1:1"]},
            "datasets": [
                {"name": name, "format": "glaive", "path": "/x", "unbounded": True}
                for name in NAMES
            ],
            "extract": {"dtype": "float32", "aux_layers": [1, 3, 4], "shard_tokens": 400},
            "host": {"workspace": str(tmp_path / "workspace")},
        },
        "test",
    )
    for name, lengths in TOKENS.items():
        rows = [
            {"sample_id": f"{name}-{i}", "input_ids": [1] * length, "prompt_tokens": 5}
            for i, length in enumerate(lengths)
        ]
        write_tokenized(workspace_of(recipe).prepared(name), rows)
    return recipe


def workspace_of(recipe: Recipe) -> Workspace:
    return Workspace(Path(recipe.host.workspace))


@pytest.mark.parametrize(
    ("config", "billions"), [(KIMI, 32), (LLAMA_8B, 7.5), (QWEN3_30B_A3B, 3.0)], ids=str
)
def test_active_parameters_are_those_that_the_makers_publish(
    config: dict[str, Any], billions: float
) -> None:
    assert forecast.active_parameters(config) / 1e9 == pytest.approx(billions, rel=0.03)


def test_a_dataset_is_foretold_from_its_rows_and_the_targets_shape(recipe: Recipe) -> None:
    found = forecast.forecast("B2", workspace_of(recipe), recipe)
    assert (list(found.lengths), found.num_shards, found.left_out) == ([400] * 5, 5, 0)
    assert found.needed_bytes == pytest.approx(2000 * PER_TOKEN, abs=30_000)
    rate = 200e12 / (2 * forecast.active_parameters(SHAPE))
    assert found.hours == pytest.approx(2000 / rate / 3600)
    assert "5 rows, 2,000 tokens in 5 shards, " in found.line()


@pytest.mark.parametrize(
    ("config", "field", "value", "absent"),
    [
        (LLAMA_8B, "intermediate_size", ..., ["intermediate_size"]),
        (LLAMA_8B, "num_attention_heads", ..., ["num_attention_heads"]),
        (KIMI, "v_head_dim", None, ["v_head_dim"]),
        (KIMI, "intermediate_size", ..., ["intermediate_size"]),
        (QWEN3_30B_A3B, "intermediate_size", ..., []),
        (LLAMA_8B, "kv_lora_rank", None, []),
    ],
    ids=["no mlp", "no heads", "null", "no dense mlp", "experts alone", "no latent attention"],
)
def test_a_field_that_is_not_there_or_null_is_named_where_it_is_needed(
    config: dict[str, Any], field: str, value: Any, absent: list[str]
) -> None:
    changed = {k: v for k, v in {**config, field: value}.items() if v is not ...}
    assert forecast.absent_fields(changed) == absent
    if not absent:
        same = forecast.active_parameters(config)
        assert forecast.active_parameters(changed) == pytest.approx(same)


def test_a_config_that_says_too_little_gives_bytes_and_no_hours(
    recipe: Recipe, free: Callable[[float], None]
) -> None:
    free(1e9)
    config = {**SHAPE}
    del config["intermediate_size"]
    (Path(recipe.target.path) / "config.json").write_text(json.dumps(config))
    found = foresee_extraction(plans(recipe), workspace_of(recipe), recipe)[1]
    assert (found.action, found.counts["hours"]) == ("start", None)
    assert "in 5 shards" in found.reason
    assert "hours unknown: config.json has no intermediate_size" in found.reason


def test_a_damaged_dataset_is_refused_alone(recipe: Recipe, free: Callable[[float], None]) -> None:
    free(1e9)
    workspace = workspace_of(recipe)
    decided = plans(recipe)
    workspace.prepared("B2").tokenized.write_text("torn\n")
    found = foresee_extraction(decided, workspace, recipe)
    assert [plan.action for plan in found] == ["start", "refuse", "start"]
    assert found[1].exit_code == DataError.exit_code
    assert MISSING_BYTES not in found[1].counts


def test_a_rate_that_was_measured_here_replaces_the_arithmetic(recipe: Recipe) -> None:
    workspace = workspace_of(recipe)
    for name, when, rate in (("B1", 2.0, 50.0), ("B3", 1.0, 900.0)):
        path = workspace.job("extract", name).progress
        path.parent.mkdir(parents=True)
        write_json(path, {"time": when, "tokens_per_second": rate})
    assert forecast.forecast("B2", workspace, recipe).hours == pytest.approx(2000 / 50 / 3600)


Usage = namedtuple("Usage", "total used free")


def plans(recipe: Recipe) -> list[Plan]:
    return [decide("extract", name, workspace_of(recipe), recipe) for name in NAMES]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what the disk has left, in bytes."""

    def leave(num_bytes: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, int(num_bytes)))

    return leave


def test_the_plan_says_bytes_and_hours(recipe: Recipe, free: Callable[[float], None]) -> None:
    free(1e9)
    found = foresee_extraction(plans(recipe), workspace_of(recipe), recipe)
    assert [plan.action for plan in found] == ["start"] * 3
    assert "2,000 tokens in 5 shards" in found[1].reason
    assert found[1].counts["tokens"] == 2000 and found[1].counts["hours"] >= 0


@pytest.mark.parametrize(
    ("free_bytes", "remedies"),
    [
        (2.2e6 * 0.7, ["max_length to 400 (keeps 2,350 tokens)", "only B1, B3", "spool_shards to"]),
        (0.9e6, ["extract only B1, B3", "use a larger workspace"]),
        (1000, ["for them: use a larger workspace"]),
    ],
)
def test_too_little_disk_for_all_of_them_refuses_all_with_each_limit_that_fits(
    recipe: Recipe, free: Callable[[float], None], free_bytes: float, remedies: list[str]
) -> None:
    free(free_bytes)
    found = foresee_extraction(plans(recipe), workspace_of(recipe), recipe)
    assert {plan.action for plan in found} == {"refuse"}
    assert {plan.exit_code for plan in found} == {RecipeError.exit_code}
    assert all(plan.counts[MISSING_BYTES] > 0 for plan in found)
    (reason,) = {plan.reason for plan in found}
    assert reason.startswith("hidden states of 3 datasets, 3,050 tokens, need ")
    for remedy in remedies:
        assert remedy in reason


def test_every_limit_that_is_named_does_fit(recipe: Recipe, free: Callable[[float], None]) -> None:
    free(2.2e6 * 0.7)
    workspace = workspace_of(recipe)
    shorter = recipe.extract.model_copy(update={"max_length": 400})
    capped = recipe.model_copy(update={"extract": shorter})
    assert {p.action for p in foresee_extraction(plans(capped), workspace, capped)} == {"start"}
    fewer = [plan for plan in plans(recipe) if plan.dataset != "B2"]
    assert {p.action for p in foresee_extraction(fewer, workspace, recipe)} == {"start"}


def test_a_recipe_that_spools_is_sent_to_the_train_dag_for_lack_of_room(
    recipe: Recipe, free: Callable[[float], None]
) -> None:
    free(2.2e6 * 0.7)
    spools = recipe.train.model_copy(update={"spool_shards": 2})
    spooled = recipe.model_copy(update={"train": spools})
    reason = foresee_extraction(plans(spooled), workspace_of(spooled), spooled)[0].reason
    assert "set train.spool_shards" not in reason
    assert "run the train DAG instead" in reason


def test_what_is_done_needs_no_room(recipe: Recipe, free: Callable[[float], None]) -> None:
    free(0.9e6)
    done = [replace(plan, action="done") for plan in plans(recipe) if plan.dataset == "B2"]
    found = foresee_extraction([*done, plans(recipe)[0]], workspace_of(recipe), recipe)
    assert [plan.action for plan in found] == ["done", "start"]


@pytest.mark.parametrize(
    ("hours", "words"), [(0.01, "36 s"), (0.4, "24 min"), (1.44, "86 min"), (1234, "1,234.0 h")]
)
def test_hours_are_written_for_people(hours: float, words: str) -> None:
    assert forecast.duration(hours) == words
