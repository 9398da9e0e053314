"""The gate between paid-for tokens and training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.fake_engine import (
    BLANK,
    CLOSE,
    DATASET,
    FAMILY,
    STOP,
    TEXT,
    TOOL,
    TOOL_END,
    FakeEngine,
    Site,
    thoughtful,
)

from drafter import plan, validate
from drafter.errors import DataError, RecipeError
from drafter.files import file_record, read_json, read_section, write_section
from drafter.identity import generation_identity
from drafter.kinds import KINDS
from drafter.validation.facts import Collector, Nobody
from drafter.validation.toolcalls import Judge

LENIENT: dict[str, Any] = {"max_rejected_share": 1.0, "cap": dict.fromkeys(KINDS, 1.0)}
JUDGE = Judge(FAMILY, None, str)


def row(i: int, output_ids: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    prompt = [TEXT, TEXT + 1, *map(int, f"{i:04d}")]
    output_ids = thoughtful({"input_ids": prompt}) if output_ids is None else output_ids
    return {
        "sample_id": f"{DATASET}-{i:04d}",
        "output_ids": output_ids,
        "prompt_tokens": 6,
        "completion_tokens": len(output_ids),
        "finish_reason": "stop",
        **changes,
    }


def say_origin(site: Site) -> None:
    """The rows were made with the recipe, says the manifest."""
    section = {"identity": generation_identity(site.recipe)}
    write_section(site.prepared.manifest, "generate", section)


def check(site: Site, collector: Collector | None = None) -> None:
    validate.validate(site.job("validate"), FAMILY, JUDGE, collector or Nobody())


def run(site: Site, rows: list[Any] | None = None) -> dict[str, Any]:
    """Validate; gives the section's counts."""
    if rows is not None:
        site.write(site.prepared.responses, rows)
    say_origin(site)
    check(site)
    section = read_section(site.prepared.manifest, "validate")
    assert section is not None
    counts: dict[str, Any] = section["counts"]
    return counts


def test_what_generate_stored_is_accepted_as_prompt_then_output(tmp_path: Path) -> None:
    from drafter.generate import generate

    with FakeEngine() as engine:
        site = Site(tmp_path, urls=(engine.url,))
        generate(site.job(), FAMILY)
    check(site)
    section = read_section(site.prepared.manifest, "validate") or {}
    counts = section["counts"]
    stored = site.responses()
    assert [
        (line["sample_id"], line["prompt_tokens"], line["input_ids"])
        for line in site.read(site.prepared.tokenized)
    ] == [
        (
            row["sample_id"],
            6,
            [TEXT, TEXT + 1, *map(int, row["sample_id"][-4:]), *row["output_ids"]],
        )
        for row in stored
    ]
    tokens = sum(row["completion_tokens"] for row in stored)
    assert counts == {
        "stored": 60,
        "accepted": 60,
        "flagged": 0,
        "rejected": 0,
        "tokens": tokens + 6 * 60,
        "response_tokens": tokens,
        "by_reason": {},
        "by_kind": {"closed": 60},
    }
    assert section["inputs"] == plan.inputs("validate", DATASET, site.job().workspace, site.recipe)
    assert section["files"]["tokenized_data.jsonl"] == file_record(site.prepared.tokenized)
    progress = read_json(site.job("validate").dir.progress)
    assert progress["done"] and progress["changed"] and "60 of 60" in progress["line"]


CASES = [
    (row(1), None),
    (row(1, [TEXT, TOOL, TEXT, TOOL_END, STOP]), None),
    (row(1, [TEXT, TOOL, TEXT, STOP]), "tool call not closed"),
    (row(1, [TEXT, CLOSE, TOOL, TEXT], finish_reason="length"), "cut by length in a tool call"),
    (row(1, [TEXT, CLOSE, TEXT]), "no stop id"),
    (row(1, [TEXT, CLOSE, TEXT], finish_reason="length"), None),
    (row(1, [TEXT, CLOSE], finish_reason="length"), None),
    (row(1, [TEXT, TEXT], finish_reason="length"), "truncated in thinking"),
    (row(1, [TEXT, TOOL, TEXT], finish_reason="length"), "cut by length in a tool call"),
    (row(1, [CLOSE, TEXT], finish_reason="length"), "empty thinking"),
    (row(1, [TEXT, TEXT, STOP]), "unclosed"),
    (row(1, [CLOSE, TEXT, STOP]), "empty thinking"),
    (row(1, [TEXT, CLOSE, STOP]), "no answer"),
    (row(1, sample_id="B1-9999"), "unknown sample_id"),
    (row(1, prompt_tokens=7), "wrong prompt_tokens"),
    (row(1, completion_tokens=1), "wrong completion_tokens"),
    ({**row(1), "output_ids": "AQID"}, "wrong type of output_ids"),
    ({**row(1), "finish_reason": {"type": "stop"}}, "wrong type of finish_reason"),
    (row(0), "duplicate"),
]


