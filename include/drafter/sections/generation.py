"""Prompts and the engine that answers them."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from drafter.sections.section import EnvironmentName, Section

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
