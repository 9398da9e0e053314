"""# Extract: the target's hidden states over prompt and response

Starts when every dataset of the recipe is validated, so that the big model never extracts while it
generates. For each dataset a sensor checks the **schema** (the validated manifest still matches the
files, byte for byte), then the target runs over every row and its EAGLE-3 features are stored in
shards. When every dataset is extracted, the join emits the asset `extracted`.

Where the recipe spools (`[train] spool_shards`) nothing starts this DAG but a person or its cron:
the train DAG makes its states itself and stores none.
"""

from __future__ import annotations

from airflow.sdk import DAG, task_group

from drafter.recipe import deployed_recipe
from gpu_host.commands import DeployOperator, HostCommandOperator
from gpu_host.dag_options import DEFAULTS, START, dataset_params, joined_asset, schedule
from gpu_host.operators import PhaseOperator
from gpu_host.planning import JoinOperator, PlanOperator
from gpu_host.sensors import SchemaSensor

RECIPE = deployed_recipe()

with DAG(
    dag_id="extract",
    schedule=schedule(
        RECIPE,
        RECIPE.schedule.extract,
        assets=None if RECIPE.spools else joined_asset(RECIPE, "validated"),
    ),
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
        command=["doctor", "extract", "--now", "{{ macros.time.time() }}"],
        retries=0,
    )
    plan = PlanOperator(task_id="plan", recipe=RECIPE, code=deploy.output, phase="extract")

    @task_group(group_id="dataset")
    def states(dataset: str) -> None:
        schema = SchemaSensor(task_id="schema", recipe=RECIPE, dataset=dataset)
        extract = PhaseOperator(
            task_id="extract",
            recipe=RECIPE,
            code=deploy.output,
            phase="extract",
            dataset=dataset,
        )
        schema >> extract

    join = JoinOperator(
        task_id="join",
        recipe=RECIPE,
        code=deploy.output,
        phase="extract",
        asset=joined_asset(RECIPE, "extracted"),
    )
    deploy >> doctor >> plan
    states.expand(dataset=plan.output) >> join
