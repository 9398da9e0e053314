"""Files of a dataset on the Hugging Face hub, read where they lie.

Two of its routes are needed: the tree of a revision, which names files and their sizes, and
``resolve``, which answers a range of bytes, mostly by a redirect to some storage. Ranges and not
one long answer, because Parquet is read in places, and because what was cut off goes on at the byte
where it ended. HF_ENDPOINT and HF_TOKEN (or a login by ``hf auth login``) of the host count; the
token goes to the hub alone, not to its storage.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import IO, Any, cast
from urllib.parse import quote

import httpx

from drafter.errors import Busy, DataError, RecipeError
from drafter.sections import Dataset
from drafter.source_files import holds_rows

BLOCK_BYTES = 8 << 20
"""Of files that are read from one end to the other: one request, held in memory."""

PATIENCE_S = 300.0
"""Without one byte of an answer: longer than a restart of a router takes."""

_TIMEOUT_S = 30.0
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_SHOWN = 8
_SHARD = re.compile(r"(?<![A-Za-z0-9.])\d+(-of-\d+)?(-[0-9a-f]{16})?(?=\.)")


@dataclass(frozen=True)
class HubFile:
    """One file, as a :class:`drafter.sources.compression.SourceFile`."""

    hub: str
    revision: str
    path: str
    size: int

    def __str__(self) -> str:
        return f"{self.hub}/{self.path}"

    def open(self, mode: str, buffering: int = -1) -> IO[bytes]:
        assert mode == "rb"
        ranges = _Ranges(self)
        return cast(IO[bytes], ranges if buffering == 0 else io.BufferedReader(ranges, BLOCK_BYTES))


def files(source: Dataset) -> list[HubFile]:
    """The files of ``source.hub`` that ``source.files`` matches, in the order of their names.

    Raises RecipeError when there is none, when the hub refuses, and when ``source.files`` is not
    given and would have to choose; Busy when the hub does not answer.
    """
    assert source.hub
    with _client() as client:
        tree = {
            entry["path"]: HubFile(source.hub, source.revision, entry["path"], entry["size"])
            for entry in _tree(client, source.hub, source.revision)
            if entry["type"] == "file"
        }
    names = sorted(name for name in tree if holds_rows(name.rpartition("/")[2]))
    kinds = sorted({_SHARD.sub("*", name) for name in names})
    if source.files is not None:
        names = sorted(name for name in tree if fnmatchcase(name, source.files))
        fault = f"no file of {source.hub} matches files = {source.files!r}"
    else:
        names = names if len(kinds) == 1 else []
        fault = f"{source.hub} holds {len(kinds)} kinds of data files"
    if not names:
        shown = ", ".join(kinds[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
        raise RecipeError(
            f"{source.name}: {fault}: set files to what is meant ({shown or 'it holds no data'})"
        )
    return [tree[name] for name in names]


def _tree(client: httpx.Client, hub: str, revision: str) -> Iterator[dict[str, Any]]:
    url = f"{_endpoint()}/api/datasets/{hub}/tree/{revision}"
    query: dict[str, str] | None = {"recursive": "true"}
    asked: list[dict[str, str]] = []
    while query is not None:
        answer = _page(client, url, query, hub)
        asked.append(query)
        try:
            yield from _entries(answer.json())
            following = answer.links.get("next", {}).get("url")
            # Only its query counts: the token goes to the endpoint, wherever else a link points.
            query = dict(httpx.URL(following).params) if following else None
        except (ValueError, httpx.InvalidURL):
            raise _no_hub(url, "answers no list of files") from None
        if query in asked:
            raise _no_hub(url, "begins its list of files anew")


def _entries(listed: Any) -> list[dict[str, Any]]:
    """ValueError for what is no page of a tree."""
    kinds = {"type": str, "path": str, "size": int}
    if not isinstance(listed, list):
        raise ValueError("no list")
    for entry in listed:
        wanted = kinds if isinstance(entry, dict) and entry.get("type") == "file" else {"type": str}
        for key, kind in wanted.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                raise ValueError(f"an entry without {key}")
    entries: list[dict[str, Any]] = listed
    return entries


def _no_hub(url: str, what: str) -> RecipeError:
    return RecipeError(f"{url} {what}: correct HF_ENDPOINT, or the proxy, of the GPU host")


def _page(client: httpx.Client, url: str, query: dict[str, str], hub: str) -> httpx.Response:
    patience = _Patience(hub)
    while True:
        try:
            answer = client.get(url, params=query)
            _check(answer, hub)
            return answer
        except (httpx.RequestError, _Later) as error:
            patience.wait(error)


class _Ranges(io.RawIOBase):
    """A file of the hub, read and sought like one on disk."""

    def __init__(self, file: HubFile) -> None:
        super().__init__()
        self._file = file
        self._client = _client()
        self._url = f"{_endpoint()}/datasets/{file.hub}/resolve/{file.revision}/{quote(file.path)}"
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = origin[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, over as many requests as it takes; less only at the end of the file."""
        view = memoryview(buffer).cast("B")
        view = view[: max(self._file.size - self._position, 0)]
        patience = _Patience(str(self._file))
        done = 0
        while done < len(view):
            before = done
            try:
                for block in self._blocks(self._position + done, self._position + len(view)):
                    block = block[: len(view) - done]
                    view[done : done + len(block)] = block
                    done += len(block)
                    patience.renew()
                    if done == len(view):
                        break
                if done == before:
                    raise _Later("an empty answer")
            except (httpx.RequestError, _Later) as error:
                patience.wait(error)
        self._position += done
        return done

    def close(self) -> None:
        self._client.close()
        super().close()

    def _blocks(self, begin: int, end: int) -> Iterator[bytes]:
        # Packed once more on its way, a range would be one of something else.
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with self._client.stream("GET", self._url, headers=headers) as answer:
            _check(answer, self._file.hub)
            place, _, total = answer.headers.get("Content-Range", "").rpartition("/")
            is_part = answer.status_code == httpx.codes.PARTIAL_CONTENT
            if begin and not (is_part and place.startswith(f"bytes {begin}-")):
                raise RecipeError(
                    f"{self._url} gives no ranges: correct HF_ENDPOINT of the GPU host, or fetch"
                    " the files and set path"
                )
            if total and total != str(self._file.size):
                raise DataError(
                    f"{self._file} has {total} bytes, its tree says {self._file.size:,}: fetch the"
                    " files and set path"
                )
            yield from answer.iter_raw()


