"""The four DAGs parse fast and without I/O, carry their documents, and refuse wrong forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KIMI = ROOT / "include" / "recipes" / "kimi-k2.5.toml"

REPORT = """
import json, os, pathlib, sys, time, warnings
import airflow.providers.ssh.hooks.ssh, asyncssh  # what these do is not ours
from airflow.dag_processing.dagbag import DagBag
cpu_seconds = {}
for file in pathlib.Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"]).glob("*.py"):
    # As the DAG processor does it: each file in a process that knows none of our modules yet.
    read, write = os.pipe()
    if os.fork() == 0:
        begun = time.process_time()
        DagBag(str(file))
        os.write(write, str(time.process_time() - begun).encode())
        os._exit(0)
    os.wait()
    cpu_seconds[file.stem] = float(os.read(read, 64))
outside = []
def watch(event, arguments):
    wrote = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if importing and (wrote or event in {"socket.connect", "subprocess.Popen", "os.system"}):
        outside.append(f"{event} {arguments}")
sys.addaudithook(watch)
importing = True
with warnings.catch_warnings():
    warnings.simplefilter("error")
    bag = DagBag()
importing = False
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
        "described": {name: bool(param.description) for name, param in dag.params.items()},
        "pools": {t.task_id: t.pool for t in dag.tasks},
        "after": {t.task_id: sorted(t.downstream_task_ids) for t in dag.tasks},
        "named": sorted(t.task_id for t in dag.tasks if getattr(t, "map_index_template", None)),
        "alerted": sorted(t.task_id for t in dag.tasks if t.has_on_failure_callback),
        "schedule": DagSerialization.to_dict(dag)["dag"]["timetable"],
    }
    for dag_id, dag in bag.dags.items()
}
errors = list(bag.import_errors.values())
report = {"dags": dags, "errors": errors, "cpu_seconds": cpu_seconds, "outside": outside}
print("REPORT" + json.dumps(report, default=str))
"""


def parse(home: Path, recipe: Path | str) -> Any:
    """What a DAG processor sees, in a process of its own."""
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
            "PYTHONDONTWRITEBYTECODE": "1",
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
    return parse(home, KIMI)


def test_one_dag_per_phase_and_no_import_error(parsed: Any) -> None:
    assert parsed["errors"] == []
    assert set(parsed["dags"]) == {"generate", "validate", "extract", "train"}


def test_every_dag_is_documented_owned_tagged_and_runs_once_at_a_time(parsed: Any) -> None:
    for dag_id, dag in parsed["dags"].items():
        assert dag["doc"].startswith(f"# {dag_id.capitalize()}"), dag_id
        assert dag["owner"] == "drafter"
        assert "drafter" in dag["tags"]
        assert (dag["max_active_runs"], dag["catchup"]) == (1, False)
        assert dag["schedule"]
        assert all(dag["described"].values())


def test_parsing_is_quick_and_touches_nothing_outside(parsed: Any) -> None:
    assert parsed["outside"] == []
    assert set(parsed["cpu_seconds"]) == set(parsed["dags"])
    assert max(parsed["cpu_seconds"].values()) < 2, parsed["cpu_seconds"]


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


def test_a_pilot_and_its_approval_stand_before_each_dataset(scheduled: Any) -> None:
    text = KIMI.read_text().replace("[engine]\n", '[engine]\nstart = "serve"\n')
    plain, piloted = scheduled("", text), scheduled("[pilot]\nrows = 16\n", text)
    assert plain["errors"] == piloted["errors"] == []
    tasks = [set(report["dags"]["generate"]["tasks"]) for report in (plain, piloted)]
    group = {"dataset.pilot", "dataset.approve", "dataset.generate"}
    assert tasks[1] == tasks[0] - {"generate"} | group
    dag = piloted["dags"]["generate"]
    assert group <= set(dag["named"])
    assert {name for name, pool in dag["pools"].items() if pool == "gpu"} == group - {
        "dataset.approve"
    }
    after = dag["after"]
    assert {"dataset.pilot"} <= set(after["start_engine"])
    assert after["dataset.pilot"] == ["dataset.approve"]
    assert after["dataset.approve"] == ["dataset.generate"]
    assert after["dataset.generate"] == ["stop_engine"]
    for name in ("validate", "extract", "train"):
        assert piloted["dags"][name] == plain["dags"][name]


def test_training_is_over_all_datasets_and_offers_no_choice(parsed: Any) -> None:
    assert set(parsed["dags"]["train"]["params"]) == {"plan_only"}


def test_a_spool_runs_beside_training_and_nothing_waits_for_extraction(
    parsed: Any, scheduled: Any
) -> None:
    text = KIMI.read_text()
    spooled = scheduled("", text.replace("[train]\n", "[train]\nspool_shards = 8\n"))
    assert spooled["errors"] == []
    plain, dag = parsed["dags"]["train"], spooled["dags"]["train"]
    assert set(dag["tasks"]) == {*plain["tasks"], "spool"}
    after = dag["after"]
    assert {"spool", "train"} <= set(after["plan"])
    assert (after["spool"], after["train"]) == (["datasets"], ["datasets"])
    assert dag["pools"]["spool"] == "gpu" and "spool" in dag["named"]
    uris = [json.dumps(report["dags"]["train"]["schedule"]) for report in (parsed, spooled)]
    assert ["/extracted" in uri for uri in uris] == [True, False]
    assert ["/validated" in uri for uri in uris] == [False, True]
    assert spooled["dags"]["extract"]["schedule"]["__type"].endswith("NullTimetable")
    for name in ("generate", "validate"):
        assert set(spooled["dags"][name]["tasks"]) == set(parsed["dags"][name]["tasks"])


def test_the_form_is_a_schema_that_refuses_what_is_wrong(parsed: Any) -> None:
    params = parsed["dags"]["generate"]["params"]
    assert set(params) == {"datasets", "mode", "token_budget", "plan_only"}
    assert len(params["datasets"]["items"]["enum"]) == 8
    assert params["mode"]["enum"] == ["resume", "restart", "adopt"]
    assert params["token_budget"]["minimum"] == 1


@pytest.fixture
def scheduled(tmp_path: Path) -> Any:
    """What is parsed when the recipe's [schedule] and [alerts] are these."""

    def parse_with(sections: str, text: str = KIMI.read_text()) -> Any:
        recipe = tmp_path / "scheduled.toml"
        recipe.write_text(text + sections)
        return parse(tmp_path, recipe)

    return parse_with


