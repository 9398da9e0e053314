"""Which prompts count as one: the fast ways give what the plain definition gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.files import digest
from drafter.preparation.likeness import hashes
from drafter.sources.prompt import clean

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    " \t\n\r\v\f\x1c\x1f\x85\u00a0aAbBßẞſK", max_size=8
)


def contents(*texts: str) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    return {"messages": messages, "tools": None}


@given(texts=st.lists(TEXTS.map(clean), min_size=1, max_size=3))
def test_the_whole_hash_is_that_of_canonical_json(texts: list[str]) -> None:
    assert hashes(contents(*texts))[0].hex() == digest(contents(*texts))


@given(first=TEXTS.map(clean), second=TEXTS.map(clean))
def test_contents_are_near_if_case_and_the_amount_of_white_space_are_all_that_differs(
    first: str, second: str
) -> None:
    def plain(text: str) -> str:
        return " ".join(text.casefold().split())

    are_near = hashes(contents(first))[1] == hashes(contents(second))[1]
    assert are_near == (plain(first) == plain(second))
    spread = "\n\t" + first.upper().replace(" ", " \u2003 \n") + "  "
    assert (
        plain(spread) != plain(first) or hashes(contents(spread))[1] == hashes(contents(first))[1]
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (contents("a", "b"), contents("a b")),
        (contents("ab"), contents("a b")),
        (contents("a", "b"), contents("b", "a")),
        (contents("a"), {**contents("a"), "tools": []}),
        (contents("a"), {**contents("a"), "tools": [{"type": "function"}]}),
        (contents("user", "x"), contents("user\nassistant x")),
        (
            {"messages": [{"role": "tool", "tool_call_id": "1", "content": "a"}], "tools": None},
            {"messages": [{"role": "tool", "tool_call_id": "2", "content": "a"}], "tools": None},
        ),
    ],
)
def test_what_differs_in_more_is_not_near(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert hashes(one)[1] != hashes(other)[1]
    assert hashes(one)[0] != hashes(other)[0]


def test_tools_and_calls_are_compared_without_case_and_white_space_too() -> None:
    def called(text: str) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        messages = [{"role": "assistant", "content": text, "tool_calls": [call]}]
        return {"messages": messages, "tools": [{"x": [text, 0.5, 1e-7, None]}]}

    assert hashes(called("A  b"))[1] == hashes(called(" a\nB "))[1]
    assert hashes(called("A  b"))[0] != hashes(called(" a\nB "))[0]
    assert hashes(called("A  b"))[0].hex() == digest(called("A  b"))


def test_the_hash_of_a_known_content_stays_what_it_was() -> None:
    """Workspaces hold sample ids made of it."""
    assert hashes(contents('Grüße "x"\n\x7f'))[0].hex()[:16] == "bc86d854f604bb29"
