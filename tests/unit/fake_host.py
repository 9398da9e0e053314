"""A GPU host that plays a script, and what a task that fails because of it must say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from structlog.testing import capture_logs

Answer = tuple[int, str, str]


class FakeHost:
    """Plays a script of answers, the last one for ever; keeps what it was asked."""

    def __init__(self, *answers: Answer | Exception | dict[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.stdin = ""

    def __enter__(self) -> FakeHost:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def run(self, arguments: list[str], stdin: str = "", timeout_s: float = 0) -> Answer:
        assert timeout_s > 0
        self.asked.append(arguments)
        self.stdin = stdin
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, dict):
            return 0, json.dumps(answer) + "\n", ""
        return answer

    async def arun(self, arguments: list[str], timeout_s: float = 60) -> Answer:
        return self.run(arguments, timeout_s=timeout_s)

    async def aclose(self) -> None:
        return


@contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects this failure, its sentence logged as the only line that starts with "drafter: "."""
    with capture_logs() as entries, pytest.raises(AirflowException, match=message) as raised:
        yield raised
    assert isinstance(raised.value, kind)
    is_for_good = isinstance(raised.value, AirflowFailException)
    assert is_for_good == issubclass(kind, AirflowFailException)
    lines = [entry["event"] for entry in entries if "drafter: " in entry["event"]]
    assert lines == [str(raised.value)]
    assert lines[0].startswith("drafter: ")
    assert "\n" not in lines[0]
