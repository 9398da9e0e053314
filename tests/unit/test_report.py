"""The report: what is counted, what is seen first, and that nothing foreign becomes markup."""

from __future__ import annotations

import csv
import html.parser
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
import pytest
from unit.test_show import TOKENIZER, answer, prepared, put

from demo.make_target import TARGET
from drafter import audit, cli, findings, template, validate
from drafter.errors import DataError, RecipeError
from drafter.facts import Facts, Outcome
from drafter.files import file_record, read_section, write_json, write_section
from drafter.findings import Findings
from drafter.identity import generation_identity, target_identity
from drafter.job import Job
from drafter.layout import Prepared, Workspace
from drafter.recipe import Recipe, parse_recipe
from drafter.report import Report
from drafter.report.figures import EDGES, figures, group
from drafter.report.glance import headline
from drafter.report.html import page, percent, tag
from drafter.report.page import dataset_page
from drafter.report.tables import lines

__all__ = ["prepared"]
FAMILY = template.family(TARGET, TOKENIZER)
INCLUDE = Path(__file__).parents[2] / "include"
SOUND = "oak elm</think>palm bay<|im_end|>"


def found(*rows: tuple[str, ...], **more: Any) -> Findings:
    """Rows of these classes, the deciding one first, as validate would find them."""
    facts = [fact(number, kinds, **more) for number, kinds in enumerate(rows, start=1)]
    about: findings.About = {
        "dataset": "B1",
        "thinking": True,
        "responses_bytes": 0,
        "prompts": None,
        "failed": None,
        "completion_tokens": None,
        "token_budget": None,
        "stop_reason": None,
        "refused": [],
        "policy": {},
        "cap": {},
        "letters": {},
    }
    table = findings.table(facts)
    table["audited"] = False
    return Findings(table, about)


def fact(number: int, kinds: tuple[str, ...], offset: int = 0, **more: Any) -> Facts:
    """Invalid where the class says so; otherwise 10 tokens of thinking and 4 of answer."""
    told: Any = kinds
    verdict = "accepted" if kinds[0] in ("closed", "not thinking") else "rejected"
    if kinds[0] == "tool in thinking":
        verdict = "flagged"
    id_ = None if kinds[0] == "damaged line" else f"B1-{number - 1}"
    if kinds[0] in ("damaged line", "invalid row", "duplicate"):
        return Facts(number, offset, id_, "rejected", told, kinds[0])
    numbers = {"prompt_tokens": 5, "completion_tokens": 16, "thinking_tokens": 10}
    numbers |= {"answer_tokens": 4, "finish_reason": "stop", **more}
    return Facts(number, offset, id_, verdict, told, kinds[0], **numbers)  # type: ignore[arg-type]


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


