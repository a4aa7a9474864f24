"""Bytes that calls hold together: who reads takes the largest, and who is quiet goes when others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from freshet.runtime.grpc_room import Place, Room

LARGEST, QUIET_S = 100, 0.05
DEADLINE_S = 20.0


def on_loop(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene()

    asyncio.run(bounded())


def granted(*places: Place) -> list[bool]:
    return [place.granted.done() for place in places]


def test_as_many_read_as_largest_messages_fit_and_others_wait_in_turn() -> None:
    async def scene() -> None:
        room = Room(250, LARGEST, QUIET_S)
        a, b, c, d = (room.place() for _ in range(4))
        assert (granted(a, b, c, d), room.held) == ([True, True, False, False], 200)

        a.came(60)
        assert (granted(c, d), room.held) == ([False, False], 160)
        b.came(20)
        assert (granted(c, d), room.held) == ([True, False], 180)
        c.leave()
        assert (granted(d), room.held) == ([True], 180)
        for place in (a, b, d):
            place.leave()
            place.leave()
        assert room.held == 0

    on_loop(scene)


def test_one_message_is_taken_however_little_room_there_is() -> None:
    async def scene() -> None:
        room = Room(1, LARGEST, QUIET_S)
        a, b = room.place(), room.place()
        assert granted(a, b) == [True, False]

    on_loop(scene)


def test_who_waits_no_more_is_passed_over() -> None:
    async def scene() -> None:
        room = Room(LARGEST, LARGEST, QUIET_S)
        a, b, c, d = (room.place() for _ in range(4))
        b.leave()
        c.granted.cancel()  # as where the wait for it is cancelled
        a.leave()
        assert (granted(d), room.held) == ([True], LARGEST)

    on_loop(scene)


def test_quiet_streams_end_the_longest_first_and_only_as_many_as_others_wait() -> None:
    async def scene() -> None:
        room = Room(3 * LARGEST, LARGEST, QUIET_S)
        ended: list[int] = []
        any_ended = asyncio.Event()
        streams: list[Place] = []

        def end(n: int) -> None:
            ended.append(n)
            any_ended.set()
            streams[n].leave()

        streams += [room.place(quiet=partial(end, n)) for n in range(3)]
        streams[0].came(LARGEST)  # reads no more
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * QUIET_S):
                await any_ended.wait()

        await room.place().granted
        assert ended == [1]
        streams[2].came(1)
        assert room.held == 2 * LARGEST + 1

    on_loop(scene)


def test_a_stream_is_left_alone_for_a_while_though_others_wait() -> None:
    async def scene() -> None:
        room = Room(LARGEST, LARGEST, QUIET_S)
        began = asyncio.get_running_loop().time()
        ended = asyncio.Event()
        room.place(quiet=ended.set)
        room.place()
        await ended.wait()
        assert asyncio.get_running_loop().time() - began >= QUIET_S

    on_loop(scene)
