"""Wait until a dataset is ready for the next phase, or say at once why it will not be.

Both ask the host for ``status --json``, when they start and when the job they wait for has ended;
in between they are deferred and hold no slot.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperator

from drafter.errors import DataError
from drafter.layout import Workspace
from drafter.recipe import Recipe
from drafter.status import is_pilot
from gpu_host import alerts
from gpu_host.commands import Failed, failure, output_of
from gpu_host.hooks import GpuHostHook
from gpu_host.triggers import StatusTrigger, is_alive, stored_tokens

VERIFY_TIMEOUT_S = 3600
"""Hashing takes about a second per GB."""


class _DatasetSensor(BaseOperator):
    """Waits while ``phase`` runs on the dataset; then :meth:`judge` decides."""

    template_fields = ("dataset", "code")
    phase: str

    def __init__(
        self,
        *,
        dataset: str,
        recipe: Recipe,
        code: str | None = None,
        map_index_template: str = "{{ task.dataset }}",
        **kwargs: Any,
    ) -> None:
        told = alerts.callbacks(recipe, self.phase, is_sensor=True)
        super().__init__(**{"map_index_template": map_index_template, **told, **kwargs})
        self.dataset = dataset
        self.recipe = recipe
        self.code = code

    @classmethod
    def partial(cls, **kwargs: Any) -> Any:
        told = alerts.callbacks(kwargs["recipe"], cls.phase, is_sensor=True)
        return super().partial(**{"map_index_template": "{{ task.dataset }}", **told, **kwargs})

    def judge(self, status: dict[str, Any]) -> dict[str, Any]:
        """Numbers for XCom. Raises what :meth:`unready` makes of the reason."""
        raise NotImplementedError

    def execute(self, context: Any) -> dict[str, Any]:  # noqa: ARG002
        return self._look()

    def execute_complete(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return self._look()

    def _look(self) -> dict[str, Any]:
        status = self.status()
        if not is_alive(status, self.phase, self.dataset):
            return self.judge(status)
        host = self.recipe.host
        self.log.info("%s %s is running: waiting for its end", self.phase, self.dataset)
        self.defer(
            trigger=StatusTrigger(
                conn_id=host.conn_id,
                workspace=host.workspace,
                python=host.python,
                code=self.code,
                phase=self.phase,
                dataset=self.dataset,
                poll_s=host.poll_s,
                patience_s=host.lease_s,
            ),
            method_name="execute_complete",
        )
        raise AssertionError("defer raises")

    def status(self, *arguments: str) -> dict[str, Any]:
        command = ["status", "--json", "--dataset", self.dataset, *arguments]
        with self.hook() as hook:
            output = output_of(self.log, hook, command, timeout_s=VERIFY_TIMEOUT_S)
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        return answer

    def hook(self) -> GpuHostHook:
        return GpuHostHook.of(self.recipe.host, self.code)

    def unready(self, reason: str) -> Failed:
        """Nothing runs that a retry could wait for."""
        return failure(self.log, DataError.exit_code, reason)

    def imported(self, status: dict[str, Any]) -> dict[str, Any] | None:
        """Numbers for XCom where another system's states stand for the dataset; None elsewhere, and
        where the recipe spools, which makes all states itself. Whether they are whole, and of the
        recipe's target, the plan for extract says."""
        section = status["datasets"].get(self.dataset, {}).get("extract", {})
        system = section.get("imported")
        if system is None or self.recipe.spools:
            return None
        self.log.info("%s: its states are imported from %s", self.dataset, system)
        return {"imported": system, **section["counts"]}

    def section(self, status: dict[str, Any]) -> dict[str, Any] | None:
        section: dict[str, Any] | None = status["datasets"].get(self.dataset, {}).get(self.phase)
        return section


class TokenBudgetSensor(_DatasetSensor):
    """Succeeds when generation of the dataset has finished and its rows are still those it left, or
    when it has none because its states are imported."""

    phase = "generate"

    def judge(self, status: dict[str, Any]) -> dict[str, Any]:
        limits = self.recipe.dataset(self.dataset)
        section = self.section(status) or {}
        tokens, stop_reason = stored_tokens(status, self.dataset), section.get("stop_reason")
        numbers = (
            f"{tokens} tokens stored, budget {limits.token_budget or 'none'}, minimum"
            f" {limits.min_tokens}"
        )
        has_rows = section or status["datasets"].get(self.dataset, {}).get("stored")
        if not has_rows and (imported := self.imported(status)):
            return imported
        if not (stop_reason and self._is_as_left(status, section)):
            fault, remedy = self._fault(status)
            raise self.unready(f"{fault}: {numbers}; {remedy}")
        if tokens < limits.min_tokens:
            raise self.unready(
                f"generation of {self.dataset} ended ({stop_reason}) too early: {numbers}; lower"
                " its min_tokens or give it more prompts"
            )
        self.log.info("%s (%s): %s", self.dataset, stop_reason, numbers)
        return {"tokens": tokens, "stop_reason": stop_reason}

    def _is_as_left(self, status: dict[str, Any], section: dict[str, Any]) -> bool:
        """A complete manifest stands, whatever the exit record of a later or killed try says."""
        workspace = Workspace(Path(self.recipe.host.workspace))
        name = workspace.prepared(self.dataset).responses.name
        left: int = section["files"][name]["bytes"]
        now: int | None = status["datasets"][self.dataset]["sizes"].get(name)
        return now == left

    def _fault(self, status: dict[str, Any]) -> tuple[str, str]:
        """(what is wrong, what to do)"""
        again = "run the generate DAG again"
        job = status["jobs"].get(self.phase, {}).get(self.dataset)
        if job and job["job"] and job["exit"] is None:
            return f"generation of {self.dataset} left no exit record", again
        if job and job["job"] and job["exit"]["code"]:
            code, reason = job["exit"]["code"], job["exit"]["reason"]
            return f"generation of {self.dataset} ended with exit {code} ({reason})", again
        stored = status["datasets"].get(self.dataset, {}).get("stored", {}).get("responses")
        if job and is_pilot(job) and stored:
            found = f"only a pilot of {self.dataset} is generated ({stored:,} rows)"
            return found, "approve it in the generate DAG, which then goes on"
        return f"{self.dataset} is not generated and nothing runs", again


class SchemaSensor(_DatasetSensor):
    """Succeeds when validation has finished, and what it read and left is still as it was then; or
    when the dataset's states are imported, which no row decides.

    Every row was checked by validation, so bytes with the same hashes pass. They are hashed anew
    each time, dates are not believed; but only of this dataset, and only when its sizes agree.
    """

    phase = "validate"

    def judge(self, status: dict[str, Any]) -> dict[str, Any]:
        if imported := self.imported(status):
            return imported
        section = self.section(status)
        if section is None:
            raise self.unready(
                f"{self.dataset} is not validated and nothing runs: run the validate DAG"
            )
        verified = self.status("--verify")["datasets"][self.dataset]["verified"]
        for file, state in verified.items():
            if state != "ok":
                raise self.unready(
                    f"{file} of {self.dataset} is not what was validated ({state}): run the"
                    " generate DAG if a file is damaged, and the validate DAG"
                )
        counts: dict[str, Any] = dict(section["counts"])
        self.log.info(
            "%s: %s rows accepted; %d files are as validation saw them",
            self.dataset,
            counts.get("accepted"),
            len(verified),
        )
        return counts
