"""What a notifier of the recipe hears, how often, and that it can never hurt a job."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import BaseNotifier
from airflow.sdk.exceptions import AirflowException
from unit.fake_host import FakeHost
from unit.test_operators import RECIPE, context, phase
from unit.test_sensors import sensor, status
from unit.test_triggers import ARGUMENTS, END, look

from drafter.errors import RecipeError
from drafter.recipe import Recipe, parse_recipe
from gpu_host import alerts, triggers
from gpu_host.sensors import TokenBudgetSensor
from gpu_host.triggers import JobTrigger

GB = 10**9


class FileNotifier(BaseNotifier):
    """Writes each alert as a line of a file, below a text with a template."""

    template_fields = ("title",)

    def __init__(self, path: str, title: str = "", wait_s: float = 0, fault: str = "") -> None:
        super().__init__()
        self.path = path
        self.title = title
        self.wait_s = wait_s
        self.fault = fault

    def notify(self, context: Any) -> None:
        time.sleep(self.wait_s)
        if self.fault:
            raise RuntimeError(self.fault)
        with open(self.path, "a") as file:
            file.write(json.dumps({"title": self.title, **context["alert"]}) + "\n")


class Heard:
    """A recipe whose notifier writes to a file, and what is in that file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def recipe(self, notifier: str = f"{__name__}.FileNotifier", **kwargs: Any) -> Recipe:
        section = {"notifier": notifier, "kwargs": {"path": str(self.path), **kwargs}}
        tree = {**RECIPE.as_json(), "alerts": {**section, "stall_s": 60, "min_free_gb": 5}}
        return parse_recipe(tree, "test")

    @property
    def alerts(self) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr(alerts, "_low_disks", set())
    monkeypatch.setattr(triggers, "FIRST_EVENT_S", 0.0)
    return Heard(tmp_path / "alerts")


def here() -> dict[str, Any]:
    return context()


ABOUT = {
    "recipe": "tiny",
    "dag_id": "generate",
    "run_id": "run 1",
    "phase": "generate",
    "dataset": "B1",
}


def fail(task: Any, execute: Any) -> None:
    """As Airflow does: the callback gets the task's context with the exception in it."""
    around = {**here(), "task": task}
    try:
        execute(around)
    except AirflowException as error:
        around["exception"] = error
    for callback in task.on_failure_callback:
        callback(around)


@pytest.mark.parametrize(("code", "condition"), [(1, "failed"), (65, "tainted"), (143, "failed")])
def test_a_failed_task_of_a_dataset_is_told(heard: Heard, code: int, condition: str) -> None:
    task = phase(FakeHost({}), recipe=heard.recipe(title="{{ alert.dataset }} {{ run_id }}"))
    end = {**END, "code": code, "reason": "told to"}
    event = {"outcome": "ended", "exit": end, "progress": None, "last_line": "", "message": ""}
    fail(task, lambda around: task.execute_complete(around, event, "started"))
    (alert,) = heard.alerts
    assert alert.pop("reason").startswith("generate B1: ")
    assert alert == {
        "title": "B1 run 1",
        "condition": condition,
        "numbers": {"exit_code": code},
        **ABOUT,
    }


def test_a_task_whose_process_died_is_told_by_the_name_of_its_instance(heard: Heard) -> None:
    """Airflow then calls from elsewhere, with the mapped operator and without an error."""
    (callback,) = phase(FakeHost({}), recipe=heard.recipe()).on_failure_callback
    instance = SimpleNamespace(dag_id="generate", rendered_map_index="B1", map_index=0)
    callback({**here(), "task": SimpleNamespace(task_id="generate"), "ti": instance})
    (alert,) = heard.alerts
    assert (alert["dataset"], alert["condition"]) == ("B1", "failed")
    assert alert["reason"] == "the process of the task ended without a word"


def test_a_failed_sensor_is_told(heard: Heard) -> None:
    task = sensor(TokenBudgetSensor, status(tokens=49), recipe=heard.recipe())
    fail(task, task.execute)
    (alert,) = heard.alerts
    assert (alert["condition"], alert["dataset"]) == ("failed", "B1")
    assert "49 tokens stored, budget 100, minimum 50" in alert["reason"]


def test_without_a_notifier_nothing_is_called() -> None:
    assert not phase(FakeHost({})).on_failure_callback


