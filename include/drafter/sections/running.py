"""Where and when jobs run, and who hears of them."""

from __future__ import annotations

from pydantic import Field

from drafter.sections.section import Section


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
    ``extract.jobs`` says. Where the recipe spools, extraction and training share them."""

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

    kwargs: dict[str, str | int | float | bool] = Field(default={})
    """Arguments of the notifier: connection ids and texts (templates see ``alert``), no secrets."""

    stall_s: float = Field(default=1800, gt=0)
    """A job whose numbers stand still for so long."""

    min_free_gb: float = Field(default=20, ge=0)
    """Of the workspace's disk; below it a job that runs there is in danger."""
