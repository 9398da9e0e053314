"""What validate found, for people: a page per dataset and over all, tables, rows to read.

:class:`Report` collects one tuple per row while validate reads; of its tokens nothing is kept. At
the end it writes ``rows.parquet``, ``summary.csv`` and the pages (see drafter.layout). The same
rows give the same bytes. pandas is imported here at the end only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drafter.errors import DataError
from drafter.files import clear_partial, locked, read_section, whole_file
from drafter.job import Job
from drafter.layout import Prepared, Workspace
from drafter.recipe import Recipe
from drafter.report.figures import figures
from drafter.report.overview import Entry, overview
from drafter.report.page import dataset_page
from drafter.report.reading import Audited
from drafter.report.tables import lines, summary
from drafter.rows import Family
from drafter.show import Reader, view
from drafter.validation import audit, findings
from drafter.validation.facts import Facts, Outcome
from drafter.validation.findings import About, Findings


class Report:
    """Collects what validate finds on one dataset."""

    def __init__(self, job: Job, prepared: Prepared, tokenizer: Any, family: Family) -> None:
        self._job = job
        self._prepared = prepared
        self._reader = Reader(tokenizer, family, job.recipe.target)
        self._facts: list[Facts] = []

    def add(self, facts: Facts) -> None:
        self._facts.append(facts)

    def finish(self, outcome: Outcome) -> Iterable[Path]:
        """Write everything; gives the files that hold the data, in the dataset's directory. The
        pages are views of them and may be made anew."""
        prepared, recipe = self._prepared, self._job.recipe
        about = _about(prepared, recipe, outcome)
        found = Findings(findings.table(self._facts), about)
        audited = _audit(prepared, found, recipe.validate_.audit_rows, self._reader)
        counted = figures(found)
        with locked(self._job.workspace.report_lock, wait=True):
            findings.save(found, prepared.findings)
            _write(prepared.summary, summary(counted))
            _write(prepared.report, dataset_page(counted, audited))
            _write_overview(self._job.workspace, recipe)
        for line in lines(counted, prepared.report):
            print(line, flush=True)
        return [prepared.findings, prepared.summary]


def remake(workspace: Workspace, recipe: Recipe, dataset: str, reader: Reader) -> list[str]:
    """The dataset's page anew, from rows.parquet and the answers; gives the table for a log.
    DataError when one is missing or they do not belong together."""
    prepared = workspace.prepared(dataset)
    with locked(workspace.report_lock, wait=True):
        found = findings.load(prepared.findings)
        audited = _audit(prepared, found, recipe.validate_.audit_rows, reader)
        counted = figures(found)
        _write(prepared.report, dataset_page(counted, audited))
    return lines(counted, prepared.report)


def remake_overview(workspace: Workspace, recipe: Recipe) -> None:
    with locked(workspace.report_lock, wait=True):
        _write_overview(workspace, recipe)


def _write_overview(workspace: Workspace, recipe: Recipe) -> None:
    entries, missing = [], []
    for name in recipe.dataset_names:
        prepared = workspace.prepared(name)
        try:
            found = findings.load(prepared.findings)
        except DataError:
            # None yet, or of another version: that must not fail the dataset at hand.
            missing.append(name)
            continue
        outdated = audit.responses_bytes(prepared) != found.about["responses_bytes"]
        entries.append(Entry(figures(found), outdated))
    _write(workspace.report, overview(recipe.name, entries, missing))


def _about(prepared: Prepared, recipe: Recipe, outcome: Outcome) -> About:
    generate = read_section(prepared.manifest, "generate") or {}
    counts, rules = generate.get("counts", {}), recipe.validate_
    failed = counts.get("failed")
    kinds = sorted(outcome.counts["by_kind"])
    caps = {kind: rules.cap_of(kind) for kind in kinds}
    return {
        "dataset": outcome.dataset,
        "thinking": recipe.target.thinking,
        "responses_bytes": audit.responses_bytes(prepared),
        "prompts": counts.get("prompts"),
        "failed": None if failed is None else sum(failed.values()),
        "completion_tokens": counts.get("completion_tokens"),
        "token_budget": generate.get("token_budget"),
        "stop_reason": generate.get("stop_reason"),
        "refused": [*outcome.breaches, *outcome.damaged],
        "policy": {kind: rules.policy_of(kind) for kind in kinds},
        "cap": {kind: cap for kind, cap in caps.items() if cap is not None},
        "letters": {},
    }


def _audit(prepared: Prepared, found: Findings, num_rows: int, reader: Reader) -> list[Audited]:
    positions, rows = audit.read(prepared, found, num_rows)
    views = [view(row.sample, reader) for row in rows]
    audit.mark_scripts(found, positions, views)
    return [Audited(shown, row.verdict, row.kinds) for shown, row in zip(views, rows, strict=True)]


def _write(path: Path, text: str) -> None:
    """The caller holds the report's lock."""
    clear_partial(path.parent, path.name)
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