@pytest.mark.parametrize(("case", "reason"), CASES)
def test_each_row_has_its_verdict(case: Any, reason: str | None, tmp_path: Path) -> None:
    site = Site(tmp_path, rules=LENIENT)
    counts = run(site, [row(0), case, row(2)])
    assert counts["by_reason"] == ({reason: 1} if reason else {})
    assert counts["accepted"] + counts["rejected"] == counts["stored"] == 3
    rejected = site.read(site.prepared.rejected)
    assert [line["sample_id"] for line in rejected] == ([case["sample_id"]] if reason else [])
    accepted = [line["sample_id"] for line in site.read(site.prepared.tokenized)]
    assert accepted == ["B1-0000", *([] if reason else ["B1-0001"]), "B1-0002"]


def test_rows_cut_by_length_can_be_refused_altogether(tmp_path: Path) -> None:
    site = Site(tmp_path, rules={**LENIENT, "policy": {"cut by length": "reject"}})
    counts = run(site, [row(0), row(1, [TEXT, CLOSE, TEXT], finish_reason="length")])
    assert counts["by_reason"] == {"cut by length": 1}


def test_without_thinking_the_answer_is_judged_and_no_thought_may_show_up(tmp_path: Path) -> None:
    site = Site(tmp_path, thinking=False, rules=LENIENT)
    bad = [row(2, [BLANK, STOP]), row(3, [CLOSE, TEXT, STOP]), row(4, [TOOL, TEXT, STOP])]
    counts = run(site, [row(0, [TEXT, STOP]), row(1, [TEXT], finish_reason="length"), *bad])
    assert counts["accepted"] == 2
    assert counts["by_reason"] == {
        "no answer": 1,
        "thinking although off": 1,
        "tool call not closed": 1,
    }


def test_of_duplicates_the_first_acceptable_one_is_kept(tmp_path: Path) -> None:
    site = Site(tmp_path, rules=LENIENT)
    good, other = row(0), row(0, [TEXT, TEXT, CLOSE, TEXT, STOP])
    assert run(site, [row(0, [TEXT, STOP]), good, other])["accepted"] == 1
    (kept,) = site.read(site.prepared.tokenized)
    assert kept["input_ids"][6:] == good["output_ids"]


def test_the_bytes_are_the_same_under_any_hash_seed_locale_and_number_of_threads(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, rules=LENIENT)
    run(site, [case for case, _ in CASES])
    names = ("tokenized_data.jsonl", "rejected.jsonl", "manifest.json")
    before = [(site.prepared.root / name).read_bytes() for name in names]
    tests = Path(__file__).parents[1]
    code = (
        "import sys; from pathlib import Path; from drafter.job import load_job;"
        "from unit.fake_engine import Site; from unit import test_validate as t;"
        "t.validate.validate(load_job(Path(sys.argv[1])), t.FAMILY, t.JUDGE, t.Nobody())"
    )
    for seed, locale, threads in (("1", "C", "1"), ("2", "C.UTF-8", "2"), ("3", "POSIX", "7")):
        for name in names[:2]:
            (site.prepared.root / name).unlink()
        path = os.pathsep.join([str(tests), str(tests.parent / "include")])
        subprocess.run(
            [sys.executable, "-c", code, str(site.job("validate").dir.root)],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONHASHSEED": seed,
                "LC_ALL": locale,
                "OMP_NUM_THREADS": threads,
                "RAYON_NUM_THREADS": threads,
            },
            check=True,
            stdout=subprocess.DEVNULL,
        )
        assert [(site.prepared.root / name).read_bytes() for name in names] == before
    assert read_json(site.job("validate").dir.progress)["changed"] is False


def test_too_many_rejected_rows_fail_with_the_numbers_and_leave_no_section(tmp_path: Path) -> None:
    site = Site(tmp_path)
    run(site, [row(i) for i in range(10)])
    rows = [row(i) if i < 7 else row(i, [TEXT, STOP]) for i in range(10)]
    with pytest.raises(DataError, match=r"3 of 10 rows rejected \(3 unclosed\), at most 20%"):
        run(site, rows)
    assert len(site.read(site.prepared.rejected)) == 3
    assert read_section(site.prepared.manifest, "validate") is None
    assert read_section(site.prepared.manifest, "prepare") is not None


def test_damage_is_named_with_file_and_line_and_costs_no_good_row(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.write(site.prepared.responses, [row(i) for i in range(20)])
    lines = site.prepared.responses.read_bytes().splitlines(keepends=True)
    lines[4:4] = [b'{"sample_id": "B1-00\n', b"[]\n"]
    site.prepared.responses.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"raw_responses\.jsonl:5 is damaged.*1 more such line"):
        run(site)
    assert len(site.read(site.prepared.tokenized)) == 20
    assert [line["sample_id"] for line in site.read(site.prepared.rejected)] == [None, None]


