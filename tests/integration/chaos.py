"""The embedded engine with faults: a proxy before the real process that spoils answers by a plan.

The plan says by number which requests to /generate go wrong and how; the proxy counts what it did
and what each client was told, by the class that the answer must fall into.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

INCLUDE = Path(__file__).parents[2] / "include"

Class = Literal["ok", "length", "empty", "abort", "transient", "malformed"]
Answer = dict[str, Any]

SLOW_S = 1.0
RETRY_AFTER_S = 1


def _with(answer: Answer, output_ids: list[int] | None = None, **meta: Any) -> Answer:
    changed = {} if output_ids is None else {"output_ids": output_ids}
    return {**answer, **changed, "meta_info": {**answer["meta_info"], **meta}}


SPOILT: dict[str, tuple[Class, Callable[[Answer], Answer]]] = {
    "error body": ("malformed", lambda _: {"error": {"message": "CUDA out of memory"}}),
    "abort": ("abort", lambda a: _with(a, finish_reason={"type": "abort", "message": "by a test"})),
    "more completion_tokens": (
        "malformed",
        lambda a: _with(a, completion_tokens=a["meta_info"]["completion_tokens"] + 1),
    ),
    "fewer ids": ("malformed", lambda a: _with(a, a["output_ids"][1:])),
    "fewer prompt_tokens": (
        "malformed",
        lambda a: _with(a, prompt_tokens=a["meta_info"]["prompt_tokens"] - 1),
    ),
    "id too large": ("malformed", lambda a: _with(a, [10**6, *a["output_ids"][1:]])),
    "negative id": ("malformed", lambda a: _with(a, [-1, *a["output_ids"][1:]])),
    "no ids": ("empty", lambda a: _with(a, [], completion_tokens=0)),
    "no stop id": (
        "malformed",
        lambda a: _with(
            a,
            a["output_ids"][:-1],
            completion_tokens=len(a["output_ids"]) - 1,
            finish_reason={"type": "stop"},
        ),
    ),
}
"""Whole answers under HTTP 200, spoilt: fault -> (class, how)."""

UNANSWERED = ("500", "502", "503", "503 with Retry-After", "hang", "reset", "cut body")
"""Faults that are transient: the engine may be asked again."""

OTHERS = ("slow", "half a JSON")


def plan(seed: int, each: int, bursts: int, among: int) -> dict[int, str]:
    """{request number: fault}, drawn: ``each`` of every kind and ``bursts`` of 503, 10 to 20 long,
    among the first ``among`` requests."""
    dice = random.Random(seed)
    faults: dict[int, str] = {}
    for i in range(bursts):
        begin = dice.randrange(among - 20)
        kind = "503" if i % 2 else "503 with Retry-After"
        faults |= dict.fromkeys(range(begin, begin + dice.randrange(10, 20)), kind)
    kinds = [kind for kind in (*SPOILT, *UNANSWERED, *OTHERS) for _ in range(each)]
    free = [number for number in range(among) if number not in faults]
    return faults | dict(zip(dice.sample(free, len(kinds)), kinds, strict=True))


class Embedded:
    """``drafter serve`` in a process of its own, killed and started again on the same port."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.port = 0

    def start(self) -> None:
        command = [sys.executable, "-m", "drafter", "serve", "--model", str(self._target)]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            env={**os.environ, "PYTHONPATH": str(INCLUDE)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        hello = self._process.stdout.readline()
        urls = [word for word in hello.split() if word.startswith("http")]
        assert urls, f"the engine did not start: {hello!r}"
        self.port = int(urls[0].rstrip(",").rpartition(":")[2])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class ChaosEngine:
    """Listens before ``target``'s embedded engine; restarts it at request ``restart_at``."""

    def __init__(self, target: Path, faults: dict[int, str], restart_at: int) -> None:
        self._engine = Embedded(target)
        self._faults = faults
        self._restart_at = restart_at
        self._restart: asyncio.Task[None] | None = None
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self.requests = 0
        self.injected = Counter[str]()
        """Faults as they came about."""
        self.told = Counter[Class]()
        """What clients were told, by class."""
        self.good: list[tuple[list[int], list[int]]] = []
        """(prompt ids, output ids) of every good answer that went out."""

    def __enter__(self) -> Self:
        self._engine.start()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=1024)
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._server = await asyncio.start_server(self._connection, sock=self._listener)

    async def _start_again(self) -> None:
        """As a person would: for a while nothing listens there."""
        waiting = []
        # The kernel resets who waits to be accepted when nobody listens, and nobody counts it.
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(self._listener.accept()[0])
        self._server.close()
        late = [
            asyncio.create_task(self._connection(*await asyncio.open_connection(sock=each)))
            for each in waiting
        ]
        await asyncio.to_thread(self._engine.kill)
        await asyncio.to_thread(self._engine.start)
        await self._listen()
        await asyncio.gather(*late)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _header(head, "content-length")
                body = await reader.readexactly(int(length or 0))
                if b" /generate " in head.split(b"\r\n")[0]:
                    await self._generate(reader, writer, head, body)
                else:
                    writer.write(_response(*await self._ask(head, body)))
                    await writer.drain()
        writer.close()

    async def _generate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes
    ) -> None:
        number = self.requests
        self.requests += 1
        if number == self._restart_at:
            self._restart = asyncio.create_task(self._start_again())
        fault = self._faults.get(number, "")
        if fault == "reset":
            self._reset(writer, fault)
        if fault.startswith("50"):
            retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if "Retry" in fault else ""
            status = int(fault[:3])
            writer.write(_response(status, b'{"error": {"message": "busy"}}', retry))
            return self._tell("transient", fault)
        asked = asyncio.create_task(
            self._ask(head, body) if fault != "hang" else asyncio.sleep(1e6)
        )
        gone = asyncio.create_task(reader.read(1))
        await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            self._tell("transient", fault if fault == "hang" else "client gave up")
            raise ConnectionError
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        if asked.exception():
            self._reset(writer, "restart")
        status, content = asked.result()
        assert status == 200, content
        return await self._answer(writer, json.loads(body)["input_ids"], fault, content)

    async def _answer(
        self, writer: asyncio.StreamWriter, prompt: list[int], fault: str, content: bytes
    ) -> None:
        answer = json.loads(content)
        if fault in SPOILT:
            told, spoil = SPOILT[fault]
            writer.write(_response(200, json.dumps(spoil(answer)).encode()))
            return self._tell(told, fault)
        if fault == "half a JSON":
            writer.write(_response(200, content[: len(content) // 2]))
            return self._tell("malformed", fault)
        whole = _response(200, content)
        if fault == "cut body":
            writer.write(whole[:-20])
            await writer.drain()
            self._tell("transient", fault)
            raise ConnectionError
        if fault == "slow":
            for begin in range(0, len(whole), len(whole) // 10):
                writer.write(whole[begin : begin + len(whole) // 10])
                await asyncio.sleep(SLOW_S / 10)
        else:
            writer.write(whole)
        await writer.drain()
        self.good.append((prompt, answer["output_ids"]))
        ended = answer["meta_info"]["finish_reason"]["type"]
        return self._tell("ok" if ended == "stop" else ended, fault)

    async def _ask(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        """(status, body) that the engine answers. ConnectionError when it is gone."""
        method, path, _ = head.split(b"\r\n")[0].split(b" ")
        reader, writer = await asyncio.open_connection("127.0.0.1", self._engine.port)
        try:
            about = f"Host: engine\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(method + b" " + path + b" HTTP/1.1\r\n" + about.encode() + body)
            answer_head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        if not answer_head or len(content) != int(_header(answer_head, "content-length") or 0):
            raise ConnectionError("the engine went away in the middle")
        return int(answer_head.split(b" ")[1]), content

    def _tell(self, told: Class, fault: str) -> None:
        self.told[told] += 1
        if fault:
            self.injected[fault] += 1

    def _reset(self, writer: asyncio.StreamWriter, fault: str) -> None:
        self._tell("transient", fault)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        raise ConnectionResetError


def _header(head: bytes, name: str) -> str | None:
    for line in head.decode().split("\r\n")[1:]:
        key, _, value = line.partition(":")
        if key.lower() == name:
            return value.strip()
    return None


def _response(status: int, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
