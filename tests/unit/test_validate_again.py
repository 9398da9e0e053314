"""Validation as its job runs it, with a tokenizer of its own: once, again, and after a change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import KIMI
from unit.fake_engine import DATASET, Site

from drafter import behaviour, cli, template, validate
from drafter.errors import DataError, DrafterError, RecipeError
from drafter.files import read_json, read_section, write_json, write_section
from drafter.identity import generation_identity
from drafter.jsonl import Appender

ROWS = 12


class Answered(Site):
    """A dataset of a tiny target of Kimi's family, prepared and answered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        target = KIMI.save(self.root / "target")
        self.tokenizer = template.load_tokenizer(target)
        prompt = template.encode(self.tokenizer, "<|im_user|>user<|im_middle|>Why?<|im_end|>")
        self.prepare([[*prompt, i] for i in range(ROWS)])
        message = [{"role": "user", "content": "Why?"}]
        names = [row["sample_id"] for row in self.read(self.prepared.prompt_ids)]
        prompts = [{"sample_id": name, "messages": message, "tools": None} for name in names]
        self.write(self.prepared.prompts, prompts)
        self.answer([self.row(name) for name in names])
        with Appender(self.prepared.sessions) as sessions:
            start = {"time": 1.0, "offset": 0, "start_id": "s", "code": "c", "run_id": "r"}
            made = behaviour.fingerprint(target, self.tokenizer)
            identity = generation_identity(self.recipe)
            sessions.append({**start, "identity": identity, "tokenizer": made})
        write_json(self.prepared.root.parents[1] / "recipe.json", self.recipe.as_json())

    def row(self, name: str, text: str = "Hm.</think>So.<|im_end|>") -> dict[str, Any]:
        ids = template.encode(self.tokenizer, text)
        prompt_tokens = len(self.read(self.prepared.prompt_ids)[0]["input_ids"])
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}
        return {"sample_id": name, "output_ids": ids, **counts, "finish_reason": "stop"}

    def answer(self, rows: list[Any]) -> None:
        self.write(self.prepared.responses, rows)

    def validate(self) -> dict[str, Any]:
        """Run the phase; gives what it reported."""
        job = self.job("validate")
        validate.run(job)
        return read_json(job.dir.progress)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.prepared.root.iterdir()}


@pytest.fixture
def site(tmp_path: Path) -> Answered:
    return Answered(tmp_path)


def test_a_finished_dataset_costs_no_byte_and_no_torch(site: Answered) -> None:
    first = site.validate()
    assert first["changed"] and first["accepted"] == ROWS
    before = site.files()
    code = (
        "import sys; from pathlib import Path; from drafter import validate;"
        "from drafter.job import load_job; validate.run(load_job(Path(sys.argv[1])));"
        "assert not {'torch', 'transformers', 'pandas', 'pyarrow'} & set(sys.modules)"
    )
    job = site.job("validate")
    include = str(Path(__file__).parents[2] / "include")
    subprocess.run(
        [sys.executable, "-c", code, str(job.dir.root)],
        env={**os.environ, "PYTHONPATH": include},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    again = read_json(job.dir.progress)
    assert (again["changed"], again["accepted"]) == (False, ROWS)
    assert site.files() == before


def rules(site: Answered) -> None:
    site.rules = {"max_rejected_share": 0.19}


def one_row_less(site: Answered) -> None:
    site.answer(site.responses()[:-1])


def lost_output(site: Answered) -> None:
    site.prepared.tokenized.unlink()


def altered_output(site: Answered) -> None:
    path = site.prepared.tokenized
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))


def lost_report(site: Answered) -> None:
    site.prepared.findings.unlink()


def other_tools(site: Answered) -> None:
    path = site.prepared.prompts
    path.write_text(path.read_text().replace('"tools": null', '"tools": []  '))


def other_stop_ids(site: Answered) -> None:
    path = site.root / "target" / "generation_config.json"
    stop_ids = json.loads(path.read_text())["eos_token_id"]
    path.write_text(json.dumps({"eos_token_id": [*stop_ids, 1]}))


