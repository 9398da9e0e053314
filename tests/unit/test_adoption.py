"""What an older run left is adopted when every row proves itself, and refused by name otherwise."""

from __future__ import annotations

import base64
import io
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from families import PERMUTED_KIMI
from unit.host import until
from unit.older_run import B1, B2, B3, DEMO, NAMES, OlderRun

from drafter import generate, prepare, validate
from drafter.cli import main
from drafter.errors import DataError, RecipeError
from drafter.files import read_section, write_json
from drafter.job import load_job
from drafter.layout import ALL


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded engine over the demo's target; gives its URL."""
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [sys.executable, "-m", "drafter", "serve", "--model", str(DEMO / "target")]
    with open(log, "w") as file:
        process = subprocess.Popen(
            [*command, "--port", "0"],
            stdout=file,
            stderr=file,
            env={"PYTHONPATH": str(DEMO.parent), "PATH": "/usr/bin:/bin"},
        )
    try:
        until(lambda: "at http" in log.read_text() or process.poll() is not None, 60)
        yield log.read_text().split(" at ")[1].split(",")[0]
    finally:
        process.terminate()
        process.wait()


def run(site: OlderRun, phase: str, dataset: str, mode: str) -> None:
    directory = site.workspace.job(phase, dataset)
    spec = {"phase": phase, "dataset": dataset, "start_id": "s", "code": "c", "run_id": "r"}
    spec |= {"mode": mode, "token_budget": None, "in_flight": 8, "recipe": site.recipe.as_json()}
    write_json(directory.job, spec)
    {"prepare": prepare, "generate": generate, "validate": validate}[phase].run(
        load_job(directory.root)
    )


def planned(site: OlderRun, capsys: Any, mode: str, *names: str) -> dict[str, tuple[str, str]]:
    """{dataset: (action, reason)} as ``drafter plan`` prints it."""
    write_json(site.workspace.recipe, site.recipe.as_json())
    capsys.readouterr()
    main(["plan", "generate", *names, "--mode", mode, "--workspace", str(site.workspace.root)])
    lines = capsys.readouterr().out.splitlines()
    return {name: (action, why) for name, action, why in (line.split(None, 2) for line in lines)}


def test_an_older_workspace_is_adopted_as_the_plan_says(
    tmp_path: Path, engine: str, capsys: Any
) -> None:
    site = OlderRun(tmp_path, engine)
    before = {name: site.stored(name) for name in (B1, B2, B3)}
    tokenized = site.prepared(B1).tokenized.read_text().splitlines()
    plan = planned(site, capsys, "adopt")
    b1, b2, b3, rest = plan[B1], plan[B2], plan[B3], [plan[name] for name in NAMES[3:]]
    assert b1[0] == b2[0] == b3[0] == "adopt"
    assert b1[1].startswith("10,000 responses, ") and "budget met" in b1[1]
    assert b1[1].endswith(
        f"validate tokenizes 2 more: {site.untokenized(0)} (line 4712, left out),"
        f" {site.untokenized(1)} (line 10000, stored after the last tokenized row)"
    )
    assert b2[1].startswith("2,912 responses, ") and b2[1].endswith(
        "budget met, nothing is generated"
    )
    assert b3[1].startswith("2 responses, ") and b3[1].endswith("resume from 2")
    assert [action for action, _ in rest] == ["start"] * 5
    assert not list(site.workspace.root.rglob("manifest.json"))  # a plan writes nothing

    run(site, "prepare", ALL, "adopt")
    for name in NAMES:
        run(site, "generate", name, "adopt")
    for name in (B1, B2):
        assert site.stored(name) == before[name]
    assert site.stored(B3)[:2] == before[B3] and site.tokens(B3) >= 300
    assert len({row["sample_id"] for row in site.stored(B3)}) == len(site.stored(B3))
    run(site, "validate", B1, "resume")
    after = site.prepared(B1).tokenized.read_text().splitlines()
    assert len(after) == 10_000
    assert [
        json.loads(line) for line in after if json.loads(line) in map(json.loads, tokenized[:9])
    ]
    section = read_section(site.prepared(B1).manifest, "validate")
    assert section and section["counts"]["rejected"] == 0
    sessions = [json.loads(line) for line in site.prepared(B2).sessions.read_text().splitlines()]
    assert [line["adopted"]["responses"] for line in sessions] == [2912]
    assert {action for action, _ in planned(site, capsys, "resume").values()} == {"done"}


