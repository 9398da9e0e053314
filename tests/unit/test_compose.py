"""The compose file and the requirements agree, and it holds no secret."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yaml").read_text()
COMPOSE: Any = yaml.safe_load(TEXT)
AIRFLOW = [name for name in COMPOSE["services"] if name.startswith("airflow")]


def test_airflow_in_the_image_is_the_one_that_is_tested() -> None:
    pinned = dict(
        re.findall(r"^(apache-[a-z-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.M)
    )
    assert set(pinned) == {"apache-airflow", "apache-airflow-providers-ssh"}
    for name, version in pinned.items():
        assert f"{name}=={version}" in TEXT
    assert f"FROM apache/airflow:{pinned['apache-airflow']}-python3.11" in TEXT


def test_every_part_of_airflow_reads_the_same_code_and_recipe() -> None:
    assert len(AIRFLOW) == 5
    for name in AIRFLOW:
        service = COMPOSE["services"][name]
        assert {"./dags", "./plugins", "./include"} <= {v.split(":")[0] for v in service["volumes"]}
        assert service["environment"]["PYTHONPATH"] == "/opt/airflow/include"
        assert service["environment"]["DRAFTER_RECIPE"].startswith("/opt/airflow/include/recipes/")


def test_the_gpu_service_has_sshd_the_engine_and_a_reaper() -> None:
    gpu = COMPOSE["services"]["gpu"]
    command = gpu["command"][-1]
    assert "sglang.launch_server" in command
    assert command.endswith(
        "exec /usr/sbin/sshd -D -e -h /etc/ssh/drafter_host_key -o PasswordAuthentication=no"
    )
    assert gpu["init"] is True


def test_secrets_come_from_files_and_variables_outside_the_repository() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"secrets/", ".env"} <= set(ignored)
    assert all(secret["file"].startswith("./secrets/") for secret in COMPOSE["secrets"].values())
    for variable in ("POSTGRES_PASSWORD", "JWT_SECRET"):
        assert f"${{{variable}:?" in TEXT
