"""The sections of a recipe: every knob once, with its unit, its bound and its reason.

Each class is a table of ``include/recipes/<name>.toml``; drafter.recipe puts them together.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from drafter.kinds import KINDS, SOUND, Kind, Policy

SourceFormat = Literal[
    "glaive",
    "opencodeinstruct",
    "magicoder",
    "mixturethoughts",
    "openthoughts",
    "ultrachat",
    "sharegpt",
    "sweagent",
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
EngineCommand = (
    Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)]
)
Share = Annotated[float, Field(ge=0, le=1)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Target(Section):
    """The model that the drafter drafts for."""

    path: str = Field(min_length=1)
    """Directory on the GPU host with config, tokenizer, template and (for extraction) weights."""

    revision: str = Field(min_length=1)
    """Commit or date that pins the checkpoint. Another revision needs another workspace."""

    thinking: bool = True
    """Render prompts with thinking on: the model reasons before it answers."""


class Engine(Section):
    """The server that writes the responses, token ids in and out."""

    kind: Literal["sglang", "vllm"] = "sglang"
    """SGLang's native /generate, or vLLM's /inference/v1/generate (needs --enable-scale-out)."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Base URLs as seen from the GPU host. Several share the work by outstanding tokens; a run
    begins when one of them answers and goes on with those that are left."""

    api_key_env: EnvironmentName | None = None
    """Environment variable *on the GPU host* that holds the key."""

    in_flight: int = Field(default=150, ge=1, le=4096)
    """Requests in flight over all jobs that use this engine; each job gets its share."""

    queue_timeout_s: float = Field(default=600, gt=0)
    """One request may wait and prefill for so long; what gives up earlier throws work away."""

    slowest_tokens_per_s: float = Field(default=5.0, gt=0)
    """Of one request under load: the whole timeout is queue_timeout_s + its max_new_tokens / this.
    A timeout over all requests alike would cut the longest answers, or notice a hang in hours."""

    patience_s: float = Field(default=600, ge=0)
    """While no URL answers, a job waits for so long before it ends as busy: longer than a restart
    of the engine, shorter than a GPU reserved for nobody should be."""

    start: EngineCommand | None = None
    """What starts the engine on the GPU host: a shell line, or a list of words. It stays in the
    foreground, serves ``urls``, and is run as a supervised job while jobs use it. Without it the
    engine is somebody else's and only checked. Not for secrets: let it read those on the host."""

    ready_timeout_s: float = Field(default=1800, gt=0)
    """From the start until it serves the target: a trillion parameters load in 10 to 20 minutes."""

    lease_s: float = Field(default=1800, ge=5)
    """An engine that no job has used for so long ends itself: longer than a wait for the pool or
    for a retry (15 minutes at most), for to load again costs ``ready_timeout_s``."""


