"""From hidden states to a drafter."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drafter.sections.section import EnvironmentName, Section

_EXTRACT_WHERE = {"urls", "api_key_env", "timeout_s", "jobs", "forecast_tflops"}
"""Who makes the states, how fast and how many at once: it decides nothing about them."""

_TRAIN_HOW = {
    "start_from",
    "checkpoint_every_steps",
    "evaluate_every_steps",
    "recompute_activations",
    "processes",
    "export",
    "spool_shards",
    "spool_patience_s",
}
"""How often training saves and looks, where it computes, how its states reach it, and which
checkpoint is taken of it: none decides a weight (the number of processes only how sums round)."""


class Extract(Section):
    """How the target's hidden states are made, and when they are believed."""

    backend: Literal["transformers", "vllm", "sglang"] = "transformers"
    """In the job's own process: any model that fits. Through a vLLM server that extracts: any size.
    Through an SGLang server: auxiliary layers only, the rest in the process, for small models."""

    urls: tuple[str, ...] = ()
    """Base URLs of the servers, as seen from the GPU host, which share the rows; none for
    transformers. They are not those of [engine]: extraction needs flags that generation must not
    have."""

    api_key_env: EnvironmentName | None = None
    """Environment variable *on the GPU host* that holds the servers' key."""

    timeout_s: float = Field(default=600, gt=0)
    """For the states of one row: longer means that the server hangs."""

    jobs: int = Field(default=1, ge=1)
    """Datasets extracted or evaluated at once; each loads the target."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the stored states; on a GPU also of the forward pass."""

    aux_layers: tuple[int, int, int] | None = None
    """HF ``hidden_states`` indices; default [2, n//2, n-3] for n layers."""

    max_length: int = Field(default=8192, ge=2)
    """Longer rows are left out, with a count."""

    batch_tokens: int = Field(default=16_384, ge=1)
    """Padded tokens per forward pass."""

    shard_tokens: int = Field(default=65_536, ge=1)
    """Tokens per shard file at most (one longer row is one shard)."""

    min_argmax_share: float = Field(default=0.3, ge=0, le=1)
    """Share of response tokens that must equal argmax lm_head(norm(final)): near 1 for greedy
    rows, lower for sampled ones; a misaligned extraction is near 0."""

    forecast_tflops: float = Field(default=200.0, gt=0)
    """Of the target's forward pass, all GPUs together, for the hours that the plan foretells until
    a dataset has been measured: about two fifths of what the GPUs' makers promise."""

    @model_validator(mode="after")
    def _served(self) -> Self:
        if (self.backend == "transformers") != (not self.urls):
            raise ValueError(
                "urls are the servers of backend vllm or sglang: set both, or neither for"
                " transformers"
            )
        return self

    def rules(self) -> dict[str, Any]:
        """What the stored states depend on, and the bound they are judged by."""
        return self.model_dump(mode="json", exclude=_EXTRACT_WHERE)


_DRAFT_VOCAB_SIZE = 32_000