class Site:
    """Rows of a dataset, as stored and as validate would find them."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        recipe = two_datasets(prepared)
        write_json(Workspace(prepared.root.parents[1]).recipe, recipe.as_json())
        self.job = Job(
            phase="validate",
            dataset="B1",
            recipe=recipe,
            dir=Workspace(prepared.root.parents[1]).job("validate", "B1"),
            start_id="start",
            code="code",
            run_id="run",
            mode="resume",
            token_budget=None,
            in_flight=1,
        )
        self.facts: list[Facts] = []

    def store(self, row: Any, *kinds: str, **facts: Any) -> None:
        number = len(self.facts) + 1
        there = self.prepared.responses.exists()
        offset = self.prepared.responses.stat().st_size if there else 0
        put(self.prepared.responses, row)
        fact_ = fact(number, kinds, offset)
        if isinstance(row, dict):
            facts = {"sample_id": row["sample_id"], **facts}
        self.facts.append(fact_._replace(**facts))

    def finish(self, *breaches: str) -> list[Path]:
        report = Report(self.job, self.prepared, TOKENIZER, FAMILY)
        by_kind: dict[str, int] = {}
        for facts in self.facts:
            report.add(facts, None)
            for kind in facts.kinds:
                by_kind[kind] = by_kind.get(kind, 0) + 1
        return list(report.finish(Outcome("B1", {"by_kind": by_kind}, breaches, ())))

    @property
    def page(self) -> str:
        return self.prepared.report.read_text(encoding="utf-8")

    @property
    def overview(self) -> str:
        return self.job.workspace.report.read_text(encoding="utf-8")


def two_datasets(prepared: Prepared) -> Recipe:
    tree = {
        "name": "test",
        "target": {"path": str(TARGET), "revision": "r1"},
        "engine": {"urls": ["http://127.0.0.1:9"]},
        "datasets": [
            {"name": name, "format": "glaive", "path": "/none", "unbounded": True}
            for name in ("B1", "B2")
        ],
        "host": {"workspace": str(prepared.root.parents[1])},
    }
    return parse_recipe(tree, "test")


@pytest.fixture
def site(prepared: Prepared) -> Site:
    site = Site(prepared)
    for number in range(4):
        site.store(answer(f"B1-{number}", SOUND), "closed")
    site.store(answer("B1-4", "oak<|im_end|>"), "unclosed")
    site.store(b'{"sample_id": "B1-00\x1b[31m<i>\n', "damaged line")
    return site


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


def run(site: Site, *arguments: str) -> int:
    return cli.main([arguments[0], "--workspace", str(site.job.workspace.root), *arguments[1:]])


def test_pages_are_made_anew_from_what_validate_left(site: Site, capsys: Any) -> None:
    site.finish()
    pages = {path: path.read_bytes() for path in (site.prepared.report, site.job.workspace.report)}
    data = site.prepared.findings.read_bytes()
    for path in pages:
        path.unlink()
    capsys.readouterr()
    assert run(site, "report") == 0
    assert {path: path.read_bytes() for path in pages} == pages
    assert site.prepared.findings.read_bytes() == data
    shown = capsys.readouterr().out
    assert "no reasoning" in shown and f"all datasets: {site.job.workspace.report}" in shown


def test_a_report_of_answers_that_changed_since_is_refused_and_called_outdated(site: Site) -> None:
    site.finish()
    put(site.prepared.responses, answer("B1-5", SOUND))
    with pytest.raises(DataError, match=r"validate saw [\d,]+: run validate again"):
        run(site, "report", "B1")
    assert ">outdated</span>" in site.overview


def test_without_a_validation_there_is_no_report(site: Site) -> None:
    with pytest.raises(DataError, match="is validated yet: run validate first"):
        run(site, "report")
    with pytest.raises(DataError, match=r"rows\.parquet is missing: run validate first"):
        run(site, "report", "B1")
    with pytest.raises(RecipeError, match="no dataset 'B9'"):
        run(site, "report", "B9")
    with pytest.raises(DataError, match=r"rows\.parquet is missing: run validate first"):
        run(site, "show", "B1", "--audit")


@pytest.mark.parametrize("content", ["nothing", "another table", "another writer"])
def test_a_table_that_cannot_be_read_is_named_and_harms_no_other_dataset(
    site: Site, content: str
) -> None:
    other = site.job.workspace.prepared("B2").findings
    other.parent.mkdir()
    for path in (other, site.prepared.findings):
        if content == "nothing":
            path.write_bytes(b"PAR1")
        elif content == "another writer":
            column = pyarrow.table({"a": [1]})
            pyarrow.parquet.write_table(column.replace_schema_metadata({"pandas": "{}"}), path)
        else:
            pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(DataError, match=r"rows\.parquet .* delete it, then run validate"):
        run(site, "report", "B1")
    site.finish()
    assert "by another version: B2." in site.overview
    with pytest.raises(DataError, match=r"B2/rows\.parquet .* delete it, then run validate"):
        run(site, "report")


def test_show_has_the_same_rows_as_the_page(site: Site, capsys: Any) -> None:
    site.finish()
    capsys.readouterr()
    assert run(site, "show", "B1", "--audit") == 0
    shown = capsys.readouterr().out
    assert shown.index("rejected: damaged line") < shown.index("accepted: closed")
    assert "rejected: unclosed" in shown and '--- line\n{"sample_id": "B1-00\\x1b[31m<i>' in shown
    assert re.findall(r"^(\S+(?: \d)?)  raw", shown, re.M) == re.findall(
        r'class="id">(.+?)<', site.page
    )
    assert run(site, "show", "B1", "--audit", "--rejected") == 0
    assert "accepted: closed" not in capsys.readouterr().out


def originate(site: Site) -> None:
    """Say in the manifest what prepare and generate would have said."""
    recipe, prepared = site.job.recipe, site.prepared
    prompt_ids = {prepared.prompt_ids.name: file_record(prepared.prompt_ids)}
    section = {"identity": target_identity(recipe), "files": prompt_ids}
    write_section(prepared.manifest, "prepare", section)
    write_section(prepared.manifest, "generate", {"identity": generation_identity(recipe)})
    site.job.dir.root.mkdir(parents=True)


def test_validate_leaves_a_report_and_records_its_tables(prepared: Prepared, capsys: Any) -> None:
    site = Site(prepared)
    put(prepared.responses, *(answer(f"B1-{number}", SOUND) for number in range(6)))
    originate(site)
    validate.run(site.job)
    section = read_section(prepared.manifest, "validate") or {}
    assert section["report"] == {
        path.name: file_record(path) for path in (prepared.findings, prepared.summary)
    }
    assert "All 6 rows have their reasoning" in site.page
    assert f"report: {prepared.report}" in capsys.readouterr().out
    frame = findings.load(prepared.findings).frame
    assert frame["thinking_tokens"].tolist() == [2] * 6


def test_a_dataset_that_validate_refuses_has_its_report(prepared: Prepared) -> None:
    site = Site(prepared)
    put(prepared.responses, *(answer(f"B1-{number}", SOUND) for number in range(4)))
    put(prepared.responses, *(answer(f"B1-{number}", "oak<|im_end|>") for number in (4, 5)))
    originate(site)
    with pytest.raises(DataError, match="2 of 6 rows"):
        validate.run(site.job)
    for text in (site.page, site.overview):
        assert "2 of 6 rows (33.3\u202f%) have no reasoning" in text
        assert "B1 is refused" in text and "2 of 6 rows" in text


@pytest.mark.parametrize(
    "code",
    [
        "import drafter.report, drafter.audit, drafter.findings, drafter.validate",
        "import drafter.cli; drafter.cli.main(['status', '--workspace', '/none'])",
    ],
)
def test_pandas_is_imported_where_a_report_is_made_and_not_before(code: str) -> None:
    heavy = "{'pandas', 'pyarrow', 'torch', 'transformers'}"
    code = f"{code}; import sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=INCLUDE)


def test_what_is_no_markup_of_ours_is_escaped_wherever_it_stands() -> None:
    text = page("<t>", tag("p", "<b>", title='"><i>'), "<u>")
    assert "<b>" not in text and "<i>" not in text and "<u>" not in text and "<t>" not in text
