"""Messages of many partitions in the order of their times: what keeps a backlog from being late.

A topic's partitions are read one after the other when there is much to read. Sent like that, the newest
events of one partition would close windows that the others still have events for. So a message waits until
every partition has shown something as new, or that it has nothing more.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, Protocol

Place = tuple[str, int]
"""Topic and partition."""


class Message(Protocol):
    """The part of confluent_kafka.Message that the bridge uses."""

    def topic(self) -> Any:
        """Name."""

    def partition(self) -> Any:
        """Number."""

    def offset(self) -> Any:
        """Place in the partition."""

    def timestamp(self) -> Any:
        """(kind, ms since 1970)."""

    def value(self) -> Any:
        """Bytes, or None for a tombstone."""


def place_of(message: Message) -> Place:
    """Where a message comes from."""
    return message.topic(), message.partition()


class InOrder:
    """A merge of partitions by time; each is taken to be in order itself, as far as the spec's grace goes.

    No I/O. It holds at most about `most` messages of each partition, if `full` ones are paused.
    """

    def __init__(self, most: int = 2_000) -> None:
        self._most = most
        self._held: dict[Place, deque[tuple[int, Message]]] = {}
        self._newest_ms: dict[Place, int] = {}
        self._at_end: set[Place] = set()

    def assign(self, places: Collection[Place]) -> None:
        """Read these from now on; what is held of others belongs to another bridge now."""
        self._held = {place: self._held.get(place, deque()) for place in places}
        self._newest_ms = {place: self._newest_ms.get(place, 0) for place in places}
        self._at_end &= set(places)

    def take(self, messages: Iterable[Message]) -> None:
        """Hold messages, in the order in which their partitions gave them."""
        for message in messages:
            place = place_of(message)
            if place in self._held:
                newest = max(self._newest_ms[place], message.timestamp()[1])
                self._newest_ms[place] = newest
                self._held[place].append((newest, message))
                self._at_end.discard(place)

    def ended(self, places: Iterable[Place]) -> None:
        """These have nothing more to read for now."""
        self._at_end |= self._held.keys() & set(places)

    def full(self) -> set[Place]:
        """Partitions that hold so much that they should not be read for a while."""
        return {place for place, held in self._held.items() if len(held) >= self._most}

    def ready(self) -> list[Message]:
        """Messages whose turn has come, by time; they are not held any more."""
        until = min((self._newest_ms[p] for p in self._held if p not in self._at_end), default=None)
        runs = []
        for held in self._held.values():
            run = []
            while held and (until is None or held[0][0] <= until):
                run.append(held.popleft())
            runs.append(run)
        return [message for _, message in heapq.merge(*runs, key=lambda timed: timed[0])]
