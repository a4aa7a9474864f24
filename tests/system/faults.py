"""What can happen to a fleet and to the servers that it stands on, and how each thing begins and ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, get_args

from tests.servers.disk import Disk
from tests.servers.jumping_clock import JumpingClock
from tests.servers.processes import Process
from tests.servers.redis_cluster import RedisServer
from tests.servers.slow_link import SlowLink

Way = Literal["kill", "pause", "fill", "reset", "lose", "ahead", "back"]
WAYS: tuple[Way, ...] = get_args(Way)

SERVICES = ("gateway", "joiner", "paramserver", "embedder", "trainer", "inference")
LINKS: Mapping[str, str] = {"paramserver-link": "paramserver", "embedder-link": "embedder"}
"""A link leads all clients to one shard, or to one embedder, which itself is well and keeps its claims."""


class Server(Protocol):
    """What can be killed and paused."""

    def launch(self) -> None:
        """Start it, and wait for nothing."""

    def kill(self) -> None:
        """SIGKILL."""

    def pause(self) -> None:
        """SIGSTOP."""

    def resume(self) -> None:
        """SIGCONT."""


ROUND: tuple[tuple[str, Way], ...] = (
    *((role, way) for role in SERVICES for way in ("kill", "kill", "pause")),
    ("redis", "kill"),
    ("redis", "pause"),
    ("redis", "fill"),
    ("kafka", "kill"),
    ("kafka", "pause"),
    ("paramserver-link", "reset"),
    ("paramserver-link", "lose"),
    ("embedder-link", "lose"),
    ("disk", "fill"),
    ("clock", "ahead"),
    ("clock", "back"),
)
"""Faults are dealt in rounds of these, in random order."""

JUMP_S: Mapping[Way, float] = {"ahead": 3_600.0, "back": -3_600.0}
STARTS_IN_IT = (
    0.5  # share of processes whose clock jumps that are killed in the same moment, and start with it
)

LOST: tuple[Mapping[str, bool], ...] = ({}, {"asks": False}, {"answers": False})
"""What a link loses, one of these: all, or only what one side sends."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault's two moments; neither waits for anything."""

    begin: Callable[[], object]
    end: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Clocked:
    """A process and its wall clock."""

    process: Process
    clock: JumpingClock
    may_be_killed: bool  # too

    def strike(self, way: Way, rng: random.Random) -> Strike:
        """Its clock jumps, and later back; the process goes on, or is one that is started in between."""
        starts = self.may_be_killed and rng.random() < STARTS_IN_IT

        def begin() -> None:
            self.clock.jump(JUMP_S[way])
            if starts:
                self.process.kill()
                self.process.launch()

        return Strike(begin, partial(self.clock.jump, 0.0))


Victim = Server | SlowLink | Disk | Clocked


def strike_on(victim: Victim, way: Way, rng: random.Random) -> Strike:
    """What is done to a victim, and what ends it."""
    if isinstance(victim, Clocked):
        return victim.strike(way, rng)
    if isinstance(victim, SlowLink):
        cut = victim.reset if way == "reset" else partial(victim.lose, **rng.choice(LOST))
        return Strike(cut, victim.mend)
    if isinstance(victim, RedisServer | Disk) and way == "fill":
        return Strike(victim.fill, victim.make_room)
    assert not isinstance(victim, Disk)
    return Strike(victim.kill, victim.launch) if way == "kill" else Strike(victim.pause, victim.resume)
