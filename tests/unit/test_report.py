"""The pages of a report: what is seen first, and that nothing foreign becomes markup."""

from __future__ import annotations

import csv
import html.parser
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from unit.report_site import INCLUDE, SOUND, Site, fact, found, prepared, site
from unit.test_show import answer, put

from drafter.files import write_section
from drafter.layout import Prepared
from drafter.report.figures import figures
from drafter.report.html import page, tag
from drafter.report.page import dataset_page
from drafter.report.tables import lines
from drafter.validation import audit, findings

__all__ = ["prepared", "site"]


def test_files_hold_the_rows_the_figures_and_the_pages(site: Site) -> None:
    counts = {"prompts": 6, "failed": {"abort": 1}, "completion_tokens": 90}
    section = {"counts": counts, "token_budget": 100}
    write_section(site.prepared.manifest, "generate", {**section, "stop_reason": "budget"})
    made = site.finish("1 of 6 rows are of class 'unclosed', at most 10% may be")
    assert made == [site.prepared.findings, site.prepared.summary]
    frame = pd.read_parquet(site.prepared.findings)
    assert frame["kind"].tolist() == ["closed"] * 4 + ["unclosed", "damaged line"]
    assert frame["sample_id"].isna().tolist() == [False] * 5 + [True]
    assert frame["answer_script"].tolist()[:4] == ["Latin"] * 4
    assert frame["audited"].all() and frame.attrs["token_budget"] == 100
    with open(site.prepared.summary, newline="") as file:
        values = {(row["figure"], row["label"]): row["value"] for row in csv.DictReader(file)}
    assert values["rows", "stored"] == "6" and values["reasoning", "missing"] == "1"
    assert values["generate", "stop reason"] == "budget"
    assert values["thinking tokens, histogram", "8"] == "5"
    for page_ in (site.page, site.overview):
        assert "1 of 6 rows (16.7\u202f%) has no reasoning</h1>" in page_
        assert "B1 is refused" in page_ and "at most 10% may be" in page_
    assert "of 6 prompts, 1 got no answer" in site.page
    assert "90.0\u202f% of a budget of 100; ended by budget" in site.page
    assert "Not validated, or by another version: B2." in site.overview
    assert 'href="prepared/B1/report.html"' in site.overview