class _Later(Exception):
    """The hub asks to be asked again."""

    def __init__(self, reason: str, wait_s: float = 0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _Patience:
    """Waits longer each time, and ends when nothing has come for ``PATIENCE_S``."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.renew()

    def renew(self) -> None:
        self._since = time.monotonic()
        self._wait_s = _FIRST_WAIT_S

    def wait(self, error: Exception) -> None:
        if time.monotonic() - self._since >= PATIENCE_S:
            raise Busy(
                f"nothing of {self._what} has come from {_endpoint()} for {PATIENCE_S:.0f} s"
                f" ({error or type(error).__name__}): see to the GPU host's network and run again,"
                " or fetch the files and set path"
            )
        asked_s = error.wait_s if isinstance(error, _Later) else 0
        time.sleep(max(asked_s, self._wait_s))
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)


def _check(answer: httpx.Response, hub: str) -> None:
    """Raises RecipeError for a refusal, _Later for what may pass."""
    status = answer.status_code
    if answer.is_success:
        return
    said = answer.headers.get("X-Error-Message") or answer.reason_phrase
    hub_url, url = httpx.URL(_endpoint()), answer.url
    # A link to the storage is signed for a while: the hub gives another.
    is_of_storage = (url.host, url.port) != (hub_url.host, hub_url.port)
    if is_of_storage or status in (408, 429) or status >= 500:
        after = answer.headers.get("Retry-After", "")
        raise _Later(f"{status} {said}", min(float(after), 120) if after.isdecimal() else 0)
    remedy = {
        401: "correct hub, or set HF_TOKEN on the GPU host to a token that may read it",
        403: f"accept its terms at {_endpoint()}/datasets/{hub}, or set HF_TOKEN to another token",
        404: "correct hub and revision",
    }
    raise RecipeError(
        f"the hub refuses {hub} ({status} {said}): {remedy.get(status, 'fetch it and set path')}"
    )


def _client() -> httpx.Client:
    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(headers=headers, timeout=_TIMEOUT_S, follow_redirects=True)


def _endpoint() -> str:
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        is_usable = url.startswith(("http://", "https://")) and bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        is_usable = False
    if not is_usable:
        raise RecipeError(f"HF_ENDPOINT is {url!r}: it needs http:// or https:// and a host")
    return url
