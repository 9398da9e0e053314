"""A hub for tests: two real HTTP servers, one that redirects and one that holds the bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
NAME = "owner/name"


class FakeHub:
    """What the hub does with a dataset, as far as reading it goes.

    ``faults`` holds what happens to the next requests for bytes, one each: ("status", number),
    ("cut", bytes that still come), ("retry after", seconds), ("from the begin", 0) whatever the
    range, or ("endless", 0): the file and more, until the reader has gone.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.token: str | None = None
        self.page_size = 1000
        self.last_cursor: int | None = None
        """Of the list of files; after it comes itself again."""
        self.refusal: tuple[int, str] | None = None
        self.portal: bytes | None = None
        """A page that answers instead of the hub, as that of a proxy does."""
        self.faults: list[tuple[str, int]] = []
        self.gives_ranges = True
        self.listings = 0
        self.ranges: list[tuple[str, int, int]] = []
        """Name, begin and end of every request for bytes."""
        self.storage_headers: list[dict[str, str]] = []

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The endpoint's URL."""
        hub = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(_HubHandler))
        storage = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(_StorageHandler))
        self.url, self.storage_url = (
            f"http://127.0.0.1:{server.server_port}" for server in (hub, storage)
        )
        threads = [
            threading.Thread(target=server.serve_forever, args=(0.01,)) for server in (hub, storage)
        ]
        for thread in threads:
            thread.start()
        try:
            yield self.url
        finally:
            for server, thread in zip((hub, storage), threads, strict=True):
                server.shutdown()
                server.server_close()
                thread.join()

    def _handler(self, kind: type[_Handler]) -> type[_Handler]:
        return type(kind.__name__, (kind,), {"hub": self})


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _HubHandler(_Handler):
    def do_GET(self) -> None:
        hub = self.hub
        url = urlsplit(self.path)
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.answer(401, X_Error_Message="Invalid credentials")
        elif hub.portal:
            self.answer(200, hub.portal, Content_Type="text/html")
        elif hub.refusal:
            self.answer(hub.refusal[0], X_Error_Message=hub.refusal[1])
        elif url.path == f"/api/datasets/{NAME}/tree/{REVISION}":
            self.tree(parse_qs(url.query))
        elif url.path.startswith(f"/datasets/{NAME}/resolve/{REVISION}/"):
            path = url.path.removeprefix(f"/datasets/{NAME}/resolve/{REVISION}/")
            self.answer(302, Location=f"{hub.storage_url}/{path}")
        else:
            self.answer(404, X_Error_Message="Revision not found")

    def tree(self, query: dict[str, list[str]]) -> None:
        hub = self.hub
        hub.listings += 1
        assert query["recursive"] == ["true"]
        begin = int(query.get("cursor", ["0"])[0])
        entries = [{"type": "directory", "path": "data"}] + [
            {"type": "file", "path": path, "size": len(data), "oid": "x"}
            for path, data in hub.files.items()
        ]
        headers = {}
        if begin + hub.page_size < len(entries):
            cursor = min(begin + hub.page_size, hub.last_cursor or len(entries))
            following = f"recursive=true&cursor={cursor}"
            headers["Link"] = f'<https://elsewhere.invalid/tree?{following}>; rel="next"'
        page = entries[begin : begin + hub.page_size]
        self.answer(200, json.dumps(page).encode(), Content_Type="application/json", **headers)


class _StorageHandler(_Handler):
    def do_GET(self) -> None:
        hub = self.hub
        path = unquote(self.path.removeprefix("/"))
        data = hub.files[path]
        asked = self.headers["Range"].removeprefix("bytes=").split("-")
        begin, end = int(asked[0]), min(int(asked[1]) + 1, len(data))
        hub.ranges.append((path, begin, end))
        hub.storage_headers.append(dict(self.headers))
        fault, number = hub.faults.pop(0) if hub.faults else ("none", 0)
        if fault == "retry after":
            self.answer(429, Retry_After=str(number))
        elif fault == "status":
            self.answer(number)
        elif not hub.gives_ranges:
            self.answer(200, data)
        elif fault == "endless":
            self.endless(data)
        else:
            if fault == "from the begin":
                begin, end = 0, end - begin
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            self.wfile.write(data[begin : begin + number if fault == "cut" else end])
            self.close_connection = fault == "cut"

    def endless(self, data: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        try:
            self.wfile.write(data)
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            pass  # the reader has gone
