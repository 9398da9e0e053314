"""Prompts once there are answers: none is reordered, lost, or asked again in other letters."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import KIMI
from unit.test_prepare import MANY, Site, ids, questions, read


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    KIMI.save(site.target)
    return site


def test_beside_responses_prompts_keep_their_order_and_new_ones_are_appended(site: Site) -> None:
    site.source("B2", "opencodeinstruct", questions(*MANY[:10]))
    site.run()
    old = ids(site.prepared("B2").prompts)
    site.respond("B2", old[:3])
    site.source("B2", "opencodeinstruct", questions(*MANY))
    site.run()
    now = ids(site.prepared("B2").prompts)
    assert now[:10] == old
    assert len(now) == 30
    assert ids(site.prepared("B2").prompt_ids) == now


@pytest.mark.parametrize("place", ["B1", "B2"])
def test_what_has_an_answer_is_not_asked_again_in_other_letters(place: str, site: Site) -> None:
    site.source("B1", "opencodeinstruct", questions("something else"))
    site.source("B2", "opencodeinstruct", questions("why is it so?", "a", "b"))
    site.run()
    paid = next(
        row["sample_id"]
        for row in read(site.prepared("B2").prompts)
        if row["messages"][0]["content"] == "why is it so?"
    )
    site.respond("B2", [paid])
    alike = questions(*("why is it so?".upper() + " " * n for n in range(8)))
    before = site.prepared(place).prompts.read_text()
    site.source(place, "opencodeinstruct", [*alike, *read(site.root / f"{place}.jsonl")])
    site.run()
    assert "WHY" not in site.prepared("B1").prompts.read_text()
    assert "WHY" not in site.prepared("B2").prompts.read_text()
    assert "retired" not in site.prepared("B2").prompts.read_text()
    assert (
        before.splitlines()[0].partition('"source"')[0] in site.prepared(place).prompts.read_text()
    )


def test_a_vanished_prompt_is_retired_and_keeps_its_ids_only_if_it_has_a_response(
    site: Site,
) -> None:
    site.source("B2", "opencodeinstruct", questions("a", "b", "c"))
    site.run()
    by_text = {
        row["messages"][0]["content"]: row["sample_id"] for row in read(site.prepared("B2").prompts)
    }
    before = read(site.prepared("B2").prompt_ids)
    site.respond("B2", [by_text["a"]])
    site.source("B2", "opencodeinstruct", questions("c", "d"))
    site.run()
    retired = [row["sample_id"] for row in read(site.prepared("B2").prompts) if "retired" in row]
    assert set(retired) == {by_text["a"], by_text["b"]}
    kept = read(site.prepared("B2").prompt_ids)
    assert by_text["b"] not in [row["sample_id"] for row in kept]
    answered = next(row for row in before if row["sample_id"] == by_text["a"])
    assert {**answered, "retired": True} in kept
    assert site.counts("B2")["retired"] == 2
    site.source("B2", "opencodeinstruct", questions("a", "b", "c", "d"))
    site.run()
    assert not any("retired" in row for row in read(site.prepared("B2").prompts))
    assert len(ids(site.prepared("B2").prompt_ids)) == 4
