"""The figures of a report: what is counted, and how it is said."""

from __future__ import annotations

import pytest
from unit.report_site import found

from drafter.report.figures import EDGES, figures, group
from drafter.report.glance import headline
from drafter.report.html import percent


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("closed",), "sound"),
        (("repetition", "closed"), "sound"),
        (("tool in thinking",), "sound"),
        (("unclosed",), "missing"),
        (("thinking as text", "unclosed"), "missing"),
        (("repetition", "unclosed"), "missing"),
        (("empty thinking",), "empty"),
        (("truncated in thinking",), "cut"),
        (("thinking although off",), "unasked"),
        (("duplicate",), "unjudged"),
        (("damaged line",), "unjudged"),
        (("no answer", "closed"), "sound"),
    ],
)
def test_a_row_is_in_the_worst_group_that_its_classes_name(
    kinds: tuple[str, ...], expected: str
) -> None:
    assert group(kinds) == expected


@pytest.mark.parametrize(
    ("rows", "thinking", "told", "bad"),
    [
        ([("closed",)] * 4, True, "All 4 rows have their reasoning", False),
        ([("closed",)] * 3 + [("unclosed",)], True, "1 of 4 rows (25.0 %) has no reasoning", True),
        (
            [("closed",)] * 2588 + [("unclosed",)] * 400 + [("empty thinking",)] * 12,
            True,
            "412 of 3,000 rows (13.7 %) have no reasoning",
            True,
        ),
        (
            [("closed",), ("duplicate",)],
            True,
            "No row lost its reasoning: 1 of 2 are as they should be",
            False,
        ),
        ([("not thinking",)], False, "Thinking is off for this target, and no row thinks", False),
        (
            [("thinking although off",)],
            False,
            "Thinking is off for this target, yet 1 of 1 row think",
            True,
        ),
        ([], True, "No rows are stored", True),
    ],
)
def test_the_first_sentence_says_how_many_rows_have_no_reasoning(
    rows: list[tuple[str, ...]], thinking: bool, told: str, bad: bool
) -> None:
    counted = found(*rows)
    counted.about["thinking"] = thinking
    first = headline([figures(counted)]).replace("\u202f", " ")
    assert f">{told}</h1>" in first
    assert ('class="bad"' in first) is bad


def test_figures_add_up_to_the_rows() -> None:
    rows = [("closed",)] * 5 + [("unclosed",)] * 2 + [("tool in thinking",), ("invalid row",)]
    counted = figures(found(*rows, ("repetition", "closed")))
    assert counted.rows == 10 and counted.valid == 9
    assert sum(counted.groups.values()) == sum(counted.verdicts.values()) == 10
    assert counted.verdicts == {"accepted": 5, "flagged": 1, "rejected": 4}
    assert counted.verdict_tokens == {"accepted": 80, "flagged": 16, "rejected": 48}
    assert [(kind.name, kind.rows, kind.tokens) for kind in counted.kinds] == [
        ("closed", 6, 96),
        ("unclosed", 2, 32),
        ("invalid row", 1, 0),
        ("repetition", 1, 16),
        ("tool in thinking", 1, 16),
    ]
    thinking = counted.spreads["thinking"]
    assert (thinking.median, thinking.p95, thinking.longest, thinking.total) == (10, 10, 10, 90)
    assert thinking.counts[EDGES.index(8)] == sum(thinking.counts) == 9


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 63, 64, 65, 1448, 40_000, 10**6, 5 * 10**6])
def test_every_length_has_a_bin(tokens: int) -> None:
    spread = figures(found(("closed",), thinking_tokens=tokens)).spreads["thinking"]
    (place,) = (place for place, rows in enumerate(spread.counts) if rows)
    assert EDGES[place] <= tokens
    assert tokens < EDGES[place + 1] or place == len(spread.counts) - 1
    assert figures(found(("closed",), thinking_tokens=0)).spreads["thinking"].num_none == 1


@pytest.mark.parametrize(
    ("part", "whole", "told"),
    [
        *((0, 10, "0 %"), (10, 10, "100 %"), (1, 3, "33.3 %"), (0, 0, "–")),
        *((1, 100_000, "< 0.1 %"), (99_999, 100_000, "> 99.9 %"), (1, 2000, "0.1 %")),
    ],
)
def test_a_share_is_never_nothing_for_something_nor_all_for_less(
    part: int, whole: int, told: str
) -> None:
    assert percent(part, whole).replace("\u202f", " ") == told
