"""A button on a dataset's task that leads to what it left: numbers and, of generate, samples; of
validate, where on the GPU host the report's page lies; of train, a table of losses and accuracies
over the steps, and where the page with their curves lies."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf


class ReportLink(BaseOperatorLink):
    """The XCom page of the task instance. The worker writes the address down when the task ends, so
    the web server needs neither this class nor a plugin."""

    name = "Report and samples"
    xcom_key = "report_link"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002
        base = conf.get("api", "base_url", fallback="/").rstrip("/")
        names = [quote(str(name), safe="") for name in (ti_key.dag_id, ti_key.run_id)]
        page = f"{base}/dags/{names[0]}/runs/{names[1]}/tasks/{ti_key.task_id}"
        mapped = f"/mapped/{ti_key.map_index}" if ti_key.map_index >= 0 else ""
        return f"{page}{mapped}/xcom"
