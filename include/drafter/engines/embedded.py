"""The embedded engine: SGLang's native /generate over a tiny model, on a CPU, in one process.

It is to this project what SQLite is to Airflow: a default that needs nothing else, for demos and
tests. A model worth drafting for is served by SGLang; both answer the same requests. It says what
it is when it starts and in /server_info ("version": "embedded").

    POST /generate       {rid?, input_ids, sampling_params?}, or lists of them
    POST /abort_request  {rid} or {abort_all: true}
    GET  /model_info /server_info /health, also under their older get_ names
    GET or POST /flush_cache

Answers are those of SGLang 0.5.23: output_ids at top level, the matched stop id included; an
aborted request answers 200 with what it had; a request beyond the context is refused. It differs on
purpose: an id outside the vocabulary is answered 400, where SGLang dies; every error body is
{"error": {"message": ...}}; and what it cannot do (streams, logprobs, hidden states, text prompts,
most sampling fields) is refused by name. Requests of a client that hung up end within a second.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch

from drafter.engines.batch import Batch, DuplicateId, Request
from drafter.engines.decoding import Decoder, load_decoder
from drafter.engines.protocol import BadRequest, requests_of
from drafter.errors import RecipeError

_HANG_UP_POLL_S = 1.0


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024  # clients connect all at once

    def __init__(self, address: tuple[str, int], model_dir: Path, decoder: Decoder) -> None:
        super().__init__(address, _Handler)
        self.model_dir = model_dir
        self.decoder = decoder
        self.batch = Batch(decoder)
        self.tokenizer = _tokenizer(model_dir)
        self.num_generate = 0
        self.count_lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error of ours; anything else is printed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def result(self, request: Request) -> dict[str, Any]:
        output_ids = request.output_ids
        result: dict[str, Any] = {
            "output_ids": output_ids,
            "meta_info": {
                "id": request.rid,
                "finish_reason": request.finish_reason,
                "prompt_tokens": request.num_prompt,
                "completion_tokens": len(output_ids),
                "cached_tokens": 0,
                "e2e_latency": request.seconds,
            },
        }
        if self.tokenizer is not None:
            shown = output_ids[: -1 if request.finish_reason["type"] == "stop" else None]
            result["text"] = self.tokenizer.decode(shown, skip_special_tokens=True)
        return result


def _tokenizer(model_dir: Path) -> Any:
    """The checkpoint's fast tokenizer, or None: then answers carry no text."""
    from tokenizers import Tokenizer

    path = model_dir / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.exists() else None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave together

    def do_GET(self) -> None:
        self._route({})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdigit():
            self.close_connection = True
            return self._answer(411, _error("send the body's length in Content-Length"))
        data = self.rfile.read(int(length))
        try:
            body = json.loads(data or b"{}")
        except ValueError as error:
            return self._answer(400, _error(f"the body is not JSON: {error}"))
        if not isinstance(body, dict):
            return self._answer(400, _error("the body is not a JSON object"))
        return self._route(body)

    do_PUT = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """A line per request would drown everything else."""

    def _route(self, body: dict[str, Any]) -> None:
        routes: dict[str, Callable[[dict[str, Any]], None]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/flush_cache": self._flush_cache,
            "/health": self._health,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
        }
        path = self.path.partition("?")[0]
        if path not in routes:
            return self._answer(404, _error(f"no {path} here, only {', '.join(routes)}"))
        if path in ("/generate", "/abort_request") and self.command == "GET":
            return self._answer(405, _error(f"{path} takes POST"))
        return routes[path](body)

    def _generate(self, body: dict[str, Any]) -> None:
        with self.server.count_lock:
            self.server.num_generate += 1
        try:
            requests = requests_of(body, self.server.decoder)
            self.server.batch.submit(requests)
        except BadRequest as error:
            return self._answer(400, _error(str(error)))
        except DuplicateId as error:
            return self._answer(400, _error(f"Duplicate request ID detected: {error}"))
        for request in requests:
            while not request.done.wait(_HANG_UP_POLL_S):
                if self._client_is_gone():
                    self.close_connection = True
                    return self.server.batch.abort(request.rid for request in requests)
        results = [self.server.result(request) for request in requests]
        return self._answer(200, results if isinstance(body["input_ids"][0], list) else results[0])

    def _client_is_gone(self) -> bool:
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def _abort(self, body: dict[str, Any]) -> None:
        self.server.batch.abort(None if body.get("abort_all") else [str(body.get("rid"))])
        self._answer(200, None)

    def _flush_cache(self, _: dict[str, Any]) -> None:
        if self.server.batch.is_idle:
            self._answer(200, {"message": "nothing is kept between requests"})
        else:
            self._answer(400, _error("requests are running or waiting: flush when they are done"))

    def _health(self, _: dict[str, Any]) -> None:
        self._answer(200, None)  # a fault while decoding ends the process

    def _model_info(self, _: dict[str, Any]) -> None:
        path = str(self.server.model_dir)
        info = {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": path,
            "model_type": self.server.decoder.model_type,
            "architectures": [self.server.decoder.architecture],
            "is_generation": True,
        }
        self._answer(200, info)

    def _server_info(self, _: dict[str, Any]) -> None:
        decoder = self.server.decoder
        info = {
            "version": "embedded",
            "about": "embedded engine for demos and tests, in place of SGLang",
            "model_path": str(self.server.model_dir),
            "context_length": decoder.context,
            "max_req_input_len": decoder.context - 1,
            "max_running_requests": decoder.num_slots,
            "generate_requests": self.server.num_generate,
        }
        self._answer(200, info)

    def _answer(self, status: int, value: Any) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def serve(model_dir: Path, host: str, port: int) -> None:
    """Answer until SIGTERM or SIGINT, then exit 0; port 0 takes a free one. Main thread only.

    Raises RecipeError when the model is not one this engine computes, or the port is taken.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    # An operation takes microseconds and a barrier between threads as much; the other cores belong
    # to whatever else runs beside a demo.
    torch.set_num_threads(1)
    server = _listen(model_dir, host, port)

    def end(*_: object) -> None:
        os.write(1, f"answered {server.num_generate} /generate requests\n".encode())
        # Nothing is kept, and tearing torch down would take longer than the stop may.
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    decoder = server.decoder
    print(
        f"embedded engine for demos and tests, in place of SGLang: {model_dir} at"
        f" http://{host}:{server.server_address[1]}, {decoder.num_slots} rows at once,"
        f" context {decoder.context} tokens",
        flush=True,
    )
    server.batch.run()


def _listen(model_dir: Path, host: str, port: int) -> _Server:
    decoder = load_decoder(model_dir)
    try:
        return _Server((host, port), model_dir, decoder)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RecipeError(
                f"port {port} is taken: stop what listens there, or choose another --port"
            ) from None
        raise RecipeError(f"cannot listen on {host}:{port} ({error.strerror})") from None