def other_software(site: Answered) -> None:
    section = read_section(site.prepared.manifest, "validate") or {}
    software = {**section["inputs"]["software"], "tokenizers": "0.0"}
    inputs = {**section["inputs"], "software": software}
    write_section(site.prepared.manifest, "validate", {**section, "inputs": inputs})


@pytest.mark.parametrize(
    "change",
    [
        rules,
        one_row_less,
        lost_output,
        altered_output,
        lost_report,
        other_tools,
        other_stop_ids,
        other_software,
    ],
)
def test_whatever_the_result_depends_on_makes_it_be_done_anew(
    change: Callable[[Answered], None], site: Answered
) -> None:
    site.validate()
    before = site.files()
    change(site)
    site.validate()
    after = site.files()
    if change is not one_row_less:
        assert after["tokenized_data.jsonl"] == before["tokenized_data.jsonl"]
    section = read_section(site.prepared.manifest, "validate") or {}
    assert section["counts"]["accepted"] == len(site.responses())
    assert site.validate()["changed"] is False


def test_prompts_that_changed_since_they_were_validated_are_refused(site: Answered) -> None:
    site.validate()
    path = site.prepared.prompt_ids
    before, age = path.read_bytes(), path.stat()
    path.write_bytes(before.replace(b"0]", b"1]", 1))
    os.utime(path, ns=(age.st_atime_ns, age.st_mtime_ns))
    with pytest.raises(DataError, match=r"prompt_ids\.jsonl is not as prepare left it"):
        site.validate()
    path.write_bytes(before)
    assert site.validate()["changed"] is False


def test_a_tokenizer_that_is_another_now_is_refused_by_the_file_that_changed(
    site: Answered,
) -> None:
    path = site.root / "target" / "chat_template.jinja"
    path.write_text(path.read_text() + "{{ ' ' }}")
    named = (
        r"\(file chat_template\.jinja differs; probe prompt 'history', thinking off differs; .*"
        r" and \d more\): bring that back"
    )
    with pytest.raises(RecipeError, match=named):
        site.validate()
    assert not site.prepared.tokenized.exists()


def test_a_tokenizer_that_does_something_else_with_the_same_files_is_refused_by_the_text(
    site: Answered,
) -> None:
    (start,) = site.read(site.prepared.sessions)
    start["tokenizer"]["behaviour"]["text 'emoji'"] = "another"
    start["tokenizer"]["software"]["tokenizers"] = "0.1"
    site.write(site.prepared.sessions, [start])
    named = r"\(tokenizers was 0\.1 and is .*; probe text 'emoji' differs\): bring that back"
    with pytest.raises(RecipeError, match=named):
        site.validate()


def test_responses_of_a_run_that_noted_only_the_files_hash_are_known_by_that(
    site: Answered,
) -> None:
    (start,) = site.read(site.prepared.sessions)
    del start["tokenizer"]
    site.write(site.prepared.sessions, [start])
    assert site.validate()["accepted"] == ROWS
    path = site.root / "target" / "tokenizer_config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(RecipeError, match="tokenizer differ"):
        site.validate()


def test_thinking_that_sits_in_the_answer_fails_the_dataset_by_name(site: Answered) -> None:
    """Regression: three thousand such rows were paid for before a person looked at one."""
    chat = {"reasoning_content": None, "content": "Hm.</think>So.", "finish_reason": "stop"}
    site.answer([{"sample_id": row["sample_id"], **chat} for row in site.responses()])
    with pytest.raises(DataError, match=r"12 of 12 rows rejected \(12 older format\)"):
        site.validate()
    reasons = {line["reason"] for line in site.read(site.prepared.rejected)}
    assert len(reasons) == 1 and "whose thinking sits in the answer" in reasons.pop()
    assert site.read(site.prepared.tokenized) == []


