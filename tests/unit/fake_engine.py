"""A small SGLang-shaped HTTP server that can misbehave, and a workspace of one dataset for it.

Real sockets, no model: what it answers is a function of the prompt and of how often it was asked.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from drafter.files import file_record, read_section, write_json, write_section
from drafter.generate import generate
from drafter.identity import target_identity
from drafter.job import Job
from drafter.layout import JobDir, Prepared, Workspace
from drafter.recipe import Recipe, parse_recipe
from drafter.rows import ROW_KEYS, Family, check_row

OPEN, CLOSE, TOOL, TOOL_END, STOP, BLANK, TEXT = 1, 2, 3, 4, 5, 6, 10
VOCAB = 1000
FAMILY = Family(
    think_open=OPEN,
    think_close=CLOSE,
    prefilled=True,
    tool_begin=frozenset({TOOL}),
    tool_ids=frozenset({TOOL, TOOL_END}),
    stop_ids=frozenset({STOP}),
    vocab_size=VOCAB,
    blank_ids=frozenset({BLANK}),
    tool_end=frozenset({TOOL_END}),
)
DATASET = "B1"


@dataclass
class Reply:
    status: int = 200
    body: Any = None
    delay_s: float = 0.0
    cut: Literal["reset", "truncated"] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    stall_s: float = 0.0
    """In the middle of the body."""


def answer(
    request: dict[str, Any], output_ids: list[int], ended: str = "stop", **meta: Any
) -> dict[str, Any]:
    return {
        "output_ids": output_ids,
        "meta_info": {
            "id": request["rid"],
            "finish_reason": {"type": ended},
            "prompt_tokens": len(request["input_ids"]),
            "completion_tokens": len(output_ids),
            **meta,
        },
    }


def thoughtful(request: dict[str, Any]) -> list[int]:
    """Thinking, an answer, a stop id: the same for the same prompt; up to about 40 tokens."""
    dice = random.Random(str(request["input_ids"]))
    said = [dice.randrange(TEXT, VOCAB) for _ in range(dice.randrange(4, 40))]
    return [*said[:-2], CLOSE, *said[-2:], STOP]


def sound(request: dict[str, Any], _number: int, _again: int) -> Reply:
    return Reply(body=answer(request, thoughtful(request)))


class FakeEngine:
    """Speaks SGLang. ``behave(request, number, again)``: number counts all requests, again those of
    one prompt."""

    path = "/generate"
    prompt_key = "input_ids"

    def __init__(
        self,
        behave: Callable[[dict[str, Any], int, int], Reply] = sound,
        context: int = 4096,
        key: str | None = None,
    ) -> None:
        self.behave = behave
        self.context = context
        self.key = key
        self.model_path = "/models/target"
        self.model_info: dict[str, Any] = {}
        self.health = 200
        self.open_route = True
        self.requests: list[dict[str, Any]] = []
        self.most_in_flight = 0
        self.in_flight = 0
        self._asked: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._port = 0

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def about(self) -> dict[str, Any]:
        """What it says about itself, by path."""
        model = {"model_path": self.model_path, **self.model_info}
        return {"/model_info": model, "/server_info": {"context_length": self.context}}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Again after ``stop`` it listens on the same port."""
        self._on_loop(self._listen())

    def stop(self) -> None:
        self._on_loop(self._drop())

    def _on_loop(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> None:
        self._open: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(
            self._connection, "127.0.0.1", self._port, backlog=1024
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def _drop(self) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._send(writer, await self._reply(path, headers, body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _reply(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if path == "/health":
            return Reply(self.health)
        if self.key and headers.get("authorization") != f"bearer {self.key}":
            return Reply(401, {"error": "Unauthorized"})
        if path != self.path:
            told = self.about().get(path)
            return Reply(404, {"detail": "Not Found"}) if told is None else Reply(body=told)
        request = json.loads(body or b"{}")
        if not self.open_route:
            return Reply(403, {"error": {"message": "Scale-out endpoints are disabled."}})
        if self.prompt_key not in request:
            return Reply(400, {"error": {"message": "1 validation error"}})
        prompt = str(request[self.prompt_key])
        self.requests.append(request)
        reply = self.behave(request, len(self.requests), self._asked[prompt])
        self._asked[prompt] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(reply.delay_s)
        finally:
            self.in_flight -= 1
        return reply

    async def _send(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        if reply.cut == "reset":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            raise ConnectionResetError
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        headers = {"Content-Length": str(len(body)), **reply.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        half = len(body) // 2
        writer.write(f"HTTP/1.1 {reply.status} X\r\n{lines}\r\n".encode() + body[:half])
        await writer.drain()
        if reply.cut:
            raise ConnectionResetError
        await asyncio.sleep(reply.stall_s)
        writer.write(body[half:])
        await writer.drain()


class FakeVLLM(FakeEngine):
    """Speaks vLLM's raw-token route, as 0.32.0 does."""

    path = "/inference/v1/generate"
    prompt_key = "token_ids"

    def about(self) -> dict[str, Any]:
        model = {"id": "served", "root": self.model_path, "max_model_len": self.context}
        return {"/v1/models": {"object": "list", "data": [{**model, "created": 1}]}}


def vllm_answer(
    request: dict[str, Any], output_ids: list[int], ended: str = "stop", **usage: Any
) -> dict[str, Any]:
    counts = {"prompt_tokens": len(request["token_ids"]), "completion_tokens": len(output_ids)}
    choice = {"index": 0, "finish_reason": ended, "stop_reason": None, "token_ids": output_ids}
    return {
        "request_id": f"generate-tokens-{request['request_id']}",
        "usage": {**counts, **usage},
        "choices": [choice],
    }


@dataclass
class Site:
    """A workspace with one dataset, prepared, and its recipe."""

    root: Path
    num_prompts: int = 60
    urls: tuple[str, ...] = ("http://127.0.0.1:9",)
    dataset: dict[str, Any] = field(default_factory=lambda: {"unbounded": True})
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    thinking: bool = True
    in_flight: int = 8
    pilot: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        target = self.root / "target"
        target.mkdir(parents=True, exist_ok=True)
        (target / "tokenizer.json").write_text("{}")
        self.prepare([[TEXT, TEXT + 1, *map(int, f"{i:04d}")] for i in range(self.num_prompts)])

    @property
    def recipe(self) -> Recipe:
        tree = {
            "name": "test",
            "target": {
                "path": str(self.root / "target"),
                "revision": "r1",
                "thinking": self.thinking,
            },
            "engine": {
                "urls": self.urls,
                "queue_timeout_s": 5,
                "slowest_tokens_per_s": 1000,
                "patience_s": 1,
                **self.engine,
            },
            "datasets": [{"name": DATASET, "format": "glaive", "path": "/none", **self.dataset}],
            "generate": {"max_new_tokens": 64, **self.settings},
            "validate": self.rules,
            "pilot": self.pilot,
            "host": {"workspace": str(self.root / "workspace")},
        }
        return parse_recipe(tree, "test")

    @property
    def prepared(self) -> Prepared:
        return Workspace(self.root / "workspace").prepared(DATASET)

    def prepare(self, prompts: list[list[int]]) -> None:
        self.prepared.root.mkdir(parents=True, exist_ok=True)
        rows = [{"sample_id": f"{DATASET}-{i:04d}", "input_ids": p} for i, p in enumerate(prompts)]
        self.write(self.prepared.prompt_ids, rows)
        section = {
            "inputs": {},
            "identity": target_identity(self.recipe),
            "counts": {"prompts": len(rows)},
            "files": {self.prepared.prompt_ids.name: file_record(self.prepared.prompt_ids)},
        }
        write_section(self.prepared.manifest, "prepare", section)

    def job(
        self, phase: str = "generate", mode: Literal["resume", "restart"] = "resume", **more: Any
    ) -> Job:
        directory = Workspace(self.root / "workspace").job(phase, DATASET).root
        directory.mkdir(parents=True, exist_ok=True)
        told = {"run_id": "run:1", "token_budget": None, "in_flight": self.in_flight, **more}
        job = Job(
            phase=phase,
            dataset=DATASET,
            recipe=self.recipe,
            dir=JobDir(directory),
            start_id="start",
            code="code",
            mode=mode,
            **told,
        )
        spec = {**told, "phase": phase, "dataset": DATASET, "mode": mode}
        spec |= {"recipe": self.recipe.as_json(), "start_id": "start", "code": "code"}
        write_json(job.dir.job, spec)
        return job

    @staticmethod
    def write(path: Path, rows: list[Any]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @staticmethod
    def read(path: Path) -> list[Any]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def responses(self) -> list[dict[str, Any]]:
        return self.read(self.prepared.responses)


def generated(site: Site, **job: Any) -> dict[str, Any]:
    """Run the phase here; gives the manifest section."""
    generate(site.job(**job), FAMILY)
    section = read_section(site.prepared.manifest, "generate")
    assert section is not None
    return section


def assert_complete(site: Site, num_prompts: int) -> None:
    rows = site.responses()
    assert sorted(row["sample_id"] for row in rows) == [
        f"{DATASET}-{i:04d}" for i in range(num_prompts)
    ]
    assert all(check_row(row, FAMILY, 6) is None and row.keys() == ROW_KEYS for row in rows)
