"""The code on the host is the code that was deployed: named by its hash, whole, once."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, Asset
from airflow.serialization.serialized_objects import DagSerialization

from drafter import code
from drafter.code import code_hash
from drafter.errors import DrafterError, RecipeError
from drafter.recipe import Recipe, parse_recipe
from gpu_host.commands import DeployOperator
from gpu_host.dag_options import DEFAULTS
from gpu_host.deploy import PACKAGE, archive, deploy
from gpu_host.hooks import GpuHostHook
from gpu_host.operators import PhaseOperator, what
from gpu_host.sensors import SchemaSensor, TokenBudgetSensor


class LocalHost:
    """Runs the shell lines here that would run over SSH, and counts uploaded bytes."""

    def __init__(self) -> None:
        self.uploads: list[int] = []

    def run_line(self, line: str, stdin: bytes, timeout_s: float) -> tuple[int, str, str]:
        self.uploads.append(len(stdin.partition(b"\n")[2]))
        done = subprocess.run(
            ["sh", "-c", line], input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()


def recipe(workspace: Path, **sections: Any) -> Recipe:
    tree = {
        "name": "tiny",
        "target": {"path": "/model", "revision": "1"},
        "engine": {"urls": ["http://127.0.0.1:1"], "in_flight": 10},
        "datasets": [
            {"name": "B1", "format": "glaive", "path": "/b1.jsonl", "token_budget": 100},
            {"name": "B2", "format": "glaive", "path": "/b2.jsonl", "unbounded": True},
        ],
        "host": {"workspace": str(workspace), "python": sys.executable},
    }
    return parse_recipe({**tree, **sections}, "test")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / 'it\'s a $(touch x) "dir"'


def test_the_hash_is_of_names_and_bytes_and_leaves_bytecode_out(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for package in (one, other):
        (package / "engines").mkdir(parents=True)
        (package / "a.py").write_text("a")
        (package / "engines" / "b.py").write_text("b")
    (other / "__pycache__").mkdir()
    (other / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"junk")
    os.utime(other / "a.py", (1, 1))
    assert code_hash(one) == code_hash(other)
    (other / "engines" / "b.py").rename(other / "b.py")
    assert code_hash(one) != code_hash(other)


def test_a_missing_copy_is_uploaded_once(workspace: Path) -> None:
    host: Any = LocalHost()
    sha256 = deploy(host, recipe(workspace))
    assert sha256 == code_hash(PACKAGE) == code_hash(workspace / "code" / sha256 / "drafter")
    assert deploy(host, recipe(workspace)) == sha256
    assert [size > 0 for size in host.uploads] == [False, True, False]
    assert os.listdir(workspace / "code") == [sha256]
    assert json.loads((workspace / "recipe.json").read_text()) == recipe(workspace).as_json()


def test_the_launcher_runs_the_deployed_code_from_anywhere(workspace: Path, tmp_path: Path) -> None:
    deploy(LocalHost(), recipe(workspace))  # type: ignore[arg-type]
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    line = [workspace / "bin" / "drafter", "status", "--json"]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout) == {"jobs": {}, "datasets": {}}
    assert not list(workspace.rglob("__pycache__"))


def test_an_edited_copy_is_refused(workspace: Path) -> None:
    sha256 = deploy(LocalHost(), recipe(workspace))  # type: ignore[arg-type]
    (workspace / "code" / sha256 / "drafter" / "errors.py").write_text("# edited\n")
    with pytest.raises(RecipeError, match="somebody edited it; remove that directory"):
        deploy(LocalHost(), recipe(workspace))  # type: ignore[arg-type]


def test_half_an_upload_leaves_nothing(tmp_path: Path) -> None:
    stream = archive(PACKAGE)
    for cut in (700, len(stream) // 2):
        code_dir = tmp_path / "code" / code_hash(PACKAGE)
        try:
            assert code.install(code_dir, io.BytesIO(stream[:cut])) == "damaged"
        except OSError:
            pytest.fail("a cut stream must be told, not raised")
        assert os.listdir(tmp_path / "code") == []


def test_a_workspace_on_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DrafterError, match=r"cannot deploy to .*file/workspace: .*Not a directory"):
        deploy(LocalHost(), recipe(tmp_path / "file" / "workspace"))  # type: ignore[arg-type]


def test_a_python_that_is_not_there_is_one_sentence(workspace: Path) -> None:
    host = {"workspace": str(workspace), "python": "/no/python"}
    with pytest.raises(RecipeError, match=r"no /no/python on the host: set host\.python"):
        deploy(LocalHost(), recipe(workspace, host=host))  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["a b", "it's", '"', "$(touch x)", "`id`", "a\\b", "ü;&|<>*?"])
def test_an_argument_arrives_as_it_is(workspace: Path, argument: str) -> None:
    hook = GpuHostHook("gpu_host", str(workspace), sys.executable, "0" * 64)
    line = shlex.split(hook.line(["status", argument]))
    assert line[-1] == argument
    assert f"PYTHONPATH={workspace}/code/{'0' * 64}" in line
    shell = subprocess.run(
        ["sh", "-c", f"printf %s {shlex.quote(argument)}"], capture_output=True, check=True
    )
    assert shell.stdout.decode() == argument


def test_a_command_whose_code_is_not_there_says_so_and_is_never_retried(workspace: Path) -> None:
    class Here(GpuHostHook):
        def run_line(self, line: str, stdin: Any = b"", timeout_s: float = 60) -> Any:
            return LocalHost().run_line(line, stdin, timeout_s)

    absent = Here("gpu_host", str(workspace), sys.executable, "0" * 64)
    code_dir = workspace / "code" / ("0" * 64)
    sentence = f"drafter: there is no {code_dir} on the host: run the deploy task\n"
    assert absent.run(["status", "--json"]) == (RecipeError.exit_code, "", sentence)
    sha256 = deploy(LocalHost(), recipe(workspace))  # type: ignore[arg-type]
    there = Here("gpu_host", str(workspace), sys.executable, sha256)
    exit_code, output, _ = there.run(["status", "--json"])
    assert (exit_code, json.loads(output)) == (0, {"jobs": {}, "datasets": {}})


def test_what_is_to_be_done_leaves_budgets_and_concurrency_out() -> None:
    base = recipe(Path("/w"))
    engine = {"urls": ["http://127.0.0.1:1"], "in_flight": 99}
    datasets = [
        {"name": "B1", "format": "glaive", "path": "/b1.jsonl", "token_budget": 7},
        {"name": "B2", "format": "glaive", "path": "/b2.jsonl", "unbounded": True},
    ]
    same = recipe(Path("/w"), engine=engine, datasets=datasets)
    warmer = recipe(Path("/w"), generate={"temperature": 0.5})
    for phase, dataset in (("generate", "B1"), ("prepare", "all")):
        now = what(base, phase, dataset, "resume", "run 1")
        assert now == what(same, phase, dataset, "resume", "run 2")
        assert now != what(warmer, phase, dataset, "resume", "run 1")
        assert now != what(base, phase, dataset, "restart", "run 1")
    assert what(base, "extract", "B1", "resume", "r") == what(
        warmer, "extract", "B1", "resume", "r"
    )


def test_how_many_extract_at_once_is_not_what_is_to_be_done() -> None:
    one, four = (recipe(Path("/w"), extract={"jobs": jobs}) for jobs in (1, 4))
    asked = ("extract", "B1", "resume", "r")
    assert what(one, *asked) == what(four, *asked)


def test_a_dag_of_these_operators_serializes_the_same_every_time(workspace: Path) -> None:
    tiny = recipe(workspace)
    with DAG("tiny", schedule=None, default_args=DEFAULTS) as dag:
        deployed = DeployOperator(task_id="deploy", recipe=tiny)
        PhaseOperator.partial(
            task_id="generate",
            recipe=tiny,
            code=deployed.output,
            phase="generate",
            mode="{{ params.mode }}",
            asset="drafter://tiny/generated",
        ).expand(dataset=tiny.dataset_names)
        TokenBudgetSensor.partial(task_id="tokens", recipe=tiny).expand(dataset=["B1"])
        SchemaSensor(task_id="schema", recipe=tiny, dataset="B1")
        asset = Asset("drafter://tiny/drafter")
        PhaseOperator(task_id="export", recipe=tiny, phase="export", dataset="all", asset=asset)
    first = DagSerialization.to_dict(dag)
    assert DagSerialization.to_dict(dag) == first
    loaded = DagSerialization.from_dict(first)
    deployed, generate, tokens, export = map(
        loaded.get_task, ("deploy", "generate", "tokens", "export")
    )
    assert (generate.pool, generate.map_index_template) == ("gpu", "{{ task.dataset }}")
    assert [task.retries for task in (deployed, generate, tokens, export)] == [5] * 4
    assert generate.retry_exponential_backoff == 2.0
    assert (tokens.pool, export.pool) == ("default_pool", "default_pool")
    assert [asset.uri for asset in dag.get_task("generate").inlets] == [
        "drafter://tiny/generated/B1",
        "drafter://tiny/generated/B2",
    ]
    assert generate.template_fields[0] == "dataset"
    assert generate.upstream_task_ids == {"deploy"}


def test_a_package_without_its_copy_is_not_intact(tmp_path: Path) -> None:
    sha256 = code_hash(PACKAGE)
    assert not code.is_intact(tmp_path / sha256)
    shutil.copytree(PACKAGE, tmp_path / sha256 / "drafter")
    assert code.is_intact(tmp_path / sha256)
