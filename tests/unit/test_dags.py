"""The four DAGs parse fast and without I/O, carry their documents, and refuse wrong forms."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

REPORT = """
import json, sys, time, warnings
warnings.simplefilter("error", append=False)
from airflow.dag_processing.dagbag import DagBag
begun = time.monotonic()
bag = DagBag()
seconds = time.monotonic() - begun
from airflow.serialization.serialized_objects import DagSerialization
dags = {
    dag_id: {
        "tasks": sorted(dag.task_ids),
        "tags": sorted(dag.tags),
        "doc": dag.doc_md,
        "owner": dag.owner,
        "max_active_runs": dag.max_active_runs,
        "catchup": dag.catchup,
        "params": {name: param.schema for name, param in dag.params.items()},
        "pools": {t.task_id: t.pool for t in dag.tasks},
        "serialized": bool(DagSerialization.to_dict(dag)),
    }
    for dag_id, dag in bag.dags.items()
}
errors = list(bag.import_errors.values())
print("REPORT" + json.dumps({"dags": dags, "errors": errors, "seconds": seconds}, default=str))
"""


def parse(home: Path, recipe: Path | str) -> Any:
    """What a DAG processor sees, in a process of its own."""
    import json

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPORT],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
            "PYTHONPATH": f"{ROOT / 'include'}:{ROOT / 'plugins'}",
            "DRAFTER_RECIPE": str(recipe),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "REPORT" in done.stdout, done.stderr
    return json.loads(done.stdout.rpartition("REPORT")[2])


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("airflow")
    return parse(home, ROOT / "include" / "recipes" / "kimi-k2.5.toml")


def test_one_dag_per_phase_and_no_import_error(parsed: Any) -> None:
    assert parsed["errors"] == []
    assert set(parsed["dags"]) == {"generate", "validate", "extract", "train"}


def test_every_dag_is_documented_owned_tagged_and_runs_once_at_a_time(parsed: Any) -> None:
    for dag_id, dag in parsed["dags"].items():
        assert dag["doc"].startswith(f"# {dag_id.capitalize()}"), dag_id
        assert dag["owner"] == "drafter"
        assert "drafter" in dag["tags"]
        assert (dag["max_active_runs"], dag["catchup"]) == (1, False)
        assert dag["serialized"]


def test_datasets_are_mapped_tasks_behind_their_sensors(parsed: Any) -> None:
    tasks = {dag_id: set(dag["tasks"]) for dag_id, dag in parsed["dags"].items()}
    assert {"deploy", "doctor", "prepare", "plan", "generate"} == tasks["generate"]
    assert all({"deploy", "doctor", "plan"} <= names for names in tasks.values())
    assert {"dataset.token_budget", "dataset.validate", "join"} <= tasks["validate"]
    assert {"dataset.schema", "dataset.extract", "join"} <= tasks["extract"]
    assert {"plan", "train", "datasets", "evaluate", "export"} <= tasks["train"]


def test_gpu_jobs_take_a_slot_of_the_pool_and_nothing_else_does(parsed: Any) -> None:
    pools = {task: pool for dag in parsed["dags"].values() for task, pool in dag["pools"].items()}
    in_pool = {task for task, pool in pools.items() if pool == "gpu"}
    assert in_pool == {"generate", "dataset.extract", "train", "evaluate"}


def test_training_is_over_all_datasets_and_offers_no_choice(parsed: Any) -> None:
    assert set(parsed["dags"]["train"]["params"]) == {"plan_only"}


def test_the_form_is_a_schema_that_refuses_what_is_wrong(parsed: Any) -> None:
    params = parsed["dags"]["generate"]["params"]
    assert set(params) == {"datasets", "mode", "token_budget", "plan_only"}
    assert len(params["datasets"]["items"]["enum"]) == 8
    assert params["mode"]["enum"] == ["resume", "restart", "adopt"]
    assert params["token_budget"]["minimum"] == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("[target]\npath = 1\n", "target.path = 1", id="wrong"),
        pytest.param(None, "set DRAFTER_RECIPE to a file that exists", id="missing"),
    ],
)
def test_a_broken_recipe_is_one_readable_import_error(
    tmp_path: Path, text: str | None, sentence: str
) -> None:
    recipe = tmp_path / "broken.toml"
    if text is not None:
        recipe.write_text(text)
    errors = parse(tmp_path, recipe)["errors"]
    assert len(errors) == 4
    assert all(sentence in error.strip().splitlines()[-1] for error in errors)
