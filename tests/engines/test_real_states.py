"""The same rows through transformers, a real vLLM and a real SGLang: the same states.

Both engines run on the CPU, on the demo's target in float32. vLLM is started so that a long row
takes several chunks, and keeps its prefix cache; SGLang must have neither, and one that has a cache
is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import reference
from engines.real_site import TARGET, RealSite
from unit.random_targets import greedy_rows, one_thread, validated_job

from drafter import jobs
from drafter.backends import Backend, opener
from drafter.backends.sglang import spelled_layers
from drafter.backends.transformers import TransformersBackend
from drafter.errors import RecipeError
from drafter.extract import extract
from drafter.extraction.shards import Features, read_rows
from drafter.files import read_section
from drafter.layout import HiddenStates
from drafter.plan import decide
from drafter.sections import Extract

NUM_LAYERS = 4
AUX_LAYERS = (3, 1, 2)
"""Not in the order in which the engines return them."""

MAX_LENGTH = 2000
MIN_COSINE = 0.999
LONG = 1500
"""Tokens: many blocks of either cache, several chunks of vLLM's prefill."""

CHUNK = 512
SHARE_SLACK = 0.005
"""Ties of the argmax may fall otherwise."""

Say = Callable[[str], None]
both = pytest.mark.parametrize("site", ["vllm", "sglang"], indirect=True)


def flags(kind: str, directory: Path) -> tuple[str, ...]:
    """What an engine needs in order to extract."""
    if kind == "sglang":
        ids = map(str, spelled_layers("qwen3", AUX_LAYERS))
        states = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3")
        return (*states, "--return-aux-hidden-state-layer-ids", *ids)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, *sorted(AUX_LAYERS), NUM_LAYERS]}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    transfer = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "vllm_cpu_hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }
    states = ("--speculative-config", json.dumps(speculative))
    chunks = ("--enable-chunked-prefill", "--max-num-batched-tokens", str(CHUNK))
    cache = ("--enable-prefix-caching",)
    return (*states, "--kv-transfer-config", json.dumps(transfer), *chunks, *cache)


UNCACHED = ("--disable-radix-cache", "--chunked-prefill-size", "-1")


def start(root: Path, kind: str, more: tuple[str, ...], say: Say) -> Iterator[RealSite]:
    """An engine that extracts. Nothing of it lives on."""
    site = RealSite(root, kind, (*flags(kind, root / "states"), *more))
    try:
        site.start_engine()
        say(f"{kind} for states: ready after {site.await_engine():.0f} s")
        yield site
        assert '"outcome":"stopped"' in site.drafter("engine", "stop")
    finally:
        jobs.stop_all(site.workspace.root)
    assert site.processes() == []


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, say: Say
) -> Iterator[RealSite]:
    kind = request.param
    root = tmp_path_factory.mktemp(f"{kind}-states")
    yield from start(root, kind, UNCACHED if kind == "sglang" else (), say)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, say: Say) -> Iterator[RealSite]:
    yield from start(tmp_path_factory.mktemp("sglang-cached"), "sglang", (), say)


