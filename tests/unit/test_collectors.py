"""Whoever collects what validate finds hears of every line, and of the end before it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.fake_engine import DATASET, STOP, TEXT, Site
from unit.test_validate import LENIENT, check, row, say_origin

from drafter import plan, validate
from drafter.errors import DataError
from drafter.validation.facts import Facts, Outcome


class Listener:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.facts: list[Facts] = []
        self.outcome: Outcome | None = None
        self.path: Path | None = None

    def add(self, facts: Facts) -> None:
        self.facts.append(facts)

    def finish(self, outcome: Outcome) -> list[Path]:
        self.outcome = outcome
        if self.path is None:
            return []
        self.path.write_text("heard")
        return [self.path]


def test_whoever_listens_hears_of_every_line_and_of_the_end_before_it_fails(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.write(site.prepared.responses, [row(0), row(1, [TEXT, STOP]), {"no": "row"}])
    say_origin(site)
    heard = Listener()
    with pytest.raises(DataError, match="2 of 3 rows rejected"):
        check(site, heard)
    assert [(facts.number, facts.verdict) for facts in heard.facts] == [
        (1, "accepted"),
        (2, "rejected"),
        (3, "rejected"),
    ]
    assert heard.facts[1].offset == len(site.prepared.responses.read_text().splitlines()[0]) + 1
    assert heard.outcome is not None and heard.outcome.counts["by_kind"] == {
        "closed": 1,
        "invalid row": 1,
        "unclosed": 1,
    }
    assert len(heard.outcome.breaches) == 1 and heard.outcome.damaged == ()


def test_files_that_a_listener_made_are_looked_after_like_our_own(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.write(site.prepared.responses, [row(i) for i in range(10)])
    say_origin(site)
    heard = Listener()
    heard.path = site.prepared.root / "heard.txt"
    check(site, heard)

    def action() -> str:
        return plan.decide("validate", DATASET, site.job().workspace, site.recipe).action

    assert action() == "done"
    heard.path.write_text("Heard")
    assert action() == "start"


class Meddler(Listener):
    """Appends to the responses while they are read."""

    def __init__(self, responses: Path) -> None:
        super().__init__()
        self._responses = responses

    def add(self, facts: Facts) -> None:
        if facts.number == 1:
            with open(self._responses, "ab") as file:
                file.write(self._responses.read_bytes().splitlines(keepends=True)[0])


def test_rows_that_come_while_validate_reads_are_noticed(tmp_path: Path) -> None:
    # As many as do not fit one block of reading.
    site = Site(tmp_path, rules=LENIENT)
    site.write(site.prepared.responses, [row(i % 60, [TEXT] * 9000) for i in range(60)])
    say_origin(site)
    with pytest.raises(DataError, match="a writer is at work, stop it and validate again"):
        check(site, Meddler(site.prepared.responses))


def test_of_many_damaged_lines_the_first_are_named_and_all_are_counted(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.prepared.responses.write_text("{\n" * 50)
    say_origin(site)
    heard = Listener()
    with pytest.raises(DataError, match=r"raw_responses\.jsonl:1 is damaged.*49 more such lines"):
        check(site, heard)
    assert heard.outcome is not None and len(heard.outcome.damaged) == validate.NAMED
    assert heard.outcome.counts["rejected"] == 50