WRONG = [
    pytest.param({"notifier": "nowhere.at.All"}, "ModuleNotFoundError: No module named", id="gone"),
    pytest.param({"notifier": f"{__name__}.Gone"}, "ImportError: ", id="no class"),
    pytest.param({"colour": "red"}, "TypeError: ", id="wrong argument"),
    pytest.param({"fault": "no\nroute"}, "RuntimeError: no route", id="fails"),
    pytest.param({"title": "{{ nothing.there }}"}, "UndefinedError: ", id="wrong template"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_a_notifier_that_fails_is_one_line_and_no_more(
    heard: Heard, changes: dict[str, str], said: str
) -> None:
    lines: list[str] = []
    recipe = heard.recipe(**changes)
    alerts.notify(
        alerts.settings(recipe), {"alert": {}}, lambda text, *args: lines.append(text % args)
    )
    (line,) = lines
    assert line.startswith(f"The notifier {recipe.alerts.notifier} failed ({said}")
    assert "\n" not in line
    assert heard.alerts == []


def watch(heard: Heard) -> alerts.Watch:
    def complain(*_: Any) -> None:
        raise AssertionError

    return alerts.Watch(alerts.settings(heard.recipe()), ABOUT, ("gpu_host", "/w"), complain, 0.0)


def found(watching: alerts.Watch, now: float, **changes: Any) -> list[str]:
    return [alert["condition"] for alert in watching.found(look(**changes), now)]


def progress(tokens: int, clock: float) -> dict[str, Any]:
    return {"completion_tokens": tokens, "time": clock, "tokens_per_s": clock, "in_flight": 1}


def test_standing_still_is_told_once_until_it_goes_on(heard: Heard) -> None:
    watching = watch(heard)
    seen = [
        (now, found(watching, now, progress=progress(tokens, now)))
        for now, tokens in [
            (1, 5),
            (59, 5),
            (62, 5),
            (90, 5),
            (150, 5),
            (160, 6),
            (219, 6),
            (221, 6),
        ]
    ]
    assert [now for now, conditions in seen if conditions == ["stalled"]] == [62, 221]
    assert sum(len(conditions) for _, conditions in seen) == 2


def test_a_job_without_numbers_lives_by_its_log(heard: Heard) -> None:
    watching = watch(heard)
    assert found(watching, 50.0, log_bytes=10) == []
    assert found(watching, 100.0, log_bytes=10) == []
    assert found(watching, 111.0, log_bytes=10) == ["stalled"]
    assert found(watching, 112.0, log_bytes=10, alive=False) == []


def test_a_full_disk_is_told_once_for_all_jobs_until_there_is_room(heard: Heard) -> None:
    first, second = watch(heard), watch(heard)
    assert found(first, 1.0, free_bytes=6 * GB) == []
    assert found(first, 2.0, free_bytes=4 * GB) == ["disk"]
    assert found(second, 2.0, free_bytes=4 * GB) == []
    assert found(second, 3.0, free_bytes=None) == []
    assert found(second, 4.0, free_bytes=5 * GB) == []
    assert found(first, 5.0, free_bytes=4 * GB) == ["disk"]


def following(host: FakeHost, recipe: Recipe, complaints: list[str]) -> JobTrigger:
    class Trigger(JobTrigger):
        def hook(self) -> Any:
            return host

    settings = alerts.settings(recipe)
    trigger = Trigger(**{**ARGUMENTS, "alerts": {"settings": settings, "about": ABOUT}})
    trigger._log = SimpleNamespace(  # type: ignore[assignment]
        info=lambda *_: None, error=lambda text, *args: complaints.append(text % args)
    )
    return trigger


async def test_the_trigger_tells_what_poll_reports(heard: Heard) -> None:
    polls = [look(free_bytes=GB), look(free_bytes=GB), look(alive=False, exit=END)]
    trigger = following(FakeHost(*polls), heard.recipe(wait_s=0.2, title="{{ run_id }}"), [])
    events = [event.payload["outcome"] async for event in trigger.run()]
    assert events == ["ended"]
    (alert,) = heard.alerts
    assert alert["reason"].startswith("1.0 GB are free in /w, less than the 5 GB of min_free_gb")
    assert alert | ABOUT == alert
    assert (alert["numbers"], alert["title"]) == ({"free_bytes": GB}, "run 1")


async def test_a_notifier_that_hangs_or_fails_does_not_hold_up_the_job(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "ALERT_PATIENCE_S", 0.05)
    polls = [look(free_bytes=GB), look(alive=False, exit=END)]
    for changes in ({"wait_s": 1.0}, {"fault": "no route"}):
        complaints: list[str] = []
        monkeypatch.setattr(alerts, "_low_disks", set())
        trigger = following(FakeHost(*polls), heard.recipe(**changes), complaints)
        events = [event.payload["outcome"] async for event in trigger.run()]
        assert events == ["ended"]
        assert heard.alerts == []
    assert len(complaints) == 1


async def test_a_killed_task_does_not_wait_for_an_alert_that_is_being_sent(heard: Heard) -> None:
    polls = [look(free_bytes=GB) for _ in range(500)]
    trigger = following(FakeHost(*polls), heard.recipe(wait_s=3.0), [])

    async def follow() -> None:
        async for _ in trigger.run():
            raise AssertionError

    following_it = asyncio.create_task(follow())
    await asyncio.sleep(0.3)
    following_it.cancel()
    killed_at = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await following_it
    assert time.monotonic() - killed_at < 2


def test_a_wrong_name_is_refused_with_the_recipe(heard: Heard) -> None:
    with pytest.raises(RecipeError, match=r"alerts.notifier = 'not a class'"):
        heard.recipe("not a class")
