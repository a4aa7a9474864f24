"""The open loop in virtual time, against servers that stall, refuse and fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from freshet.load.connections import Answer
from freshet.load.open_loop import Figures, Lane, drive
from freshet.load.requests import Request
from tests.unit.load.virtual import VirtualLoop

Serve = Callable[[float], Awaitable[Answer]]


class Server:
    """A substitute for `Connections`: `at_once` concurrent requests, each answered by `serve`."""

    def __init__(self, serve: Serve, at_once: int = 1_000) -> None:
        self._serve, self._slots = serve, asyncio.Semaphore(at_once)
        self.asked = 0

    async def post(self, path: str, body: bytes) -> Answer:
        self.asked += 1
        async with self._slots:
            loop = asyncio.get_running_loop()
            sent = loop.time()
            answer = await self._serve(sent)
            return Answer(answer.status, answer.body, answer.problem, sent)


def lane(server: Any, rate: float = 100, name: str = "events", events: int = 1) -> Lane:
    return Lane(name, rate, lambda: Request("/x", b"{}", events), server, seed=1)


def ms(figures: Figures, percent: float) -> float:
    """Return a percentile in ms, which must not be a bound."""
    latency = figures.latency.percentile(percent)
    assert latency is not None
    assert not latency.at_least
    return latency.seconds * 1e3


def driven(
    make: Callable[[], Lane],
    seconds: float,
    *,
    report: Callable[[float, dict[str, Figures]], None] = lambda at, part: None,
    stop_at: float | None = None,
) -> Figures:
    async def run() -> dict[str, Figures]:
        stop = asyncio.Event()
        if stop_at is not None:
            asyncio.get_running_loop().call_at(stop_at, stop.set)
        return await drive([make()], seconds, every_s=1, report=report, stop=stop)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())["events"]


async def quick(_: float) -> Answer:
    await asyncio.sleep(0.001)
    return Answer(202)


def test_the_stated_rate_is_sent() -> None:
    figures = driven(lambda: lane(Server(quick), rate=200, events=3), 60)

    assert figures.requests == pytest.approx(200 * 60, rel=0.03)  # Poisson: 12,000 +- 110
    assert figures.events == 3 * figures.requests
    assert figures.as_json()["requests_per_s"] == pytest.approx(200, rel=0.03)
    assert ms(figures, 99) == pytest.approx(1, rel=0.02)


def test_stall_delays_every_request_due_meanwhile() -> None:
    async def stalls(now: float) -> Answer:
        await asyncio.sleep(max(0.001, 6.0 - now) if now >= 5 else 0.001)  # from the 5th to the 6th second
        return Answer(202)

    figures = driven(lambda: lane(Server(stalls, at_once=1)), 10)

    assert figures.requests == pytest.approx(1_000, rel=0.1)
    slow = sum(1 for p in range(1_000) if ms(figures, p / 10) > 50)
    assert slow == pytest.approx(1_000 * 0.1, rel=0.25), "a tenth of the time, so a tenth of the requests"
    assert figures.service.percentile(99) == pytest.approx(0.001, rel=0.02), "but it was sent to only one"
    late = figures.late.percentile(99)
    assert late is not None
    assert late * 1e3 == pytest.approx(ms(figures, 99), abs=10)


def test_timeouts_during_stall_count_in_percentiles() -> None:
    """The server stalls for longer than the time-out, so most requests of that time fail."""

    async def stalls(now: float) -> Answer:
        if not 5 <= now < 30:
            return await quick(now)
        await asyncio.sleep(min(5.0, 30.0 - now))
        return Answer(0, problem="no answer within 5 s") if now < 25 else Answer(202)

    figures = driven(lambda: lane(Server(stalls, at_once=10_000)), 100)

    assert figures.failed == pytest.approx(20 * 100, rel=0.1)
    assert figures.latency.count == figures.requests
    assert ms(figures, 70) == pytest.approx(1, rel=0.02)
    for percent in (90, 99, 99.9):
        latency = figures.latency.percentile(percent)
        assert latency is not None
        assert latency.at_least
        assert latency.seconds == pytest.approx(5, rel=0.01)
    shown = figures.as_json()
    assert shown["latency"]["at_least"] == ["p90_ms", "p99_ms", "p99.9_ms", "max_ms"]
    assert shown["latency_of_answers"]["p90_ms"] < 5_000


def test_slow_server_does_not_count_as_late_generator() -> None:
    async def slow(_: float) -> Answer:
        await asyncio.sleep(0.02)
        return Answer(202)

    figures = driven(lambda: lane(Server(slow, at_once=1)), 5)

    assert (figures.late.percentile(50) or 0) > 1
    assert figures.begun_late.count == figures.requests
    assert (figures.begun_late.percentile(100) or 0) < 1e-4
    assert not figures.generator_late


def test_late_generator_is_reported() -> None:
    """Building a request takes 20 ms, and one is due every 10 ms."""

    def make() -> Lane:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        def source() -> Request:
            loop.spend(0.02)
            return Request("/x", b"{}", 1)

        return Lane("events", 100, source, Server(quick), seed=1)  # type: ignore[arg-type]

    parts: list[Figures] = []
    figures = driven(make, 5, report=lambda _, part: parts.append(part["events"]))

    assert (figures.begun_late.percentile(50) or 0) > 1, "its delay grows"
    assert (figures.service.percentile(50) or 0) > 0.01, "it reads answers late, too"
    assert figures.generator_late
    assert figures.as_json()["generator_late"] is True
    assert sum(part.begun_late.count for part in parts) == figures.begun_late.count == figures.requests


def test_straggler_does_not_change_rate() -> None:
    pauses = iter([0.001] * 500 + [30.0])

    async def one_straggles(_: float) -> Answer:
        await asyncio.sleep(next(pauses, 0.001))
        return Answer(202)

    figures = driven(lambda: lane(Server(one_straggles), events=3), 10)

    assert figures.seconds == 10
    assert figures.good == figures.requests
    assert figures.requests_per_s == pytest.approx((figures.requests - 1) / 10, rel=0.001)
    assert figures.events_per_s == pytest.approx(3 * figures.requests_per_s)
    assert ms(figures, 100) == pytest.approx(30_000, rel=0.001), "and is seen where it belongs"


def test_slow_server_gets_the_full_rate() -> None:
    async def slow(_: float) -> Answer:
        await asyncio.sleep(0.02)  # 50 a second, one after the other
        return Answer(202)

    figures = driven(lambda: lane(Server(slow, at_once=1)), 10)

    assert figures.requests == pytest.approx(1_000, rel=0.1)
    assert figures.latency.answered.longest_s == pytest.approx(10, rel=0.3)
    assert figures.good == figures.requests
    assert figures.requests_per_s == pytest.approx(50, rel=0.05), (
        "while they were due, not while it caught up"
    )


def test_failures_are_counted_with_first_problem() -> None:
    async def refuses(now: float) -> Answer:
        await asyncio.sleep(0.001)
        if now < 1:
            return Answer(429, b'{"error": "full"}')
        if now < 2:
            return Answer(0, problem="no connection: refused")
        return Answer(202)

    figures = driven(lambda: lane(Server(refuses)), 3)

    assert set(figures.answers) == {"429", "no connection", "202"}
    assert figures.failed == figures.answers["429"] + figures.answers["no connection"]
    assert figures.good + figures.failed == figures.requests
    assert figures.events == figures.good == figures.latency.answered.count, "of good answers only"
    assert figures.failed == figures.latency.failed.count
    latency = figures.latency.percentile(90)
    assert latency is not None
    assert latency.at_least, "a quick refusal is no quick answer"
    assert figures.first_problem == {"429": '{"error": "full"}', "no connection": "no connection: refused"}


def test_parts_add_up_to_the_whole() -> None:
    parts: list[int] = []
    figures = driven(
        lambda: lane(Server(quick)), 10, report=lambda _, part: parts.append(part["events"].requests)
    )

    assert len(parts) >= 10
    assert sum(parts) == figures.requests


def test_stop_waits_for_requests_in_progress() -> None:
    async def slow(_: float) -> Answer:
        await asyncio.sleep(0.5)
        return Answer(202)

    server: list[Server] = []

    def make() -> Lane:
        server.append(Server(slow))
        return lane(server[0])

    figures = driven(make, 3_600, stop_at=2)

    assert figures.requests == server[0].asked == pytest.approx(200, rel=0.25)
    assert figures.failed == 0
    assert figures.seconds == 2, "in which they were due"


@pytest.mark.slow
def test_nothing_is_sent_before_it_is_due() -> None:
    figures = driven(lambda: lane(Server(quick), rate=20_000), 1)

    assert figures.late.percentile(0.001) is not None
    assert figures.service.percentile(50) == pytest.approx(ms(figures, 50) / 1e3, rel=0.02)
    assert ms(figures, 0.001) == pytest.approx(1, rel=0.02), "never less than it took"


def test_malformed_ranking_is_counted() -> None:
    async def nonsense(_: float) -> Answer:
        return Answer(200, b"<html>")

    figures = driven(lambda: lane(Server(nonsense)), 2)

    assert figures.failed == figures.requests
    assert figures.latency.answered.count == figures.events == 0
    assert figures.latency.failed.count == figures.requests
    [(kind, problem)] = figures.first_problem.items()
    assert kind == "200, not understood"
    assert "<html>" in problem


def test_failed_lane_ends_the_others() -> None:
    def broken() -> Request:
        raise ZeroDivisionError

    async def run() -> float:
        lanes = [lane(Server(quick)), Lane("ranks", 1, broken, Server(quick), seed=1)]  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            await drive(lanes, 3_600, every_s=1, report=lambda at, part: None, stop=asyncio.Event())
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(run()) < 30


def test_error_of_source_ends_run() -> None:
    def broken() -> Request:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        driven(lambda: Lane("events", 10, broken, Server(quick), seed=1), 3)  # type: ignore[arg-type]


def test_freshness_is_read_from_rankings() -> None:
    async def ranks(_: float) -> Answer:
        return Answer(200, b'{"freshness_ms": 250}')

    figures = driven(lambda: lane(Server(ranks)), 2)

    assert figures.freshness.count == figures.requests
    assert figures.freshness.percentile(50) == pytest.approx(0.25, rel=0.01)
