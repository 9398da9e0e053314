"""An engine that only keeps time, in a process of its own, for measuring clients.

``python -m bench.paced_engine RATE NUM_TOKENS`` prints its port. A request takes as long as
decoding its answer at RATE tokens/s would; at rate 0 no time at all. An answer has NUM_TOKENS ids
on average, the same for the same prompt, and as many requests run at once as come in.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from unit.fake_engine import CLOSE, STOP, TEXT

SPREAD = 0.5
"""Sigma of the log-normal lengths."""

_ABOUT = {
    b"/health": b"{}",
    b"/model_info": b'{"model_path":"/models/target"}',
    b"/server_info": b'{"context_length":1000000}',
}


@contextmanager
def paced_engine(rate: float, num_tokens: int) -> Iterator[str]:
    """Its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.paced_engine", str(rate), str(num_tokens)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


class _Connection(asyncio.Protocol):
    def __init__(self, rate: float, num_tokens: int, bodies: dict[int, bytes]) -> None:
        self._rate = rate
        self._num_tokens = num_tokens
        self._bodies = bodies
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if len(body) < length:
            return
        self._received = b""
        path = head.split(b" ", 2)[1]
        if path in _ABOUT:
            self._send(_ABOUT[path])
            return
        if not self._rate:
            self._send(self._body(self._num_tokens))
            return
        dice = random.Random(orjson.loads(body)["input_ids"].__repr__())
        mean = math.log(self._num_tokens) - SPREAD**2 / 2
        length = max(4, int(dice.lognormvariate(mean, SPREAD)))
        loop = asyncio.get_running_loop()
        loop.call_later(length / self._rate, self._send, self._body(length))

    def _body(self, num_tokens: int) -> bytes:
        if num_tokens not in self._bodies:
            ids = [TEXT] * (num_tokens - 3) + [CLOSE, TEXT, STOP]
            meta = {
                "id": "",
                "finish_reason": {"type": "stop", "matched": STOP},
                "prompt_tokens": 6,
                "completion_tokens": num_tokens,
            }
            self._bodies[num_tokens] = json.dumps({"output_ids": ids, "meta_info": meta}).encode()
        return self._bodies[num_tokens]

    def _send(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
            self._transport.write(head.encode() + body)


async def _serve(rate: float, num_tokens: int) -> None:
    bodies: dict[int, bytes] = {}
    server = await asyncio.get_running_loop().create_server(
        lambda: _Connection(rate, num_tokens, bodies), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    asyncio.run(_serve(float(sys.argv[1]), int(sys.argv[2])))
