"""Thinking that sits in the answer as text is found in every family, however it is cut into ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from families import FAMILIES, PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.kimi_dataset import World, line, make_world

from drafter.template import THINK_CLOSE
from drafter.validation.spelled import Spelled

BEGUN = [THINK_CLOSE[:k] for k in range(1, len(THINK_CLOSE))]


class Worlds(NamedTuple):
    thinking: dict[str, World]
    answering: dict[str, World]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    made: list[dict[str, World]] = [
        {
            name: make_world(tmp_path_factory.mktemp("world"), target, thinking)
            for name, target in FAMILIES.items()
            if not (thinking and target is PLAIN)
        }
        for thinking in (True, False)
    ]
    return Worlds(*made)


def stop(world: World) -> list[int]:
    return [min(world.family.stop_ids)]


def spelled(world: World, begun: str) -> list[int]:
    """Thinking, its end in two pieces, an answer."""
    return [*world.ids(f"Hm.{begun}"), *world.ids(f"{THINK_CLOSE[len(begun) :]}\n\nThree metres.")]


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_end_of_thinking_that_is_spelled_out_is_named_and_rejected(
    name: str, begun: str, worlds: Worlds
) -> None:
    for each, kind in (
        (worlds.thinking, "thinking as text"),
        (worlds.answering, "thinking although off"),
    ):
        if name not in each:
            continue
        world = each[name]
        ids = spelled(world, begun)
        for row in (
            world.of([*ids, *stop(world)]),
            # As it comes out of text that was encoded again.
            world.of(ids),
            world.of(ids, finish_reason="length"),
        ):
            (judged,) = world.look(line(row))
            assert judged.facts.kinds[0] == kind and judged.facts.verdict == "rejected"


def test_a_mark_that_the_vocabulary_has_and_the_template_does_not_is_text_too(
    worlds: Worlds,
) -> None:
    world = worlds.answering["plain"]
    (judged,) = world.look(line(world.of([*world.ids("Hm.</think>3 m."), *stop(world)])))
    assert judged.facts.reason == "thinking although off: </think> is spelled out"


TEXTS = [
    "Three metres.",
    "\n\n<table><thead><tr><th>a</th></tr></thead></table>",
    "if a < b / c: think(a, b)  # </ think> </thinking>",
    "List<String> t = x</t>",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_good_answers_of_every_family_are_accepted_without_a_remark(
    name: str, text: str, worlds: Worlds
) -> None:
    if name in worlds.thinking:
        world = worlds.thinking[name]
        opened = "" if world.family.prefilled else "<think>"
        ids = [*world.ids(f"{opened}\nHm.{text}\n</think>\n\n{text}"), *stop(world)]
        (judged,) = world.look(line(world.of(ids)))
        assert (judged.facts.verdict, judged.facts.kinds) == ("accepted", ("closed",))
    world = worlds.answering[name]
    (judged,) = world.look(line(world.of([*world.ids(text), *stop(world)])))
    assert (judged.facts.verdict, judged.facts.kinds) == ("accepted", ("not thinking",))


pieces = st.sampled_from([*BEGUN, *(THINK_CLOSE[k:] for k in range(8)), "k>\n", ".<", " ", "ü"])


@settings(max_examples=300)
@given(st.lists(pieces, min_size=1, max_size=8))
def test_it_is_found_where_decoding_finds_it(worlds: Worlds, cut: list[str]) -> None:
    world = worlds.thinking["qwen"]
    find = Spelled(THINK_CLOSE, world.family, world.judge.decode)
    ids = [
        i for piece in cut for i in world.ids(piece) if i not in world.family.controls
    ] or world.ids("x")
    found = find.is_in(np.array(ids, dtype=np.uint32))
    assert found is (THINK_CLOSE in world.judge.decode(ids))
