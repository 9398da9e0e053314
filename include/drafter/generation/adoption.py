"""Taking over what an older run left, without a manifest: checked row by row, then kept.

The file names and the five keys of a row are those of runs that exist in the field, so their paid
rows can be kept. Nothing says what they were made with, so a person has to ask for it (mode
"adopt"), and every stored row must prove itself first: its prompt, rendered by the recipe's target,
has as many ids as the row says; its fields are valid by drafter.rows; its reasoning is such that
the canary would have let it pass. The first row that is not is named, with its field, and nothing
is touched. Sampling cannot be seen in rows: adopting says that it was the recipe's.

Adopted prompts are marked ``adopted`` in prompts.jsonl and stay, whatever the source holds; the
recipe's prompts are appended up to ``max_samples`` (prompts.py). The adoption itself is a line
of sessions.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from drafter import template
from drafter.engines.outcomes import failure_fault
from drafter.errors import DataError
from drafter.files import read_section
from drafter.generation.canary import Canary
from drafter.generation.sessions import known_identities
from drafter.jsonl import damage, rows
from drafter.layout import Prepared
from drafter.recipe import Recipe
from drafter.rows import Family, check_row
from drafter.sources.prompt import Prompt, prompt_fault

Render = Callable[[Prompt], list[int]]

UNKNOWN = (
    "it holds responses, and nothing says what they were made with: trigger generate with mode"
    " adopt to check and keep them, or with mode restart"
)

NAMED = 5
"""Sample ids that a sentence names; the rest is a count."""


class Stored(NamedTuple):
    """What stands in raw_responses.jsonl, all of it sound."""

    responses: int
    completion_tokens: int
    untokenized: list[str]
    """Why, for each row that tokenized_data.jsonl lacks: ``<sample id> (line n, <reason>)``; empty
    when there is no such file."""


def has_unknown_prompts(prepared: Prepared) -> bool:
    """Prompts that no prepare of ours says it wrote."""
    return prepared.prompts.exists() and read_section(prepared.manifest, "prepare") is None


def has_unknown_responses(prepared: Prepared) -> bool:
    """Responses of which nothing says what they were made with."""
    path = prepared.responses
    return path.exists() and path.stat().st_size > 0 and not known_identities(prepared)


def check(prepared: Prepared, recipe: Recipe, render: Render, family: Family) -> tuple[int, Stored]:
    """(prompts, what is stored), when all of it can be adopted.

    Reads everything, writes nothing. Raises DataError naming file, line, sample and field.
    """
    template.require_thinking(recipe.target, family)
    num_tokens = {sample_id: len(ids) for sample_id, ids in _rendered(prepared, render)}
    return len(num_tokens), check_responses(prepared, recipe, num_tokens, family)


def checked_prompts(prepared: Prepared) -> Iterator[tuple[str, Prompt]]:
    """(sample id, prompt) of every row. Raises DataError for one that is no prompt, or comes twice;
    consumed to its end it has looked at all."""
    seen = set[str]()
    for line in rows(prepared.prompts):
        fault = prompt_fault(line.value)
        if fault is None and line.value["sample_id"] in seen:
            fault = f"sample_id {line.value['sample_id']} stands there twice"
        if fault:
            raise damage(prepared.prompts, line._replace(fault=fault))
        seen.add(line.value["sample_id"])
        yield line.value["sample_id"], Prompt(line.value["messages"], line.value.get("tools"))


def check_responses(
    prepared: Prepared, recipe: Recipe, num_tokens: dict[str, int], family: Family
) -> Stored:
    """``num_tokens``: prompt ids per sample id. A torn last line is no row, as everywhere."""
    for line in rows(prepared.failed):
        if fault := failure_fault(line.value):
            raise damage(prepared.failed, line._replace(fault=fault))
    settings = recipe.generate
    canary = Canary(family, recipe.target.thinking, settings.canary_window, settings.canary_share)
    tokenized = _tokenized(prepared)
    last_tokenized = 0
    tokens, stored = 0, dict[str, int]()
    for line in rows(prepared.responses):
        row = line.value
        sample_id = row.get("sample_id")
        known = num_tokens.get(sample_id) if isinstance(sample_id, str) else None
        reason = check_row(row, family, known)
        if reason is None and sample_id in stored:
            reason = f"sample_id stands in line {stored[sample_id]} already"
        if reason is None and known is None:
            reason = "unknown sample_id: no such prompt in prompts.jsonl"
        if reason is not None:
            raise DataError(
                f"{prepared.responses}:{line.number} (sample {sample_id!r}) cannot be adopted,"
                f" {reason}{_field_hint(reason)}: move such rows to another file, or generate anew"
                " with mode restart"
            )
        alarm = canary.see(row, line.offset)
        if alarm:
            raise DataError(
                f"{prepared.responses}:{line.number} (sample {sample_id!r}) cannot be adopted,"
                f" {alarm.reason}: generate anew with mode restart"
            )
        stored.setdefault(str(sample_id), line.number)
        tokens += row["completion_tokens"]
        if tokenized and sample_id in tokenized:
            last_tokenized = line.number
    untokenized = [
        f"{sample_id} (line {number}, "
        + ("stored after the last tokenized row)" if number > last_tokenized else "left out)")
        for sample_id, number in stored.items()
        if tokenized is not None and sample_id not in tokenized
    ]
    return Stored(len(stored), tokens, untokenized)


def named(items: list[str]) -> str:
    """The first of ``items``, and how many more there are."""
    more = f" and {len(items) - NAMED:,} more" if len(items) > NAMED else ""
    return ", ".join(items[:NAMED]) + more


def num_prompt_tokens(prepared: Prepared) -> dict[str, int]:
    """Prompt ids per sample id, as prepare rendered them."""
    return {
        line.value["sample_id"]: len(line.value["input_ids"]) for line in rows(prepared.prompt_ids)
    }


def _rendered(prepared: Prepared, render: Render) -> Iterator[tuple[str, list[int]]]:
    for sample_id, prompt in checked_prompts(prepared):
        try:
            yield sample_id, render(prompt)
        except DataError as error:
            raise DataError(
                f"{prepared.prompts} (sample {sample_id!r}) cannot be adopted, {error}"
            ) from None


def _tokenized(prepared: Prepared) -> set[str] | None:
    if not prepared.tokenized.exists():
        return None
    return {str(line.value.get("sample_id")) for line in rows(prepared.tokenized)}


def _field_hint(reason: str) -> str:
    if reason.startswith("wrong prompt_tokens"):
        return " ids when the recipe's target renders it, so another template or tokenizer made it"
    return ""
