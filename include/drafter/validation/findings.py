"""What validate found, as a table: ``rows.parquet``, one line per stored row in file order.

Columns::

    line, offset             of raw_responses.jsonl
    sample_id                null where the line has none
    verdict                  accepted, flagged (accepted too) or rejected
    kind, kinds              the deciding class; all that apply, joined by ", "
    reason                   the deciding class, with its detail
    finish_reason            stop or length; empty, and all numbers 0, where the row is no valid row
    prompt_tokens, completion_tokens, thinking_tokens, answer_tokens, tool_tokens
    num_tool_calls, num_valid_tool_calls
    repetition, period       share of the output that is its longest loop, tokens of one round
    draw                     hash of sample_id, in whose order rows are drawn for reading: the same
                             rows in whatever order they were stored
    audited                  drawn, and decoded for the report
    thinking_script, answer_script       of most letters; null but for audited rows

``pandas.read_parquet(path).attrs`` is :class:`About`. The same rows give the same bytes. pandas is
imported when a table is made or read, not before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from drafter.errors import DataError
from drafter.files import clear_partial, whole_file
from drafter.validation.facts import Facts

if TYPE_CHECKING:
    import pandas as pd

AUDITED = ("audited", "thinking_script", "answer_script")

SEPARATOR = ", "
"""Between kinds."""

_NUMBERS = (
    *("prompt_tokens", "completion_tokens", "thinking_tokens", "answer_tokens", "tool_tokens"),
    *("num_tool_calls", "num_valid_tool_calls", "period"),
)


class About(TypedDict):
    """Of the dataset as a whole, as validate saw it."""

    dataset: str
    thinking: bool
    """Was the target asked to think?"""

    responses_bytes: int
    """Of raw_responses.jsonl: another size is another set of rows."""

    prompts: int | None
    failed: int | None
    """Prompts without an answer. These five are None when generate has not finished."""

    completion_tokens: int | None
    """As generate counts them towards the budget: of rows that are no valid ones too."""

    token_budget: int | None
    stop_reason: str | None
    refused: list[str]
    """Why the dataset as a whole is not accepted."""

    policy: dict[str, str]
    """Of each class that occurs."""

    cap: dict[str, float]
    """Share of stored rows that a class may have, where it has a cap."""

    letters: dict[str, dict[str, int]]
    """{part: {script: letters}} of the audited rows."""


class Findings(NamedTuple):
    frame: pd.DataFrame
    about: About
    """Apart from the frame: pandas copies what is attached to one with every step it takes."""


def table(facts: Sequence[Facts]) -> pd.DataFrame:
    """Without the columns AUDITED, which :mod:`drafter.validation.audit` adds."""
    import pandas as pd

    columns = dict(zip(Facts._fields, zip(*facts, strict=True), strict=True)) if facts else {}

    def column(name: str) -> Any:
        return columns.get(name, ())

    kinds = column("kinds")
    return pd.DataFrame(
        {
            "line": pd.Series(column("number"), dtype="int64"),
            "offset": pd.Series(column("offset"), dtype="int64"),
            "sample_id": pd.Series(column("sample_id"), dtype="str"),
            "verdict": pd.Series(column("verdict"), dtype="str"),
            "kind": pd.Series([several[0] for several in kinds], dtype="str"),
            "kinds": pd.Series([SEPARATOR.join(several) for several in kinds], dtype="str"),
            "reason": pd.Series(column("reason"), dtype="str"),
            "finish_reason": pd.Series(column("finish_reason"), dtype="str"),
            **{name: pd.Series(column(name), dtype="int32") for name in _NUMBERS},
            "repetition": pd.Series(column("repetition"), dtype="float64"),
            "draw": pd.Series(list(map(_draw, facts)), dtype="int64"),
        }
    )


def _draw(facts: Facts) -> int:
    """A line without an id is known by its number."""
    name = f"line {facts.number}" if facts.sample_id is None else facts.sample_id
    seeded = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8, person=b"audit")
    return int.from_bytes(seeded.digest(), "big", signed=True)


def save(found: Findings, path: Path) -> None:
    """The caller holds the report's lock."""
    frame = found.frame.copy(deep=False)
    frame.attrs = dict(found.about)
    clear_partial(path.parent, path.name)
    with whole_file(path) as partial:
        frame.to_parquet(partial, index=False)


def load(path: Path) -> Findings:
    """DataError when there is none, or none that this code can read."""
    import pandas as pd

    if not path.exists():
        raise DataError(f"{path} is missing: run validate first")
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} is not a table of Parquet ({error}): delete it, then run validate"
        ) from None
    about: Any = frame.attrs
    frame.attrs = {}
    missing = {*About.__annotations__, *table(()).columns, *AUDITED} - {*about, *frame.columns}
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(sorted(missing))}: another version wrote it, delete it, then"
            " run validate"
        )
    return Findings(frame, about)
