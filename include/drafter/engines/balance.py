"""Which endpoint gets the next request, and how many it holds at once: pure, times are passed in.

Load is outstanding tokens: prompt plus the mean answer so far for everything in flight. Each
endpoint's concurrency follows what it can take (additive increase, multiplicative decrease): a 503,
429 or timeout cuts it once per burst, answers let it grow back. A circuit breaker keeps requests
from an endpoint that is gone:

    closed   requests go out
    open     connection refused, or 5 failures in a row (resets, 5xx); /health is asked with backoff
             (also when it hangs: silent, requests in flight, /health does not answer; and when
             it says 401, 403, 404 or 405)
    trial    /health answers and the model is right: one request goes first. The breaker closes on
             an answer, or after 10 s without a failure, because an answer may take an hour

An engine that is full (503, 429) or refuses a request (any other 4xx) answers, so that never opens
a closed breaker: one bad class of prompts must not shed all others. Times are seconds of any steady
clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

FAILURES_TO_OPEN = 5
PROBE_S = 1.0
PROBE_CAP_S = 30.0
TRIAL_S = 10.0

CUT = 0.75
CUT_COOLDOWN_S = 1.0
"""Within it, as for requests sent before the last cut, a refusal is of the same burst."""

GROW_AFTER = 4
"""Answers per request more, beyond what the endpoint could take last; up to there each answer is
one. Answers take minutes: one more per round of all would take days."""

FULL_STREAK = 16
"""Refusals in a row, without an answer between, that are the engine's state and no prompt's."""

PAUSE_S = 0.5
PAUSE_CAP_S = 30.0
"""After a burst nothing is sent for so long, doubled per burst without an answer between."""


@dataclass(eq=False)
class Endpoint:
    url: str
    limit: float
    """Requests in flight at most, now."""

    in_flight: int = 0
    tokens: float = 0.0
    """Outstanding."""

    state: Literal["closed", "open", "trial"] = "closed"
    failures: int = 0
    """In a row."""

    refusals: int = 0
    """503 and 429 without an answer between."""

    heard_at: float = 0.0
    """When it last answered, failed, or got a request while it had none."""

    probe_wait_s: float = PROBE_S
    """From one look at /health to the next."""

    _trial_since: float | None = None
    _answers: int = 0
    _held: float = float("inf")
    """What it could take when it last answered: no burst without answers lowers it."""

    _bursts: int = 0
    _cut_at: float = float("-inf")
    _paused_until: float = float("-inf")


@dataclass(eq=False, slots=True)
class Slot:
    """One request's place at an endpoint."""

    endpoint: Endpoint
    tokens: float
    sent_at: float
    fault: Literal["full", "lost"] | None = None
    """Of the endpoint, whatever the request asked: it refuses everything; it hangs, or has become
    another kind of server."""


