"""Airflow's UI in a real browser: Debian's Chromium, driven by Playwright.

Roles and labels, as a person finds things; nothing here asks the REST API.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Locator, Page, sync_playwright

TIMEOUT_MS = 90_000
"""The UI is megabytes of script: a busy machine takes half a minute to its first click."""

CELLS = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"


class Ui:
    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url

    def trigger(self, dag_id: str, leave_out: list[str], **numbers: int) -> str:
        """Fill in the trigger form and send it; returns the run's id."""
        self.page.goto(f"{self.url}/dags/{dag_id}", wait_until="domcontentloaded")
        self.page.get_by_role("button", name="Trigger Dag").click()
        form = self._dialog()
        for dataset in leave_out:
            form.get_by_label(f"Remove {dataset}").click()
        for name, number in numbers.items():
            form.get_by_role("spinbutton", name=name).fill(str(number))
        form.get_by_role("button", name="Trigger", exact=True).click()
        self.page.wait_for_url(re.compile(r"/runs/[^/]+"))
        return self.page.url.partition("/runs/")[2].strip("/")

    def open_mapped(self, dag_id: str, run_id: str, task_id: str) -> None:
        """The list of a mapped task's instances, by a click on the grid."""
        self.page.goto(f"{self.url}/dags/{dag_id}/runs/{run_id}", wait_until="domcontentloaded")
        cell = f"a[href*='/runs/'][href$='/tasks/{task_id}/mapped']"
        self.page.locator(cell).first.click()

    def mapped(self) -> dict[str, str]:
        """{name: state} of the instances that the open list shows."""
        rows: Any = self.page.locator("tbody tr").evaluate_all(CELLS)
        return {row[1]: row[2] for row in rows if len(row) > 2 and row[1]}

    def flip_pause(self) -> float:
        """The DAG's switch; returns, once it is answered, when (monotonic) the request was sent."""
        with self.page.expect_response(lambda response: response.request.method == "PATCH") as it:
            self.page.get_by_test_id("toggle-pause").first.click()
        assert it.value.ok, it.value.text()
        return time.monotonic() - (time.time() - it.value.request.timing["startTime"] / 1000)

    def clear(self, name: str) -> None:
        """One instance of the open list, with what depends on it."""
        row = self.page.get_by_role("row").filter(has_text=name)
        row.get_by_role("button", name="Clear Task Instance").click()
        dialog = self._dialog()
        with self.page.expect_response(
            lambda response: '"dry_run":false' in (response.request.post_data or "")
        ):
            dialog.get_by_role("button", name="Confirm").click()
        dialog.wait_for(state="hidden")

    def _dialog(self) -> Locator:
        dialog = self.page.get_by_role("dialog")
        dialog.wait_for()
        return dialog


@contextmanager
def browser(url: str) -> Iterator[Ui]:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("chromium is missing: install the package chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium)
        page = opened.new_page(viewport={"width": 1500, "height": 1000}, reduced_motion="reduce")
        page.set_default_timeout(TIMEOUT_MS)
        try:
            yield Ui(page, url)
        finally:
            opened.close()