def start(site: OlderRun, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``drafter start`` of B3's generation, as the operator sends it."""
    spec = {"phase": "generate", "dataset": B3, "recipe": site.recipe.as_json(), "mode": mode}
    spec |= {"token_budget": None, "run_id": "r"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(spec)))
    main(["start"])


def small(root: Path) -> OlderRun:
    return OlderRun(root, "http://127.0.0.1:9", cap=40, killed_at=20, in_flight=8)


def older_format(site: OlderRun) -> None:
    """The same five keys with other types."""
    rows = [
        {
            **row,
            "output_ids": base64.b64encode(
                struct.pack(f"<{len(row['output_ids'])}i", *row["output_ids"])
            ).decode(),
            "finish_reason": {"type": "stop", "matched": 5},
        }
        for row in site.stored(B3)
    ]
    site.write(site.prepared(B3).responses, rows)


def finish_reason_object(site: OlderRun) -> None:
    rows = [{**row, "finish_reason": {"type": "stop"}} for row in site.stored(B3)]
    site.write(site.prepared(B3).responses, rows)


def other_template(site: OlderRun) -> None:
    """Prompts rendered with one id less, as a template without its last marker would."""
    rows = [{**row, "prompt_tokens": row["prompt_tokens"] - 1} for row in site.stored(B3)]
    site.write(site.prepared(B3).responses, rows)


def lost_reasoning(site: OlderRun) -> None:
    close = site.family.think_close
    rows = [
        {**row, "output_ids": ids, "completion_tokens": len(ids)}
        for row in site.rows(B3)
        for ids in [[i for i in row["output_ids"] if i != close]]
    ]
    site.write(site.prepared(B3).responses, rows)


def unknown_prompt(site: OlderRun) -> None:
    rows = site.stored(B3)
    site.write(site.prepared(B3).responses, [{**rows[0], "sample_id": "elsewhere-1"}, *rows[1:]])


def twice(site: OlderRun) -> None:
    path = site.prepared(B3).prompts
    path.write_text(path.read_text() + path.read_text().splitlines()[4] + "\n")


def answered_twice(site: OlderRun) -> None:
    rows = site.stored(B3)
    site.write(site.prepared(B3).responses, [*rows, rows[0]])


def foreign_failures(site: OlderRun) -> None:
    site.prepared(B3).failed.write_text('{"id": 7, "error": "timeout"}\n')


def odd_message(site: OlderRun) -> None:
    path = site.prepared(B3).prompts
    path.write_text(path.read_text().replace('"role": "user"', '"speaker": "user"', 1))


VARIANTS: list[tuple[Callable[[OlderRun], None], str]] = [
    (
        older_format,
        rf"raw_responses\.jsonl:1 \(sample '{B3}-000000'\).*wrong type of output_ids: str",
    ),
    (
        finish_reason_object,
        r"raw_responses\.jsonl:1 .*wrong type of finish_reason: dict, needs str",
    ),
    (
        other_template,
        r"raw_responses\.jsonl:1 .*wrong prompt_tokens: \d+, stored prompt \d+ ids when",
    ),
    (lost_reasoning, r"raw_responses\.jsonl:\d+ .*are not sound"),
    (unknown_prompt, r"raw_responses\.jsonl:1 \(sample 'elsewhere-1'\).*unknown sample_id"),
    (answered_twice, rf"raw_responses\.jsonl:3 \(sample '{B3}-000000'\).*stands in line 1 already"),
    (foreign_failures, r"failed\.jsonl:1 .*drafter repair"),
    (twice, rf"prompts\.jsonl:41 .*{B3}-000004 stands there twice"),
    (odd_message, r"prompts\.jsonl:1 .*needs role and content"),
]


