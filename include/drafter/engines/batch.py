"""Requests in flight in the embedded engine: any thread submits and aborts, one thread decodes.

Rows join at any step and leave when they end; every step runs all of them once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from drafter.engines.decoding import Decoder, Row
from drafter.engines.sampling import Sampling, next_ids

_PROMPT_TOKENS_PER_STEP = 512
"""New prompts that join one step, so that running rows never wait long; one always may."""


class DuplicateId(Exception):
    """A live request has the same id."""


@dataclass(eq=False)
class Request:
    """One row of /generate, from submission to its end."""

    rid: str
    row: Row
    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]
    num_prompt: int
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    aborted: bool = False
    finish_reason: dict[str, Any] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def output_ids(self) -> list[int]:
        return self.row.ids[self.num_prompt :]

    def finish(self, reason: dict[str, Any]) -> None:
        self.finish_reason = reason
        self.seconds = time.monotonic() - self.began
        self.done.set()

    def ending(self) -> dict[str, Any] | None:
        """Why it ends now, or None. Length is looked at before the stop ids, as SGLang does."""
        num_output = len(self.row.ids) - self.num_prompt
        if num_output >= self.max_new_tokens:
            return {"type": "length", "length": num_output}
        if num_output and self.row.ids[-1] in self.stop_ids:
            return {"type": "stop", "matched": self.row.ids[-1]}
        return None


_ABORTED = {"type": "abort", "message": "aborted on request", "status_code": None, "err_type": None}


class Batch:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._changed = threading.Condition()
        self._live: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        # The slot that was freed last is taken first: its pages are in memory already.
        self._free_slots = list(reversed(range(decoder.num_slots)))

    @property
    def is_idle(self) -> bool:
        return not self._live

    def submit(self, requests: list[Request]) -> None:
        """Queue all of them. Raises DuplicateId, and then queues none."""
        with self._changed:
            rids = [request.rid for request in requests]
            for rid in rids:
                if rid in self._live or rids.count(rid) > 1:
                    raise DuplicateId(rid)
            for request in requests:
                if reason := request.ending():
                    request.finish(reason)
                else:
                    self._live[request.rid] = request
                    self._waiting.append(request)
            self._changed.notify()

    def abort(self, rids: Iterable[str] | None) -> None:
        """End these, or all, before the next step. An id that is not live is nobody's: no error."""
        with self._changed:
            for rid in list(self._live) if rids is None else rids:
                if rid in self._live:
                    self._live[rid].aborted = True

    def run(self) -> NoReturn:
        """Decode for ever. What it raises is a fault that must end the process."""
        while True:
            with self._changed:
                while not self._live:
                    self._changed.wait()
                for request in [r for r in self._live.values() if r.aborted]:
                    self._end(request, dict(_ABORTED))
                self._admit()
            if self._running:
                self._step()

    def _admit(self) -> None:
        num_tokens = 0
        while self._waiting and self._free_slots:
            num_tokens += self._waiting[0].num_prompt
            if num_tokens > max(_PROMPT_TOKENS_PER_STEP, self._waiting[0].num_prompt):
                break
            request = self._waiting.popleft()
            request.row.slot = self._free_slots.pop()
            self._running.append(request)
        self._running.sort(key=lambda request: request.row.slot)

    def _step(self) -> None:
        rows = [request.row for request in self._running]
        samplings = [request.sampling for request in self._running]
        with torch.inference_mode():
            new_ids = next_ids(self._decoder.logits(rows), samplings)
        with self._changed:
            for request, token in zip(list(self._running), new_ids, strict=True):
                request.row.ids.append(token)
                if reason := request.ending():
                    self._end(request, reason)

    def _end(self, request: Request, reason: dict[str, Any]) -> None:
        del self._live[request.rid]
        if request.row.slot < 0:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._free_slots.append(request.row.slot)
        request.finish(reason)
