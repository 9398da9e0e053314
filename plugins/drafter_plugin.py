"""What Airflow itself must know of :mod:`gpu_host`; the only file here that it loads on its own."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

from gpu_host.pages import PREFIX, Pages
from gpu_host.pause import PauseStops
from gpu_host.timetables import CronAhead


class DrafterPlugin(AirflowPlugin):
    name = "drafter"
    fastapi_root_middlewares: ClassVar[list[Any]] = [
        {"middleware": PauseStops, "args": [], "kwargs": {}, "name": "pause stops jobs"}
    ]
    fastapi_apps: ClassVar[list[Any]] = [
        {"app": Pages(), "url_prefix": PREFIX, "name": "pages of results"}
    ]
    timetables: ClassVar[list[Any]] = [CronAhead]
