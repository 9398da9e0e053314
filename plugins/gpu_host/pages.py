"""Pages of results in the browser: what validate found, and how a training goes.

``/drafter/report.html`` over all datasets, ``/drafter/prepared/<dataset>/report.html`` and
``/drafter/curves.html``, below the address of Airflow's UI: as in the workspace, so that links from
one page to another hold. A page is read from the GPU host whenever somebody asks, so that of a
training that still runs has the curves up to its last checkpoint. Reports show decoded answers:
they are for whoever may read the XComs of the DAG, for which the API server itself is asked, as the
same user. Mounting as read and measured on Airflow 3.3.2.
"""

from __future__ import annotations

import asyncio
import html
import re
from typing import Any
from urllib.parse import quote

import httpx

from drafter.errors import MEANING, Busy, DataError, DrafterError, RecipeError
from drafter.layout import ALL
from drafter.recipe import deployed_recipe
from gpu_host.hooks import GpuHostHook

PREFIX = "/drafter"
TIMEOUT_S = 30
_ROUTE = re.compile(r"/(?:(curves)|(?:prepared/([^/]+)/)?report)\.html")
_OF_THE_USER = ("authorization", "cookie")
_HEADERS = {
    # Pages hold what models and people wrote; they need no script and nothing from elsewhere.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "sandbox allow-same-origin",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "content-type": "text/html; charset=utf-8",
}


def path(phase: str, dataset: str) -> str | None:
    """Of a page, below the address of Airflow's UI; None when the phase leaves none."""
    if phase == "train":
        return f"{PREFIX}/curves.html"
    if phase == "validate":
        folder = "" if dataset == ALL else f"/prepared/{quote(dataset, safe='')}"
        return f"{PREFIX}{folder}/report.html"
    return None


class Pages:
    """An ASGI application to be mounted at ``PREFIX`` of the API server."""

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, page = await _answer(scope)
        body = page.encode() if scope["method"] != "HEAD" else b""
        headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _answer(scope: Any) -> tuple[int, str]:
    route = _ROUTE.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
    if route is None or scope["method"] not in ("GET", "HEAD"):
        pages = "curves.html, report.html and prepared/DATASET/report.html"
        return 404, _sentence(f"no such page: below {PREFIX}/ there are {pages}")
    phase, dataset = ("train" if route[1] else "validate"), route[2] or ALL
    refusal = await _refusal(scope, phase)
    if refusal:
        return refusal, _sentence(f"Airflow does not show you what {phase} left: log in, or ask")
    try:
        return 200, await asyncio.to_thread(_read, phase, dataset)
    except DrafterError as error:
        status = 404 if isinstance(error, RecipeError | DataError) else 503
        return status, _sentence(str(error))


async def _refusal(scope: Any, dag_id: str) -> int | None:
    """The status with which this user is refused the DAG's XComs; None when they are shown."""
    root = scope.get("app_root_path", "")
    headers = {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name.decode() in _OF_THE_USER
    }
    transport = httpx.ASGITransport(scope["app"], raise_app_exceptions=False, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://airflow{root}") as client:
        xcoms = f"/api/v2/dags/{dag_id}/dagRuns/~/taskInstances/~/xcomEntries"
        found = await client.get(xcoms, params={"limit": 1}, headers=headers)
    if found.status_code == 200:
        return None
    return found.status_code if found.is_error else 403


def _read(phase: str, dataset: str) -> str:
    recipe = deployed_recipe()
    if dataset != ALL:
        recipe.dataset(dataset)
    with GpuHostHook.of(recipe.host) as hook:
        code, page, errors = hook.run(["page", phase, dataset], timeout_s=TIMEOUT_S)
    if code:
        said = (errors.strip().splitlines() or [MEANING.get(code, "failed")])[-1]
        kind = {RecipeError.exit_code: RecipeError, DataError.exit_code: DataError}.get(code, Busy)
        raise kind(said.removeprefix("drafter: "))
    return page


def _sentence(text: str) -> str:
    return f"<!doctype html><title>drafter</title><p>{html.escape(text)}</p>\n"
