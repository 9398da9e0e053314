"""The task that asks a person about a pilot: when it asks, what it shows, what an answer does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.operators import hitl
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    TaskAwaitingInput,
)
from unit.fake_host import FakeHost, refused
from unit.test_operators import RECIPE as WITHOUT
from unit.test_operators import context

from drafter.errors import RecipeError
from drafter.recipe import Recipe, parse_recipe
from gpu_host import alerts, pilot
from gpu_host.hooks import Unreachable
from gpu_host.operators import what
from gpu_host.pilot import ApprovePilotOperator, fenced, page

DAY_S = 86_400.0
RECIPE: Recipe = parse_recipe(
    {**WITHOUT.as_json(), "pilot": {"response_timeout_s": 2 * DAY_S, "samples": 1}}, "test"
)
SHOWN: dict[str, Any] = {
    "action": "approve",
    "reason": "pilot of 32 rows waits for approval",
    "rejected": None,
    "figures": {"rows": 32},
    "story": ["32 rows, 900 completion tokens: mean 28, most 60", "sound: 32 (100%)"],
    "samples": ["B1-7\n--- thinking\nhm</think>\n--- answer\n```\n# a heading, not ours"],
    "seen": "5ee2",
}
COMMAND = ["pilot", "show", "B1", "--json", "--mode", "resume", "--run-id", "run 1"]
SAID = (0, "B1: said by the host\n", "")


@pytest.fixture(autouse=True)
def questions(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Airflow was told to show; and no pauses."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **told: asked.append(told))
    monkeypatch.setattr(pilot, "PAUSES_S", (0.0, 0.0))
    return asked


def task(host: FakeHost, recipe: Recipe = RECIPE, **changes: Any) -> ApprovePilotOperator:
    class Approve(ApprovePilotOperator):
        def hook(self) -> Any:
            return host

    return Approve(
        **{"task_id": "approve", "dataset": "B1", "recipe": recipe, "code": "c"} | changes
    )


def here() -> dict[str, Any]:
    made: dict[str, Any] = context()
    return {**made, "task_instance": made["ti"]}


def response(choice: str, user: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "chosen_options": [choice],
        "params_input": {},
        "responded_at": datetime(2026, 1, 1, tzinfo=UTC),
        "responded_by_user": user or {"id": "7", "name": "Ada"},
        "timedout": False,
    }


@pytest.mark.parametrize("action", ["done", "resume", "start", "refuse"])
def test_where_nothing_is_to_approve_nobody_is_asked(
    action: str, questions: list[dict[str, Any]]
) -> None:
    host = FakeHost({"action": action, "reason": "its inputs are unchanged"})
    told = task(host).execute(here())
    assert told == {"outcome": "nothing to ask", "reason": "its inputs are unchanged"}
    assert host.asked == [COMMAND] and questions == []


@pytest.mark.parametrize("action", ["approve", "pilot"])
def test_a_person_is_asked_with_figures_and_samples(
    action: str, questions: list[dict[str, Any]]
) -> None:
    host = FakeHost({**SHOWN, "action": action})
    with pytest.raises(TaskAwaitingInput) as waits:
        task(host, token_budget="70", mode="restart").execute(here())
    assert host.asked[0][5:] == ["restart", "--run-id", "run 1", "--token-budget", "70"]
    (question,) = questions
    assert question["options"] == ["Approve", "Reject"] and question["defaults"] is None
    assert "B1" in question["subject"]
    assert "* sound: 32 (100%)" in question["body"] and "--- thinking" in question["body"]
    awaited = (waits.value.method_name, waits.value.kwargs, waits.value.timeout)
    assert awaited == ("execute_complete", {"seen": "5ee2"}, timedelta(days=2))


def test_a_pilot_rejected_in_this_run_is_not_asked_about_again(
    questions: list[dict[str, Any]],
) -> None:
    host = FakeHost({**SHOWN, "rejected": "/w/archive/rejected-run_1"})
    with pytest.raises(AirflowSkipException, match="is in /w/archive/rejected-run_1: clear its"):
        task(host).execute(here())
    assert questions == []


def test_without_a_row_there_is_nothing_to_ask(questions: list[dict[str, Any]]) -> None:
    host = FakeHost({**SHOWN, "figures": {"rows": 0}, "story": ["no rows"]})
    with refused(AirflowFailException, r"B1 has no pilot to show \(no rows\)"):
        task(host).execute(here())
    assert questions == []


def test_an_approval_is_kept_on_the_host_with_the_name() -> None:
    host = FakeHost(SAID)
    told = task(host).execute_complete(here(), response("Approve"), seen="5ee2")
    assert told == {"outcome": "approved", "by": "Ada"}
    command = ["pilot", "approve", "B1", "--yes", "--by=Ada", "--seen", "5ee2", "--run-id", "run 1"]
    assert host.asked == [command]


def test_a_rejection_archives_the_pilot_and_skips_the_dataset() -> None:
    host = FakeHost(SAID)
    with pytest.raises(AirflowSkipException, match="said by the host"):
        task(host).execute_complete(here(), response("Reject"), seen="5ee2")
    assert host.asked[0][:3] == ["pilot", "reject", "B1"]


BUSY = (75, "", "drafter: is held by another job\n")


@pytest.mark.parametrize("trouble", [BUSY, Unreachable("gone"), (1, "", "disk full")])
def test_an_answer_outlives_a_host_that_is_away(trouble: Any) -> None:
    host = FakeHost(trouble, trouble, SAID)
    assert task(host).execute_complete(here(), response("Approve"))["outcome"] == "approved"
    assert len(host.asked) == 3


@pytest.mark.parametrize(
    ("answer", "kind", "tries"),
    [
        (BUSY, AirflowException, 3),
        ((65, "", "drafter: not those that were shown\n"), AirflowFailException, 1),
        ((64, "", "drafter: nothing to reject\n"), AirflowFailException, 1),
    ],
)
@pytest.mark.parametrize("choice", ["Approve", "Reject"])
def test_an_answer_that_cannot_be_kept_fails_the_task(
    choice: str, answer: Any, kind: type[Exception], tries: int
) -> None:
    host = FakeHost(answer)
    with pytest.raises(AirflowException) as raised:
        task(host).execute_complete(here(), response(choice))
    assert isinstance(raised.value, AirflowFailException) == (kind is AirflowFailException)
    assert len(host.asked) == tries


def test_silence_fails_the_task_for_good_and_touches_nothing() -> None:
    host = FakeHost(SAID)
    timeout = {"error": "too late", "error_type": "timeout"}
    message = "nobody answered for the pilot of B1 within 2 days, 0:00:00: its rows are kept"
    with refused(AirflowFailException, message):
        task(host).execute_complete(here(), timeout)
    assert host.asked == []


def test_the_notifier_hears_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(alerts, "notify", lambda _settings, at, _log: told.append(at["alert"]))
    tree = {**RECIPE.as_json(), "alerts": {"notifier": "package.module.Class"}}
    asks = task(FakeHost(SHOWN), parse_recipe(tree, "test"))
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "http://airflow")
    at = here()
    at["ti"] = at["task_instance"] = SimpleNamespace(
        id="try 1", dag_id="generate", run_id="run 1", task_id="dataset.approve", map_index=2
    )
    with pytest.raises(TaskAwaitingInput):
        asks.execute({**at, "task": asks})
    (alert,) = told
    assert (alert["condition"], alert["dataset"], alert["phase"]) == ("approval", "B1", "generate")
    assert "/tasks/dataset.approve/required_actions?map_index=2" in alert["reason"]
    assert alert["numbers"] == {"rows": 32}


def test_no_approval_without_a_pilot() -> None:
    with pytest.raises(RecipeError, match="asks for no pilot"):
        task(FakeHost(SHOWN), WITHOUT)


def test_a_pilot_and_what_follows_it_are_different_jobs() -> None:
    told = [what(RECIPE, "generate", "B1", "resume", "r", rows) for rows in (None, 32, 16)]
    assert len(set(told)) == 3
    assert told[0] == what(WITHOUT, "generate", "B1", "resume", "r")


@pytest.mark.parametrize(
    "text", ["plain", "```\nout\n```", "a `b` `````c", "``````", "# h\n\n<b>x</b> {{ 1 }}", ""]
)
def test_nothing_in_a_sample_ends_its_block(text: str) -> None:
    first, *inside, last = fenced(text).split("\n")
    fence = first.removesuffix("text")
    assert set(fence) == {"`"} and len(fence) >= 3 and last == fence
    assert "\n".join(inside) == text and fence not in text


def test_the_page_names_what_either_answer_does() -> None:
    text = page("B1", SHOWN, timedelta(days=3))
    assert text.startswith("**Approve** generates the rest of B1; these 32 rows count")
    assert "**Reject** moves them to `archive/`" in text
    assert "Without an answer within 3 days, 0:00:00 this task fails, and the rows stay" in text
    assert "Sample 1 of 1:\n\n````text\nB1-7\n--- thinking" in text


def test_long_lines_are_folded_and_keep_every_character() -> None:
    text = "\n".join(["word " * 100, "", "x" * 500, "  indented\tby a tab", "-" * 200])
    inside = fenced(text).split("\n")[1:-1]
    assert max(map(len, inside)) <= pilot.FOLDED_AT
    assert "".join(inside) == text.replace("\n", "")
    assert "  indented\tby a tab" in inside and "" in inside
