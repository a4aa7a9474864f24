"""The open loop: requests at moments that were drawn before, and what became of them."""

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

__all__ = ["Durations", "Figures", "Lane", "Waited", "Waits", "drive"]

# --- Percentiles of durations, in bounded memory.


LEAST_S, MOST_S = 1e-6, 3_600.0
RATIO = 1.01
_LOG = math.log(RATIO)
_BINS = math.ceil(math.log(MOST_S / LEAST_S) / _LOG) + 1
PERCENTS = (50, 90, 99, 99.9)


class Durations:
    """A histogram of bins that are each 1% wider than the one before, from 1 µs to 1 h.

    A percentile is the upper end of its bin: at most 1% more than the true one, and never less.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self.count = 0
        self.shortest_s = math.inf
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        """One duration; below the least it counts as that, above the most as that."""
        at = 0 if seconds <= LEAST_S else min(math.ceil(math.log(seconds / LEAST_S) / _LOG), _BINS - 1)
        self._counts[at] += 1
        self.count += 1
        self.shortest_s = min(self.shortest_s, seconds)
        self.longest_s = max(self.longest_s, seconds)

    def merge(self, other: Durations) -> None:
        """Add all of another's."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.shortest_s = min(self.shortest_s, other.shortest_s)
        self.longest_s = max(self.longest_s, other.longest_s)

    def percentile(self, percent: float) -> float | None:
        """Seconds that so many percent of all are within; None of none."""
        if not self.count:
            return None
        return self.nth(_wanted(self.count, percent))

    def nth(self, n: int) -> float:
        """The n-th shortest, from 1 to `count`; at most 1% more than it."""
        return min(LEAST_S * RATIO ** self._bin(n), self.longest_s)

    def nth_at_least(self, n: int) -> float:
        """The n-th shortest; at most 1% less than it, and never more."""
        at = self._bin(n)
        return max(LEAST_S * RATIO ** (at - 1) if at else 0.0, self.shortest_s)

    def figures(self) -> dict[str, float | None]:
        """Milliseconds: p50, p90, p99, p99.9 and the longest; None of none."""
        shown = {f"p{p:g}_ms": self.percentile(p) for p in PERCENTS}
        shown["max_ms"] = self.longest_s if self.count else None
        return {name: None if s is None else round(s * 1e3, 3) for name, s in shown.items()}

    def _bin(self, n: int) -> int:
        seen = 0
        for at, count in enumerate(self._counts):
            seen += count
            if seen >= n:
                return at
        raise AssertionError("counts add up to `count`")


class Waited(NamedTuple):
    """How long something was waited for."""

    seconds: float
    at_least: bool  # it did not come: nobody knows how long it would have been

    def ms(self) -> str:
        """Milliseconds, for people."""
        return f"{'>= ' if self.at_least else ''}{self.seconds * 1e3:,.1f}"


class Waits:
    """How long was waited for what came, and for what did not.

    What failed counts as longer than all that came. So whatever failed makes no percentile smaller, and one
    that lies among what failed is a bound: what was waited for so many percent, at least.
    """

    def __init__(self) -> None:
        self.came = Durations()
        self.failed = Durations()

    @property
    def count(self) -> int:
        """Of both."""
        return self.came.count + self.failed.count

    def merge(self, other: Waits) -> None:
        """Add all of another's."""
        self.came.merge(other.came)
        self.failed.merge(other.failed)

    def percentile(self, percent: float) -> Waited | None:
        """What so many percent of all are within; None of none."""
        if not self.count:
            return None
        wanted = _wanted(self.count, percent)
        if wanted <= self.came.count:
            return Waited(self.came.nth(wanted), at_least=False)
        waited_s = self.failed.nth_at_least(wanted - self.came.count)
        return Waited(max(waited_s, self.came.longest_s), at_least=True)

    def longest(self) -> Waited | None:
        """The longest; None of none."""
        if not self.count:
            return None
        longest_s = max(self.came.longest_s, self.failed.longest_s)
        return Waited(longest_s, at_least=self.failed.count > 0)

    def all(self) -> dict[str, Waited | None]:
        """p50, p90, p99, p99.9 and the longest, by their names in JSON."""
        return {f"p{p:g}_ms": self.percentile(p) for p in PERCENTS} | {"max_ms": self.longest()}

    def figures(self) -> dict[str, Any]:
        """Milliseconds of `all`, and the names of those that are only bounds from below."""
        shown = self.all()
        return {
            **{
                name: None if waited is None else round(waited.seconds * 1e3, 3)
                for name, waited in shown.items()
            },
            "at_least": [name for name, waited in shown.items() if waited is not None and waited.at_least],
        }


