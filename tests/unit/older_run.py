"""A workspace as an older script left it: no manifests, no rendered ids, files cut short by kills.

The shape of a run from the field, with fewer tokens: B1 answered to the end under a sample cap and
tokenized but for two rows; B2 killed with 150 in flight, its budget already exceeded; B3 killed
after two answers; the others not begun.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter import template
from drafter.layout import Prepared, Workspace
from drafter.recipe import Recipe, parse_recipe
from drafter.sources.prompt import Prompt

DEMO = Path(__file__).parents[2] / "include" / "demo"
NAMES = [path.stem for path in sorted((DEMO / "prompts").glob("B*"))]
B1, B2, B3 = NAMES[:3]

CAP = 10_000
"""Prompts per dataset that the older run took."""

UNTOKENIZED = (4711, 9999)
"""Rows of B1 that its last step left out: one in the middle, and the last."""

Row = dict[str, Any]


class OlderRun:
    def __init__(
        self, root: Path, url: str, *, cap: int = CAP, killed_at: int = 2912, in_flight: int = 150
    ) -> None:
        self.root = root
        self.workspace = Workspace(root / "workspace")
        self.url = url
        self.cap = cap
        self.killed_at = killed_at
        self.in_flight = in_flight
        self.target = DEMO / "target"
        self.max_samples: int | None = None
        self._tokenizer = template.load_tokenizer(self.target)
        self.family = template.family(self.target)
        self._dice = random.Random(0)
        for name in NAMES:
            self.prepared(name).root.mkdir(parents=True)
            prompts = self.cap if name in NAMES[:2] else 40
            self.write(self.prepared(name).prompts, self._prompts(name, prompts))
        self._answer_b1()
        self._answer_b2()
        self.write(self.prepared(B3).responses, self.rows(B3)[:2])
        with open(self.prepared(B3).responses, "a") as file:
            file.write('{"sample_id": "torn", "output')

    @property
    def recipe(self) -> Recipe:
        budgets = {B1: self.tokens(B1) - 5, B2: self.tokens(B2) - 100}
        tree = {
            "name": "older",
            "target": {"path": str(self.target), "revision": "r1"},
            "engine": {"urls": [self.url]},
            "generate": {"max_new_tokens": 64, "max_prompt_tokens": 400},
            "host": {"workspace": str(self.workspace.root)},
            "datasets": [
                {
                    "name": name,
                    "format": name.split("_")[1],
                    "path": str(next((DEMO / "prompts").glob(f"{name}.*"))),
                    "token_budget": budgets.get(name, 300),
                    "max_samples": self.max_samples,
                }
                for name in NAMES
            ],
        }
        return parse_recipe(tree, "test")

    def prepared(self, name: str) -> Prepared:
        return self.workspace.prepared(name)

    def tokens(self, name: str) -> int:
        return sum(row["completion_tokens"] for row in self.stored(name))

    def stored(self, name: str) -> list[Row]:
        lines = self.prepared(name).responses.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def rows(self, name: str, tokenizer: Any = None) -> list[Row]:
        """A sound answer to each prompt of a dataset, with what ``tokenizer`` renders."""
        return [self._row(*prompt) for prompt in self._rendered(name, tokenizer)]

    @staticmethod
    def write(path: Path, rows: list[Row]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _answer_b1(self) -> None:
        prompts = list(self._rendered(B1))
        rows = [self._row(*prompt) for prompt in prompts]
        self.write(self.prepared(B1).responses, rows)
        skip = {self.untokenized(i) for i in range(len(UNTOKENIZED))}
        tokenized = [
            {
                "sample_id": row["sample_id"],
                "input_ids": [*ids, *row["output_ids"]],
                "prompt_tokens": len(ids),
            }
            for row, (_, ids) in zip(rows, prompts, strict=True)
            if row["sample_id"] not in skip
        ]
        self.write(self.prepared(B1).tokenized, tokenized)

    def _answer_b2(self) -> None:
        """Answers in the order of completion; those in flight at the kill never came back."""
        sent = self.rows(B2)[: self.killed_at + self.in_flight]
        holes = set(self._dice.sample(range(len(sent) // 2, len(sent)), self.in_flight))
        kept = [row for i, row in enumerate(sent) if i not in holes]
        self._dice.shuffle(kept)
        self.write(self.prepared(B2).responses, kept)

    def untokenized(self, index: int) -> str:
        return f"{B1}-{UNTOKENIZED[index] * self.cap // CAP:06d}"

    def _prompts(self, name: str, number: int) -> list[Row]:
        return [
            {
                "sample_id": f"{name}-{i:06d}",
                "messages": [{"role": "user", "content": f"{name} asks for step {i}"}],
            }
            for i in range(number)
        ]

    def _rendered(self, name: str, tokenizer: Any = None) -> Iterator[tuple[str, list[int]]]:
        for line in self.prepared(name).prompts.read_text().splitlines():
            row = json.loads(line)
            prompt = Prompt(row["messages"], row.get("tools"))
            yield row["sample_id"], template.render(tokenizer or self._tokenizer, prompt, True)

    def _row(self, sample_id: str, prompt_ids: list[int]) -> Row:
        thought, answer = (
            [self._dice.randrange(300, 400) for _ in range(self._dice.randrange(1, 6))]
            for _ in range(2)
        )
        ids = [*thought, self.family.think_close, *answer, min(self.family.stop_ids)]
        return {
            "sample_id": sample_id,
            "output_ids": ids,
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "finish_reason": "stop",
        }
