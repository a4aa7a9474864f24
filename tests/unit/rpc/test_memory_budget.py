"""Reads reserve the size of the largest message, and idle streams end when others wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from freshet.rpc.memory_budget import OLDEST_EVERY, MemoryBudget, Priority, Reservation

LARGEST, IDLE_S = 100, 0.05
DEADLINE_S = 60.0


def on_loop(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene()

    asyncio.run(bounded())


class Jumping(selectors.DefaultSelector):
    """Where a loop would wait for a time, it is that time at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def at_once(scene: Callable[[], Awaitable[None]]) -> None:
    """As `on_loop`, in no time."""

    async def bounded() -> None:
        async with asyncio.timeout(3600):
            await scene()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(bounded())


def granted(*places: Reservation) -> list[bool]:
    return [place.granted.done() for place in places]


def test_as_many_reads_as_largest_messages_fit() -> None:
    async def scene() -> None:
        budget = MemoryBudget(250, LARGEST, IDLE_S)
        a, b, c, d = (budget.reserve() for _ in range(4))
        assert (granted(a, b, c, d), budget.reserved) == ([True, True, False, False], 200)

        a.shrink(60)
        assert (granted(c, d), budget.reserved) == ([False, False], 160)
        b.shrink(20)
        assert (granted(c, d), budget.reserved) == ([True, False], 180)
        c.release()
        assert (granted(d), budget.reserved) == ([True], 180)
        for place in (a, b, d):
            place.release()
            place.release()
        assert budget.reserved == 0

    on_loop(scene)


def test_one_message_always_fits() -> None:
    async def scene() -> None:
        budget = MemoryBudget(1, LARGEST, IDLE_S)
        a, b = budget.reserve(), budget.reserve()
        assert granted(a, b) == [True, False]

    on_loop(scene)


def test_a_cancelled_reservation_is_skipped() -> None:
    async def scene() -> None:
        budget = MemoryBudget(LARGEST, LARGEST, IDLE_S)
        a, b, c, d = (budget.reserve() for _ in range(4))
        b.release()
        c.granted.cancel()  # as where the wait for it is cancelled
        a.release()
        assert (granted(d), budget.reserved) == ([True], LARGEST)

    on_loop(scene)


def test_one_idle_stream_ends_for_each_waiter_the_longest_first() -> None:
    async def scene() -> None:
        budget = MemoryBudget(3 * LARGEST, LARGEST, IDLE_S)
        ended: list[int] = []
        any_ended = asyncio.Event()
        streams: list[Reservation] = []

        def end(n: int) -> None:
            ended.append(n)
            any_ended.set()
            streams[n].release()

        streams += [budget.reserve(on_idle=partial(end, n)) for n in range(3)]
        streams[0].shrink(LARGEST)  # reads no more
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * IDLE_S):
                await any_ended.wait()

        await budget.reserve().granted
        assert ended == [1]
        streams[2].shrink(1)
        assert budget.reserved == 2 * LARGEST + 1

    on_loop(scene)


def test_an_idle_stream_stays_for_a_while_though_others_wait() -> None:
    async def scene() -> None:
        budget = MemoryBudget(LARGEST, LARGEST, IDLE_S)
        began = asyncio.get_running_loop().time()
        ended = asyncio.Event()
        budget.reserve(on_idle=ended.set)
        budget.reserve()
        await ended.wait()
        assert asyncio.get_running_loop().time() - began >= IDLE_S / 2  # one of two

    on_loop(scene)


async def idle(budget: MemoryBudget) -> None:
    """A producer that sends nothing, and opens its stream again whenever it is ended."""
    while True:
        ended = asyncio.Event()
        place = budget.reserve(ended.set, Priority.OPENED)
        try:
            await place.granted
            await ended.wait()
        finally:
            place.release()


async def waited(budget: MemoryBudget, priority: Priority) -> float:
    """Return how long a call waits whose message has arrived."""
    began = asyncio.get_running_loop().time()
    place = budget.reserve(None if priority is Priority.CALL else lambda: None, priority)
    await place.granted
    place.shrink(1)
    place.release()
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(
    ("priority", "within_s"), [(Priority.CALL, 2), (Priority.SENDING, 2), (Priority.OPENED, 10)]
)
def test_two_hundred_idle_streams_delay_others_briefly(priority: Priority, within_s: float) -> None:
    async def scene() -> None:
        budget = MemoryBudget(31 * LARGEST, LARGEST, 10.0)
        async with asyncio.TaskGroup() as tasks:
            idling = [tasks.create_task(idle(budget)) for _ in range(200)]
            await asyncio.sleep(100)  # they have been ended and opened again by now
            for _ in range(20):
                asked = [waited(budget, priority) for _ in range(5)]
                assert max(await asyncio.gather(*asked)) < within_s
                await asyncio.sleep(0.7)
            for one in idling:
                one.cancel()

    at_once(scene)


def test_steady_calls_leave_some_grants_to_streams() -> None:
    async def scene() -> None:
        budget = MemoryBudget(LARGEST, LARGEST, 10.0)
        calls = [budget.reserve()]
        streams = [budget.reserve(lambda: None, priority) for priority in (Priority.OPENED, Priority.SENDING)]
        for _ in range(OLDEST_EVERY):
            calls.append(budget.reserve())
            calls.pop(0).release()
        assert granted(*streams, calls[-1]) == [True, False, False]

    at_once(scene)


def test_a_message_on_its_way_has_some_time_however_many_wait() -> None:
    async def scene() -> None:
        budget = MemoryBudget(LARGEST, LARGEST, 10.0)
        for _ in range(1000):
            budget.reserve()
        assert budget.idle_limit_s() == 1.0

    at_once(scene)