def _wanted(count: int, percent: float) -> int:
    return max(1, math.ceil(count * percent / 100))


GOOD = (200, 202)
LATE_S = 0.01
"""The 99th percentile of `Figures.begun_late` beyond which latencies are not the server's alone."""
PR_SET_TIMERSLACK = 29  # prctl(2)


@dataclass(slots=True)
class Figures:
    """What became of the requests that were due in some time."""

    seconds: float = 0.0  # in which requests were due: what is waited for afterwards counts no time
    requests: int = 0  # that were due; those under way are in no other figure yet
    events: int = 0  # in those with a good answer
    good_meanwhile: int = 0  # good answers that came within `seconds`
    events_meanwhile: int = 0  # in these
    answers: Counter[str] = field(default_factory=Counter)  # by status, or what went wrong
    latency: Waits = field(default_factory=Waits)  # from when they were due; what got no good answer failed
    service: Durations = field(default_factory=Durations)  # of good answers, from when they were sent
    late: Durations = field(default_factory=Durations)  # from when they were due to when they were sent
    begun_late: Durations = field(default_factory=Durations)  # to when this process got round to them
    freshness: Durations = field(default_factory=Durations)  # of rankings: now minus the newest event learned
    first_problem: dict[str, str] = field(default_factory=dict)  # by what stands in `answers`

    @property
    def good(self) -> int:
        """Requests with a good answer."""
        return sum(self.answers[str(status)] for status in GOOD)

    @property
    def failed(self) -> int:
        """Requests without one."""
        return sum(self.answers.values()) - self.good

    @property
    def requests_per_s(self) -> float:
        """Good answers a second, while requests were due."""
        return self.good_meanwhile / self.seconds if self.seconds else 0.0

    @property
    def events_per_s(self) -> float:
        """Events in good answers a second, likewise."""
        return self.events_meanwhile / self.seconds if self.seconds else 0.0

    @property
    def generator_late(self) -> bool:
        """Whether this process itself was late, before any wait for a connection: it has no time."""
        return (self.begun_late.percentile(99) or 0.0) > LATE_S

    def merge(self, other: Figures) -> None:
        """Add those of a time that follows."""
        self.seconds += other.seconds
        self.requests += other.requests
        self.events += other.events
        self.good_meanwhile += other.good_meanwhile
        self.events_meanwhile += other.events_meanwhile
        self.latency.merge(other.latency)
        self.answers.update(other.answers)
        for mine, its in (
            (self.service, other.service),
            (self.late, other.late),
            (self.begun_late, other.begun_late),
            (self.freshness, other.freshness),
        ):
            mine.merge(its)
        self.first_problem = other.first_problem | self.first_problem

    def as_json(self) -> dict[str, Any]:
        """As `freshet load --json` tells them."""
        return {
            "seconds": round(self.seconds, 3),
            "requests": self.requests,
            "requests_per_s": round(self.requests_per_s, 2),
            "events_per_s": round(self.events_per_s, 2),
            "answers": dict(sorted(self.answers.items())),
            "failed": self.failed,
            "first_problems": dict(sorted(self.first_problem.items())),
            "latency": self.latency.figures(),
            "latency_of_answers": self.latency.came.figures(),
            "from_sending": self.service.figures(),
            "sent_late": self.late.figures(),
            "begun_late": self.begun_late.figures(),
            "generator_late": self.generator_late,
            "freshness": self.freshness.figures() if self.freshness.count else None,
        }


@dataclass(eq=False)
class Lane:
    """Requests of one kind at one rate."""

    name: str
    rate: float  # requests a second
    source: Source
    connections: Connections
    seed: int
    now: Figures = field(default_factory=Figures)  # since they were taken last
    due_until: float = math.inf  # of the loop's time: no requests are due from here on
    _taken_at: float = 0.0

    def begin(self, at: float) -> None:
        """Its figures count from here."""
        self._taken_at = at

    def take(self, at: float) -> Figures:
        """The figures since this was called last."""
        taken, self.now = self.now, Figures()
        until = max(min(at, self.due_until), self._taken_at)
        taken.seconds, self._taken_at = until - self._taken_at, until
        return taken


