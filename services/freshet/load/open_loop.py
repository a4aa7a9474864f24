"""The open loop: requests at times drawn in advance, and statistics of their answers.

Times without another note are seconds of the event loop's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import random
import selectors
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import orjson

from freshet.load.connections import Answer, Connections
from freshet.load.requests import Request, Source

LEAST_S, MOST_S = 1e-6, 3_600.0
RATIO = 1.01
_LOG = math.log(RATIO)
_BINS = math.ceil(math.log(MOST_S / LEAST_S) / _LOG) + 1
PERCENTS = (50, 90, 99, 99.9)


class Durations:
    """A histogram from 1 µs to 1 h in bins that each grow by 1%, for percentiles in bounded memory.

    A percentile is the upper end of its bin: at most 1% above the exact value, and never below it.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self.count = 0
        self.shortest_s = math.inf
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration, clipped to the range of the histogram."""
        at = 0 if seconds <= LEAST_S else min(math.ceil(math.log(seconds / LEAST_S) / _LOG), _BINS - 1)
        self._counts[at] += 1
        self.count += 1
        self.shortest_s = min(self.shortest_s, seconds)
        self.longest_s = max(self.longest_s, seconds)

    def merge(self, other: Durations) -> None:
        """Add the durations of another histogram."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.shortest_s = min(self.shortest_s, other.shortest_s)
        self.longest_s = max(self.longest_s, other.longest_s)

    def percentile(self, percent: float) -> float | None:
        """Return a percentile in seconds; None if the histogram is empty."""
        if not self.count:
            return None
        return self.nth(_rank(self.count, percent))

    def nth(self, n: int) -> float:
        """Return the n-th shortest duration, from 1 to `count`, rounded up by at most 1%."""
        return min(LEAST_S * RATIO ** self._bin(n), self.longest_s)

    def nth_at_least(self, n: int) -> float:
        """Return the n-th shortest duration, from 1 to `count`, rounded down by at most 1%."""
        at = self._bin(n)
        return max(LEAST_S * RATIO ** (at - 1) if at else 0.0, self.shortest_s)

    def figures(self) -> dict[str, float | None]:
        """Return p50, p90, p99, p99.9 and the maximum in milliseconds; None if the histogram is empty."""
        shown = {f"p{p:g}_ms": self.percentile(p) for p in PERCENTS}
        shown["max_ms"] = self.longest_s if self.count else None
        return {name: None if s is None else round(s * 1e3, 3) for name, s in shown.items()}

    def _bin(self, n: int) -> int:
        total = 0
        for at, count in enumerate(self._counts):
            total += count
            if total >= n:
                return at
        raise AssertionError("counts add up to `count`")


class Latency(NamedTuple):
    """The latency of a request."""

    seconds: float
    at_least: bool  # a lower bound, because no successful answer came

    def ms(self) -> str:
        """Format the latency in milliseconds."""
        return f"{'>= ' if self.at_least else ''}{self.seconds * 1e3:,.1f}"


class Latencies:
    """Latencies of requests with and without a successful answer.

    A failure counts as longer than all successes, so failures never lower a percentile. A percentile that
    falls among the failures is a lower bound.
    """

    def __init__(self) -> None:
        self.answered = Durations()
        self.failed = Durations()

    @property
    def count(self) -> int:
        """All requests."""
        return self.answered.count + self.failed.count

    def merge(self, other: Latencies) -> None:
        """Add the latencies of another."""
        self.answered.merge(other.answered)
        self.failed.merge(other.failed)

    def percentile(self, percent: float) -> Latency | None:
        """Return a percentile; None without requests."""
        if not self.count:
            return None
        rank = _rank(self.count, percent)
        if rank <= self.answered.count:
            return Latency(self.answered.nth(rank), at_least=False)
        waited_s = self.failed.nth_at_least(rank - self.answered.count)
        return Latency(max(waited_s, self.answered.longest_s), at_least=True)

    def longest(self) -> Latency | None:
        """Return the longest latency; None without requests."""
        if not self.count:
            return None
        longest_s = max(self.answered.longest_s, self.failed.longest_s)
        return Latency(longest_s, at_least=self.failed.count > 0)

    def all(self) -> dict[str, Latency | None]:
        """Return p50, p90, p99, p99.9 and the maximum, by their names in JSON."""
        return {f"p{p:g}_ms": self.percentile(p) for p in PERCENTS} | {"max_ms": self.longest()}

    def figures(self) -> dict[str, Any]:
        """Return `all` in milliseconds, and the names of those that are lower bounds."""
        latencies = self.all()
        return {
            **{
                name: None if latency is None else round(latency.seconds * 1e3, 3)
                for name, latency in latencies.items()
            },
            "at_least": [name for name, latency in latencies.items() if latency and latency.at_least],
        }


