"""What can happen to a fleet and to the servers that it stands on, and how each thing begins and ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, get_args

from tests.servers.disk import Disk
from tests.servers.redis_cluster import RedisServer
from tests.servers.slow_link import SlowLink

__all__ = ["LINKS", "ROUND", "SERVICES", "WAYS", "Strike", "Victim", "Way", "strike_on"]

Way = Literal["kill", "pause", "fill", "reset", "lose"]
WAYS: tuple[Way, ...] = get_args(Way)

SERVICES = ("gateway", "joiner", "paramserver", "embedder", "trainer", "inference")
LINKS: Mapping[str, str] = {"paramserver-link": "paramserver", "embedder-link": "embedder"}
"""A link leads everybody to one shard, or to one embedder, which itself is well and keeps its claims."""


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
)
"""Faults are dealt in rounds of these, in random order."""

Victim = Server | SlowLink | Disk

LOST: tuple[Mapping[str, bool], ...] = ({}, {"asks": False}, {"answers": False})
"""What a link loses, one of these: all, or only what one side sends."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault's two moments; neither waits for anything."""

    begin: Callable[[], object]
    end: Callable[[], object]


def strike_on(victim: Victim, way: Way, rng: random.Random) -> Strike:
    """What is done to a victim, and what ends it."""
    if isinstance(victim, SlowLink):
        cut = victim.reset if way == "reset" else partial(victim.lose, **rng.choice(LOST))
        return Strike(cut, victim.mend)
    if isinstance(victim, RedisServer | Disk) and way == "fill":
        return Strike(victim.fill, victim.make_room)
    assert not isinstance(victim, Disk)
    return Strike(victim.kill, victim.launch) if way == "kill" else Strike(victim.pause, victim.resume)
