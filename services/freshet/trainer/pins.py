"""Whether an operator has put `stable` where it must stay: read from `<model>.versions`, which every alias
move goes to."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from freshet.seams.eventlog import EventLog
from freshet.seams.versions.moves import PEOPLE
from freshet.types import TopicPartition

__all__ = ["Pin", "Pins"]


@dataclass(frozen=True, slots=True)
class Pin:
    """Where `stable` must stay until a person promotes."""

    number: int  # of the version that was rolled back to

    @property
    def reason(self) -> str:
        """Why the gate may promote nothing."""
        return (
            f"an operator rolled back to version {self.number}; `freshet version promote` lets the gate go on"
        )


class Pins:
    """Follows the alias moves; the last one by a person counts. Used by one thread."""

    def __init__(self, log: EventLog, topic: str) -> None:
        self._log = log
        self._at = TopicPartition(topic, 0)
        self._next = log.bounds(self._at).start
        self._reader = log.reader()
        self._reader.assign({self._at: self._next})
        self._pin: Pin | None = None

    def pin(self) -> Pin | None:
        """Where `stable` must stay now; None if the gate may promote."""
        end = self._log.bounds(self._at).end
        while self._next < end:
            for _, records in self._reader.poll(1000, 1.0):
                for value in records.values:
                    self._take(orjson.loads(value))
                self._next = records.next_offset
        return self._pin

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _take(self, record: dict[str, object]) -> None:
        number = record.get("number")
        if record.get("kind") == "alias" and record.get("by") in PEOPLE and isinstance(number, int):
            self._pin = Pin(number) if record.get("pinned") else None
