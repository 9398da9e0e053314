"""Whatever a row of a source holds, it becomes a prompt or a known reason."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.test_prepare import ids
from unit.test_source_rows import CONVERT, FILES, REASONS, Row, format_of, make_site, rows

from drafter import files
from drafter.sections import SourceFormat
from drafter.sources.prompt import Prompt

OBJECTS = [(dataset, row) for dataset in FILES for row in rows(dataset) if isinstance(row, dict)]


def nested(depth: int) -> Any:
    value: Any = {"name": "deep"}
    for _ in range(depth):
        value = [value]
    return value


JUNK: list[Any] = [
    *(None, True, False, 0, -1, 10**30, 0.5, math.inf, math.nan),
    *("", " ", "\0", "\ud800", "\udfff\ud83d", "\x1b[", "<think>", "x" * 100_000, "[" * 5000),
    *('"', "{}", "[]", "null", "USER:", "\n\n\nUSER: a\n\n\nASSISTANT: <functioncall> {}"),
    *("[{}]", '{"name": "f", "arguments": \'{"a": "\\ud800"}\'}', '{"name": 5}'),
    *([], {}, [[]], [None], {"": None}, {"role": "user"}, {"\ud800": "\0"}),
    nested(5),
]
DEEP = [nested(252), nested(300)]
TOO_DEEP = nested(2000)
"""Can be in memory, but not be written."""

ACTS = ["replace", "delete", "wrap in a list", "wrap in an object", "twice", "insert", "as text"]

Place = tuple[str | int, ...]


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Where something is inside of a JSON value, as keys and indexes."""
    if isinstance(value, list | dict) and len(here) < 12:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*here, key)
            yield from places(value[key], (*here, key))


def damaged(value: Any, place: Place, act: str, junk: Any) -> Any:
    """``value`` with one act done at ``place``; what is given stays as it is."""
    key, *deeper = place
    changed = copy.copy(value)
    there = changed[key]
    if deeper:
        changed[key] = damaged(there, tuple(deeper), act, junk)
    elif act == "delete":
        del changed[key]
    elif act == "twice" and isinstance(changed, list):
        changed.insert(int(key), there)
    elif act == "insert" and isinstance(there, str):
        middle = len(there) // 2
        changed[key] = there[:middle] + (junk if isinstance(junk, str) else "\0") + there[middle:]
    elif act == "as text" and not isinstance(there, list | dict):
        changed[key] = str(there)
    else:
        wrapped = {"wrap in a list": [there], "wrap in an object": {"value": there}}
        changed[key] = wrapped.get(act, junk)
    return changed


def damage(row: Row, junk: list[Any], data: st.DataObject) -> Row:
    """``row`` with one thing broken; what is JSON text in it can be broken inside, too."""
    inside = [key for key in ("messages", "tools") if isinstance(row.get(key), str)]
    if inside and data.draw(st.booleans()):
        try:
            text = {"it": json.loads(row[inside[0]])}
        except (ValueError, RecursionError):
            return row
        return {**row, inside[0]: json.dumps(damage(text, JUNK, data).get("it"))}
    found = list(places(row))
    if not found:
        return row
    place, act = data.draw(st.sampled_from(found)), data.draw(st.sampled_from(ACTS))
    broken: Row = damaged(row, place, act, data.draw(st.sampled_from(junk)))
    return broken


def check(format: SourceFormat, row: Row) -> None:
    """What a converter makes of ``row`` is a reason of its own or can be asked and written."""
    prompt = CONVERT[format](row)
    if isinstance(prompt, str):
        assert prompt in REASONS[format]
        return
    assert isinstance(prompt, Prompt)
    roles = [message["role"] for message in prompt.messages]
    assert roles[-1] in ("user", "tool")
    assert not any(a == b == "user" for a, b in itertools.pairwise(roles))
    assert all(type(message["content"]) is str for message in prompt.messages)
    written = orjson.dumps({**prompt.content, "source": prompt.source_id})
    assert b"\\u0000" not in written
    assert files.digest(prompt.content)
    assert CONVERT[format](row) == prompt


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_row_becomes_a_prompt_or_a_known_reason(data: st.DataObject) -> None:
    dataset, row = data.draw(st.sampled_from(OBJECTS))
    for _ in range(data.draw(st.integers(1, 4))):
        row = damage(row, [*JUNK, *DEEP, TOO_DEEP], data)
    check(format_of(dataset), row)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_prepare_accounts_for_every_damaged_row(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("damaged")
    site = make_site(root)
    num_rows: dict[str, int] = {}
    for entry in site.datasets:
        name, path = entry["name"], root / f"{entry['name']}.jsonl"
        whole = [row for dataset, row in OBJECTS if dataset == name]
        broken = [damage(row, JUNK + DEEP, data) for row in whole]
        text = "".join(json.dumps(row) + "\n" for row in [*broken, *whole])
        path.write_text(text, encoding="utf-8", newline="")
        entry["path"], num_rows[name] = str(path), 2 * len(whole)
    site.run()
    for name in num_rows:
        counts = site.counts(name)
        assert counts["source_rows"] == num_rows[name]
        assert counts["prompts"] == len(ids(site.prepared(name).prompt_ids)) >= 5


# Any row ------------------------------------------------------------------------------------------

KEYS = (
    "id input problem instruction question messages conversations trajectory role from content"
    " value text system_prompt system chat tool_calls function name arguments traj_id index tools"
    " prompt starter_code tool_call_id tool_call_ids"
).split()
TEXTS = st.one_of(
    st.text(alphabet=st.characters(), max_size=20),
    st.sampled_from(
        [
            *("user", "human", "assistant", "gpt", "ai", "tool", "system", "bard", "", "\0"),
            *("USER: a\n\n\nASSISTANT: b\n\n\nUSER: c", "\ud800", "<think>", "[1]", '"a"'),
            'USER: a\n\n\nASSISTANT: <functioncall> {"name": "x", "arguments": \'{}\'}',
            'x {"name": "f", "n": 1e999} {"name": 5}',
            '[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}]',
        ]
    ),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(TEXTS, st.none(), st.booleans(), st.integers(), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=25,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": TEXTS, "content": TEXTS, "from": TEXTS, "value": TEXTS},
        optional={"tool_calls": VALUES, "text": VALUES, "tool_call_id": VALUES},
    ),
    max_size=6,
)
ROWS = st.dictionaries(st.sampled_from(KEYS), st.one_of(VALUES, TURNS, TEXTS), max_size=8)


@settings(max_examples=150, deadline=None)
@given(row=ROWS)
def test_any_row_becomes_a_prompt_or_a_known_reason(row: Row) -> None:
    for format in CONVERT:
        check(format, row)
