"""# Validate: every row, every field, before anything is trained on it

Started per dataset by the assets that the generate DAG emits, or by hand. For each dataset a sensor
waits for its **token budget** (and fails at once when generation ended short), then every stored
row is checked and the accepted ones become `tokenized_data.jsonl`. When every dataset of the recipe
is validated, the join emits the asset `validated`. A button of each dataset's task opens what was
found, as a page, with a link to that over all datasets.
"""

from __future__ import annotations

from airflow.sdk import DAG, AssetAny, task_group

from drafter.recipe import deployed_recipe
from gpu_host.commands import DeployOperator, HostCommandOperator
from gpu_host.dag_options import (
    DEFAULTS,
    START,
    dataset_params,
    generated_assets,
    joined_asset,
    schedule,
)
from gpu_host.operators import PhaseOperator
from gpu_host.planning import JoinOperator, PlanOperator
from gpu_host.sensors import TokenBudgetSensor

RECIPE = deployed_recipe()

with DAG(
    dag_id="validate",
    schedule=schedule(RECIPE, RECIPE.schedule.validate_, AssetAny(*generated_assets(RECIPE))),
    start_date=START,
    catchup=False,
    max_active_runs=1,
    params=dataset_params(RECIPE),
    default_args=DEFAULTS,
    tags=["drafter", RECIPE.name],
    doc_md=__doc__,
):
    deploy = DeployOperator(task_id="deploy", recipe=RECIPE)
    doctor = HostCommandOperator(
        task_id="doctor",
        recipe=RECIPE,
        code=deploy.output,
        command=["doctor", "validate", "--now", "{{ macros.time.time() }}"],
        retries=0,
    )
    plan = PlanOperator(task_id="plan", recipe=RECIPE, code=deploy.output, phase="validate")

    @task_group(group_id="dataset")
    def check(dataset: str) -> None:
        enough = TokenBudgetSensor(task_id="token_budget", recipe=RECIPE, dataset=dataset)
        validate = PhaseOperator(
            task_id="validate",
            recipe=RECIPE,
            code=deploy.output,
            phase="validate",
            dataset=dataset,
        )
        enough >> validate

    join = JoinOperator(
        task_id="join",
        recipe=RECIPE,
        code=deploy.output,
        phase="validate",
        asset=joined_asset(RECIPE, "validated"),
    )
    deploy >> doctor >> plan
    check.expand(dataset=plan.output) >> join
