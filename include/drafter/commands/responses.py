"""show, report, repair, discard, restart: a person's eye and hand on a dataset's answers. What
changes them shows first and needs ``--yes``."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.commands import ADD_YES, Add, count, prepared_of, recipe_of, workspace_of
from drafter.errors import DataError
from drafter.files import locked

if TYPE_CHECKING:
    from drafter.recipe import Recipe
    from drafter.show import Reader


def add_to(add: Add) -> None:
    show = add("show", _show, "samples as a person reads them")
    show.add_argument("dataset")
    which = show.add_mutually_exclusive_group()
    which.add_argument("--sample", metavar="ID")
    which.add_argument("--random", type=count, metavar="N")
    which.add_argument("--last", type=count, metavar="N", default=3, help="default: 3")
    which.add_argument("--audit", action="store_true", help="those of the report, with verdicts")
    show.add_argument("--rejected", action="store_true", help="of those that validate refused")
    show.add_argument("--full", action="store_true", help="long texts whole")

    report = add("report", _report, "make the pages of what validate found anew, and print it")
    report.add_argument("datasets", nargs="*", help="default: all that are validated")

    repair = add("repair", _repair, "set damaged lines of a dataset's files aside")
    repair.add_argument("dataset")
    repair.add_argument("--yes", action="store_true", help="do it, not only show it")

    discard = add("discard", _discard, "move answers of a session, or since a time, to archive/")
    discard.add_argument("dataset")
    which = discard.add_mutually_exclusive_group(required=True)
    which.add_argument("--session", help="number of the job start from 1, or its start_id")
    which.add_argument("--since", type=_moment, help="ISO time (UTC if it does not say), or Unix")
    discard.add_argument("--yes", action="store_true", help="do it, not only show it")

    restart = add("restart", _restart, "move all answers of a dataset to archive/")
    restart.add_argument("dataset")
    restart.add_argument("--yes", action="store_true", help="do it, not only show it")


def _moment(text: str) -> float:
    try:
        moment = _unix_or_iso(text)
        # What no calendar holds, nan and inf among it.
        datetime.fromtimestamp(moment, UTC)
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(f"{text!r} is neither an ISO nor a Unix time") from None
    return moment


def _unix_or_iso(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _show(arguments: argparse.Namespace) -> int:
    from drafter.samples import Choice, find
    from drafter.show import ELIDED_AT, render
    from drafter.terminal import colours, painter
    from drafter.validation import audit, findings

    workspace = workspace_of(arguments)
    prepared, recipe = prepared_of(workspace, arguments.dataset), recipe_of(workspace)
    notes: list[str] = []
    if arguments.audit:
        found = findings.load(prepared.findings)
        _, rows = audit.read(prepared, found, recipe.validate_.audit_rows)
        chosen = [row for row in rows if row.verdict == "rejected" or not arguments.rejected]
        samples = [row.sample for row in chosen]
    else:
        choice = Choice(arguments.sample, arguments.random, arguments.last, arguments.rejected)
        samples, notes = find(prepared, choice)
    paint = painter(colours(sys.stdout))
    if samples:
        reader = _reader(recipe)
        for sample in samples:
            print(render(sample, reader, paint, None if arguments.full else ELIDED_AT), end="\n\n")
    else:
        print(f"{arguments.dataset}: no such responses")
    for note in notes:
        print(paint(note, "yellow"))
    return 0


def _reader(recipe: Recipe) -> Reader:
    from drafter import template
    from drafter.show import Reader

    path = Path(recipe.target.path)
    tokenizer = template.load_tokenizer(path)
    return Reader(tokenizer, template.family(path, tokenizer), recipe.target)


def _report(arguments: argparse.Namespace) -> int:
    from drafter import report

    workspace = workspace_of(arguments)
    recipe = recipe_of(workspace)
    names = arguments.datasets or [
        name for name in recipe.dataset_names if workspace.prepared(name).findings.exists()
    ]
    if not names:
        raise DataError(f"nothing in {workspace.root} is validated yet: run validate first")
    for name in names:
        prepared_of(workspace, name)
    reader, errors = _reader(recipe), []
    for name in names:
        try:
            print(f"{name}:", *report.remake(workspace, recipe, name, reader), sep="\n", end="\n\n")
        except DataError as error:
            # The others are worth reading all the same.
            errors.append(error)
    report.remake_overview(workspace, recipe)
    print(f"all datasets: {workspace.report}")
    if errors:
        raise errors[0]
    return 0


def _repair(arguments: argparse.Namespace) -> int:
    from drafter import repair, rewrite

    workspace = workspace_of(arguments)
    prepared = prepared_of(workspace, arguments.dataset)
    if not arguments.yes:
        found = list(repair.examine(workspace, prepared))
        for line in repair.report(found):
            print(line)
        if found:
            raise DataError(
                f"{arguments.dataset}: {repair.counts(found)} damaged: `drafter repair"
                f" {arguments.dataset} --yes` moves these lines to files named *.damaged"
            )
        print(f"{arguments.dataset}: nothing is damaged")
        return 0
    with locked(prepared.lock):
        rewrite.finish(prepared)
        found = list(repair.examine(workspace, prepared))
        for line in repair.report(found):
            print(line)
        if found:
            repair.set_aside(prepared, found)
            print(f"{arguments.dataset}: set aside {repair.counts(found)}, in *.damaged beside it")
        else:
            print(f"{arguments.dataset}: nothing is damaged")
    return 0


def _discard(arguments: argparse.Namespace) -> int:
    from drafter import rewrite
    from drafter.files import count_lines
    from drafter.generation import discard
    from drafter.terminal import utc

    prepared = prepared_of(workspace_of(arguments), arguments.dataset)

    def select() -> discard.Selection:
        found = (
            discard.since(prepared, arguments.since)
            if arguments.session is None
            else discard.by_session(prepared, arguments.session)
        )
        print(
            f"{arguments.dataset}: {found.num_rows:,} answers with {found.num_tokens:,} tokens,"
            f" stored from {utc(found.earliest)} to {utc(found.latest)}, and"
            f" {count_lines(prepared.failed):,} failures (they carry no time:"
            " their prompts are asked again)"
        )
        return found

    if not arguments.yes:
        select()
        print(ADD_YES)
        return 0
    with locked(prepared.lock):
        if rewrite.finish(prepared):
            print(f"{arguments.dataset}: finished what a killed command had begun")
        selection = select()
        if selection.num_rows:
            print(f"{arguments.dataset}: they are now in {discard.apply(prepared, selection)}")
        else:
            print(f"{arguments.dataset}: nothing to discard")
    return 0


def _restart(arguments: argparse.Namespace) -> int:
    from drafter import rewrite
    from drafter.generation import discard

    prepared = prepared_of(workspace_of(arguments), arguments.dataset)
    num_rows, num_tokens, num_failed = discard.count(prepared)
    print(
        f"{arguments.dataset}: {num_rows:,} answers with {num_tokens:,} tokens and"
        f" {num_failed:,} failures move to archive/"
    )
    if not arguments.yes:
        print(ADD_YES)
        return 0
    with locked(prepared.lock):
        rewrite.finish(prepared)
        archive = discard.restart(prepared)
    told = f"they are now in {archive}" if archive else "nothing to move"
    print(f"{arguments.dataset}: {told}")
    return 0