@dataclass(frozen=True)
class Plain:
    """The target as transformers runs it."""

    model: Any
    rows: list[dict[str, Any]]
    """With greedy responses, the last one long."""

    @property
    def batch(self) -> list[list[int]]:
        """The rows, one of them twice, and the beginning of the long one."""
        ids = [row["input_ids"] for row in self.rows]
        return [*ids, ids[0], ids[-1][: LONG // 2]]

    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        output = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        return [layer[0] for layer in output.hidden_states]


@pytest.fixture(scope="module")
def plain() -> Plain:
    model = reference.load(TARGET, torch.float32).requires_grad_(False)
    with one_thread():
        rows = greedy_rows(model, 16)
        prompt = torch.tensor([rows[0]["input_ids"][:6]])
        ids = model.generate(prompt, do_sample=False, eos_token_id=None, max_new_tokens=LONG - 6)
    return Plain(model, [*rows, {"sample_id": "B1-long", "input_ids": ids[0].tolist(),
                                 "prompt_tokens": 6}])  # fmt: skip


def settings(site: RealSite) -> dict[str, Any]:
    return {"backend": site.kind, "urls": list(site.recipe.engine.urls)}


def opened(site: RealSite) -> Backend:
    tree = {**settings(site), "max_length": MAX_LENGTH, "dtype": "float32"}
    return opener(Extract.model_validate(tree))(TARGET, torch.float32, AUX_LAYERS)


def smallest(got: torch.Tensor, want: torch.Tensor) -> float:
    """Cosine of a token's states."""
    assert got.shape == want.shape
    return float(torch.cosine_similarity(got, want, dim=-1).min())


@both
def test_every_token_of_every_layer_equals_a_plain_forward_cold_and_warm(
    site: RealSite, plain: Plain, say: Say
) -> None:
    backend = opened(site)
    head = backend.head().to("cpu", torch.float32)
    ours = TransformersBackend(TARGET, torch.float32, AUX_LAYERS)
    found: dict[str, list[float]] = {}
    for _ in ("cold", "warm"):
        for ids, got in zip(plain.batch, backend.features(plain.batch), strict=True):
            want = plain.hidden_states(ids)
            for a, k in enumerate(AUX_LAYERS):
                found.setdefault(f"layer {k}", []).append(smallest(got.aux_TAD[:, a], want[k]))
            (hooked,) = ours.features([ids])
            found.setdefault("final", []).append(smallest(got.final_TD, hooked.final_TD))
            normed = smallest(head.normed(got.final_TD), want[-1])
            found.setdefault("norm(final)", []).append(normed)
            if site.kind == "vllm":
                check_vllm(got, ids, want, found)
    told = ", ".join(f"{name} {min(values):.7f}" for name, values in sorted(found.items()))
    say(f"{site.kind}: smallest cosine of {sum(map(len, plain.batch))} tokens: {told}")
    assert min(map(min, found.values())) >= MIN_COSINE


def check_vllm(
    got: Features, ids: list[int], want: list[torch.Tensor], found: dict[str, list[float]]
) -> None:
    assert got.returned_ids == ids
    assert got.low_TD is not None
    found.setdefault("layer 0", []).append(smallest(got.low_TD, want[0]))


@both
def test_the_phase_ends_with_the_manifest_that_transformers_gives(
    site: RealSite, plain: Plain, tmp_path: Path, say: Say
) -> None:
    sections, stored = [], []
    for name, more in {"transformers": {}, site.kind: settings(site)}.items():
        job = validated_job(
            tmp_path / name,
            TARGET,
            plain.rows,
            aux_layers=AUX_LAYERS,
            max_length=MAX_LENGTH,
            batch_tokens=2048,
            **more,
        )
        extract(job, opener(job.recipe.extract))
        assert decide("extract", "B1", job.workspace, job.recipe).action == "done"
        sections.append(section_of(job.workspace.hidden_states("B1")))
        stored.append(list(read_rows(job.workspace.hidden_states("B1"))))
    want, got = (section["gates"] for section in sections)
    say(
        f"{site.kind}: argmax share {got['argmax_share']:.4f}, of transformers "
        f"{want['argmax_share']:.4f}; reference error {got['reference_error']:.1e}"
    )
    assert sections[1]["counts"] == sections[0]["counts"]
    assert got["argmax_share"] == pytest.approx(want["argmax_share"], abs=SHARE_SLACK)
    for ours, theirs in zip(*stored, strict=True):
        assert ours.sample_id == theirs.sample_id
        assert smallest(ours.aux_TAD, theirs.aux_TAD) >= MIN_COSINE
        assert smallest(ours.final_TD, theirs.final_TD) >= MIN_COSINE
    if site.kind == "vllm":
        assert os.listdir(site.workspace.root.parent / "states") == []


def test_sglang_with_a_radix_cache_is_refused_before_it_shortens_a_row(cached: RealSite) -> None:
    with pytest.raises(RecipeError, match=r"radix cache.*start SGLang with.*--disable-radix-cache"):
        opened(cached)


def section_of(hidden: HiddenStates) -> dict[str, Any]:
    section = read_section(hidden.manifest, "extract")
    assert section is not None
    return section
