"""The first and the last task over all datasets: what will be done, and is it done everywhere?"""

from __future__ import annotations

import json
from typing import Any

from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped

from drafter.layout import ALL
from drafter.plan import MISSING_BYTES, OVER_ALL
from drafter.recipe import Recipe
from gpu_host.commands import failure, output_of
from gpu_host.dag_options import generated_asset
from gpu_host.hooks import GpuHostHook
from gpu_host.operators import last_digest

PLAN_TIMEOUT_S = 600
"""The plan may hash files: about a second per GB."""


class PlanOperator(BaseOperator):
    """Log what ``phase`` will do per dataset and why; return the names to map over.

    A run that was started by events of single datasets maps over those; any other run over the
    ``datasets`` of its trigger form, or over all; a phase over all datasets is mapped once, as
    "all". A refusal that concerns all of them fails here; one of a single dataset is told by that
    dataset's own task. With ``plan_only`` everything after it is skipped. The plan itself is the
    XCom ``plan``.
    """

    template_fields = ("code",)

    def __init__(self, *, recipe: Recipe, code: str, phase: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.recipe = recipe
        self.code = code
        self.phase = phase

    def execute(self, context: Any) -> list[str]:
        params = context["params"]
        names = self._names(context)
        command = ["plan", self.phase, *names, "--json", "--run-id", context["run_id"]]
        if params.get("mode"):
            command += ["--mode", params["mode"]]
        if params.get("token_budget"):
            command += ["--token-budget", str(params["token_budget"])]
        with self.hook() as hook:
            output = output_of(self.log, hook, command, timeout_s=PLAN_TIMEOUT_S)
        *lines, last = output.splitlines()
        for line in lines:
            self.log.info("%s", line)
        plans = json.loads(last)
        context["ti"].xcom_push(key="plan", value=plans)
        if params["plan_only"]:
            self.log.info("plan_only is set: nothing is started")
            context["ti"].xcom_push(key="return_value", value=[])
            raise DownstreamTasksSkipped(tasks=sorted(self.downstream_task_ids))
        for line in plans:
            if self._is_of_all(line):
                raise failure(self.log, line["exit_code"], line["reason"])
        return names

    def _is_of_all(self, line: dict[str, Any]) -> bool:
        """Is it a refusal that no dataset's own job could tell better, or too late?"""
        if line["action"] != "refuse":
            return False
        # One disk for all: the first ones would take the room of the others. And the other side of
        # a spool would hold its slots while it waits for one that is refused.
        return self.phase in OVER_ALL or MISSING_BYTES in line["counts"]

    def hook(self) -> GpuHostHook:
        return GpuHostHook.of(self.recipe.host, self.code)

    def _names(self, context: Any) -> list[str]:
        if self.phase in OVER_ALL:
            return [ALL]
        chosen = context["params"].get("datasets", self.recipe.dataset_names)
        return _of_events(context, self.recipe) or list(chosen)


class JoinOperator(BaseOperator):
    """Announce ``asset`` once per new set over all datasets of the recipe.

    Looks at the manifests on the host, not at this run: a dataset repaired later, in a run of its
    own, completes the set too. Skipped, and silent, while a dataset is missing or when this very
    set was announced before (its digest is on the asset's last event).
    """

    template_fields = ("code",)

    def __init__(
        self, *, recipe: Recipe, code: str, phase: str, asset: Asset, **kwargs: Any
    ) -> None:
        super().__init__(**{"outlets": [asset], "inlets": [asset], **kwargs})
        self.recipe = recipe
        self.code = code
        self.phase = phase
        self.asset = asset

    def execute(self, context: Any) -> dict[str, Any]:
        with self.hook() as hook:
            output = output_of(self.log, hook, ["join", self.phase], timeout_s=PLAN_TIMEOUT_S)
        joined: dict[str, Any] = json.loads(output.splitlines()[-1])
        if joined["missing"]:
            raise AirflowSkipException(
                f"not every dataset is there: {', '.join(joined['missing'])}"
            )
        if last_digest(context, self.asset) == joined["digest"]:
            raise AirflowSkipException("this set was announced before: nothing new")
        context["outlet_events"][self.asset].extra = {"digest": joined["digest"]}
        return joined

    def hook(self) -> GpuHostHook:
        return GpuHostHook.of(self.recipe.host, self.code)


def _of_events(context: Any, recipe: Recipe) -> list[str]:
    """Datasets whose generation's events started this run, in recipe order; none for other runs.

    An event made by hand in the UI has no extra: the asset's URI says which dataset it is of.
    """
    uris = {
        event.asset.uri
        for events in context["triggering_asset_events"].values()
        for event in events
    }
    prefix = generated_asset(recipe)
    return [name for name in recipe.dataset_names if f"{prefix}/{name}" in uris]
