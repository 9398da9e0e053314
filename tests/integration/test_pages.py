"""Pages of results behind a real API server in which not everybody is admin."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from integration.kill_stack import wait
from integration.test_demo import HOST_PYTHON, SMALL

from demo import sshd
from demo.stack import PORTS, Stack, environment, free_ports

PATHS = ["curves.html", "report.html", "prepared/B1_glaive/report.html"]


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v2/version").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address, and the token of one who may see everything; there is no GPU host."""
    home = tmp_path_factory.mktemp("pages")
    web, *others = free_ports(1 + len(PORTS))
    stack = Stack(home, SMALL, HOST_PYTHON, web, dict(zip(PORTS, others, strict=True)))
    sshd.make_keys(home / "ssh")
    passwords = home / "passwords.json"
    told = environment(stack) | {
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
    }
    airflow = [sys.executable, "-m", "airflow"]
    with open(home / "log", "wb") as log:
        for command in (["db", "migrate"], ["dags", "reserialize"]):
            subprocess.run([*airflow, *command], env=told, stdout=log, stderr=log, check=True)
        serve = [*airflow, "api-server", "--host", "127.0.0.1", "--port", str(web)]
        process = subprocess.Popen([*serve, "--workers", "1"], env=told, stdout=log, stderr=log)
        try:
            wait(lambda: answers(stack.url), "the API server")
            (login,) = json.loads(passwords.read_text()).items()
            user = dict(zip(("username", "password"), login, strict=True))
            asked = httpx.post(f"{stack.url}/auth/token", json=user)
            yield stack.url, asked.json()["access_token"]
        finally:
            process.terminate()
            process.wait()


@pytest.mark.parametrize("path", PATHS)
def test_who_is_not_logged_in_sees_no_page(server: tuple[str, str], path: str) -> None:
    url, token = server
    for told in ({}, {"Cookie": "_token=none"}, {"Authorization": f"Bearer {token}x"}):
        assert httpx.get(f"{url}/drafter/{path}", headers=told).status_code in (401, 403)


@pytest.mark.parametrize("path", PATHS)
def test_who_may_see_it_is_told_that_the_host_is_not_there(
    server: tuple[str, str], path: str
) -> None:
    url, token = server
    for told in ({"Cookie": f"_token={token}"}, {"Authorization": f"Bearer {token}"}):
        answer = httpx.get(f"{url}/drafter/{path}", headers=told, timeout=60)
        assert answer.status_code == 503
        assert "the host behind connection" in answer.text and "is sshd up?" in answer.text
