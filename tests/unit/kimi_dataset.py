"""A dataset of three prompts for a tiny target, of Kimi's family unless told otherwise, and rows
for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from families import KIMI, TinyTarget

from drafter import jsonl, template
from drafter.rows import Family
from drafter.sections import Validate
from drafter.validation import toolcalls
from drafter.validation.declared import Tools
from drafter.validation.gate import Gate, Judged
from drafter.validation.tokenized import Prompts
from drafter.validation.toolcalls import Judge

Row = dict[str, Any]
NAMES = ("a", "b", "c")
TIDE = {"type": "function", "function": {"name": "tide"}}


class World(NamedTuple):
    """A dataset of three prompts, and how rows for it are made."""

    root: Path
    tokenizer: Any
    family: Family
    judge: Judge
    prompt: list[int]
    thinking: bool = True

    def ids(self, text: str) -> list[int]:
        return template.encode(self.tokenizer, text)

    def row(self, text: str = "Hm.</think>Three metres.<|im_end|>", **changes: Any) -> Row:
        return self.of(self.ids(text), **changes)

    def of(self, output_ids: list[Any], name: str = "b", **changes: Any) -> Row:
        row = {
            "sample_id": name,
            "output_ids": output_ids,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(output_ids),
            "finish_reason": "stop",
        }
        return {**row, **changes}

    def look(self, *lines: bytes, rules: Validate | None = None) -> list[Judged]:
        path = self.root / "raw_responses.jsonl"
        path.write_bytes(b"".join(lines))
        with self.gate(rules) as gate:
            return [gate.look(line) for line in jsonl.scan(path)]

    @contextmanager
    def gate(self, rules: Validate | None = None) -> Iterator[Gate]:
        with Prompts(self.root / "prompt_ids.jsonl") as prompts:
            tools = Tools(self.root / "prompts.jsonl")
            rules = rules or Validate()
            yield Gate(self.family, rules, self.thinking, prompts, tools, self.judge)


def make_world(root: Path, target: TinyTarget = KIMI, thinking: bool = True) -> World:
    tokenizer = template.load_tokenizer(target.save(root))
    family = template.family(root, tokenizer)
    spelling = toolcalls.learn(tokenizer, family)
    judge = Judge(family, spelling, lambda ids: template.decode(tokenizer, ids))
    prompt = template.encode(tokenizer, "<|im_user|>user<|im_middle|>How high?<|im_end|>")
    message = [{"role": "user", "content": "How high?"}]
    prompts = [{"sample_id": name, "messages": message, "tools": [TIDE]} for name in NAMES]
    (root / "prompts.jsonl").write_bytes(b"".join(map(line, prompts)))
    prompt_ids = [{"sample_id": name, "input_ids": prompt} for name in NAMES]
    (root / "prompt_ids.jsonl").write_bytes(b"".join(map(line, prompt_ids)))
    return World(root, tokenizer, family, judge, prompt, thinking)


def line(row: Any) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