async def drive(
    lanes: Sequence[Lane],
    seconds: float,
    *,
    every_s: float,
    told: Callable[[float, dict[str, Figures]], None],
    stop: asyncio.Event,
) -> dict[str, Figures]:
    """Send for so many seconds, or until told to stop; then wait for what is under way, which the connections
    give up after their timeout.

    Args:
        lanes:   what is sent.
        seconds: for how long.
        every_s: how often `told` gets each lane's figures since the last time.
        told:    gets seconds since the beginning, and figures by lane.
        stop:    ends it early.

    Returns:
        The figures of the whole run, by lane.
    """
    wake_in_time()
    loop = asyncio.get_running_loop()
    began = loop.time()
    whole = {lane.name: Figures() for lane in lanes}
    for lane in lanes:
        lane.begin(began)

    def tell() -> None:
        now = loop.time()
        part = {lane.name: lane.take(now) for lane in lanes}
        for name, figures in part.items():
            whole[name].merge(figures)
        told(now - began, part)

    async def tell_often() -> None:
        while True:
            await asyncio.sleep(every_s)
            tell()

    sending = [_Sending(lane, began, seconds) for lane in lanes]

    async def stop_when_told() -> None:
        await stop.wait()
        for one in sending:
            one.end()

    helpers = [asyncio.create_task(tell_often()), asyncio.create_task(stop_when_told())]
    tasks = [asyncio.create_task(one.run()) for one in sending]
    for task in tasks:  # one that cannot go on ends the others
        task.add_done_callback(partial(_stop_if_failed, stop))
    try:
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
    finally:
        for task in helpers:
            task.cancel()
    tell()
    return whole


def _stop_if_failed(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        stop.set()


class _Sending:
    """One lane's requests, sent when they are due until it is told to end. Then those under way are waited
    for, each for as long as the lane's connections do.
    """

    def __init__(self, lane: Lane, began: float, seconds: float) -> None:
        self._lane, self._began = lane, began
        lane.due_until = began + seconds
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{lane.seed}/{lane.name}")  # nosec B311  # repeatable
        self._ended = False
        self._pause: asyncio.Future[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    def end(self) -> None:
        """Send no more."""
        self._ended = True
        self._lane.due_until = min(self._lane.due_until, self._loop.time())
        self._wake()

    def _wake(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    async def run(self) -> None:
        """Send, and wait for the answers. Raises what the lane's source raises."""
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
            task = self._loop.create_task(_ask(self._lane, request, due))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            due += self._rng.expovariate(self._lane.rate)

    async def _wait_until(self, due: float) -> None:
        if due <= self._loop.time():
            await asyncio.sleep(0)  # answers are read also while this falls behind
            return
        self._pause = self._loop.create_future()
        timer = self._loop.call_at(due, self._wake)
        try:
            await self._pause
        finally:
            timer.cancel()


async def _ask(lane: Lane, request: Request, due: float) -> None:
    lane.now.requests += 1
    lane.now.begun_late.add(asyncio.get_running_loop().time() - due)
    answer = await lane.connections.post(request.path, request.body)
    _count(lane, request, answer, due, asyncio.get_running_loop().time())


def _count(lane: Lane, request: Request, answer: Answer, due: float, now: float) -> None:
    figures = lane.now
    sent = now if answer.sent_at is None else answer.sent_at
    figures.late.add(sent - due)
    kind, problem, fresh_ms = _read(request, answer)
    figures.answers[kind] += 1
    if problem:
        figures.first_problem.setdefault(kind, problem)
        figures.latency.failed.add(now - due)
        return
    figures.events += request.events
    if now <= lane.due_until:
        figures.good_meanwhile += 1
        figures.events_meanwhile += request.events
    figures.latency.came.add(now - due)
    figures.service.add(now - sent)
    if fresh_ms is not None:
        figures.freshness.add(max(0.0, fresh_ms / 1e3))


def _read(request: Request, answer: Answer) -> tuple[str, str, float | None]:
    """What stands in `Figures.answers`; what is wrong with the answer, if anything is; how fresh it was."""
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


def wake_in_time() -> None:
    """Have the calling thread's pauses end when they are due: Linux lets them end 50 µs late."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop whose pauses are exact to some 10 µs: epoll, which is used otherwise, counts in milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
