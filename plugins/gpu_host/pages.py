"""Pages of results in the browser: what validate found, and how a training goes.

``/drafter/validate/<dataset>``, ``/drafter/validate/all`` and ``/drafter/train/all``, below the
address of Airflow's UI. A page is read from the GPU host whenever somebody asks, so that of a
training that still runs has the curves up to its last checkpoint. Who may see a DAG may see its
pages: the API server itself is asked, as the same user. Mounting as read and measured on Airflow
3.3.2.
"""

from __future__ import annotations

import asyncio
import html
import re
from typing import Any
from urllib.parse import quote

import httpx

from drafter.errors import MEANING, Busy, DrafterError, RecipeError
from drafter.layout import ALL
from drafter.recipe import deployed_recipe
from gpu_host.hooks import GpuHostHook

PREFIX = "/drafter"
PHASES = ("validate", "train")
"""Those that leave a page, each the name of its DAG too."""

TIMEOUT_S = 30
_ROUTE = re.compile(r"/(validate|train)/([^/]+)")
_OF_THE_USER = ("authorization", "cookie")
_HEADERS = {
    # Pages hold what models and people wrote; they need no script and nothing from elsewhere.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "sandbox",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "content-type": "text/html; charset=utf-8",
}


def path(phase: str, dataset: str) -> str:
    """Of a page, below the address of Airflow's UI."""
    return f"{PREFIX}/{phase}/{quote(dataset, safe='')}"


class Pages:
    """An ASGI application to be mounted at ``PREFIX`` of the API server."""

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, body = await _answer(scope)
        headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})


async def _answer(scope: Any) -> tuple[int, str]:
    below = scope["path"].removeprefix(scope.get("root_path", ""))
    route = _ROUTE.fullmatch(below)
    if route is None or scope["method"] != "GET":
        pages = ", ".join(f"{PREFIX}/{phase}/DATASET" for phase in PHASES)
        return 404, _sentence(f"no such page: there are {pages}")
    phase, dataset = route[1], route[2]
    refusal = await _refusal(scope, phase)
    if refusal:
        return refusal, _sentence(f"Airflow does not show you the DAG {phase}: log in, or ask")
    try:
        return 200, await asyncio.to_thread(_read, phase, dataset)
    except DrafterError as error:
        status = 404 if isinstance(error, RecipeError) else 503
        return status, _sentence(str(error))


async def _refusal(scope: Any, dag_id: str) -> int | None:
    """The status with which the API server refuses the DAG to this user; None when it shows it."""
    root = scope.get("app_root_path", "")
    headers = {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name.decode() in _OF_THE_USER
    }
    transport = httpx.ASGITransport(scope["app"], raise_app_exceptions=False, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://airflow{root}") as client:
        found = await client.get(f"/api/v2/dags/{dag_id}", headers=headers)
    return found.status_code if found.is_error else None


def _read(phase: str, dataset: str) -> str:
    recipe = deployed_recipe()
    if dataset != ALL:
        recipe.dataset(dataset)
    with GpuHostHook.of(recipe.host) as hook:
        code, page, errors = hook.run(["page", phase, dataset], timeout_s=TIMEOUT_S)
    if code:
        said = (errors.strip().splitlines() or [MEANING.get(code, "failed")])[-1]
        kind = RecipeError if code == RecipeError.exit_code else Busy
        raise kind(said.removeprefix("drafter: "))
    return page


def _sentence(text: str) -> str:
    return f"<!doctype html><title>drafter</title><p>{html.escape(text)}</p>\n"
