"""Jobs that run what a param says instead of a phase; everything else is PhaseOperator."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Param

from drafter.recipe import deployed_recipe
from gpu_host.commands import DeployOperator
from gpu_host.hooks import GpuHostHook
from gpu_host.operators import PhaseOperator

START = """
import json, os, sys, time
from drafter import jobs
spec = json.load(sys.stdin)
spec["argv"] = json.loads(sys.argv[1])
os.environ.update(json.loads(sys.argv[3]))
answer = jobs.start(spec["recipe"]["host"]["workspace"], spec)
time.sleep(float(sys.argv[2]))
print(json.dumps(answer))
"""
"""``drafter start`` without its look at the plan; with a wait, the task stays in state running."""


class ScriptHook(GpuHostHook):
    program = "[]"
    wait_s = "0"
    environ = "{}"

    def line(self, arguments: list[str]) -> str:
        line = super().line(arguments)
        if arguments != ["start"]:
            return line
        python = shlex.split(line)[: -len(["-m", "drafter", "start"])]
        return shlex.join([*python, "-c", START, self.program, self.wait_s, self.environ])


class ScriptOperator(PhaseOperator):
    template_fields = (*PhaseOperator.template_fields, "program", "wait_s", "environ")

    def __init__(self, *, program: str, wait_s: str, environ: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.program = program
        self.wait_s = wait_s
        self.environ = environ

    def hook(self) -> GpuHostHook:
        hook = ScriptHook.of(self.recipe.host, self._code)
        hook.program, hook.wait_s, hook.environ = self.program, self.wait_s, self.environ
        return hook


RECIPE = deployed_recipe()

for dataset in RECIPE.dataset_names:
    with DAG(
        dag_id=dataset,
        schedule=None,
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        tags=["drafter"],
        params={
            "program": Param("[]", type="string"),
            "wait_s": Param(0, type="number"),
            "environ": Param("{}", type="string"),
        },
    ):
        deploy = DeployOperator(task_id="deploy", recipe=RECIPE)
        ScriptOperator(
            task_id="job",
            recipe=RECIPE,
            code=deploy.output,
            phase="generate",
            dataset=dataset,
            program="{{ params.program }}",
            wait_s="{{ params.wait_s }}",
            environ="{{ params.environ }}",
            retries=1,
            retry_delay=timedelta(seconds=2),
        )
