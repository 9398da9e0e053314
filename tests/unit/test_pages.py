"""Pages of results: what the host prints, who gets to see it, what is said when there is none."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urljoin

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from unit.drafter_site import DrafterSite
from unit.report_site import Site, prepared, site

from drafter import train
from drafter.errors import RecipeError
from drafter.files import write_json
from gpu_host import links, pages
from gpu_host.hooks import Unreachable

__all__ = ["prepared", "site"]

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
    assert "leave the dataset out" in printed(site, "train", "B1")[2]
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


async def airflow_shows(request: Request) -> Response:
    """The API server's own route: B, logged in, may read XComs; C may not, D is sent away."""
    user = request.cookies.get("_token") or request.headers.get("authorization")
    if user == "D":
        return RedirectResponse("/login")
    seen = {"B": 200, "Bearer B": 200, "C": 403}.get(user or "", 401)
    return JSONResponse({"xcom_entries": []}, seen)


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


def client(root: str = "") -> httpx.AsyncClient:
    shown = [
        Route("/api/v2/dags/{dag}/dagRuns/~/taskInstances/~/xcomEntries", airflow_shows),
        Mount(pages.PREFIX, pages.Pages()),
    ]
    transport = httpx.ASGITransport(Starlette(routes=shown), root_path=root)
    return httpx.AsyncClient(transport=transport, base_url="http://a")


async def got(path: str, root: str = "", **headers: str) -> httpx.Response:
    async with client(root) as asker:
        return await asker.get(root + path, headers=headers)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "headers", [{"cookie": "_token=B"}, {"authorization": "Bearer B"}], ids=["browser", "API"]
)
async def test_who_may_see_the_dag_sees_its_page_and_no_script_runs_in_it(
    host: FakeHost, headers: dict[str, str]
) -> None:
    answer = await got("/drafter/prepared/B%201/report.html", **headers)
    assert (answer.status_code, answer.text) == (200, "<svg>")
    assert host.asked == [["page", "validate", "B 1"]]
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ") and "script" not in policy
    assert answer.headers["content-type"].startswith("text/html")


def test_links_from_page_to_page_are_addresses_of_pages(site: Site) -> None:
    site.finish()
    everything, one = (pages.path("validate", name) for name in ("all", "B1"))
    assert everything and one
    for page, at, leads_to in ((site.overview, everything, one), (site.page, one, everything)):
        links = [link for link in re.findall(r'href="([^"]+)"', page) if link[0] != "#"]
        assert {urljoin(at, link) for link in links} == {leads_to}


@pytest.mark.asyncio
async def test_only_the_header_is_sent_to_who_asks_for_the_header(host: FakeHost) -> None:
    async with client() as asker:
        answer = await asker.head("/drafter/curves.html", headers={"cookie": "_token=B"})
        refused = await asker.post("/drafter/curves.html", headers={"cookie": "_token=B"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert refused.status_code == 404 and len(host.asked) == 1


@pytest.mark.asyncio
async def test_a_page_is_found_where_airflow_is_served_below_a_prefix(host: FakeHost) -> None:
    answer = await got("/drafter/curves.html", root="/airflow", cookie="_token=B")
    assert (answer.status_code, answer.text) == (200, "<svg>")
    assert host.asked == [["page", "train", "all"]]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("cookie", "status"), [("_token=C", 403), ("_token=D", 403), ("_token=E", 401), ("", 401)]
)
async def test_others_are_refused_as_airflow_refuses_them_and_the_host_is_not_asked(
    host: FakeHost, cookie: str, status: int
) -> None:
    answer = await got("/drafter/curves.html", cookie=cookie)
    assert (answer.status_code, host.asked) == (status, [])
    assert "does not show you what train left" in answer.text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "answer", "status", "said"),
    [
        ("/drafter/generate.html", (0, "", ""), 404, "no such page"),
        ("/drafter/prepared/B%2F1/report.html", (0, "", ""), 404, "no such page"),
        ("/drafter/prepared/B9/report.html", (0, "", ""), 404, "no dataset &#x27;B9&#x27;"),
        (
            "/drafter/curves.html",
            (64, "", "drafter: there is no <b> yet\n"),
            404,
            "no &lt;b&gt; yet",
        ),
        ("/drafter/curves.html", (65, "", "drafter: extract has not finished"), 404, "extract has"),
        ("/drafter/curves.html", (127, "", "sh: 1: drafter: not found"), 503, "not found"),
        ("/drafter/curves.html", (Unreachable("connection refused"),), 503, "connection refused"),
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
        ("validate", "B 1", "http://localhost:8080/drafter/prepared/B%201/report.html"),
        ("train", "all", "http://localhost:8080/drafter/curves.html"),
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
