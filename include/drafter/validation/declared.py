"""Which tools each prompt of a dataset declares, read when somebody first asks."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from drafter import jsonl
from drafter.errors import DataError
from drafter.sources.prompt import prompt_fault

Names = frozenset[str]


class Tools:
    def __init__(self, prompts: Path) -> None:
        self._path = prompts
        self.damaged: list[DataError] = []
        """Lines of prompts.jsonl that could not be read."""

    def names(self, sample_id: str) -> Names | None:
        """None when prompts.jsonl has no such prompt, or a damaged one."""
        return self._declared.get(sample_id)

    @cached_property
    def _declared(self) -> dict[str, Names]:
        declared: dict[str, Names] = {}
        # Prompts of one source share their tools.
        same: dict[Names, Names] = {}
        for line in jsonl.scan(self._path):
            if line.torn:
                break
            fault = jsonl.fault(line) or prompt_fault(line.value)
            if fault:
                self.damaged.append(jsonl.damage(self._path, line._replace(fault=fault)))
                continue
            names = frozenset(filter(None, map(_name, line.value.get("tools") or ())))
            declared[line.value["sample_id"]] = same.setdefault(names, names)
        return declared


def _name(tool: Any) -> str | None:
    """Of ``{"type": "function", "function": {"name": ...}}``, or of the inner object alone."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
