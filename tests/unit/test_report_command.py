"""Reports as validate leaves them, made anew and read by commands."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pandas as pd
import pyarrow.parquet
import pytest
from unit.report_site import INCLUDE, SOUND, Site, prepared, site
from unit.test_show import answer, put

from drafter import cli, validate
from drafter.errors import DataError, RecipeError
from drafter.files import file_record, read_section, write_section
from drafter.identity import generation_identity, target_identity
from drafter.layout import Prepared
from drafter.validation import findings

__all__ = ["prepared", "site"]


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
        "import drafter.report, drafter.validate; from drafter.validation import audit, findings",
        "import drafter.cli; drafter.cli.main(['status', '--workspace', '/none'])",
    ],
)
def test_pandas_is_imported_where_a_report_is_made_and_not_before(code: str) -> None:
    heavy = "{'pandas', 'pyarrow', 'torch', 'transformers'}"
    code = f"{code}; import sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=INCLUDE)