class Dataset(Section):
    """One prompt source and how much of it to answer."""

    name: Name
    """Directory, mapped-task name and sample id prefix, for example ``B1_glaive``."""

    format: SourceFormat
    """Which converter reads its rows."""

    path: str | None = Field(default=None, min_length=1)
    """Source rows on the GPU host: a file, a directory of files, or a glob (``**`` goes into
    directories). JSON lines, one JSON array or Parquet, plain or compressed: bytes tell, not names.
    """

    hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Instead of ``path``: ``owner/name`` of a dataset on the Hugging Face hub, streamed from there
    by the GPU host (its HF_ENDPOINT and HF_TOKEN count) and never kept."""

    files: str | None = Field(default=None, min_length=1)
    """Which files of ``hub``, as a glob in which ``*`` matches ``/`` too, for example
    ``data/train_sft-*.parquet``. Every row of them is read, so fewer files are the way to fewer
    rows. Needed when the hub has more than one split or form of the data."""

    revision: str = Field(default="local", min_length=1)
    """Pinned revision of the source, recorded beside every prompt; for ``hub`` a whole commit."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Overrides ``generate.max_prompt_tokens``. Above it an agent's run (sweagent) loses its oldest
    observations, then its last steps; any other prompt is dropped. Both are counted."""

    token_budget: int | None = Field(default=None, ge=1)
    """Completion tokens after which no new prompt is sent."""

    max_samples: int | None = Field(default=None, ge=1)
    """Prompts used at most."""

    unbounded: bool = False
    """Answer every prompt; set it when neither limit is given."""

    min_tokens: int = Field(default=1, ge=1)
    """Completion tokens below which the dataset does not count as generated."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.unbounded == (self.token_budget is not None or self.max_samples is not None):
            raise ValueError("set token_budget, max_samples or both, or unbounded = true")
        return self

    @model_validator(mode="after")
    def _located(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("set path (on the GPU host) or hub (owner/name), one of the two")
        if self.files is not None and self.hub is None:
            raise ValueError("files chooses among those of a hub: for path write the glob there")
        if self.hub is not None and not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(
                f"revision {self.revision!r} is no commit, and what a branch means changes: take"
                " the 40 digits that `git ls-remote https://huggingface.co/datasets/"
                f"{self.hub} main` prints"
            )
        return self


class Generate(Section):
    """Sampling and limits of one response."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(default=32_768, ge=1)
    """Completion tokens per response at most; fitted to the engine's context per prompt."""

    max_prompt_tokens: int = Field(default=32_768, ge=1)
    """Longer prompts are shortened by prepare where their format allows it (agent trajectories),
    else dropped, with a count; a dataset may have its own."""

    seed: int = Field(default=0, ge=0)
    """Order in which prompts are answered."""

    attempts: int = Field(default=4, ge=1, le=20)
    """Sends of one prompt at most, for failures that a retry can mend."""

    canary_window: int = Field(default=32, ge=8)
    """Finished rows looked at together."""

    canary_share: float = Field(default=0.5, gt=0, le=1)
    """Share of rows without sound reasoning and answer in a window at which the dataset stops
    itself; in the last sixteen windows a fifth of it is enough."""


class Pilot(Section):
    """A person's look before the GPU hours are spent: with this section each dataset first answers
    a few prompts, and goes on only once somebody has approved the answers. The notifier of [alerts]
    hears of every question."""

    rows: int = Field(default=32, ge=8)
    """Stored answers of a pilot; they count. Of 32 sound ones 3 % would come from a target that
    spoils one in ten, and 32 are a window of the canary."""

    response_timeout_s: float = Field(default=3 * 86_400, gt=0)
    """How long a question stands: over a weekend, for no other run of the DAG begins meanwhile.
    Then its task fails; the rows stay, and who clears it is asked again."""

    samples: int = Field(default=3, ge=1, le=20)
    """Decoded answers that the question shows."""


class Repetition(Section):
    """From when on an answer that goes round in a loop counts as one."""

    min_share: float = Field(default=0.25, gt=0, le=1)
    """Of the answer that the loop covers, three rounds at least."""

    min_tokens: int = Field(default=96, ge=24)
    """Shorter loops are tables and laughter."""


class Validate(Section):
    """What becomes of rows by class; drafter.kinds names the classes and says what they mean."""

    policy: dict[Kind, Policy] = Field(default={}, validate_default=True)
    """What becomes of a class of rows, where it is not the default: "accept", "flag" (accepted, and
    counted) or "reject"."""

    cap: dict[Kind, Share] = Field(default={}, validate_default=True)
    """Share of stored rows that a class may have, where it is not the default (one row may be of
    any class, unless its cap is 0). Above it the phase fails with the numbers."""

    max_rejected_share: Share = 0.2
    """The same for all rejected rows together."""

    repetition: Repetition = Repetition()

    audit_rows: int = Field(default=24, ge=0, le=1000)
    """Rows per dataset that the report decodes for reading."""

    @field_validator("policy")
    @classmethod
    def _every_policy(cls, policy: dict[Kind, Policy]) -> dict[Kind, Policy]:
        """The resolved recipe says all of them: a changed default is a changed rule."""
        defaults = {kind: about.policy for kind, about in KINDS.items() if about.policy}
        if fixed := policy.keys() - defaults:
            raise ValueError(f"nothing can be chosen for {', '.join(sorted(fixed))}: leave it out")
        return {**defaults, **policy}

    @field_validator("cap")
    @classmethod
    def _every_cap(cls, cap: dict[Kind, float]) -> dict[Kind, float]:
        return {**{kind: about.cap for kind, about in KINDS.items()}, **cap}

    def policy_of(self, kind: Kind) -> Policy:
        """Of any class: those without a choice are sound, or never accepted."""
        return self.policy.get(kind, "accept" if kind in SOUND else "reject")

    def cap_of(self, kind: Kind) -> float | None:
        """None when every row may be of this class."""
        cap = self.cap[kind]
        return cap if cap < 1 else None


class Extract(Section):
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


class Train(Section):
    steps: int = Field(default=20_000, ge=0)
    """Optimiser steps. 0 exports the untrained drafter."""

    batch_tokens: int = Field(default=8192, ge=2)
    """Packed tokens per step."""

    ttt_steps: int = Field(default=7, ge=1, le=16)
    """Draft steps unrolled per position (EAGLE-3 training-time test)."""

    step_decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of draft step i is step_decay ** i."""

    learning_rate: float = Field(default=1e-4, gt=0)
    warmup_share: float = Field(default=0.015, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=0.5, gt=0)
    seed: int = Field(default=0, ge=0)

    draft_vocab_size: int = Field(default=32_000, ge=1)
    """Most frequent response tokens that the drafter can propose; capped at the target's size."""

    intermediate_size: int | None = Field(default=None, ge=1)
    """Of the drafter's MLP; default: the target's dense one."""

    held_out_share: float = Field(default=0.02, gt=0, lt=1)
    """Of sample ids, by hash: never trained on, used to evaluate."""

    checkpoint_every_steps: int = Field(default=500, ge=1)

    no_states_baseline: bool = False
    """Also train the same drafter with its auxiliary states zeroed, to measure what they give."""


class Evaluate(Section):
    draft_tokens: int = Field(default=3, ge=1, le=16)
    """Tokens drafted per verification."""

    max_prompts: int = Field(default=64, ge=1)
    """Held-out prompts per dataset at most."""

    max_new_tokens: int = Field(default=1024, ge=1)
    """Of the greedy answers that are replayed."""


class Host(Section):
    conn_id: str = Field(default="gpu_host", min_length=1)
    """Airflow SSH connection."""

    workspace: str = Field(pattern=r"^/")
    """Absolute directory on the GPU host."""

    python: str = Field(default="python3", min_length=1)
    """Interpreter on the GPU host that has include/requirements.txt installed."""

    pool: str = Field(default="gpu", min_length=1)
    """Airflow pool of the GPUs: at least ``slots`` large, counting deferred tasks."""

    slots: int = Field(default=4, ge=1)
    """GPU jobs at once: generate takes one slot, train all, extract and evaluate as
    ``extract.jobs`` says."""

    lease_s: float = Field(default=900, ge=5)
    """A job that nobody has renewed for so long stops itself: longer than any triggerer outage."""

    poll_s: float = Field(default=5, gt=0)
    """Between two looks at a job."""

    grace_s: float = Field(default=3, ge=0)
    """From TERM to KILL."""

    timeout_s: float = Field(default=7 * 86_400, gt=0)
    """Deadline of one job, kept by the host itself."""


class Schedule(Section):
    """Cron in UTC for each DAG, beside the assets that start validate, extract and train; none by
    default. A scheduled run redoes what has changed and finds the rest done."""

    generate: str | None = Field(default=None, min_length=1)
    validate_: str | None = Field(default=None, min_length=1, alias="validate")
    extract: str | None = Field(default=None, min_length=1)
    train: str | None = Field(default=None, min_length=1)

    pause_stops: bool = True
    """Pausing a DAG in the UI or by the REST API ends its runs and their jobs; if false, they go on
    to their end, and only new tasks wait."""


class Alerts(Section):
    """Who is told when something goes wrong. What cannot be told never disturbs a job."""

    notifier: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
    """``package.module.Class`` of an Airflow notifier with a ``notify`` method, importable by
    workers and triggerers. It hears of a failed task of a dataset (the canary's alarm included) and
    of what ``stall_s`` and ``min_free_gb`` describe; its context holds ``alert``."""

    kwargs: dict[str, str | int | float | bool] = {}
    """Arguments of the notifier: connection ids and texts (templates see ``alert``), no secrets."""

    stall_s: float = Field(default=1800, gt=0)
    """A job whose numbers stand still for so long."""

    min_free_gb: float = Field(default=20, ge=0)
    """Of the workspace's disk; below it a job that runs there is in danger."""
