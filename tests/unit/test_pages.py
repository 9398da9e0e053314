"""Pages of results: what the host prints, who gets to see it, what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from unit.drafter_site import DrafterSite

from drafter import train
from drafter.errors import RecipeError
from drafter.files import write_json
from gpu_host import links, pages
from gpu_host.hooks import Unreachable

INCLUDE = Path(train.__file__).parents[1]


def printed(site: DrafterSite, *arguments: str) -> tuple[int, str, str]:
    write_json(site.workspace.recipe, site.recipe.as_json())
    command = [sys.executable, "-m", "drafter", "page", *arguments]
    command += ["--workspace", str(site.workspace.root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=INCLUDE)
    return done.returncode, done.stdout, done.stderr


def test_the_curves_of_the_recipes_run_are_printed_once_they_are_drawn(tmp_path: Path) -> None:
    site = DrafterSite(tmp_path, train={"steps": 5, "no_states_baseline": False})
    code, _, said = printed(site, "train")
    assert (code, said.count("\n")) == (RecipeError.exit_code, 1)
    assert said.endswith("curves.html yet: it appears with training's first checkpoint\n")
    train.run(site.job("train"))
    assert printed(site, "train") == (0, site.run.curves.read_text(), "")


@pytest.mark.parametrize("dataset", ["all", "B1"])
def test_a_report_is_printed_of_one_dataset_and_of_all(tmp_path: Path, dataset: str) -> None:
    site = DrafterSite(tmp_path)
    owner = site.workspace if dataset == "all" else site.workspace.prepared(dataset)
    code, _, said = printed(site, "validate", dataset)
    assert code == RecipeError.exit_code
    assert said.endswith("report.html yet: it appears when validate is done\n")
    owner.report.write_text(f"<p>prüfe {dataset}")
    assert printed(site, "validate", dataset) == (0, f"<p>prüfe {dataset}", "")


class FakeHost:
    """Answers ``drafter page`` with what it was made with, and remembers what it was asked."""

    def __init__(self, *answer: Any) -> None:
        self.answer = answer
        self.asked: list[list[str]] = []

    def of(self, _host: Any) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, arguments: list[str], timeout_s: float) -> Any:
        assert timeout_s > 0
        self.asked.append(arguments)
        if isinstance(self.answer[0], Exception):
            raise self.answer[0]
        return self.answer


async def airflow_shows(request: Request) -> JSONResponse:
    """The API server's own route: B, who is logged in, may see ``train`` and nobody else's."""
    user = request.cookies.get("_token") or request.headers.get("authorization")
    seen = {"B": 200, "Bearer B": 200, "C": 403}.get(user or "", 401)
    return JSONResponse({"dag_id": request.path_params["dag_id"]}, seen)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHost]:
    told = FakeHost(0, "<svg>", "")
    monkeypatch.setattr(pages, "GpuHostHook", told)
    monkeypatch.setattr(pages, "deployed_recipe", lambda: DEPLOYED)
    yield told


class Deployed:
    """A recipe of one dataset."""

    host = None

    def dataset(self, name: str) -> None:
        if name != "B 1":
            raise RecipeError(f"no dataset {name!r}")


DEPLOYED = Deployed()


async def got(path: str, root: str = "", **headers: str) -> httpx.Response:
    shown = [
        Route("/api/v2/dags/{dag_id}", airflow_shows),
        Mount(pages.PREFIX, pages.Pages()),
    ]
    transport = httpx.ASGITransport(Starlette(routes=shown), root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        return await client.get(root + path, headers=headers)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "headers", [{"cookie": "_token=B"}, {"authorization": "Bearer B"}], ids=["browser", "API"]
)
async def test_who_may_see_the_dag_sees_its_page_and_no_script_runs_in_it(
    host: FakeHost, headers: dict[str, str]
) -> None:
    answer = await got("/drafter/validate/B%201", **headers)
    assert (answer.status_code, answer.text) == (200, "<svg>")
    assert host.asked == [["page", "validate", "B 1"]]
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ") and "script" not in policy
    assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.asyncio
async def test_a_page_is_found_where_airflow_is_served_below_a_prefix(host: FakeHost) -> None:
    answer = await got("/drafter/train/all", root="/airflow", cookie="_token=B")
    assert (answer.status_code, answer.text) == (200, "<svg>")
    assert host.asked == [["page", "train", "all"]]


@pytest.mark.asyncio
@pytest.mark.parametrize(("cookie", "status"), [("_token=C", 403), ("_token=D", 401), ("", 401)])
async def test_others_are_refused_as_airflow_refuses_them_and_the_host_is_not_asked(
    host: FakeHost, cookie: str, status: int
) -> None:
    answer = await got("/drafter/train/all", cookie=cookie)
    assert (answer.status_code, host.asked) == (status, [])
    assert "does not show you the DAG train" in answer.text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "answer", "status", "said"),
    [
        ("/drafter/generate/B1", (0, "", ""), 404, "no such page"),
        ("/drafter/train/all/more", (0, "", ""), 404, "no such page"),
        ("/drafter/validate/B9", (0, "", ""), 404, "no dataset &#x27;B9&#x27;"),
        ("/drafter/train/all", (64, "", "drafter: there is no <b> yet\n"), 404, "no &lt;b&gt; yet"),
        ("/drafter/train/all", (127, "", "sh: 1: drafter: not found"), 503, "not found"),
        ("/drafter/train/all", (Unreachable("connection refused"),), 503, "connection refused"),
    ],
)
async def test_a_page_that_is_not_there_is_one_sentence(
    host: FakeHost, path: str, answer: tuple[Any, ...], status: int, said: str
) -> None:
    host.answer = answer
    got_ = await got(path, cookie="_token=B")
    assert got_.status_code == status
    assert said in got_.text and got_.text.count("\n") == 1


@pytest.mark.parametrize(
    ("phase", "dataset", "url"),
    [
        ("validate", "B 1", "http://localhost:8080/drafter/validate/B%201"),
        ("train", "all", "http://localhost:8080/drafter/train/all"),
        ("generate", "B 1", ""),
    ],
)
def test_the_button_leads_there_where_the_phase_leaves_a_page(
    monkeypatch: pytest.MonkeyPatch, phase: str, dataset: str, url: str
) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "http://localhost:8080/")

    class Task:
        pass

    Task.phase, Task.dataset = phase, dataset
    assert links.PageLink().get_link(Task, ti_key=None) == url
