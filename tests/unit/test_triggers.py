"""Following a job or a dataset: to one event, with the whole log, through lost connections."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from unit.fake_host import Answer, FakeHost

from gpu_host import triggers
from gpu_host.hooks import Unreachable
from gpu_host.triggers import JobTrigger, StatusTrigger


class FakeLog(FakeHost):
    """A job whose log is ``text``; it ends when ``looks`` looks have been taken."""

    def __init__(self, text: str, looks: int, chunk: int) -> None:
        super().__init__({})
        self.text = text.encode()
        self.looks = looks
        self.chunk = chunk

    def run(self, arguments: list[str], stdin: str = "", timeout_s: float = 0) -> Answer:
        offset = int(arguments[arguments.index("--offset") + 1])
        self.looks -= 1
        alive = self.looks > 0
        block = self.text[offset : offset + self.chunk]
        numbers = {"offset": offset + len(block), "log_bytes": len(self.text), "alive": alive}
        self.answers = [look(log=block.decode(), exit=None if alive else END, **numbers)]
        return super().run(arguments, stdin, timeout_s)


END = {"start_id": "s1", "code": 0, "reason": "", "ended": 1.0, "request": None}


def look(**changes: Any) -> dict[str, Any]:
    quiet = {"alive": True, "start_id": "s1", "exit": None, "progress": None, "log": ""}
    return {**quiet, "offset": 0, "log_bytes": 0, **changes}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "FIRST_EVENT_S", 0.0)
    monkeypatch.setattr(triggers, "BACKOFF_S", (0.0, 0.01))


ARGUMENTS: dict[str, Any] = {
    "conn_id": "gpu_host",
    "workspace": "/w",
    "python": "python3",
    "code": "c0de",
    "job_dir": "/w/jobs/generate/B1",
    "start_id": "s1",
    "offset": 0,
    "poll_s": 0.0,
    "patience_s": 0.05,
    "request": "try 1",
    "alerts": None,
}


class Trigger(JobTrigger):
    def __init__(self, host: FakeHost) -> None:
        super().__init__(**ARGUMENTS)
        self.host = host
        self.shown: list[str] = []
        self._log = SimpleNamespace(  # type: ignore[assignment]
            info=lambda text, *args: self.shown.append(text % args),
            warning=lambda *_: None,
            error=lambda *_: None,
        )

    def hook(self) -> Any:
        return self.host

    async def event(self) -> dict[str, Any]:
        events = [event async for event in self.run()]
        assert len(events) == 1
        payload: dict[str, Any] = events[0].payload
        return payload


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([look(), look(alive=False, exit=END)], "ended"),
        ([look(), look(alive=False), look(alive=False)], "lost"),
        ([look(), look(alive=False), look(), look(alive=False, exit=END)], "ended"),
        ([look(), look(start_id="s2")], "replaced"),
        ([look(), Unreachable("gone"), Unreachable("gone"), look(alive=False, exit=END)], "ended"),
        ([look(), Unreachable("gone")], "unreachable"),
        ([look(), (255, "", "bash: cannot fork"), look(alive=False, exit=END)], "ended"),
        ([look(), (0, "Welcome!\n", ""), look(alive=False, exit=END)], "ended"),
    ],
)
async def test_a_job_is_followed_to_one_event(answers: list[Any], outcome: str) -> None:
    event = await Trigger(FakeHost(*answers)).event()
    assert (event["outcome"], event["start_id"]) == (outcome, "s1")
    assert event["exit"] == (END if outcome == "ended" else None)


async def test_the_log_arrives_complete_and_by_line() -> None:
    text = "".join(f"line {n}\n" for n in range(100)) + "the end"
    trigger = Trigger(FakeLog(text, looks=3, chunk=64))
    event = await trigger.event()
    assert "".join(f"{line}\n" for line in trigger.shown).count("\n") >= 101
    assert "".join(trigger.shown).replace("\n", "") == text.replace("\n", "")
    assert event["last_line"] == "the end"


async def test_a_long_log_says_where_it_is_and_shows_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triggers, "LOG_LIMIT_BYTES", 100)
    monkeypatch.setattr(triggers, "LOG_TAIL_BYTES", 20)
    text = "".join(f"line {n:04}\n" for n in range(1000))
    trigger = Trigger(FakeLog(text, looks=30, chunk=50))
    await trigger.event()
    assert trigger.shown[:10] == [f"line {n:04}" for n in range(10)]
    assert trigger.shown[10:] == [
        "The log is long: from here on read /w/jobs/generate/B1/log on the host.",
        "... 9880 bytes are only there; the end:",
        "line 0998",
        "line 0999",
    ]


async def test_a_kill_stops_this_start_and_keeps_trying() -> None:
    host = FakeHost(Unreachable("busy"), (0, '{"outcome":"stopped"}\n', ""))
    await Trigger(host).on_kill()
    stop = ["stop", "--job", "/w/jobs/generate/B1", "--start-id", "s1", "--request", "try 1"]
    assert host.asked == [stop, stop]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (JobTrigger, ARGUMENTS),
        (
            StatusTrigger,
            {
                "conn_id": "gpu_host",
                "workspace": "/w",
                "python": "python3",
                "code": None,
                "phase": "generate",
                "dataset": "B1",
                "poll_s": 5.0,
                "patience_s": 900.0,
            },
        ),
    ],
)
def test_a_trigger_is_what_it_was_after_a_restart(kind: Any, arguments: dict[str, Any]) -> None:
    path, kept = kind(**arguments).serialize()
    assert (path, kept) == (f"gpu_host.triggers.{kind.__name__}", arguments)
    assert json.loads(json.dumps(kept)) == arguments
    assert kind(**kept).serialize() == (path, kept)


async def test_everyone_who_waits_for_a_workspace_shares_one_connection() -> None:
    """Eight datasets, of which one is ready later, ask as often as one would."""

    class Waiting(StatusTrigger):
        def hook(self) -> Any:
            hosts.append(host)
            return host

    class Dataset(FakeHost):
        def run(self, arguments: list[str], stdin: str = "", timeout_s: float = 0) -> Answer:
            alive = {f"B{number}": {"alive": len(self.asked) < number} for number in range(8)}
            self.answers = [{"jobs": {"generate": alive}, "datasets": {}}]
            return super().run(arguments, stdin, timeout_s)

        async def arun(self, arguments: list[str], timeout_s: float = 60) -> Answer:
            await asyncio.sleep(0.01)
            return self.run(arguments, timeout_s=timeout_s)

    async def end(number: int) -> int:
        trigger = Waiting("gpu_host", "/w", "python3", None, "generate", f"B{number}", 0.05, 60.0)
        assert len([event async for event in trigger.run()]) == 1
        return len(host.asked)

    hosts: list[FakeHost] = []
    host = Dataset({})
    asked = await asyncio.gather(*(end(number) for number in range(8)))
    assert asked == sorted(asked)
    assert asked[-1] <= 10
    assert len(hosts) == 1
    assert triggers._statuses == {}
    await end(0)
    assert len(hosts) == 2


async def test_the_status_trigger_fires_once_nothing_runs() -> None:
    class Waiting(StatusTrigger):
        def hook(self) -> Any:
            return host

    running = {"jobs": {"generate": {"B1": {"alive": True}}}, "datasets": {}}
    host = FakeHost(running, Unreachable("gone"), running, {"jobs": {}, "datasets": {}})
    arguments = ("gpu_host", "/w", "python3", None, "generate", "B1", 0.0, 60.0)
    assert len([event async for event in Waiting(*arguments).run()]) == 1
    assert len(host.asked) == 4