def test_cron_stands_beside_the_assets(scheduled: Any) -> None:
    crons = {"generate": "0 3 * * *", "validate": "10 3 * * *", "train": "@weekly"}
    lines = "".join(f'{dag_id} = "{cron}"\n' for dag_id, cron in crons.items())
    dags = scheduled(f"[schedule]\n{lines}")["dags"]
    kinds = {dag_id: dag["schedule"]["__type"].rpartition(".")[2] for dag_id, dag in dags.items()}
    assert kinds == {
        "generate": "CronAhead",
        "validate": "AssetOrTimeSchedule",
        "extract": "AssetTriggeredTimetable",
        "train": "AssetOrTimeSchedule",
    }
    beside = dags["train"]["schedule"]["__var"]["timetable"]
    assert beside["__var"] == {"expression": "0 0 * * 0"}


def test_a_wrong_cron_is_one_readable_import_error(scheduled: Any) -> None:
    report = scheduled('[schedule]\nextract = "61 3 * * *"\n')
    (error,) = report["errors"]
    said = error.strip().splitlines()[-1]
    assert "'61 3 * * *' in [schedule] is no cron expression" in said
    assert said.endswith("write five fields, such as '0 3 * * *'")
    assert set(report["dags"]) == {"generate", "validate", "train"}


def test_a_notifier_hears_of_every_task_of_a_dataset(scheduled: Any) -> None:
    report = scheduled('[alerts]\nnotifier = "package.module.Class"\n')
    assert {dag_id: dag["alerted"] for dag_id, dag in report["dags"].items()} == {
        "generate": ["generate", "prepare"],
        "validate": ["dataset.token_budget", "dataset.validate"],
        "extract": ["dataset.extract", "dataset.schema"],
        "train": ["evaluate", "export", "train"],
    }


def test_a_tick_missed_while_paused_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    import pendulum
    from airflow.timetables import trigger
    from airflow.timetables.base import DataInterval, TimeRestriction

    from gpu_host import timetables

    def due(clock: str, last: str | None) -> str:
        moment = pendulum.parse(clock)
        monkeypatch.setattr(timetables, "now", lambda _zone: moment)
        monkeypatch.setattr(trigger, "utcnow", lambda: moment)
        start = TimeRestriction(pendulum.datetime(2026, 1, 1), None, catchup=False)
        info = timetables.CronAhead("0 3 * * *").next_dagrun_info(
            last_automated_data_interval=last and DataInterval.exact(pendulum.parse(last)),
            restriction=start,
        )
        assert info is not None
        return info.run_after.isoformat()[:16]

    yesterday = "2026-03-09T03:00"
    assert due("2026-03-10T02:59", yesterday) == "2026-03-10T03:00"
    assert due("2026-03-10T03:01", yesterday) == "2026-03-10T03:00"
    assert due("2026-03-10T03:01", "2026-03-10T03:00") == "2026-03-11T03:00"
    assert due("2026-03-10T12:00", yesterday) == "2026-03-11T03:00"
    assert due("2026-03-10T12:00", None) == "2026-03-11T03:00"


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
