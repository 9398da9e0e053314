"""Decides about each stored row, in file order: what it is, and whether it is trained on."""

from __future__ import annotations

from typing import NamedTuple

from drafter import jsonl
from drafter.jsonl import Line
from drafter.kinds import HARDNESS, KINDS, Kind, fault_of
from drafter.rows import Family, Marked, read_row
from drafter.sections import Validate
from drafter.template import THINK_CLOSE
from drafter.validation import structure
from drafter.validation.declared import Tools
from drafter.validation.facts import Facts, Verdict
from drafter.validation.repetition import longest_loop
from drafter.validation.spelled import Spelled
from drafter.validation.structure import Remark, Shape
from drafter.validation.tokenized import Prompts, encoded, has_key_twice, output_text, text_of
from drafter.validation.toolcalls import Judge

_ORDER = {kind: number for number, kind in enumerate(KINDS)}
_VERDICTS: dict[str, Verdict] = {"accept": "accepted", "flag": "flagged", "reject": "rejected"}


_CLOSED: frozenset[Kind] = frozenset({"closed", "empty thinking", "thinking although off"})
"""Thinking that a control id ended: what is written out as text means nothing then."""


class Judged(NamedTuple):
    facts: Facts

    tokenized: bytes | None
    """Its line of tokenized_data.jsonl; None when it is rejected."""


class Gate:
    """Pure but for what it has accepted so far and what it looks up in the dataset's prompts."""

    def __init__(
        self,
        family: Family,
        rules: Validate,
        thinking: bool,
        prompts: Prompts,
        tools: Tools,
        judge: Judge,
    ) -> None:
        self._family = family
        self._rules = rules
        self._thinking = thinking
        self._prompts = prompts
        self._tools = tools
        self._judge = judge
        self._spelled = Spelled(THINK_CLOSE, family, judge.decode)
        self._accepted: set[str] = set()

    def look(self, line: Line) -> Judged:
        sample_id = sample_id_of(line.value)
        valid = self._valid(line, sample_id)
        if isinstance(valid, str):
            kinds = (fault_of(valid),)
            facts = Facts(line.number, line.offset, sample_id, "rejected", kinds, valid)
            return Judged(facts, None)
        marked, prompt, output = valid
        facts = self._facts(line, marked)
        if facts.verdict == "rejected":
            return Judged(facts, None)
        row = line.value
        self._accepted.add(row["sample_id"])
        tokenized = encoded(row["sample_id"], prompt, output, row["prompt_tokens"])
        return Judged(facts, tokenized)

    def _valid(self, line: Line, sample_id: str | None) -> tuple[Marked, bytes, bytes] | str:
        """(ids, prompt as text, output as text), or why the row is no valid one."""
        if line.torn:
            return "torn last line"
        if not isinstance(line.value, dict):
            return f"damaged line: line {line.number}, {jsonl.fault(line)}"
        num_tokens = self._prompts.num_tokens(sample_id) if sample_id else None
        marked = read_row(line.value, self._family, num_tokens)
        if isinstance(marked, str):
            return marked
        if num_tokens is None or sample_id is None:
            return "unknown sample_id"
        output = output_text(line)
        if output is None:
            if has_key_twice(line):
                return "key twice: a row has each of its keys once"
            output = text_of(line.value["output_ids"])
        prompt = self._prompts.text(sample_id)
        if output.startswith(prompt + b","):
            return "prompt in output_ids: they begin with the whole prompt, needs the answer alone"
        if sample_id in self._accepted:
            return "duplicate"
        return marked, prompt, output

    def _facts(self, line: Line, marked: Marked) -> Facts:
        row, family, num_ids = line.value, self._family, len(marked.ids)
        cut = row["finish_reason"] == "length"
        shape = structure.look(marked, family, self._thinking, cut)
        found = [*structure.remarks(shape, marked, row, family, self._thinking)]
        # Arguments of a call that left the thinking may hold anything.
        text = marked.ids[: shape.rest] if self._thinking else marked.ids
        if shape.reasoning not in _CLOSED and self._spelled.is_in(text):
            kind: Kind = "thinking as text" if self._thinking else "thinking although off"
            found.append(Remark(kind, f"{THINK_CLOSE} is spelled out"))
        calls = self._judge.look(shape, marked, cut, lambda: self._tools.names(row["sample_id"]))
        found += calls.remarks
        limits = self._rules.repetition
        loop = longest_loop(marked.ids, limits.min_tokens, limits.min_share)
        if loop:
            detail = f"{loop.num_tokens} of {num_ids} tokens, {loop.period} a round"
            found.append(Remark("repetition", detail))
        thinking_tokens, left = _parts(shape, marked, family)
        return Facts(
            line.number,
            line.offset,
            row["sample_id"],
            *self._decided(found, shape.reasoning),
            row["finish_reason"],
            row["prompt_tokens"],
            num_ids,
            thinking_tokens,
            max(left - calls.num_tokens, 0),
            calls.num_tokens,
            calls.num_calls,
            calls.num_valid,
            loop.num_tokens / num_ids if loop else 0.0,
            loop.period if loop else 0,
        )

    def _decided(
        self, found: list[Remark], reasoning: Kind
    ) -> tuple[Verdict, tuple[Kind, ...], str]:
        """(verdict, kinds, reason)"""
        if not found:
            return "accepted", (reasoning,), reasoning
        policy = self._rules.policy
        found.sort(key=lambda remark: (-HARDNESS[policy[remark.kind]], _ORDER[remark.kind]))
        kinds = list(dict.fromkeys(remark.kind for remark in found))
        if reasoning not in kinds:
            kinds.append(reasoning)
        return _VERDICTS[policy[found[0].kind]], tuple(kinds), str(found[0])


def sample_id_of(row: object) -> str | None:
    sample_id = row.get("sample_id") if isinstance(row, dict) else None
    return sample_id if isinstance(sample_id, str) else None


def _parts(shape: Shape, marked: Marked, family: Family) -> tuple[int, int]:
    """Tokens of thinking, and of what follows it, without the marks that end either."""
    num_ids = len(marked.ids)
    stops = int(int(marked.ids[-1]) in family.stop_ids)
    if shape.rest == num_ids:
        return num_ids - shape.thinking - stops, 0
    closes = int(int(marked.ids[shape.rest]) == family.think_close)
    return shape.rest - shape.thinking, num_ids - shape.rest - closes - stops