class Balancer:
    def __init__(
        self, urls: Iterable[str], max_in_flight: int, down: Collection[str] = (), now: float = 0.0
    ) -> None:
        """``max_in_flight`` requests may be at any one endpoint, all of them when others are gone;
        those in ``down`` are open from the start."""
        self.endpoints = [Endpoint(url, max_in_flight) for url in urls]
        self.down_since: float | None = None
        """Since when every endpoint is open or refuses all, a trial that failed not counted; None
        while one answers. An answer that still comes in begins it anew."""
        self._max = max_in_flight
        self._num_answers = self._answer_tokens = 0
        for endpoint in self.endpoints:
            if endpoint.url in down:
                self._open(endpoint, now)

    def pick(
        self, prompt_tokens: int, max_new_tokens: int, now: float, avoid: str | None = None
    ) -> Slot | None:
        """Take a place at the least loaded endpoint, at ``avoid`` only when no other has one."""
        admitting = [endpoint for endpoint in self.endpoints if self._admits(endpoint, now)]
        if not admitting:
            return None
        endpoint = min(admitting, key=lambda e: (e.url == avoid, e.tokens))
        if endpoint.state == "trial":
            endpoint._trial_since = now
        expected = self._answer_tokens / self._num_answers if self._num_answers else max_new_tokens
        slot = Slot(endpoint, prompt_tokens + min(expected, max_new_tokens), now)
        if not endpoint.in_flight:
            endpoint.heard_at = now
        endpoint.in_flight += 1
        endpoint.tokens += slot.tokens
        return slot

    def release(self, slot: Slot, now: float) -> None:
        """The request has ended, however: call it once, after one of the three below if any."""
        slot.endpoint.heard_at = now
        slot.endpoint.in_flight -= 1
        slot.endpoint.tokens -= slot.tokens

    def silent(self, now: float, silence_s: float) -> list[Endpoint]:
        """Endpoints that hold requests and have not been heard of for ``silence_s``."""
        return [
            endpoint
            for endpoint in self.endpoints
            if endpoint.in_flight and now - endpoint.heard_at >= silence_s
        ]

    def lost(self, endpoint: Endpoint, now: float) -> None:
        """It hangs, or has become another kind of server, which /health need not show."""
        wait_s = endpoint.probe_wait_s
        self._open(endpoint, now)
        endpoint.probe_wait_s = min(2 * wait_s, PROBE_CAP_S)

    def answered(self, slot: Slot, completion_tokens: int | None, now: float) -> None:
        """``completion_tokens`` of a whole answer, None of one that is not: both show life."""
        endpoint = slot.endpoint
        endpoint.failures = endpoint.refusals = endpoint._bursts = 0
        if endpoint.state == "open":
            self.down_since = None if self.down_since is None else now
        elif endpoint.state == "closed" or _is_trial(slot):
            self._close(endpoint)
        if completion_tokens is None:
            return
        self._num_answers += 1
        self._answer_tokens += completion_tokens
        endpoint._answers += 1
        if endpoint.limit < endpoint._held or endpoint._answers >= GROW_AFTER:
            endpoint._answers = 0
            endpoint.limit = min(endpoint.limit + 1, self._max)

    def refused(self, slot: Slot, now: float, pause_s: float | None) -> None:
        """503 or 429, nothing was done: as ``throttled``, and costs the prompt nothing when the
        endpoint refuses everything."""
        endpoint = slot.endpoint
        endpoint.refusals += 1
        if endpoint.refusals >= FULL_STREAK:
            slot.fault = "full"
        self.throttled(slot, now, pause_s)
        self._note_down(now)

    def throttled(self, slot: Slot, now: float, pause_s: float | None = None) -> None:
        """It has too much to do. ``pause_s``: how long it wants nothing, None when it did not say.

        A timeout is one too, with ``pause_s`` 0.
        """
        endpoint = slot.endpoint
        if endpoint.state == "trial" and _is_trial(slot):
            # One request says nothing about how many it can take.
            self._open(endpoint, now)
            endpoint._bursts += 1
        elif slot.sent_at > endpoint._cut_at and now - endpoint._cut_at >= CUT_COOLDOWN_S:
            self._cut(endpoint)
            endpoint._cut_at = now
            endpoint._answers = 0
            endpoint._bursts += 1
        if pause_s is None:
            pause_s = min(PAUSE_S * 2.0 ** max(endpoint._bursts - 1, 0), PAUSE_CAP_S)
        endpoint._paused_until = max(endpoint._paused_until, now + pause_s)

    def failed(self, slot: Slot, now: float, refused: bool) -> None:
        """No answer came. ``refused``: nothing listens there, which needs no second proof."""
        endpoint = slot.endpoint
        endpoint.failures += 1
        if endpoint.state == "open":
            return
        on_trial = endpoint.state == "trial" and _is_trial(slot)
        if refused or on_trial or endpoint.failures >= FAILURES_TO_OPEN:
            self._open(endpoint, now)

    def probed(self, endpoint: Endpoint, up: bool) -> None:
        """/health of an open endpoint was asked, and whether it serves what it should."""
        if up:
            endpoint.state, endpoint.failures, endpoint._trial_since = "trial", 0, None
        else:
            endpoint.probe_wait_s = min(2 * endpoint.probe_wait_s, PROBE_CAP_S)

    def next_change_s(self, now: float) -> float | None:
        """Until an endpoint may admit again by the passing of time alone; None for never."""
        moments = [endpoint._paused_until for endpoint in self.endpoints] + [
            endpoint._trial_since + TRIAL_S
            for endpoint in self.endpoints
            if endpoint.state == "trial" and endpoint._trial_since is not None
        ]
        return min((moment - now for moment in moments if moment > now), default=None)

    def _admits(self, endpoint: Endpoint, now: float) -> bool:
        if endpoint.state == "open" or now < endpoint._paused_until:
            return False
        if endpoint.state == "trial":
            if endpoint._trial_since is None:
                return True
            if now < endpoint._trial_since + TRIAL_S:
                return False
            self._close(endpoint)
        return endpoint.in_flight < int(endpoint.limit)

    def _cut(self, endpoint: Endpoint) -> None:
        # The last requests of a job are few: that it fails with them is no reason to stay so low.
        load = min(endpoint.limit, max(endpoint.in_flight, endpoint.limit / 2))
        endpoint.limit = max(CUT * load, 1.0)
        if not endpoint._bursts:
            endpoint._held = endpoint.limit

    def _close(self, endpoint: Endpoint) -> None:
        endpoint.state = "closed"
        if endpoint.refusals < FULL_STREAK:
            self.down_since = None

    def _open(self, endpoint: Endpoint, now: float) -> None:
        endpoint.state, endpoint.probe_wait_s = "open", PROBE_S
        self._note_down(now)

    def _note_down(self, now: float) -> None:
        if self.down_since is None and all(
            endpoint.state == "open" or endpoint.refusals >= FULL_STREAK
            for endpoint in self.endpoints
        ):
            self.down_since = now


def _is_trial(slot: Slot) -> bool:
    since = slot.endpoint._trial_since
    return since is not None and slot.sent_at >= since
