"""A GPU host that plays a script."""

from __future__ import annotations

import json
from typing import Any

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