def _rank(count: int, percent: float) -> int:
    return max(1, math.ceil(count * percent / 100))


GOOD = (200, 202)
LATE_S = 0.01
"""Limit of the 99th percentile of `Figures.begun_late`. Above it, the generator itself delays requests."""
PR_SET_TIMERSLACK = 29  # prctl(2)


@dataclass(slots=True)
class Figures:
    """Statistics of the requests that were due in an interval."""

    seconds: float = 0.0  # length of the interval, without the wait for the last answers
    requests: int = 0  # due; the other figures exclude those in progress
    events: int = 0  # in requests with a good answer
    good_meanwhile: int = 0  # good answers within the interval
    events_meanwhile: int = 0  # in these
    answers: Counter[str] = field(default_factory=Counter)  # by status or kind of failure
    latency: Latencies = field(default_factory=Latencies)  # from the due time
    service: Durations = field(default_factory=Durations)  # of good answers, from sending
    late: Durations = field(default_factory=Durations)  # from the due time to sending
    begun_late: Durations = field(default_factory=Durations)  # from the due time to the start in this process
    freshness: Durations = field(default_factory=Durations)  # of rankings
    first_problem: dict[str, str] = field(default_factory=dict)  # by the keys of `answers`

    @property
    def good(self) -> int:
        """Requests with a good answer."""
        return sum(self.answers[str(status)] for status in GOOD)

    @property
    def failed(self) -> int:
        """Requests without a good answer."""
        return sum(self.answers.values()) - self.good

    @property
    def requests_per_s(self) -> float:
        """Good answers per second of the interval."""
        return self.good_meanwhile / self.seconds if self.seconds else 0.0

    @property
    def events_per_s(self) -> float:
        """Events in good answers per second of the interval."""
        return self.events_meanwhile / self.seconds if self.seconds else 0.0

    @property
    def generator_late(self) -> bool:
        """True if this process started requests late, so that it lacks processor time."""
        return (self.begun_late.percentile(99) or 0.0) > LATE_S

    def merge(self, other: Figures) -> None:
        """Add the figures of the following interval."""
        self.seconds += other.seconds
        self.requests += other.requests
        self.events += other.events
        self.good_meanwhile += other.good_meanwhile
        self.events_meanwhile += other.events_meanwhile
        self.latency.merge(other.latency)
        self.answers.update(other.answers)
        self.service.merge(other.service)
        self.late.merge(other.late)
        self.begun_late.merge(other.begun_late)
        self.freshness.merge(other.freshness)
        self.first_problem = other.first_problem | self.first_problem

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object that `freshet load --json` prints."""
        return {
            "seconds": round(self.seconds, 3),
            "requests": self.requests,
            "requests_per_s": round(self.requests_per_s, 2),
            "events_per_s": round(self.events_per_s, 2),
            "answers": dict(sorted(self.answers.items())),
            "failed": self.failed,
            "first_problems": dict(sorted(self.first_problem.items())),
            "latency": self.latency.figures(),
            "latency_of_answers": self.latency.answered.figures(),
            "from_sending": self.service.figures(),
            "sent_late": self.late.figures(),
            "begun_late": self.begun_late.figures(),
            "generator_late": self.generator_late,
            "freshness": self.freshness.figures() if self.freshness.count else None,
        }


@dataclass(eq=False)
class Lane:
    """Requests from one source at one rate."""

    name: str
    rate: float  # requests per second
    source: Source
    connections: Connections
    seed: int
    now: Figures = field(default_factory=Figures)  # of the current interval
    due_until: float = math.inf  # no requests are due from this time on
    _interval_start: float = 0.0

    def start_figures(self, at: float) -> None:
        """Begin the first interval of figures."""
        self._interval_start = at

    def take_figures(self, at: float) -> Figures:
        """Return the figures of the interval and begin the next one."""
        figures, self.now = self.now, Figures()
        until = max(min(at, self.due_until), self._interval_start)
        figures.seconds, self._interval_start = until - self._interval_start, until
        return figures


async def drive(
    lanes: Sequence[Lane],
    seconds: float,
    *,
    every_s: float,
    report: Callable[[float, dict[str, Figures]], None],
    stop: asyncio.Event,
) -> dict[str, Figures]:
    """Send for `seconds` or until `stop`, wait for the last answers; return the run's figures by lane.

    Args:
        lanes:   sent concurrently.
        seconds: in which requests are due.
        every_s: interval of the reports.
        report:  called with the seconds since the start, and the interval's figures by lane.
        stop:    ends the sending early.

    Raises the exception of a source, after it has stopped the other lanes.
    """
    reduce_timer_slack()
    loop = asyncio.get_running_loop()
    began = loop.time()
    whole = {lane.name: Figures() for lane in lanes}
    for lane in lanes:
        lane.start_figures(began)

    def report_interval() -> None:
        now = loop.time()
        part = {lane.name: lane.take_figures(now) for lane in lanes}
        for name, figures in part.items():
            whole[name].merge(figures)
        report(now - began, part)

    async def report_intervals() -> None:
        while True:
            await asyncio.sleep(every_s)
            report_interval()

    senders = [_Sender(lane, began, seconds) for lane in lanes]

    async def end_on_stop() -> None:
        await stop.wait()
        for sender in senders:
            sender.end()

    helpers = [asyncio.create_task(report_intervals()), asyncio.create_task(end_on_stop())]
    tasks = [asyncio.create_task(sender.run()) for sender in senders]
    for task in tasks:
        task.add_done_callback(partial(_stop_if_failed, stop))
    try:
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
    finally:
        for task in helpers:
            task.cancel()
    report_interval()
    return whole


def _stop_if_failed(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        stop.set()


class _Sender:
    """Sends one lane's requests when they are due, then waits for their answers or time-outs."""

    def __init__(self, lane: Lane, began: float, seconds: float) -> None:
        self._lane, self._began = lane, began
        lane.due_until = began + seconds
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{lane.seed}/{lane.name}")  # nosec B311  # repeatable
        self._ended = False
        self._pause: asyncio.Future[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    def end(self) -> None:
        """Stop sending."""
        self._ended = True
        self._lane.due_until = min(self._lane.due_until, self._loop.time())
        self._wake()

    def _wake(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    async def run(self) -> None:
        """Send, and wait for the answers. Raises the exception of the lane's source."""
        try:
            await self._send()
        finally:
            if self._under_way:
                await asyncio.wait(self._under_way)

    async def _send(self) -> None:
        due = self._began + self._rng.expovariate(self._lane.rate)
        while due < self._lane.due_until:
            request = self._lane.source()
            await self._wait_until(due)
            if self._ended:
                return
            task = self._loop.create_task(_send_request(self._lane, request, due))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            due += self._rng.expovariate(self._lane.rate)

    async def _wait_until(self, due: float) -> None:
        if due <= self._loop.time():
            await asyncio.sleep(0)  # the loop reads answers also while the sender is behind
            return
        self._pause = self._loop.create_future()
        timer = self._loop.call_at(due, self._wake)
        try:
            await self._pause
        finally:
            timer.cancel()


async def _send_request(lane: Lane, request: Request, due: float) -> None:
    lane.now.requests += 1
    lane.now.begun_late.add(asyncio.get_running_loop().time() - due)
    answer = await lane.connections.post(request.path, request.body)
    _count(lane, request, answer, due, asyncio.get_running_loop().time())


def _count(lane: Lane, request: Request, answer: Answer, due: float, now: float) -> None:
    figures = lane.now
    sent = now if answer.sent_at is None else answer.sent_at
    figures.late.add(sent - due)
    kind, problem, fresh_ms = _check_answer(request, answer)
    figures.answers[kind] += 1
    if problem:
        figures.first_problem.setdefault(kind, problem)
        figures.latency.failed.add(now - due)
        return
    figures.events += request.events
    if now <= lane.due_until:
        figures.good_meanwhile += 1
        figures.events_meanwhile += request.events
    figures.latency.answered.add(now - due)
    figures.service.add(now - sent)
    if fresh_ms is not None:
        figures.freshness.add(max(0.0, fresh_ms / 1e3))


def _check_answer(request: Request, answer: Answer) -> tuple[str, str, float | None]:
    """Return the key of `Figures.answers`, the problem or "", and the freshness in ms or None."""
    if not answer.status:
        return answer.problem.partition(":")[0], answer.problem, None
    kind, text = str(answer.status), answer.body[:500].decode(errors="replace")
    if answer.status not in GOOD:
        return kind, text or f"status {kind}", None
    try:
        request.answered(answer.body)
        fresh_ms = orjson.loads(answer.body).get("freshness_ms") if answer.status == 200 else None
        return kind, "", None if fresh_ms is None else float(fresh_ms)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"{kind}, not understood", f"{error!r}: {text}", None


def reduce_timer_slack() -> None:
    """Make the thread's sleeps end on time; by default, Linux may end them 50 µs late."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def new_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop with timers exact to some 10 µs; epoll, the default, counts in milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