@pytest.mark.parametrize(("spoil", "says"), VARIANTS, ids=lambda v: getattr(v, "__name__", ""))
def test_rows_that_do_not_match_are_refused_by_name_and_left_as_they_are(
    spoil: Callable[[OlderRun], None],
    says: str,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = small(tmp_path)
    spoil(site)
    before = {path: path.read_bytes() for path in site.prepared(B3).root.iterdir()}
    action, reason = planned(site, capsys, "adopt", B3)[B3]
    assert action == "refuse"
    with pytest.raises(DataError, match=says) as refused:
        raise DataError(reason)
    assert "older" not in str(refused.value)
    run(site, "prepare", ALL, "adopt")
    assert read_section(site.prepared(B2).manifest, "prepare")  # the others are adopted
    with pytest.raises(DataError, match=says):
        start(site, "adopt", monkeypatch)
    left = {path: path.read_bytes() for path in site.prepared(B3).root.iterdir()}
    left.pop(site.prepared(B3).lock, None)
    assert left == before


def test_prompts_of_another_tokenizer_are_refused(tmp_path: Path, capsys: Any) -> None:
    site = small(tmp_path)
    site.target = PERMUTED_KIMI.save(tmp_path / "other")
    action, reason = planned(site, capsys, "adopt", B3)[B3]
    assert action == "refuse" and "raw_responses.jsonl:1" in reason


def test_without_being_asked_nothing_is_adopted(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = small(tmp_path)
    before = site.prepared(B1).prompts.read_bytes()
    for name in (B1, B2, B3):
        action, reason = planned(site, capsys, "resume", name)[name]
        assert action == "refuse" and "mode adopt" in reason
    run(site, "prepare", ALL, "resume")
    assert site.prepared(B1).prompts.read_bytes() == before
    with pytest.raises(RecipeError, match="mode adopt"):
        start(site, "resume", monkeypatch)


def test_adopted_prompts_stay_and_the_recipes_are_appended_up_to_the_quota(tmp_path: Path) -> None:
    site = small(tmp_path)
    run(site, "prepare", ALL, "adopt")
    path = site.prepared(B2).prompts
    first = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["sample_id"] for row in first[:40]] == [f"{B2}-{i:06d}" for i in range(40)]
    assert all(row["adopted"] for row in first[:40]) and len(first) > 40
    bytes_before = path.read_bytes()
    run(site, "generate", B2, "adopt")
    site.workspace.prepared(B2).prompt_ids.unlink()
    run(site, "prepare", ALL, "resume")
    assert path.read_bytes() == bytes_before


def test_a_restart_of_an_older_workspace_archives_its_rows(tmp_path: Path, engine: str) -> None:
    site = OlderRun(tmp_path, engine, cap=40, killed_at=20, in_flight=8)
    old = site.prepared(B3).responses.read_bytes()
    run(site, "prepare", ALL, "restart")
    run(site, "generate", B3, "restart")
    archived = site.prepared(B3).archive("r") / "raw_responses.jsonl"
    assert archived.read_bytes() == old
    assert site.tokens(B3) >= 300


def test_a_restart_of_an_older_workspace_is_planned_as_one(tmp_path: Path, capsys: Any) -> None:
    site = small(tmp_path)
    site.prepared(B3).archive("earlier").mkdir(parents=True)
    assert planned(site, capsys, "restart", B3)[B3][0] == "restart"


def test_adopted_prompts_alone_fill_a_quota(tmp_path: Path) -> None:
    site = small(tmp_path)
    site.max_samples = 40
    run(site, "prepare", ALL, "adopt")
    section = read_section(site.prepared(B1).manifest, "prepare")
    assert section and (section["counts"]["adopted"], section["counts"]["prompts"]) == (40, 0)
    assert len(site.prepared(B1).prompt_ids.read_text().splitlines()) == 40
