"""prompts.jsonl and prompt_ids.jsonl of a dataset: in order, only grown once it has responses.

Once there are responses, prompts keep their order: new ids are appended, and vanished ones stay in
prompts.jsonl with ``retired: true``. A retired prompt stays in prompt_ids.jsonl if it has a
response (its paid-for row must remain valid) and leaves it if it has none (it must not be answered
any more).
"""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafter import jsonl, layout
from drafter.layout import Prepared
from drafter.sources.prompt import Prompt
from drafter.spool import Spool, json_line

Render = Callable[[Prompt], list[int]]


def write(prepared: Prepared, selected: dict[str, int], spool: Spool, render: Render) -> int:
    """Bring both files up to date, touching neither when its bytes stay; the number retired.

    ``selected`` maps sample ids, in their order, to the offset of their two lines in ``spool``. The
    caller holds the dataset's lock. Raises DataError naming file and line for a damaged
    prompts.jsonl.
    """
    left = dict(selected)
    num_retired = 0
    with (
        _partial(prepared.prompts) as prompts,
        _partial(prepared.prompt_ids) as prompt_ids,
    ):

        def put(offset: int) -> None:
            prompt, ids = spool.lines(offset, 2)
            prompts.write(prompt)
            prompt_ids.write(ids)

        if has_responses(prepared):
            answered = _answered(prepared.responses)
            for line in jsonl.rows(prepared.prompts):
                row = line.value
                if not {"sample_id", "messages"} <= row.keys():
                    fault = "a prompt needs sample_id and messages"
                    raise jsonl.damage(prepared.prompts, line._replace(fault=fault))
                identity = row["sample_id"]
                if identity in left:
                    put(left.pop(identity))
                    continue
                num_retired += 1
                prompts.write(json_line({**row, "retired": True}))
                if identity in answered:
                    ids = render(Prompt(row["messages"], row.get("tools")))
                    prompt_ids.write(json_line({"sample_id": identity, "input_ids": ids}))
        for offset in left.values():
            put(offset)
        _replace(prepared.prompts, prompts)
        _replace(prepared.prompt_ids, prompt_ids)
    return num_retired


def has_responses(prepared: Prepared) -> bool:
    return prepared.responses.exists() and prepared.responses.stat().st_size > 0


def _answered(responses: Path) -> set[str]:
    """Sample ids with a response. Damaged lines are for generate to complain about."""
    rows = (line.value for line in jsonl.scan(responses))
    return {row["sample_id"] for row in rows if isinstance(row, dict) and "sample_id" in row}


def _partial(path: Path) -> Any:
    """A temporary file beside ``path``, of a name that layout.clear_partial knows."""
    return tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")


def _replace(path: Path, new: Any) -> None:
    new.flush()
    if path.exists() and filecmp.cmp(path, new.name, shallow=False):
        return
    new.seek(0)
    with layout.whole_file(path) as partial, open(partial, "wb") as file:
        shutil.copyfileobj(new, file)
