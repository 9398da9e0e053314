"""Work in forked processes: its order, its errors, and that nobody is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from drafter.errors import DataError, DrafterError, RecipeError
from drafter.preparation import parallel

INCLUDE = Path(__file__).parents[2] / "include"


def no_begin(_: int) -> None:
    return


def spread(work: parallel.Work[int, object], num: int, processes: int) -> list[tuple[int, object]]:
    return list(parallel.spread(work, range(num), processes, begin=no_begin))


@pytest.mark.parametrize("ahead", [1, 3, None])
@pytest.mark.parametrize("processes", [0, 2, 5])
def test_answers_come_in_the_order_of_the_items_however_long_each_takes(
    processes: int, ahead: int | None
) -> None:
    def work(item: int) -> Iterator[str]:
        for part in range(item % 4):
            time.sleep(random.Random(item).random() / 100)
            yield f"{item}.{part}"

    answers = parallel.spread(work, range(20), processes, begin=no_begin, ahead=ahead)
    expected = [(item, f"{item}.{part}") for item in range(20) for part in range(item % 4)]
    assert list(answers) == expected


@pytest.mark.parametrize("processes", [0, 3])
def test_each_process_is_told_its_number_and_no_items_are_no_work(processes: int) -> None:
    told = list[int]()

    def work(_: int) -> Iterator[list[int]]:
        yield told

    begun = list(parallel.spread(work, range(30), processes, begin=told.append))
    assert {tuple(numbers) for _, numbers in begun} <= {(n,) for n in range(max(processes, 1))}
    assert spread(work, 0, processes) == []


def test_no_more_is_begun_than_may_be_ahead(tmp_path: Path) -> None:
    def work(item: int) -> Iterator[int]:
        (tmp_path / str(item)).touch()
        yield item

    with closing(parallel.spread(work, range(100), 2, begin=no_begin, ahead=4)) as answers:
        assert next(answers) == (0, 0)
        time.sleep(0.1)
    assert len(list(tmp_path.iterdir())) <= 5


@pytest.mark.parametrize("error", [RecipeError("no"), DataError("bad")])
def test_an_error_of_the_work_is_raised_where_it_was_asked_for(error: DrafterError) -> None:
    def work(item: int) -> Iterator[int]:
        yield item
        if item == 3:
            raise error

    with pytest.raises(type(error), match=str(error)):
        spread(work, 100, 2)


@pytest.mark.parametrize(
    ("death", "code"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "-9"), (lambda: 1 / 0, "1")],
    ids=["killed", "unforeseen"],
)
def test_a_process_that_dies_is_an_error_and_not_a_missing_answer(
    death: object, code: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(item: int) -> Iterator[int]:
        if item == 5:
            death()  # type: ignore[operator]
        yield item

    with pytest.raises(DrafterError, match=rf"died \(exit {code}\)"):
        spread(work, 10, 2)
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (code == "1")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_who_stops_listening_leaves_no_process_behind() -> None:
    def work(_: int) -> Iterator[int]:
        yield os.getpid()
        time.sleep(60)

    with closing(parallel.spread(work, range(4), 2, begin=no_begin)) as answers:
        _, pid = next(answers)
        assert alive(pid)
    assert not alive(pid)


def test_when_the_parent_is_killed_its_processes_die() -> None:
    code = """
import os, sys, time
from drafter.preparation import parallel
def work(_):
    yield os.getpid()
    time.sleep(60)
for _, pid in parallel.spread(work, range(2), 2, begin=lambda _: None):
    print(pid, flush=True)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(INCLUDE)},
    )
    assert parent.stdout
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)
    parent.stdout.close()


@pytest.mark.parametrize(
    ("cores", "items", "expected"), [(1, 9, 0), (2, 9, 2), (64, 9, 4), (64, 3, 3), (64, 1, 0)]
)
def test_processes_are_as_many_as_cores_and_items_but_few(
    cores: int, items: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert parallel.num_processes(items) == expected