def test_the_same_incident_in_ids_fails_it_too(site: Answered) -> None:
    """Thinking went into the answer and was encoded again, so no control id ends it."""
    spelled = [
        {**row, "output_ids": ids, "completion_tokens": len(ids)}
        for row in site.responses()
        for ids in [
            [
                *template.encode(site.tokenizer, "Hm.</th"),
                *template.encode(site.tokenizer, "ink>So."),
                row["output_ids"][-1],
            ]
        ]
    ]
    site.answer(spelled)
    with pytest.raises(DataError, match="12 of 12 rows are of class 'thinking as text'"):
        site.validate()


@pytest.mark.parametrize(
    ("drift", "reason"),
    [
        ({"output_ids": "AQIDBAUG"}, "12 wrong type of output_ids"),
        ({"finish_reason": {"type": "stop"}}, "12 wrong type of finish_reason"),
        ({"prompt_tokens": "6"}, "12 wrong type of prompt_tokens"),
        ({"completion_tokens": 2}, "12 wrong completion_tokens"),
    ],
)
def test_a_format_that_drifts_under_the_same_keys_fails_the_dataset(
    drift: dict[str, Any], reason: str, site: Answered
) -> None:
    """Regression: only the first row had been looked at, and only its keys."""
    good = site.responses()
    names = [f"{DATASET}-{i:04d}" for i in range(ROWS)]
    site.answer([*good, *({**site.row(name), **drift} for name in names)])
    with pytest.raises(DataError, match=rf"12 of 24 rows rejected \({reason}\)"):
        site.validate()
    assert len(site.read(site.prepared.tokenized)) == ROWS


def test_a_damaged_file_is_repaired_and_loses_no_good_row(site: Answered, capsys: Any) -> None:
    lines = site.prepared.responses.read_bytes().splitlines(keepends=True)
    lines[4:4] = [b'{"sample_id": "B1-00\n', b"\x00\x00\n"]
    site.prepared.responses.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"raw_responses\.jsonl:5 is damaged.*drafter repair B1"):
        site.validate()
    assert DataError.exit_code == 65
    assert len(site.read(site.prepared.tokenized)) == ROWS
    workspace = str(site.prepared.root.parents[1])
    assert cli.main(["repair", DATASET, "--workspace", workspace, "--yes"]) == 0
    assert "set aside 2 of raw_responses.jsonl" in capsys.readouterr().out
    assert site.validate()["accepted"] == ROWS
    assert json.loads(site.prepared.tokenized.read_text().splitlines()[0])["sample_id"]


def test_a_disk_without_room_is_one_sentence_and_costs_nothing(site: Answered) -> None:
    before = site.files()
    job = site.job("validate")
    # What anybody can do: files of a kilobyte at most.
    command = [sys.executable, "-m", "drafter", "run", str(job.dir.root)]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "-", *command],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "include")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"drafter: cannot write {site.prepared.root} (File too large): raise the limit on the size"
        " of files, then run validate again; the answers are untouched\n"
    )
    assert {**before, ".lock": b""} == site.files()
    assert site.validate()["accepted"] == ROWS


def test_a_page_that_cannot_be_replaced_is_named(site: Answered) -> None:
    site.prepared.report.mkdir()
    with pytest.raises(DrafterError, match=r"cannot write .*/report\.html \(Is a dir.*: move it"):
        site.validate()
    site.prepared.report.rmdir()
    assert site.validate()["accepted"] == ROWS


def test_damaged_prompts_cost_no_row_and_are_named(site: Answered) -> None:
    call = (
        "Hm.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.x:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    site.answer([site.row(row["sample_id"], call) for row in site.responses()])
    lines = site.prepared.prompts.read_text().splitlines(keepends=True)
    site.prepared.prompts.write_text("".join([lines[0], "{\n", *lines[1:]]))
    with pytest.raises(DataError, match=r"prompts\.jsonl:2 is damaged.*drafter repair"):
        site.validate()
    assert len(site.read(site.prepared.tokenized)) == ROWS
