"""The page of a training: whole, script-free, the same for the same lines, and what it shows."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from drafter.training import curves


def line(step: int, held_out: bool = False) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "step": step, "loss": 10 / step, "loss_0": 6 / step, "loss_1": 4 / step,
        "acc_0": 1 - 1 / step, "acc_1": 0.5 - 0.5 / step, "acc_len": 1.0, "grad_norm": 1.0,
        "lr": 1e-4, "tokens": 100, "tokens_per_s": 7,
    }  # fmt: skip
    if held_out:
        seen = {name: value for name, value in numbers.items() if name[:3] in ("los", "acc")}
        numbers |= {f"held_out_{name}": value for name, value in seen.items()}
    return numbers


LINES = [line(step, step % 5 == 0) for step in range(1, 41)]


def test_the_page_is_one_file_without_scripts_and_its_drawings_are_well_formed() -> None:
    page = curves.page("abc", LINES)
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) == 6
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert "40 steps over 4,000 tokens, loss 0.250" in page


def test_what_the_clock_says_is_not_on_the_page() -> None:
    later = [{**each, "tokens_per_s": 99} for each in LINES]
    assert curves.page("abc", LINES) == curves.page("abc", later)


def test_without_held_out_rows_their_curves_are_left_out() -> None:
    page = curves.page("abc", [line(step) for step in range(1, 41)])
    assert "held out" not in page and page.count("<svg") == 5


@pytest.mark.parametrize("lines", [[], [line(1)], [line(1, True)]], ids=["none", "one", "looked"])
def test_a_page_of_no_step_or_one_is_a_page(lines: list[dict[str, Any]]) -> None:
    assert curves.page("abc", lines).startswith("<!doctype html>")
    assert len(curves.text(lines)) == (2 if lines else 0)


def test_a_long_curve_is_thinned_out_to_means() -> None:
    many = [{"step": step, "loss": float(step % 2)} for step in range(1, 20_001)]
    thin = curves.curve("loss", many, "loss")
    assert len(thin.points) <= 300
    assert all(value == pytest.approx(0.5, abs=0.02) for _, value in thin.points)


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0.951, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (21.1, [0, 5, 10, 15, 20, 25]),
        (1e-4, [0, 2e-5, 4e-5, 6e-5, 8e-5, 1e-4]),
        (0.0, [0, 0.25]),
    ],
)
def test_an_axis_has_round_numbers(highest: float, ticks: list[float]) -> None:
    assert curves._ticks(highest) == pytest.approx(ticks)


def test_the_table_has_a_dozen_lines_and_ends_with_the_last_look() -> None:
    lines = [line(step, step % 5 == 0) for step in range(1, 501)]
    header, *rows = curves.text(lines)
    assert "held out loss" in header and len(rows) <= 12
    assert rows[-1].split()[0] == "500"
    assert len({len(row) for row in (header, *rows)}) == 1
