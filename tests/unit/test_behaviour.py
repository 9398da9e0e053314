"""A tokenizer that changed between generation and validation is refused by what changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, KIMI, write
from unit.fake_engine import Site

from drafter import template
from drafter.behaviour import PROMPTS, TEXTS, Fingerprint, changes, fingerprint, refuse_change
from drafter.errors import RecipeError
from drafter.identity import tokenizer_files, tokenizer_sha256
from drafter.jsonl import Appender


def fingerprint_of(target: Path) -> Fingerprint:
    return fingerprint(target, template.load_tokenizer(target))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_tokenizer_is_the_same_in_another_place(name: str, tmp_path: Path) -> None:
    one, two = (fingerprint_of(FAMILIES[name].save(tmp_path / place)) for place in "ab")
    assert one == two == json.loads(json.dumps(one))
    assert changes(one, two) == []
    assert len(one["behaviour"]) == len(TEXTS) + 2 * len(PROMPTS)
    # Each probe shows something of its own.
    rendered = [h for h in one["behaviour"].values() if not h.startswith("refused")]
    assert len(set(rendered)) >= len(TEXTS) + len(PROMPTS) - 2


def lose_a_merge(target: Path) -> None:
    tree = json.loads((target / "tokenizer.json").read_text())
    tree["model"]["merges"] = [m for m in tree["model"]["merges"] if m != ["t", "h"] and m != "t h"]
    tree["model"]["merges"] = [m for m in tree["model"]["merges"] if "th" not in m]
    write(target / "tokenizer.json", tree)


def another_template(target: Path) -> None:
    path = target / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_middle|><think>'", "<|im_middle|> <think>'"))


def only_spelled_otherwise(target: Path) -> None:
    tree = json.loads((target / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps(tree, indent=3))


CHANGES: list[tuple[Callable[[Path], Any], list[str], list[str]]] = [
    (lose_a_merge, ["file tokenizer.json differs", "probe text 'words' differs"], ["'numbers'"]),
    (
        another_template,
        ["file chat_template.jinja differs", "probe prompt 'one turn', thinking on differs"],
        ["probe text"],
    ),
    (only_spelled_otherwise, ["file tokenizer.json differs"], ["probe"]),
    (
        lambda target: (target / "merges.txt").write_text("x"),
        ["file merges.txt is new"],
        ["probe", "tokenizer.json"],
    ),
]


@pytest.mark.parametrize(("change", "named", "unnamed"), CHANGES)
def test_what_changed_is_named_and_nothing_else(
    change: Callable[[Path], Any], named: list[str], unnamed: list[str], tmp_path: Path
) -> None:
    target = KIMI.save(tmp_path)
    before = fingerprint_of(target)
    change(target)
    said = changes(before, fingerprint_of(target))
    assert set(named) <= set(said)
    assert not [line for line in said for word in unnamed if word in line]


def test_other_software_matters_only_when_it_does_something_else(tmp_path: Path) -> None:
    now = fingerprint_of(KIMI.save(tmp_path))
    older: Fingerprint = {**now, "software": {**now["software"], "tokenizers": "0.1"}}
    assert changes(older, now) == []
    probe = next(iter(now["behaviour"]))
    older = {**older, "behaviour": {**now["behaviour"], probe: "other"}}
    version = now["software"]["tokenizers"]
    assert changes(older, now) == [
        f"tokenizers was 0.1 and is {version}",
        f"probe {probe} differs",
    ]


def test_the_last_session_s_tokenizer_is_the_one_that_counts(tmp_path: Path) -> None:
    site = Site(tmp_path)
    now = fingerprint_of(KIMI.save(tmp_path / "kimi"))
    other: Fingerprint = {**now, "files": {**now["files"], "vocab.json": "0"}}
    refuse_change(site.prepared, other)
    site.write(site.prepared.responses, [{"sample_id": "x"}])
    refuse_change(site.prepared, other)  # nobody says what it was
    start = {"time": 1.0, "offset": 0, "start_id": "s", "identity": {}}
    with Appender(site.prepared.sessions) as sessions:
        sessions.append({**start, "tokenizer": other})
        sessions.append({**start, "tokenizer": now})
        sessions.append({"time": 2.0, "offset": 9})
        sessions.append({**start, "start_id": "adopted"})
    refuse_change(site.prepared, now)
    with pytest.raises(RecipeError, match=r"\(file vocab\.json is new\): bring that back"):
        refuse_change(site.prepared, other)


def test_one_hash_over_the_files_is_what_it_was_before_their_names_were_kept(
    tmp_path: Path,
) -> None:
    target = replace(KIMI).save(tmp_path)
    assert list(tokenizer_files(target)) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    before = tokenizer_sha256(target)
    (target / "config.json").write_text("{}")
    assert tokenizer_sha256(target) == before
    (target / "tokenizer.json").write_text("{}")
    assert tokenizer_sha256(target) != before
