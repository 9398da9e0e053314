"""What the tests measured, after their results; the engine's log beside what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

MEASURED = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """A line for the end of the run."""
    return pytestconfig.stash.setdefault(MEASURED, []).append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if lines := config.stash.get(MEASURED, []):
        terminalreporter.section("measured")
        terminalreporter.write_line("\n".join(lines))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    site = getattr(item, "funcargs", {}).get("site")
    if report.failed and site is not None:
        report.sections.append(("the engine's log", site.engine_log()))
    return report
