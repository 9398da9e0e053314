"""# Train: from hidden states to a drafter that engines load

Starts once per new set of extracted states. One training job over all datasets, then the drafter is
**evaluated** per dataset (acceptance length by replay, beside an n-gram table and a drafter without
states) and exported for SGLang and vLLM. Where the recipe names servers that use the export
(`[evaluate.served]`) it is measured there too: start them with the export once it is written (the
asset is emitted then already), and clear `served` when its retries ended before. Losses and
accuracies so far are curves at the address in train's log, also while it trains, and behind a
button of the task when it has ended.

Where the recipe spools (`[train] spool_shards`) it starts when every dataset is **validated**, and
`spool` runs beside `train`: it makes the states a few shards ahead of training, every epoch anew,
and deletes what has been trained on. Either can fail, be cleared or be killed while the other waits
for it.
"""

from __future__ import annotations

from airflow.sdk import DAG

from drafter.recipe import deployed_recipe
from gpu_host.commands import DeployOperator, HostCommandOperator
from gpu_host.dag_options import (
    DEFAULTS,
    START,
    joined_asset,
    plan_params,
    schedule,
    states_asset,
)
from gpu_host.engine import RETRIES, StartEngineOperator, StopEngineOperator
from gpu_host.operators import PhaseOperator
from gpu_host.planning import PlanOperator

RECIPE = deployed_recipe()

with DAG(
    dag_id="train",
    schedule=schedule(RECIPE, RECIPE.schedule.train, states_asset(RECIPE)),
    start_date=START,
    catchup=False,
    max_active_runs=1,
    params=plan_params(),
    default_args=DEFAULTS,
    tags=["drafter", RECIPE.name],
    doc_md=__doc__,
):
    deploy = DeployOperator(task_id="deploy", recipe=RECIPE)
    doctor = HostCommandOperator(
        task_id="doctor",
        recipe=RECIPE,
        code=deploy.output,
        command=["doctor", "train", "--now", "{{ macros.time.time() }}"],
        retries=0,
    )
    plan = PlanOperator(task_id="plan", recipe=RECIPE, code=deploy.output, phase="train")
    train = PhaseOperator.partial(
        task_id="train", recipe=RECIPE, code=deploy.output, phase="train"
    ).expand(dataset=plan.output)
    datasets = PlanOperator(task_id="datasets", recipe=RECIPE, code=deploy.output, phase="evaluate")
    evaluate = PhaseOperator.partial(
        task_id="evaluate", recipe=RECIPE, code=deploy.output, phase="evaluate"
    ).expand(dataset=datasets.output)
    export = PhaseOperator(
        task_id="export",
        recipe=RECIPE,
        code=deploy.output,
        phase="export",
        dataset="all",
        asset=joined_asset(RECIPE, "drafter"),
    )
    deploy >> doctor >> plan >> train >> datasets >> evaluate >> export
    if RECIPE.spools:
        spool = PhaseOperator.partial(
            task_id="spool", recipe=RECIPE, code=deploy.output, phase="spool"
        ).expand(dataset=plan.output)
        plan >> spool >> datasets
    if RECIPE.evaluate.served is not None:
        export >> PhaseOperator(
            task_id="served", recipe=RECIPE, code=deploy.output, phase="served", dataset="all"
        )
    if RECIPE.engine.start is not None:
        engine = StartEngineOperator(
            task_id="start_engine",
            recipe=RECIPE,
            code=deploy.output,
            plan=datasets.output["plan"],
            retries=RETRIES,
        ).as_setup()
        stop_engine = StopEngineOperator(task_id="stop_engine", recipe=RECIPE, code=deploy.output)
        engine >> evaluate >> stop_engine.as_teardown(setups=engine)
