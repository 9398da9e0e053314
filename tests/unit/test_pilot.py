"""A pilot is a few rows and no more; only what a person approved is generated to its end."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
    DATASET,
    FAMILY,
    STOP,
    TEXT,
    FakeEngine,
    Reply,
    Site,
    answer,
    assert_complete,
    generated,
    sound,
    thoughtful,
)

from drafter import cli, jobs, plan
from drafter.errors import DataError, RecipeError
from drafter.files import read_json, read_section, write_json, write_section
from drafter.generate import generate
from drafter.generation import approval, workers
from drafter.generation.approval import Pending
from drafter.identity import generation_identity

ROWS = 12


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, pilot={"rows": ROWS}, in_flight=50)


def pilot(site: Site, **job: Any) -> None:
    generate(site.job(pilot_rows=ROWS, **job), FAMILY)


def approve(site: Site, by: str = "Ada") -> None:
    identity = generation_identity(site.recipe)
    pending = approval.pending_of(DATASET, site.job().workspace, site.recipe, identity)
    assert pending is not None and pending.is_complete
    approval.give(site.prepared, pending, identity, by, "run:1")


def decided(site: Site, **how: Any) -> tuple[str, str]:
    decision = plan.decide("generate", DATASET, site.job().workspace, site.recipe, **how)
    return decision.action, decision.reason


PENDING = {
    # name: (section, stored rows, prompts, expected)
    "nothing yet": (None, 0, 60, Pending(0, 0, 12)),
    "half of it": (None, 5, 60, Pending(0, 5, 12)),
    "all of it": (None, 12, 60, Pending(0, 12, 12)),
    "many rows of before": (None, 50, 60, Pending(0, 50, 12)),
    "few prompts": (None, 3, 3, Pending(0, 3, 3)),
    "no prompts": (None, 0, 0, None),
    "approved": ({"first": 0, "approval": {"identity": {"t": 1}, "by": "Ada"}}, 12, 60, None),
    "otherwise made": (
        {"first": 0, "approval": {"identity": {}, "by": "Ada"}}, 12, 60, Pending(0, 12, 12)
    ),
    "taken back": ({"first": 40, "approval": None}, 40, 60, Pending(40, 0, 12)),
    "a new one after that": ({"first": 40, "approval": None}, 52, 60, Pending(40, 12, 12)),
    "few prompts after that": ({"first": 55, "approval": None}, 60, 60, Pending(55, 5, 5)),
    "rows discarded after that": ({"first": 40, "approval": None}, 30, 60, Pending(30, 0, 12)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "num_stored", "num_prompts", "expected"), PENDING.values(), ids=PENDING
)
def test_what_a_person_still_has_to_approve(
    section: Any, num_stored: int, num_prompts: int, expected: Pending | None, tmp_path: Path
) -> None:
    prepared = Site(tmp_path).prepared
    if section:
        write_section(prepared.manifest, approval.SECTION, section)
    assert approval.pending(prepared, {"t": 1}, 12, num_stored, num_prompts) == expected


@pytest.mark.parametrize(
    "section",
    [
        *([], "approved", {}, {"first": "0"}, {"first": -1}, {"first": True}, {"first": 1.5}),
        *({"first": 0, "approval": given} for given in (True, [], {}, {"by": "Ada"})),
    ],
    ids=repr,
)
def test_an_approval_written_by_a_clumsy_hand_is_no_approval(section: Any, site: Site) -> None:
    write_section(site.prepared.manifest, approval.SECTION, section)
    for look in (lambda: approval.given(site.prepared, {}), lambda: decided(site)):
        with pytest.raises(DataError, match=r"section pilot of .*manifest\.json is .*: remove it"):
            look()


def test_a_pilot_stops_at_its_rows_and_leaves_nothing_that_looks_generated(site: Site) -> None:
    assert decided(site) == ("pilot", f"a pilot first, 0 of its {ROWS} rows are stored")
    with FakeEngine() as engine:
        site.urls = (engine.url,)
        pilot(site)
        assert len(site.responses()) == len(engine.requests) == ROWS
        assert read_section(site.prepared.manifest, "generate") is None
        progress = read_json(site.job().dir.progress)
        assert (progress["stop_reason"], progress["changed"]) == ("pilot", False)
        assert (progress["prompts"], progress["responses"]) == (ROWS, ROWS)
        before = site.prepared.responses.read_bytes()
        pilot(site)
        assert len(engine.requests) == ROWS and site.prepared.responses.read_bytes() == before
    assert decided(site) == ("approve", f"pilot of {ROWS} rows waits for approval")


def test_prompts_without_an_answer_are_made_up_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PAUSE_S", 0.02)

    def refuses_some(request: dict[str, Any], number: int, again: int) -> Reply:
        odd = request["input_ids"][-1] in (1, 3, 5)
        return Reply(400, {"error": "no"}) if odd else sound(request, number, again)

    with FakeEngine(refuses_some) as engine:
        site.urls = (engine.url,)
        pilot(site)
    assert len(site.responses()) == ROWS
    assert {row["class"] for row in site.read(site.prepared.failed)} == {"permanent"}


def test_a_killed_pilot_goes_on_to_its_rows(site: Site) -> None:
    with FakeEngine() as engine:
        site.urls = (engine.url,)
        pilot(site)
        kept = [row for i, row in enumerate(site.responses()) if i not in (0, 4, 5)]
        site.write(site.prepared.responses, kept)
        assert decided(site)[0] == "pilot"
        pilot(site)
    assert len(site.responses()) == ROWS


def test_only_an_approved_dataset_is_generated_to_its_end(site: Site) -> None:
    with FakeEngine() as engine:
        site.urls = (engine.url,)
        with pytest.raises(
            DataError, match="a pilot first, 0 of its 12 rows are stored: clear its"
        ):
            generated(site)
        pilot(site)
        first = site.prepared.responses.read_bytes()
        with pytest.raises(DataError, match="pilot of 12 rows waits for approval: clear its pilot"):
            generated(site)
        assert len(engine.requests) == ROWS
        approve(site)
        assert decided(site) == ("resume", f"{ROWS} responses stored")
        section = generated(site)
        assert section["stop_reason"] == "prompts exhausted"
    assert_complete(site, 60)
    assert site.prepared.responses.read_bytes().startswith(first)
    assert decided(site)[0] == "done"
    site.settings = {"temperature": 0.5}
    assert decided(site)[0] == "approve"


def test_a_dataset_that_is_done_needs_no_pilot(site: Site) -> None:
    site.pilot = None
    site.dataset = {"token_budget": 300}
    with FakeEngine() as engine:
        site.urls = (engine.url,)
        generated(site)
    site.pilot = {"rows": ROWS}
    assert decided(site)[0] == "done"
    assert decided(site, token_budget=900)[0] == "approve"


def test_a_restart_begins_with_a_pilot_again(site: Site) -> None:
    with FakeEngine() as engine:
        site.urls = (engine.url,)
        pilot(site)
        approve(site)
        action, reason = decided(site, mode="restart", run_id="again")
        assert action == "restart" and reason.endswith("all is generated anew, a pilot first")
        pilot(site, mode="restart", run_id="again")
    assert decided(site, mode="restart", run_id="again")[0] == "approve"
    archived = read_json(site.prepared.archive("again") / "manifest.json")
    assert archived[approval.SECTION]["approval"]["by"] == "Ada"


def test_what_the_canary_stopped_begins_with_a_pilot_of_new_rows(site: Site) -> None:
    def loses_it(request: dict[str, Any], number: int, _again: int) -> Reply:
        ids = thoughtful(request)
        return Reply(body=answer(request, ids if number <= 100 else [TEXT, TEXT, STOP]))

    # One at a time: answers come in the order of the requests.
    site.num_prompts, site.in_flight = 300, 1
    site.__post_init__()
    with FakeEngine(loses_it) as engine:
        site.urls = (engine.url,)
        pilot(site)
        approve(site)
        with pytest.raises(DataError, match="then clear its pilot task"):
            generated(site)
        kept = site.responses()
        assert len(kept) == 100 - 32
        assert decided(site) == ("pilot", "a pilot first, 0 of its 12 rows are stored")
        with pytest.raises(DataError, match="a pilot first"):
            generated(site)
        engine.behave = sound
        pilot(site)
        assert len(site.responses()) == len(kept) + ROWS
        assert decided(site) == ("approve", "pilot of 12 rows waits for approval")
        approve(site)
        generated(site)
    assert_complete(site, 300)


STARTS = {
    # name: (rows of a pilot, approved?, mode, what a pilot is told, what the rest is told)
    "nothing yet": (0, False, "resume", "started", "a pilot first"),
    "half a pilot": (5, False, "resume", "started", "5 of its 12 rows"),
    "a pilot": (ROWS, False, "resume", f"done: pilot of {ROWS} rows waits", "waits for approval"),
    "an approved one": (ROWS, True, "resume", "done: pilot approved by Ada", "started"),
    "a restart": (ROWS, True, "restart", "started", "anew, a pilot first: clear its pilot task"),
}


@pytest.mark.parametrize(
    ("num_rows", "approved", "mode", "for_pilot", "for_rest"), STARTS.values(), ids=STARTS
)
def test_who_asks_the_host_to_start_what(
    num_rows: int,
    approved: bool,
    mode: str,
    for_pilot: str,
    for_rest: str,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    with FakeEngine() as engine:
        site.urls = (engine.url,)
        if num_rows:
            pilot(site)
    rows = site.responses() if num_rows else []
    site.write(site.prepared.responses, rows[:num_rows])
    if approved:
        approve(site)
    monkeypatch.setattr(jobs, "start", lambda _root, _spec: {"outcome": "started"})

    def said(**spec: Any) -> str:
        told = {"phase": "generate", "dataset": DATASET, "recipe": site.recipe.as_json()}
        told |= {"mode": mode, "run_id": "r", "token_budget": None, **spec}
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(told)))
        try:
            cli.main(["start"])
        except DataError as error:
            return str(error)
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        return ": ".join(said[key] for key in ("outcome", "reason") if key in said)

    assert said(pilot_rows=ROWS).startswith(for_pilot)
    assert for_rest in said()


def test_rows_of_another_identity_are_no_pilot(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeEngine() as engine:
        site.urls = (engine.url,)
        pilot(site)
    site.settings = {"temperature": 0.5}
    told = {"phase": "generate", "dataset": DATASET, "recipe": site.recipe.as_json()}
    told |= {"mode": "resume", "run_id": "r", "token_budget": None, "pilot_rows": ROWS}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(told)))
    with pytest.raises(RecipeError, match=r"temperature was 1.0 and is now 0.5"):
        cli.main(["start"])


def test_the_plan_says_what_the_pilot_waits_for(site: Site, capsys: Any) -> None:
    def planned() -> str:
        write_json(site.job().workspace.recipe, site.recipe.as_json())
        cli.main(["plan", "generate", DATASET, "--workspace", str(site.job().workspace.root)])
        line: str = capsys.readouterr().out.splitlines()[-1]
        return line.removeprefix(DATASET).strip()

    source = site.root / "source.jsonl"
    source.write_text("{}\n")
    site.dataset = {"token_budget": 9000, "path": str(source)}
    assert planned() == "pilot    a pilot first, 0 of its 12 rows are stored"
    with FakeEngine() as engine:
        site.urls = (engine.url,)
        pilot(site)
    assert planned() == "approve  pilot of 12 rows waits for approval"
    approve(site)
    tokens = sum(row["completion_tokens"] for row in site.responses())
    assert planned() == f"resume   from 12 responses, {tokens} of 9,000 tokens"