class Train(Section):
    """Defaults are the recipe that SpecForge 0.2.0 trains EAGLE-3 drafters with, where a field says
    nothing else."""

    start_from: str | None = Field(default=None, min_length=1)
    """Directory *on the GPU host* of an EAGLE-3 drafter to train further, as SGLang, SafeAILab,
    SpecForge or speculators write it; by default a new one is trained."""

    steps: int = Field(default=20_000, ge=0)
    """Optimiser steps. 0 exports the untrained drafter, or the one of start_from."""

    batch_tokens: int = Field(default=8192, ge=2)
    """Packed tokens per step, of all processes together; as speculators 0.9.0 packs them."""

    ttt_steps: int = Field(default=7, ge=1, le=16)
    """Draft steps unrolled per position (EAGLE-3 training-time test): 7 in SafeAILab's code,
    SpecForge and TorchSpec, which takes 4 for Kimi; 3 in speculators."""

    step_decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of draft step i is step_decay ** i: 0.8 in SafeAILab's code, SpecForge and
    TorchSpec; 1 in speculators."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Of AdamW, the highest: 1e-4 in SpecForge and TorchSpec, which takes 5e-5 for Kimi, as
    SafeAILab's code always does."""

    warmup_share: float = Field(default=0.015, ge=0, lt=1)
    """Of the steps, over which the learning rate grows; half a cosine takes it to zero after that:
    SpecForge and TorchSpec."""

    weight_decay: float = Field(default=0.0, ge=0)
    """SpecForge; 0.01 in speculators."""

    clip_norm: float = Field(default=0.5, gt=0)
    """Largest norm of a gradient: 0.5 in SafeAILab's code, SpecForge and TorchSpec, which takes 1
    for Kimi."""

    seed: int = Field(default=0, ge=0)

    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Most frequent response tokens that the drafter can propose, capped at the target's size;
    default: that of start_from, or 32 000, as in SafeAILab's code."""

    intermediate_size: int | None = Field(default=None, ge=1)
    """Of the drafter's MLP; default: that of start_from, or the target's dense one."""

    held_out_share: float = Field(default=0.02, gt=0, lt=1)
    """Of sample ids, by hash: never trained on, used to evaluate."""

    checkpoint_every_steps: int = Field(default=500, ge=1)

    evaluate_every_steps: int | None = Field(default=None, ge=1)
    """How often the loss of held-out rows is taken besides at every checkpoint; default: no more
    often."""

    export: Literal["last", "best"] = "last"
    """Which checkpoint is evaluated and exported: of the last step, or the one with the least
    held-out loss (where the recipe spools, over the few short rows that are kept)."""

    processes: int | None = Field(default=None, ge=1)
    """Processes that share each batch, one per GPU; default: as many as there are GPUs."""

    recompute_activations: bool = False
    """Compute each draft step once more in backward instead of keeping what it computed: a third
    more work, and the memory of one step instead of ``ttt_steps``. The numbers are the same."""

    no_states_baseline: bool = False
    """Also train the same drafter with its auxiliary states zeroed, to measure what they give."""

    spool_shards: int | None = Field(default=None, ge=2)
    """None: train from what the extract DAG stored. A number N: no states are stored; the train DAG
    makes them beside training, every epoch anew, at most N shards of ``extract.shard_tokens`` ahead
    of it, and deletes what has been trained on. The disk holds N + 1 shards, whatever the number of
    tokens: all states of a large target do not fit (57 KB per token for Kimi-K2.5, 4.6 TB for 80
    million). Each epoch costs a pass of the target. Two at least: one in use, one being made."""

    spool_patience_s: float = Field(default=1800, gt=0)
    """The two jobs of a spool wait for each other; when one has been gone for so long, the other
    ends as busy, to be retried: longer than a retry takes (15 minutes) and a target loads."""

    @property
    def new_draft_vocab_size(self) -> int:
        """Of a drafter that nothing is started from."""
        return self.draft_vocab_size or _DRAFT_VOCAB_SIZE

    def rules(self) -> dict[str, Any]:
        """What the trained drafter depends on; a start counts by its content, not by its path."""
        rules = self.model_dump(mode="json", exclude=_TRAIN_HOW)
        if self.start_from is None:
            rules["draft_vocab_size"] = self.new_draft_vocab_size
        return rules


class ServedDrafter(Section):
    """Servers somebody has started, to measure an exported drafter in a real engine."""

    kind: Literal["sglang", "vllm"] = "sglang"

    urls: tuple[str, ...] = Field(min_length=1)
    """Base URLs, as seen from the GPU host, of servers of the target that draft with the export.
    The servers themselves, for their counters are read, and busy with nothing else."""

    plain_urls: tuple[str, ...] = ()
    """The same servers without a drafter, on the same GPUs: what the speed is compared with."""

    api_key_env: EnvironmentName | None = None
    """Environment variable *on the GPU host* that holds the servers' key."""

    @model_validator(mode="after")
    def _two_servers(self) -> Self:
        if twice := sorted(set(self.urls) & set(self.plain_urls)):
            raise ValueError(
                f"{twice[0]} is in urls and plain_urls: one server cannot be both with and without"
                " a drafter"
            )
        return self


class Evaluate(Section):
    draft_tokens: int = Field(default=3, ge=1, le=16)
    """Tokens drafted per verification."""

    max_prompts: int = Field(default=64, ge=1)
    """Held-out prompts per dataset at most."""

    max_new_tokens: int = Field(default=1024, ge=1)
    """Of the greedy answers that are replayed."""

    served: ServedDrafter | None = None
    """After the export the held-out prompts are asked of a server that uses it; not without this
    section."""

    def rules(self) -> dict[str, Any]:
        """What a replay depends on."""
        return self.model_dump(mode="json", exclude={"served"})
