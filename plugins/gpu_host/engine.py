"""The engine around the tasks that use it, as Airflow setup and teardown.

Only in DAGs whose recipe says how to start it (``[engine] start``); drafter.engine_job is what
happens on the host. The jobs that use the engine ask for it themselves before they begin, so that a
retry brings back one that died; the setup is there so that a wait of many minutes holds no slot of
the pool and a failure is one red task with one reason.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperator

from drafter.errors import MEANING, Stopped
from drafter.layout import ALL, JobDir, Workspace
from drafter.recipe import Recipe
from gpu_host import alerts
from gpu_host.commands import failure, output_of
from gpu_host.hooks import GpuHostHook
from gpu_host.triggers import JobTrigger

ASK_TIMEOUT_S = 120.0
"""A port that takes connections and says nothing is asked for half a minute per URL."""

STOP_TIMEOUT_S = 15.0
DYING_S = 30.0
"""A run that is marked failed tears down while its jobs are still being ended."""

LOOK_S = 3.0
RETRIES = 1
"""Of the setup: an engine that did not load twice needs a person, and each time takes minutes."""


class EngineTrigger(JobTrigger):
    """One event "reached" once the engine serves the recipe's model, or as of any job's end.

    It renews the engine's lease while it waits. Killed, it leaves an engine that jobs use alone.
    """

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "gpu_host.engine.EngineTrigger", super().serialize()[1]

    def is_reached(self, look: dict[str, Any]) -> bool:
        return _is_ready(look)

    def stop_command(self) -> list[str]:
        return ["engine", "stop", "--request", self.request]


class StartEngineOperator(BaseOperator):
    """Start the recipe's engine, or follow the live one, and wait until it serves the model.

    ``plan`` is what the phase that uses it is going to do: when that is nothing, or nothing before
    a person approves a pilot, no engine is needed and the host is not even asked. Returns {outcome
    "not needed" | "serving" | "ready"}.
    """

    template_fields = ("code", "plan")

    def __init__(
        self, *, recipe: Recipe, code: str, plan: list[dict[str, Any]], **kwargs: Any
    ) -> None:
        super().__init__(**{**alerts.callbacks(recipe, "engine"), **kwargs})
        self.recipe = recipe
        self.code = code
        self.plan = plan
        self.dataset = ALL
        self._request: str | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        if all(line["action"] in ("done", "refuse", "approve") for line in self.plan):
            self.log.info("Nothing will be asked: no engine is needed")
            return {"outcome": "not needed"}
        return self._begin(context)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        outcome, end = event["outcome"], event["exit"] or {}
        progress = event["progress"] or {}
        if outcome == "reached":
            return self._ready(progress)
        if outcome == "unreachable":
            raise failure(self.log, 1, f"engine: {event['message']}")
        if outcome == "lost":
            raise failure(
                self.log,
                1,
                "the engine ended without a record: the host rebooted, killed it for memory, or has"
                " a full disk",
            )
        by_another = end.get("request") not in (None, self._asker(context))
        ended_for_others = end.get("code") == Stopped.exit_code and by_another
        if outcome == "replaced" or ended_for_others or end["code"] == 0:
            self.log.info("The engine was ended for somebody else: starting it again")
            return self._begin(context)
        said = progress.get("reason") or f"{end['reason']}; {event['last_line']}"
        meaning = MEANING.get(end["code"], "failed")
        raise failure(
            self.log,
            end["code"],
            f"engine: {meaning} (exit {end['code']}): {said}; log: {self._job_dir.log}",
        )

    def on_kill(self) -> None:
        """The running task is being killed: stop an engine that is just being started."""
        if self._request is None:
            return
        arguments = ["engine", "stop", "--request", self._request]
        with self.hook() as hook:
            answer = output_of(self.log, hook, arguments, timeout_s=STOP_TIMEOUT_S)
        self.log.info("%s", answer.strip())

    def _begin(self, context: Any) -> dict[str, Any]:
        self._request = self._asker(context)
        asked = {
            "recipe": self.recipe.as_json(),
            "code": self.code,
            "run_id": context["run_id"],
            "request": self._request,
        }
        poll = ["poll", "--job", str(self._job_dir.root)]
        with self.hook() as hook:
            output = output_of(
                self.log, hook, ["engine", "start"], json.dumps(asked), ASK_TIMEOUT_S
            )
            answer: dict[str, Any] = json.loads(output.splitlines()[-1])
            if answer["outcome"] == "serving":
                self.log.info("%s is served already, by no job of ours", answer["model"])
                return answer
            if answer["outcome"] == "following":
                look = json.loads(output_of(self.log, hook, poll).splitlines()[-1])
                if look["alive"] and _is_ready(look):
                    return self._ready(look["progress"])
        self.log.info(
            "The engine is job %s in %s (%s); stop it with `drafter stop %s --phase engine`",
            answer["start_id"],
            self._job_dir.root,
            answer["outcome"],
            ALL,
        )
        self._defer(context, answer)
        raise AssertionError("defer raises")

    def _ready(self, progress: dict[str, Any]) -> dict[str, Any]:
        self.log.info("Engine: %s", progress["line"])
        return {"outcome": "ready", "model": progress["model"], "context": progress["context"]}

    def _defer(self, context: Any, answer: dict[str, Any]) -> None:
        host, asker = self.recipe.host, self._asker(context)
        self.defer(
            trigger=EngineTrigger.of(host, self.code, self._job_dir, answer, asker),
            method_name="execute_complete",
        )

    def _asker(self, context: Any) -> str:
        """This try: Airflow gives every try an id of its own."""
        return str(context["ti"].id)

    @property
    def _job_dir(self) -> JobDir:
        return Workspace(Path(self.recipe.host.workspace)).job("engine", ALL)

    def hook(self) -> GpuHostHook:
        return GpuHostHook.of(self.recipe.host, self.code)


class StopEngineOperator(BaseOperator):
    """End the engine with its whole tree, unless jobs of another run use it.

    Airflow runs a teardown also when a dataset failed. Where it does not (a paused DAG), the
    engine ends by itself: drafter.engine_job says when.
    """

    template_fields = ("code",)

    def __init__(self, *, recipe: Recipe, code: str, **kwargs: Any) -> None:
        super().__init__(**{**alerts.callbacks(recipe, "engine"), **kwargs})
        self.recipe = recipe
        self.code = code
        self.dataset = ALL

    def execute(self, context: Any) -> dict[str, Any]:
        # Named, so that somebody who waits for the engine knows that no person said stop.
        arguments = ["engine", "stop", "--request", str(context["ti"].id)]
        give_up = time.monotonic() + DYING_S
        with self.hook() as hook:
            while True:
                output = output_of(self.log, hook, arguments, timeout_s=ASK_TIMEOUT_S)
                answer: dict[str, Any] = json.loads(output.splitlines()[-1])
                if answer["outcome"] != "in use" or time.monotonic() >= give_up:
                    break
                time.sleep(LOOK_S)
        if answer["outcome"] == "in use":
            self.log.info("Kept: it is used by %s", ", ".join(answer["used_by"]))
        else:
            self.log.info("Engine: %s", answer["outcome"])
        return {"outcome": answer["outcome"]}

    def hook(self) -> GpuHostHook:
        return GpuHostHook.of(self.recipe.host, self.code)


def _is_ready(look: dict[str, Any]) -> bool:
    return bool((look["progress"] or {}).get("ready"))
