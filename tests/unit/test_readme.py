"""What the README claims about the tree and the exit codes is so."""

from __future__ import annotations

import re
from pathlib import Path

from drafter.engines.outcomes import RULES
from drafter.errors import MEANING, NEVER_RETRY

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def tree() -> list[str]:
    """Paths that the README's tree names, from the root."""
    block = README.split("## The tree")[1].split("```")[1]
    paths, folder = [], ""
    for line in block.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
        paths.append(name if name == folder else folder + name)
    return paths


def test_every_path_of_the_tree_exists() -> None:
    assert len(tree()) > 8
    assert [path for path in tree() if not (ROOT / path).exists()] == []


def test_every_dag_is_in_the_tree() -> None:
    assert {f"dags/{file.name}" for file in (ROOT / "dags").glob("*.py")} <= set(tree())


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z-]+)\b(?=`|  | PORT)", README)) <= targets


def test_the_exit_codes_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| .* \| (yes|no) \|$", README, re.M)
    told = {int(code): retried for codes, retried in rows for code in codes.split(",")}
    assert set(told) | {0, 1} == set(MEANING)
    assert {code for code, retried in told.items() if retried == "no"} == set(NEVER_RETRY)


def test_the_classes_of_answers_are_those_of_the_code() -> None:
    table = README.split("## What becomes of an answer")[1].split("## ")[0]
    told = re.findall(r"^\| (.*) \| (.*) \| (\d|`attempts`) \| (counts)? ?\| (.*) \|$", table, re.M)
    assert told == [
        (kind, rule.what, str(rule.sends or "`attempts`"), "counts" * rule.counts, rule.goes_to)
        for kind, rule in RULES.items()
    ]


def test_the_license_is_apache() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