class Markup(html.parser.HTMLParser):
    """Every element and attribute of a page; fails on one that is not closed."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\u202e'\"&amp;"


def test_hostile_text_stays_text(site: Site) -> None:
    row = answer("B1-5", f"{HOSTILE}</think>{HOSTILE}<|im_end|>")
    site.store(row, "repetition", reason=f"repetition: {HOSTILE}")
    site.store(answer(HOSTILE, SOUND), "unclosed", sample_id=HOSTILE)
    site.finish(f"too many: {HOSTILE}")
    for text in (site.page, site.overview):
        markup = Markup(text)
        assert not markup.tags & {"script", "img", "iframe", "link", "object", "form"}
        assert not [name for name, _ in markup.attributes if name.startswith("on")]
        links = [value for name, value in markup.attributes if name in ("href", "src")]
        assert all(re.fullmatch(r"#audit-\d+|(\.\./)*[\w./-]+\.html", link) for link in links)
        assert "\u202e" not in text and "\x1b" not in text
    assert site.page.count("&lt;script&gt;alert(1)") >= 5


LONG = "M" * 1_000_000


def test_whatever_the_answers_hold_a_page_stays_small_enough_to_open(site: Site) -> None:
    turn = {"role": "user", "content": "<" * 5000}
    for number in range(6, 30):
        name = f"B1-{number}"
        put(site.prepared.prompts, {"sample_id": name, "messages": [turn] * 100, "tools": None})
        site.store(answer(name, f"{'oak ' * 3000}</think>{'elm ' * 3000}<|im_end|>"), "closed")
    odd = {"sample_id": LONG, "messages": [{"role": LONG, "content": LONG}], "tools": [LONG]}
    put(site.prepared.prompts, odd)
    site.store(answer(LONG, SOUND), "no stop id")
    site.finish()
    assert len(site.page) < 3_000_000 and "[... 92 turns ...]" in site.page
    assert "M" * 121 not in site.overview + re.sub("(?s)<pre.*?</pre>", "", site.page)


def test_lists_deep_in_each_other_are_shown_as_the_line_they_stand_in(site: Site) -> None:
    deep = b'{"sample_id":"B1-5","output_ids":' + b"[" * 1000 + b"]" * 1000 + b"}\n"
    put(site.prepared.prompts, deep)
    site.store(deep, "damaged line")
    site.finish()
    assert "&quot;output_ids&quot;:[[[[" in site.page


def test_a_single_row_above_its_cap_is_not_called_too_many() -> None:
    counted = found(("unclosed",), *[("closed",)] * 3)
    for cap, colour in ((0.1, ""), (0.0, "bad")):
        counted.about["cap"]["unclosed"] = cap
        text = dataset_page(figures(counted), [])
        share = re.search(r'<span class="(\w*)">25\.0\u202f%</span>', text)
        assert share is not None and share[1] == colour


def test_a_page_loads_nothing_and_runs_nothing(site: Site) -> None:
    site.finish()
    for text in (site.page, site.overview):
        assert "http:" not in text and "https:" not in text and "url(" not in text
        assert "default-src 'none'" in text and "<script" not in text
        assert "prefers-color-scheme: dark" in text


def test_the_same_rows_give_the_same_bytes_and_no_date(site: Site) -> None:
    site.finish()
    paths = (*site.prepared.root.iterdir(), site.job.workspace.report)
    before = {path: path.read_bytes() for path in paths if path.is_file()}
    site.prepared.root.joinpath(".report.html.1.partial").touch()
    site.finish()
    command = [sys.executable, "-m", "drafter", "report", "B1"]
    env = {**os.environ, "PYTHONHASHSEED": "7", "LC_ALL": "C"}
    env["DRAFTER_WORKSPACE"] = str(site.job.workspace.root)
    subprocess.run(command, check=True, cwd=INCLUDE, env=env, stdout=subprocess.DEVNULL)
    assert {path: path.read_bytes() for path in before} == before
    assert not list(site.prepared.root.glob(".*.partial"))


@pytest.mark.parametrize("num_rows", [0, 1, 3, 99])
def test_every_class_is_among_the_rows_to_read(num_rows: int) -> None:
    rows = [("closed",)] * 40 + [("repetition", "closed"), ("no answer", "closed"), ("unclosed",)]
    frame = found(*rows).frame
    drawn = audit.draw(frame, num_rows)
    assert len(drawn) == len(set(drawn)) <= max(num_rows, 1) + 3
    kinds = {kind for position in drawn for kind in frame["kinds"][position].split(", ")}
    everything = {kind for kinds in rows for kind in kinds}
    assert kinds == (everything if num_rows else set())
    assert len(drawn) >= min(num_rows, len(rows))
    verdicts = [frame["verdict"][position] for position in drawn]
    assert verdicts == sorted(verdicts, reverse=True)


def test_the_rows_to_read_do_not_depend_on_the_order_they_were_stored_in() -> None:
    facts = [fact(number, ("closed",)) for number in range(1, 200)]
    other = [one._replace(number=number) for number, one in enumerate(reversed(facts), start=1)]
    drawn = []
    for each in (facts, other):
        frame = findings.table(each)
        drawn.append([frame["sample_id"][position] for position in audit.draw(frame, 24)])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 24


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_the_first_example_of_a_class_is_among_the_rows_to_read(num_rows: int) -> None:
    rows = [("closed",), ("repetition", "closed"), ("no answer", "closed"), ("unclosed",)] * 30
    counted = found(*rows)
    drawn = audit.draw(counted.frame, num_rows)
    audited = {counted.frame["sample_id"][position] for position in drawn}
    assert {kind.examples[0] for kind in figures(counted).kinds} <= audited


@pytest.mark.parametrize(
    ("text", "scripts"),
    [
        ("oak 42 <b>", {"Latin": 4}),
        ("да oak", {"Cyrillic": 2, "Latin": 3}),
        ("漢字 かな カナ", {"Han": 2, "Japanese kana": 4}),
        ("한국 عرب", {"Hangul": 2, "Arabic": 3}),
        ("123 !? 🙂", {}),
    ],
)
def test_letters_are_counted_by_script(text: str, scripts: dict[str, int]) -> None:
    assert dict(audit.scripts(text)) == scripts


def test_scripts_say_how_few_rows_they_are_of(site: Site) -> None:
    site.finish()
    assert "Of the 6 rows of the audit sample only, out of 6:" in site.page


def test_the_table_for_the_log_is_short_and_its_numbers_stand_under_each_other() -> None:
    rows = [("closed",)] * 2000 + [("unclosed",)] * 7
    counted = figures(found(*rows, num_tool_calls=2, num_valid_tool_calls=1))
    table = lines(counted, Path("/w/prepared/B1/report.html"))
    assert table == [
        "                    rows   share   tokens",
        "accepted           2,000  99.7 %   32,000",
        "flagged                0     0 %        0",
        "rejected               7   0.3 %      112",
        "no reasoning           7   0.3 %",
        "ended by length        0     0 %",
        "valid tool calls   2,007  50.0 %",
        "tokens per row    median    95 %  longest",
        "  prompt               5       5        5",
        "  thinking            10      10       10",
        "  answer               4       4        4",
        "report: /w/prepared/B1/report.html",
    ]


def test_no_rows_at_all_make_a_report_too(prepared: Prepared) -> None:
    put(prepared.responses)
    site = Site(prepared)
    site.finish()
    assert "No rows are stored" in site.page and "No rows are stored" in site.overview


def test_what_is_no_markup_of_ours_is_escaped_wherever_it_stands() -> None:
    text = page("<t>", tag("p", "<b>", title='"><i>'), "<u>")
    assert "<b>" not in text and "<i>" not in text and "<u>" not in text and "<t>" not in text
