"""Findings of a dataset made by hand, and a workspace that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.test_show import TOKENIZER, answer, prepared, put

from demo.make_target import TARGET
from drafter import template
from drafter.files import write_json
from drafter.job import Job
from drafter.layout import Prepared, Workspace
from drafter.recipe import Recipe, parse_recipe
from drafter.report import Report
from drafter.validation import findings
from drafter.validation.facts import Facts, Outcome
from drafter.validation.findings import Findings

__all__ = ["answer", "prepared", "put"]
FAMILY = template.family(TARGET, TOKENIZER)
INCLUDE = Path(__file__).parents[2] / "include"
SOUND = "oak elm</think>palm bay<|im_end|>"


def found(*rows: tuple[str, ...], **more: Any) -> Findings:
    """Rows of these classes, the deciding one first, as validate would find them."""
    facts = [fact(number, kinds, **more) for number, kinds in enumerate(rows, start=1)]
    about: findings.About = {
        "dataset": "B1",
        "thinking": True,
        "responses_bytes": 0,
        "prompts": None,
        "failed": None,
        "completion_tokens": None,
        "token_budget": None,
        "stop_reason": None,
        "refused": [],
        "policy": {},
        "cap": {},
        "letters": {},
    }
    table = findings.table(facts)
    table["audited"] = False
    return Findings(table, about)


def fact(number: int, kinds: tuple[str, ...], offset: int = 0, **more: Any) -> Facts:
    """Invalid where the class says so; otherwise 10 tokens of thinking and 4 of answer."""
    told: Any = kinds
    verdict = "accepted" if kinds[0] in ("closed", "not thinking") else "rejected"
    if kinds[0] == "tool in thinking":
        verdict = "flagged"
    id_ = None if kinds[0] == "damaged line" else f"B1-{number - 1}"
    if kinds[0] in ("damaged line", "invalid row", "duplicate"):
        return Facts(number, offset, id_, "rejected", told, kinds[0])
    numbers = {"prompt_tokens": 5, "completion_tokens": 16, "thinking_tokens": 10}
    numbers |= {"answer_tokens": 4, "finish_reason": "stop", **more}
    return Facts(number, offset, id_, verdict, told, kinds[0], **numbers)  # type: ignore[arg-type]


class Site:
    """Rows of a dataset, as stored and as validate would find them."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        recipe = two_datasets(prepared)
        write_json(Workspace(prepared.root.parents[1]).recipe, recipe.as_json())
        self.job = Job(
            phase="validate",
            dataset="B1",
            recipe=recipe,
            dir=Workspace(prepared.root.parents[1]).job("validate", "B1"),
            start_id="start",
            code="code",
            run_id="run",
            mode="resume",
            token_budget=None,
            in_flight=1,
        )
        self.facts: list[Facts] = []

    def store(self, row: Any, *kinds: str, **facts: Any) -> None:
        number = len(self.facts) + 1
        there = self.prepared.responses.exists()
        offset = self.prepared.responses.stat().st_size if there else 0
        put(self.prepared.responses, row)
        fact_ = fact(number, kinds, offset)
        if isinstance(row, dict):
            facts = {"sample_id": row["sample_id"], **facts}
        self.facts.append(fact_._replace(**facts))

    def finish(self, *breaches: str) -> list[Path]:
        report = Report(self.job, self.prepared, TOKENIZER, FAMILY)
        by_kind: dict[str, int] = {}
        for facts in self.facts:
            report.add(facts)
            for kind in facts.kinds:
                by_kind[kind] = by_kind.get(kind, 0) + 1
        return list(report.finish(Outcome("B1", {"by_kind": by_kind}, breaches, ())))

    @property
    def page(self) -> str:
        return self.prepared.report.read_text(encoding="utf-8")

    @property
    def overview(self) -> str:
        return self.job.workspace.report.read_text(encoding="utf-8")


def two_datasets(prepared: Prepared) -> Recipe:
    tree = {
        "name": "test",
        "target": {"path": str(TARGET), "revision": "r1"},
        "engine": {"urls": ["http://127.0.0.1:9"]},
        "datasets": [
            {"name": name, "format": "glaive", "path": "/none", "unbounded": True}
            for name in ("B1", "B2")
        ],
        "host": {"workspace": str(prepared.root.parents[1])},
    }
    return parse_recipe(tree, "test")


@pytest.fixture
def site(prepared: Prepared) -> Site:
    site = Site(prepared)
    for number in range(4):
        site.store(answer(f"B1-{number}", SOUND), "closed")
    site.store(answer("B1-4", "oak<|im_end|>"), "unclosed")
    site.store(b'{"sample_id": "B1-00\x1b[31m<i>\n', "damaged line")
    return site
