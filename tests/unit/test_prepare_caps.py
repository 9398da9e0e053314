"""The cap of prompt tokens: a dataset's own, and what becomes of runs above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import KIMI
from unit.test_prepare import Row, Site, ids, questions, read

from drafter import files, plan
from drafter.sources.shortening import ELIDED


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    KIMI.save(site.target)
    return site


def trajectory(task: str, *observations: str) -> Row:
    """A run whose every step but the last is asked: it is cut before the last answer at most."""
    steps = [{"role": "system", "system_prompt": "Repair.", "text": None}]
    steps.append({"role": "user", "text": task})
    for n, observation in enumerate(observations):
        steps += [{"role": "ai", "text": f"Step {n}"}, {"role": "user", "text": observation}]
    return {"instance_id": task, "trajectory": [*steps, {"role": "ai", "text": "Done"}]}


def runs(num: int, words: int = 60) -> list[Row]:
    return [
        trajectory(f"Task {n}", *(f"run {n}, page {page}: " + "link " * words for page in range(8)))
        for n in range(num)
    ]


def by_task(site: Site, name: str = "B8") -> dict[str, Row]:
    return {row["messages"][1]["content"]: row for row in read(site.prepared(name).prompts)}


def test_a_dataset_may_have_a_cap_of_its_own(site: Site) -> None:
    site.generate = {"max_prompt_tokens": 30}
    site.source("B2", "opencodeinstruct", questions("short", "long " * 20))
    site.source("B3", "magicoder", [{"problem": "brief"}, {"problem": "wordy " * 20}])
    site.datasets[1]["max_prompt_tokens"] = 400
    site.run()
    assert site.counts("B2")["dropped"] == {"longer than max_prompt_tokens": 1}
    assert site.counts("B3")["dropped"] == {}
    site.datasets[1]["max_prompt_tokens"] = 30
    change = plan.decide("prepare", "all", site.workspace, site.recipe)
    assert (change.action, change.reason) == ("start", "changed since it was done: sources")


def test_runs_above_the_cap_are_shortened_with_a_count_and_a_mark(site: Site) -> None:
    site.source("B8", "sweagent", [*runs(40), trajectory("Task x " * 200, "page", "page")])
    site.generate = {"max_prompt_tokens": 700}
    site.run()
    counts = site.counts("B8")
    assert counts["dropped"] == {"longer than max_prompt_tokens": 1}
    assert counts["prompts"] == 40
    prompts = read(site.prepared("B8").prompts)
    shortened = [row for row in prompts if "shortened" in row]
    assert counts["shortened"] == len(shortened) > 10
    tokens = {row["sample_id"]: row["input_ids"] for row in read(site.prepared("B8").prompt_ids)}
    for row in prompts:
        contents = [message["content"] for message in row["messages"]]
        assert len(tokens[row["sample_id"]]) <= 700
        assert contents.count(ELIDED) == row.get("shortened", {}).get("elided", 0)
        assert contents[-1] != ELIDED
        content = {"messages": row["messages"], "tools": row["tools"]}
        assert row["sample_id"] == f"B8-{files.digest(content)[:16]}"


def test_of_another_format_nothing_is_shortened(site: Site) -> None:
    turns: list[Any] = []
    for n in range(8):
        turns += [{"from": "human", "value": f"{n} " * 60}, {"from": "gpt", "value": "yes"}]
    site.source("B7", "sharegpt", [{"conversations": turns}, {"conversations": turns[:2]}])
    site.run()
    assert site.counts("B7")["dropped"] == {"longer than max_prompt_tokens": 1}


def test_what_is_shortened_to_the_same_prompt_is_asked_once(site: Site) -> None:
    """Of runs of one task with other pages the task alone may be left."""
    long = [trajectory("The task", f"page {n}: " + "link " * 400) for n in range(5)]
    site.source("B8", "sweagent", [*long, *runs(1)])
    site.run()
    counts = site.counts("B8")
    assert counts["prompts"] == 2
    assert sum(counts["dropped"].values()) == 4
    assert set(counts["dropped"]) <= {"duplicate once shortened", "duplicate", "near duplicate"}
    assert "duplicate once shortened" in counts["dropped"]


def test_what_is_shortened_to_a_prompt_of_another_dataset_is_its_duplicate(site: Site) -> None:
    shared = [{"role": "system", "content": "Repair."}, {"role": "user", "content": "The task"}]
    site.source("B6", "ultrachat", [{"messages": shared}])
    rows = [trajectory("The task", f"page {n}: " + "link " * 400) for n in range(9)]
    site.source("B8", "sweagent", [*rows, *runs(1)])
    site.run()
    assert list(by_task(site)) == ["Task 0"]
    assert "duplicate once shortened" in site.counts("B8")["dropped"]


def test_under_another_cap_a_shorter_prompt_is_another_prompt_and_paid_ones_stay(
    site: Site,
) -> None:
    site.source("B8", "sweagent", runs(20))
    site.generate = {"max_prompt_tokens": 4000}
    site.run()
    before = by_task(site)
    site.respond("B8", ids(site.prepared("B8").prompts))
    answered = {row["sample_id"]: row for row in read(site.prepared("B8").prompt_ids)}
    site.datasets[0]["max_prompt_tokens"] = 700
    site.run()
    counts = site.counts("B8")
    assert counts["shortened"] == counts["retired"] > 5
    now = {row["sample_id"]: row for row in read(site.prepared("B8").prompt_ids)}
    assert all({**row, **answered[i]} == row for i, row in now.items() if i in answered)
    assert set(answered) < set(now)
    assert len(now) == 20 + counts["shortened"]
    site.datasets[0]["max_prompt_tokens"] = 4000
    site.run()
    assert by_task(site).keys() == before.keys()
    assert site.counts("B8")["shortened"] == 0


def test_the_order_of_rows_does_not_matter_for_what_is_shortened(site: Site) -> None:
    rows = [*runs(15), *(trajectory("Same", f"page {n}: " + "link " * 400) for n in range(5))]
    site.source("B8", "sweagent", rows, max_samples=8)
    site.run()
    before = site.prepared("B8").prompt_ids.read_bytes()
    counts = site.counts("B8")
    site.source("B8", "sweagent", rows[::-1], max_samples=8)
    site.run()
    assert site.prepared("B8").prompt_ids.read_bytes() == before
    assert site.counts("B8") == counts
