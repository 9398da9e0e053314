"""Tell the recipe's notifier what went wrong: a failed task, a job that stands still, a full disk.

A notifier is somebody else's code. Whatever it does, the job goes on: what it raises is one line of
the task's log. Its context holds ``alert``, a dict {condition, reason, recipe, dag_id, run_id,
phase, dataset, numbers}; for a failed task it is Airflow's own context besides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from airflow.sdk.module_loading import import_string
from asgiref.sync import sync_to_async

from drafter.errors import DataError
from drafter.recipe import Recipe

GB = 10**9

_NOT_PROGRESS = frozenset(
    {"time", "tokens_per_s", "tokens_per_second", "in_flight", "eta_s", "answers", "asked"}
)
"""They change while nothing is done: an engine that answers errors only answers too."""

_senders = ThreadPoolExecutor(2, thread_name_prefix="alert")
"""Not the event loop's own threads: notifiers that hang must not keep jobs from being stopped."""

log = logging.getLogger(__name__)

_low_disks: set[tuple[str, str]] = set()
"""(connection, workspace) that an alert was sent for: all jobs there share the disk."""


class FailureAlert:
    """``on_failure_callback`` of a dataset's task."""

    def __init__(self, recipe: Recipe, phase: str, is_sensor: bool) -> None:
        self.recipe = recipe
        self.phase = phase
        self.is_sensor = is_sensor

    def __call__(self, context: Any) -> None:
        task, error = context["task"], context.get("exception")
        # Where Airflow found the task's process dead, it has neither an error nor the real task.
        dataset = getattr(task, "dataset", None) or context["ti"].rendered_map_index
        reason = "the process of the task ended without a word" if error is None else str(error)
        exit_code = getattr(error, "exit_code", None)
        is_alarm = self.phase == "generate" and exit_code == DataError.exit_code
        alert = {
            "condition": "tainted" if is_alarm and not self.is_sensor else "failed",
            "reason": reason.removeprefix("drafter: "),
            "numbers": {} if exit_code is None else {"exit_code": exit_code},
            **subject(self.recipe, context, self.phase, str(dataset)),
        }
        notify(settings(self.recipe), {**context, "alert": alert}, log.error)


def callbacks(recipe: Recipe, phase: str, is_sensor: bool = False) -> dict[str, Any]:
    """Arguments of an operator; none without a notifier."""
    if recipe.alerts.notifier is None:
        return {}
    return {"on_failure_callback": FailureAlert(recipe, phase, is_sensor)}


def settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe's [alerts], as a trigger keeps it."""
    return recipe.alerts.model_dump(mode="json")


def subject(recipe: Recipe, context: Any, phase: str, dataset: str) -> dict[str, Any]:
    """What an alert is about."""
    return {
        "recipe": recipe.name,
        "dag_id": context["ti"].dag_id,
        "run_id": context["run_id"],
        "phase": phase,
        "dataset": dataset,
    }


def notify(alerts: dict[str, Any], context: dict[str, Any], complain: Callable[..., Any]) -> None:
    """Call the notifier; what goes wrong is one line through ``complain``."""
    try:
        notifier = import_string(alerts["notifier"])(**alerts["kwargs"])
        notifier.render_template_fields(context)
        notifier.notify(context)
    except Exception as error:  # noqa: BLE001  somebody else's code: the job must not pay for it
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        complain("The notifier %s failed (%s)", alerts["notifier"], text)


@dataclass
class Watch:
    """Looks at every poll of one job and says, once until it clears, what has become wrong."""

    alerts: dict[str, Any]
    """The recipe's [alerts]."""

    about: dict[str, Any]
    """As :func:`subject` gives it."""

    disk: tuple[str, str]
    """Connection and workspace."""

    complain: Callable[..., Any]
    since: float
    """Monotonic time of the last progress."""

    is_stalled: bool = False
    _seen: Any = None
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    def look(self, look: dict[str, Any], now: float) -> None:
        """Send what is new, in the background: following the job must not wait for it."""
        for alert in self.found(look, now):
            task = asyncio.create_task(self._send({**alert, **self.about}))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def aclose(self, patience_s: float) -> None:
        """Wait for what is being sent."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=patience_s)

    def found(self, look: dict[str, Any], now: float) -> Iterator[dict[str, Any]]:
        numbers = look["progress"] or {}
        seen = {key: value for key, value in numbers.items() if key not in _NOT_PROGRESS}
        mark = seen or look["log_bytes"]
        if mark != self._seen:
            self._seen, self.since, self.is_stalled = mark, now, False
        name = f"{self.about['phase']} {self.about['dataset']}"
        still_s = now - self.since
        if still_s >= self.alerts["stall_s"] and look["alive"] and not self.is_stalled:
            self.is_stalled = True
            yield {
                "condition": "stalled",
                "reason": f"{name} has made no progress for {still_s / 60:.0f} min",
                "numbers": {**numbers, "still_s": round(still_s)},
            }
        free, least = look.get("free_bytes"), self.alerts["min_free_gb"] * GB
        if free is None or free >= least:
            _low_disks.discard(self.disk)
        elif self.disk not in _low_disks:
            _low_disks.add(self.disk)
            yield {
                "condition": "disk",
                "reason": f"{free / GB:.1f} GB are free in {self.disk[1]}, less than the"
                f" {least / GB:g} GB of min_free_gb, while {name} runs",
                "numbers": {"free_bytes": free},
            }

    async def _send(self, alert: dict[str, Any]) -> None:
        context = {"alert": alert, "run_id": alert["run_id"]}
        await sync_to_async(notify, thread_sensitive=False, executor=_senders)(
            self.alerts, context, self.complain
        )
