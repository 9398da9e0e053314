"""# Generate: prompts in, token ids out

Deploys the code by hash, shows the **plan**, checks the host, prepares all prompts once, then lets
the engine answer each dataset's prompts up to its token budget. One mapped task per dataset: clear
a failed one and only that one runs again, resuming from the rows it already has.

* **datasets**: which ones; the plan line of each says what will happen.
* **mode**: `resume` keeps every stored row; `restart` moves them to `archive/<run id>` first;
  `adopt` checks and keeps rows that an older run left in the workspace without a manifest.
* **token_budget**: completion tokens per dataset, instead of the recipe's.
* **plan_only**: stop after the plan.

Where the recipe has a section `[pilot]`, each dataset first generates a few rows; `approve` shows
them and waits until a person answers. Approved, the rest is generated, in this run and later ones.
Rejected, the rows are archived and the dataset is skipped.
"""

from __future__ import annotations

from airflow.sdk import DAG, task_group

from drafter.recipe import deployed_recipe
from gpu_host.commands import DeployOperator, HostCommandOperator
from gpu_host.dag_options import DEFAULTS, START, generate_params, generated_asset, schedule
from gpu_host.engine import RETRIES, StartEngineOperator, StopEngineOperator
from gpu_host.operators import PhaseOperator
from gpu_host.pilot import ApprovePilotOperator
from gpu_host.planning import PlanOperator

RECIPE = deployed_recipe()

with DAG(
    dag_id="generate",
    schedule=schedule(RECIPE, RECIPE.schedule.generate),
    start_date=START,
    catchup=False,
    max_active_runs=1,
    params=generate_params(RECIPE),
    default_args=DEFAULTS,
    tags=["drafter", RECIPE.name],
    doc_md=__doc__,
):
    deploy = DeployOperator(task_id="deploy", recipe=RECIPE)
    doctor = HostCommandOperator(
        task_id="doctor",
        recipe=RECIPE,
        code=deploy.output,
        command=["doctor", "generate", "--now", "{{ macros.time.time() }}"],
        retries=0,
    )
    prepare = PhaseOperator(
        task_id="prepare",
        recipe=RECIPE,
        code=deploy.output,
        phase="prepare",
        dataset="all",
        mode="{{ params.mode }}",
    )
    plan = PlanOperator(task_id="plan", recipe=RECIPE, code=deploy.output, phase="generate")
    told = {
        "recipe": RECIPE,
        "code": deploy.output,
        "mode": "{{ params.mode }}",
        "token_budget": "{{ params.token_budget }}",
    }
    asset = generated_asset(RECIPE)

    if RECIPE.pilot is None:
        generate = PhaseOperator.partial(
            task_id="generate", phase="generate", asset=asset, **told
        ).expand(dataset=plan.output)
    else:

        @task_group(group_id="dataset")
        def behind_a_pilot(dataset: str) -> None:
            pilot = PhaseOperator(
                task_id="pilot",
                phase="generate",
                dataset=dataset,
                pilot_rows=RECIPE.pilot.rows,
                **told,
            )
            approve = ApprovePilotOperator(task_id="approve", dataset=dataset, **told)
            rest = PhaseOperator(
                task_id="generate", phase="generate", dataset=dataset, asset=asset, **told
            )
            pilot >> approve >> rest

        generate = behind_a_pilot.expand(dataset=plan.output)

    deploy >> plan >> doctor >> prepare >> generate
    if RECIPE.engine.start is not None:
        engine = StartEngineOperator(
            task_id="start_engine",
            recipe=RECIPE,
            code=deploy.output,
            plan=plan.output["plan"],
            retries=RETRIES,
        ).as_setup()
        stop_engine = StopEngineOperator(task_id="stop_engine", recipe=RECIPE, code=deploy.output)
        prepare >> engine >> generate >> stop_engine.as_teardown(setups=engine)