def test_a_torn_last_line_is_counted_and_does_not_fail_the_dataset(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.write(site.prepared.responses, [row(i) for i in range(20)])
    with open(site.prepared.responses, "a") as file:
        file.write('{"sample_id": "B1-0')
    counts = run(site)
    assert (counts["stored"], counts["accepted"]) == (21, 20)
    assert counts["by_reason"] == {"torn last line": 1}


def test_prompts_and_responses_of_another_target_are_refused_with_the_ways_out(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    run(site, [row(i) for i in range(10)])
    site.thinking = False
    with pytest.raises(RecipeError, match=r"rendered for another target \(thinking differ\)"):
        check(site)
    site.prepare([[TEXT, TEXT + 1, *map(int, f"{i:04d}")] for i in range(60)])
    ways_out = r"thinking was True and is now False\).*generate with mode restart for this dataset"
    with pytest.raises(RecipeError, match=ways_out):
        check(site)


def test_another_sampling_does_not_matter_to_what_was_sampled_before(tmp_path: Path) -> None:
    site = Site(tmp_path)
    run(site, [row(i) for i in range(10)])
    site.settings = {"temperature": 0.3}
    check(site)


def test_prompts_that_are_not_as_prepare_left_them_are_refused(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.prepared.prompt_ids.write_bytes(site.prepared.prompt_ids.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"prompt_ids\.jsonl is not as prepare left it"):
        run(site, [row(i) for i in range(10)])


def test_a_class_above_its_cap_fails_with_the_numbers_even_if_its_rows_are_accepted(
    tmp_path: Path,
) -> None:
    cut = [row(i, [TEXT, CLOSE, TEXT], finish_reason="length") for i in range(3)]
    rows = [*cut, *(row(i) for i in range(3, 10))]
    site = Site(tmp_path, rules={"cap": {"cut by length": 0.3}})
    assert run(site, rows)["flagged"] == 3
    site.rules = {"cap": {"cut by length": 0.29}}
    wanted = "3 of 10 rows are of class 'cut by length', at most 29% may be"
    with pytest.raises(DataError, match=wanted):
        run(site, rows)
    assert len(site.read(site.prepared.tokenized)) == 10
    assert read_section(site.prepared.manifest, "validate") is None


def test_a_share_below_one_percent_is_told_as_it_is(tmp_path: Path) -> None:
    site = Site(tmp_path, rules={"cap": {"cut by length": 0.005}})
    rows = [row(i, [TEXT, CLOSE, TEXT], finish_reason="length") for i in range(3)]
    with pytest.raises(DataError, match=r"at most 0\.5% may be"):
        run(site, rows)


@pytest.mark.parametrize(("cap", "allowed"), [(0, 0), (0.001, 1), (0.2, 2), (1, 10)])
def test_one_row_is_no_share_unless_there_must_be_none(
    cap: float, allowed: int, tmp_path: Path
) -> None:
    site = Site(tmp_path, rules={**LENIENT, "cap": {**LENIENT["cap"], "unclosed": cap}})
    for number in (allowed, allowed + 1):
        rows = [row(i, [TEXT, STOP] if i < number else None) for i in range(10)]
        if number == allowed or number > 10:
            assert run(site, rows)["by_kind"].get("unclosed", 0) == min(number, 10)
        else:
            with pytest.raises(DataError, match="are of class 'unclosed'"):
                run(site, rows)


def test_a_recipe_may_not_choose_what_becomes_of_what_is_no_row(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.rules = {"policy": {"duplicate": "accept", "repetition": "flag"}}
    with pytest.raises(RecipeError, match="nothing can be chosen for duplicate: leave it out"):
        _ = site.recipe
    site.rules = {"policy": {"unheard of": "accept"}}
    with pytest.raises(RecipeError, match=r"validate\.policy\.unheard of"):
        _ = site.recipe


def test_a_file_of_the_same_size_and_other_bytes_is_damaged_whatever_its_rows_look_like(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.write(site.prepared.responses, [row(i) for i in range(10)])
    say_origin(site)
    section = read_section(site.prepared.manifest, "generate") or {}
    files = {site.prepared.responses.name: file_record(site.prepared.responses)}
    write_section(site.prepared.manifest, "generate", {**section, "files": files})
    check(site)
    text = site.prepared.responses.read_text()
    ids = row(3)["output_ids"]
    other = [TEXT + (ids[0] == TEXT), *ids[1:]]
    altered = text.replace(str(ids), str(other).ljust(len(str(ids))))
    assert altered != text and len(altered) == len(text)
    site.prepared.responses.write_text(altered)
    with pytest.raises(DataError, match="has the size and not the bytes that generate left"):
        check(site)
    assert len(site.read(site.prepared.tokenized)) == 10
    site.prepared.responses.write_text(text)
    check(site)
