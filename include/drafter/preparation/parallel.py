"""Work spread over forked processes, answers in the order of the items.

A forked process has what its parent has loaded (a tokenizer, a table of converters) without
loading or pickling it; only items and answers travel. Nobody outlives the parent.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from drafter.errors import DrafterError
from drafter.processes import die_with_parent

Item = TypeVar("Item")
Answer = TypeVar("Answer")

Work = Callable[[Item], Iterator[Answer]]

MAX_PROCESSES = 4
"""A GPU host has a hundred cores, and an engine that uses them; memory grows with each process."""


def num_processes(num_items: int) -> int:
    """How many processes so many items are worth; 0 when this one does it alone."""
    num = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), num_items)
    return num if num > 1 else 0


def spread(
    work: Work[Item, Answer],
    items: Sequence[Item],
    num_processes: int,
    *,
    begin: Callable[[int], None],
    ahead: int | None = None,
) -> Generator[tuple[int, Answer]]:
    """(index of the item, answer) for every answer of ``work`` to every item, in their order.

    With ``num_processes`` = 0 everything happens in this process, as the answers are asked for.
    ``begin`` is called in each process with its number, from 0. With processes an item is begun at
    most ``ahead`` items before the first that is not finished. Raises what ``work`` raises if that
    is a DrafterError, and DrafterError when a process dies.
    """
    if not num_processes:
        begin(0)
        for index, item in enumerate(items):
            for answer in work(item):
                yield index, answer
        return
    pool = _Pool(work, num_processes, begin)
    try:
        yield from pool.answers(items, ahead or len(items))
    finally:
        pool.kill()


class _Pool:
    def __init__(self, work: Work[Any, Any], num: int, begin: Callable[[int], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._workers: dict[Connection, Any] = {}
        # Else each process copies what it never changes, by looking whether it is garbage.
        gc.freeze()
        try:
            for number in range(num):
                ours, theirs = context.Pipe()
                arguments = (work, begin, number, theirs, os.getpid())
                worker = context.Process(target=_serve, args=arguments, daemon=True)
                worker.start()
                theirs.close()
                self._workers[ours] = worker
        finally:
            gc.unfreeze()

    def answers(self, items: Sequence[Any], ahead: int) -> Iterator[tuple[int, Any]]:
        idle = deque(self._workers)
        doing: dict[Connection, int] = {}
        # Answers that came before it was their item's turn; None ends those of an item.
        early: dict[int, deque[Any]] = {}
        turn = following = 0
        while turn < len(items):
            while idle and following < min(len(items), turn + ahead):
                connection = idle.popleft()
                self._send(connection, items[following])
                doing[connection] = following
                early[following] = deque()
                following += 1
            ready = wait(list(doing))
            for connection in [connection for connection in doing if connection in ready]:
                answer = self._received(connection)
                early[doing[connection]].append(answer)
                if answer is None:
                    del doing[connection]
                    idle.append(connection)
            while turn in early:
                while early[turn]:
                    if (answer := early[turn].popleft()) is None:
                        break
                    yield turn, answer[0]
                else:
                    break
                del early[turn]
                turn += 1

    def kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        for connection, worker in self._workers.items():
            worker.join()
            connection.close()

    def _send(self, connection: Connection, item: Any) -> None:
        try:
            connection.send(item)
        except BrokenPipeError:
            raise self._death(connection) from None

    def _received(self, connection: Connection) -> Any:
        """``(answer,)``, or None at the end of an item."""
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death(connection) from None
        if isinstance(answer, DrafterError):
            raise answer
        return answer

    def _death(self, connection: Connection) -> DrafterError:
        worker = self._workers[connection]
        worker.join()
        return DrafterError(
            f"process {worker.pid}, which did a part of the work, died (exit {worker.exitcode}):"
            " its own words are above, -9 is mostly a lack of memory"
        )


def _serve(
    work: Work[Any, Any],
    begin: Callable[[int], None],
    number: int,
    connection: Connection,
    parent: int,
) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begin(number)
    while True:
        item = connection.recv()
        try:
            for answer in work(item):
                connection.send((answer,))
        except DrafterError as error:
            connection.send(error)
            return
        connection.send(None)
