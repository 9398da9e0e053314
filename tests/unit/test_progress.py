"""The bar, the line in the log and the numbers say the same, with totals or without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from unit.fake_engine import FakeEngine, Reply, Site, answer, assert_complete, thoughtful
from unit.pty_child import PYTHONPATH, PtyChild
from unit.test_run import ASKS

from drafter import cli
from drafter.errors import Busy
from drafter.files import read_json
from drafter.generation.progress import Progress, bar
from drafter.terminal import duration


def progress(**changes: float | None) -> Progress:
    told = {
        "prompts": 1000, "responses": 250, "tokens": 1_000_000, "token_budget": 10_000_000,
        "tokens_per_s": 2500.0, "rows_per_s": 0.5, "in_flight": 150,
    }  # fmt: skip
    return Progress(**{**told, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "share", "eta_s"),
    [
        ({}, 0.25, 1500),  # the prompts run out first
        ({"tokens": 5_000_000}, 0.5, 1500),
        ({"tokens": 12_000_000}, 1.0, 0),
        ({"token_budget": None}, 0.25, 1500),
        ({"prompts": None}, 0.1, 3600),
        ({"prompts": None, "token_budget": None}, None, None),
        ({"prompts": 0, "responses": 0, "token_budget": None}, None, 0),
        ({"tokens_per_s": 0.0, "rows_per_s": 0.0}, 0.25, None),
    ],
)
def test_what_is_done_and_left(
    changes: dict[str, float | None], share: float | None, eta_s: int | None
) -> None:
    assert (progress(**changes).share, progress(**changes).eta_s) == (share, eta_s)


def test_a_wide_bar_says_everything() -> None:
    assert bar("B1", progress(), 200) == (
        "B1  [#######.......................]   25%  1,000,000/10,000,000 tokens"
        "  2,500 tokens/s  ETA 25:00  250 responses  150 in flight"
    )
    unknown = bar("B1", progress(prompts=None, token_budget=None), 200)
    assert (
        unknown.startswith(f"B1  [{'.' * 30}]    ? %  1,000,000 tokens  2,500")
        and "ETA ?" in unknown
    )


@pytest.mark.parametrize("width", [0, 1, 10, 40, 60, 80, 100, 120, 300])
@pytest.mark.parametrize("known", [True, False])
def test_a_bar_fits_any_terminal(width: int, known: bool) -> None:
    state = progress() if known else progress(prompts=None, token_budget=None)
    line = bar("B1_glaive", state, width)
    assert len(line) < max(width, 1) and "\n" not in line
    if width >= 60:
        assert "tokens/s" in line and "ETA" in line


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def slow(request: dict[str, object], _number: int, _again: int) -> Reply:
    return Reply(body=answer(request, thoughtful(request)), delay_s=0.5)


def test_a_terminal_sees_a_bar_and_then_one_line(tmp_path: Path) -> None:
    with FakeEngine(slow) as engine:
        engine.model_path = str(tmp_path / "target")
        site = Site(tmp_path, num_prompts=40, urls=(engine.url,))
        argv = [sys.executable, "-c", ASKS, str(site.job().dir.root)]
        with PtyChild(argv) as child:
            assert child.read_until("tokens/s  ETA "), child.shown
            assert child.end() == 0, child.shown
    assert "\r\x1b[KB1  [" in child.shown
    last = child.shown.rpartition("\r\x1b[K")[2]
    assert last.startswith("B1: 40 responses, ") and last.count("\n") == 1
    reported = read_json(site.job().dir.progress)
    assert reported["done"] and reported["eta_s"] == 0 and reported["responses"] == 40


def test_a_log_sees_plain_lines(tmp_path: Path) -> None:
    with FakeEngine(slow) as engine:
        engine.model_path = str(tmp_path / "target")
        site = Site(tmp_path, num_prompts=20, urls=(engine.url,))
        argv = [sys.executable, "-c", ASKS, str(site.job().dir.root)]
        done = subprocess.run(argv, env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout and "\x1b" not in done.stdout
    assert done.stdout.startswith("B1: 20 responses, ")


def test_a_second_writer_and_a_discard_are_refused(tmp_path: Path) -> None:
    with FakeEngine(slow) as engine:
        engine.model_path = str(tmp_path / "target")
        site = Site(tmp_path, num_prompts=80, urls=(engine.url,))
        argv = [sys.executable, "-c", ASKS, str(site.job().dir.root)]
        with PtyChild(argv) as child:
            assert child.read_until("tokens/s  ETA "), child.shown
            with pytest.raises(Busy, match="held by another job"):
                cli.main(["run", str(site.job().dir.root)])
            with pytest.raises(Busy, match="held by another job"):
                workspace = str(tmp_path / "workspace")
                cli.main(["discard", "B1", "--session", "1", "--yes", "--workspace", workspace])
            assert child.end() == 0, child.shown
    assert_complete(site, 80)


def test_an_interrupted_bar_leaves_a_clean_line(tmp_path: Path) -> None:
    with FakeEngine(slow) as engine:
        engine.model_path = str(tmp_path / "target")
        site = Site(tmp_path, num_prompts=400, urls=(engine.url,))
        code = ASKS.replace("cli.main", "raise SystemExit(cli.main").rstrip() + ")"
        with PtyChild([sys.executable, "-c", code, str(site.job().dir.root)]) as child:
            assert child.read_until("tokens/s  ETA "), child.shown
            child.process.terminate()
            assert child.end() == 143
    assert child.shown.endswith("\r\x1b[K") and "Traceback" not in child.shown
