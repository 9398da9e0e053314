"""Buttons on a dataset's task: to what it left, numbers and, of generate, samples; and to the page
of validate's report, or of train's curves."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

from gpu_host import pages


class ReportLink(BaseOperatorLink):
    """The XCom page of the task instance. The worker writes the address down when the task ends, so
    the web server needs neither this class nor a plugin."""

    name = "Report and samples"
    xcom_key = "report_link"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002
        base = _base()
        names = [quote(str(name), safe="") for name in (ti_key.dag_id, ti_key.run_id)]
        page = f"{base}/dags/{names[0]}/runs/{names[1]}/tasks/{ti_key.task_id}"
        mapped = f"/mapped/{ti_key.map_index}" if ti_key.map_index >= 0 else ""
        return f"{page}{mapped}/xcom"


class PageLink(BaseOperatorLink):
    """What validate found, or the curves of a training, as a page; none of other phases."""

    name = "Report or curves"
    xcom_key = "page_link"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002
        return page_url(operator.phase, operator.dataset)


def page_url(phase: str, dataset: str) -> str:
    """Empty when the phase leaves no page."""
    path = pages.path(phase, dataset)
    return _base() + path if path else ""


def _base() -> str:
    return str(conf.get("api", "base_url", fallback="/")).rstrip("/")
