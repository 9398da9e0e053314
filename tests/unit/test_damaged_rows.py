"""Every way we could think of in which a stored row can be wrong, and what becomes of it.

Each row stands between two good ones, which must never suffer.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.damaged_rows import ACCEPTED, CONTENT, GOOD_CALL, REJECTED
from unit.kimi_dataset import NAMES, World, line, make_world

from drafter.kinds import KINDS, reason_class
from drafter.sections import Validate
from drafter.validation.gate import Judged


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def between_good_rows(world: World, wrong: Any) -> Judged:
    """What becomes of ``wrong``; the rows around it are accepted."""
    raw = wrong if isinstance(wrong, bytes) else line(wrong)
    before, after = (line(world.row(name=name)) for name in ("a", "c"))
    *judged, last = world.look(before, raw, after)
    first, middle = judged
    for good in (first, last):
        assert good.facts.verdict == "accepted"
        assert good.tokenized is not None
    return middle


def test_at_least_sixty_kinds_of_damage_are_made_by_hand() -> None:
    assert len(REJECTED) >= 110


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_wrong_is_rejected_by_name(name: str, world: World) -> None:
    wrong, reason = REJECTED[name]
    judged = between_good_rows(world, wrong(world))
    assert judged.facts.reason.startswith(reason) and len(judged.facts.reason) < 400
    assert judged.facts.verdict == "rejected" and judged.tokenized is None


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_odd_is_kept_and_counted(name: str, world: World) -> None:
    make, verdict, reason = ACCEPTED[name]
    judged = between_good_rows(world, make(world))
    assert (judged.facts.verdict, judged.facts.reason) == (verdict, reason)
    row = make(world)
    ids = (json.loads(row) if isinstance(row, bytes) else row)["output_ids"]
    assert judged.tokenized == line(
        {
            "sample_id": "b",
            "input_ids": [*world.prompt, *ids],
            "prompt_tokens": len(world.prompt),
        }
    )


def test_a_last_line_that_a_kill_tore_is_no_damage(world: World) -> None:
    torn = world.look(line(world.row(name="a")), line(world.row())[:-9])[-1]
    assert torn.facts.kinds == ("torn last line",) and torn.tokenized is None


def test_of_two_answers_to_a_prompt_the_first_acceptable_one_is_kept(world: World) -> None:
    bad, good, other = world.row("Hm.<|im_end|>"), world.row(), world.row("So.</think>4.<|im_end|>")
    verdicts = [judged.facts.reason for judged in world.look(*map(line, (bad, good, other)))]
    assert verdicts == ["unclosed", "closed", "duplicate"]


def test_every_class_with_a_policy_can_be_accepted_flagged_or_rejected(world: World) -> None:
    seen = set()
    for wrong, _ in [*CONTENT.values(), *((make, "") for make, *_ in ACCEPTED.values())]:
        raw = wrong(world)
        raw = raw if isinstance(raw, bytes) else line(raw)
        for policy, verdict in (
            ("accept", "accepted"),
            ("flag", "flagged"),
            ("reject", "rejected"),
        ):
            everything = {kind: policy for kind, about in KINDS.items() if about.policy}
            (judged,) = world.look(raw, rules=Validate(policy=everything))
            odd = [kind for kind in judged.facts.kinds if KINDS[kind].policy]
            assert judged.facts.verdict == (verdict if odd else "accepted")
            assert (judged.tokenized is None) == (bool(odd) and policy == "reject")
            seen |= set(odd)
    unseen = {kind for kind, about in KINDS.items() if about.policy} - seen
    assert unseen == {"thinking although off", "tool call not judged"}


def test_the_hardest_policy_decides_and_every_class_is_told(world: World) -> None:
    said = "Hm.</think>" + GOOD_CALL.replace("tide", "moon") + "so</think> " + "so " * 200
    row = line(world.row(said, finish_reason="length"))
    rules = Validate(policy={"several closes": "flag", "repetition": "reject"})
    (judged,) = world.look(row, rules=rules)
    assert judged.facts.kinds == (
        *("repetition", "several closes", "tool not declared", "cut by length", "closed"),
    )
    assert judged.facts.reason.startswith("repetition: ")


def test_the_parts_of_an_answer_are_counted(world: World) -> None:
    thought, said = world.ids("Hm, so."), world.ids("Three metres. ")
    row = world.row(f"Hm, so.</think>Three metres. {GOOD_CALL}<|im_end|>")
    (judged,) = world.look(line(row))
    facts = judged.facts
    assert facts.thinking_tokens == len(thought)
    assert facts.answer_tokens == len(said)
    assert facts.tool_tokens == len(world.ids(GOOD_CALL))
    assert facts.completion_tokens == len(thought) + len(said) + facts.tool_tokens + 2
    assert (facts.num_tool_calls, facts.num_valid_tool_calls) == (1, 1)
    assert (facts.repetition, facts.period, facts.finish_reason) == (0.0, 0, "stop")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
quick = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(data=st.data())
def test_random_damage_to_a_value_is_never_accepted(world: World, data: st.DataObject) -> None:
    row = world.row()
    key = data.draw(st.sampled_from(sorted(row)))
    value = data.draw(json_values)
    same = type(value) is type(row[key]) and value == row[key]
    # Another prompt's id and another end cannot be told from the truth, if the rest fits.
    plausible = {"sample_id": NAMES, "finish_reason": ("stop", "length")}.get(key, ())
    if same or (isinstance(value, str) and value in plausible):
        return
    (judged,) = world.look(json.dumps({**row, key: value}).encode() + b"\n")
    assert judged.facts.verdict == "rejected", judged.facts


@quick
@given(data=st.data())
def test_random_damage_to_bytes_never_crashes_and_is_accepted_only_as_what_it_says(
    world: World, data: st.DataObject
) -> None:
    raw = bytearray(line(world.row()))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.integers(0, 255))
        else:
            del raw[at : at + data.draw(st.integers(1, 9))]
        if not raw:
            return
    for judged in world.look(bytes(raw)):
        facts = judged.facts
        assert facts.kinds and facts.reason
        if judged.tokenized is None:
            assert facts.verdict == "rejected"
            continue
        # What is left is a whole row: each field is there once and agrees with the others.
        row = json.loads(bytes(raw).split(b"\n")[facts.number - 1])
        assert row.keys() == world.row().keys()
        assert row["completion_tokens"] == len(row["output_ids"])
        assert row["prompt_tokens"] == len(world.prompt)
        assert json.loads(judged.tokenized)["input_ids"] == [*world.prompt, *row["output_ids"]]


@quick
@given(data=st.data())
def test_random_ids_never_crash_and_are_written_as_they_are(
    world: World, data: st.DataObject
) -> None:
    controls = st.sampled_from(sorted(world.family.controls))
    anything = st.integers(0, world.family.vocab_size - 1) | controls
    ids = data.draw(st.lists(anything, min_size=1, max_size=40))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    (judged,) = world.look(line(world.of(ids, finish_reason=finish)))
    facts = judged.facts
    parts = facts.thinking_tokens + facts.answer_tokens + facts.tool_tokens
    assert parts <= facts.completion_tokens == len(ids)
    assert facts.num_valid_tool_calls <= facts.num_tool_calls
    assert (judged.tokenized is None) == (facts.verdict == "rejected")
    if judged.tokenized:
        assert json.loads(judged.tokenized)["input_ids"] == [*world.prompt, *ids]


def test_reasons_are_counted_by_a_few_words() -> None:
    classes = {reason_class(reason) for _, reason in REJECTED.values()}
    assert len(classes) < 40
