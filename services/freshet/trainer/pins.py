"""Whether an operator has put `stable` where it must stay: read from `<model>.versions`, which every alias
move goes to."""

from __future__ import annotations

import orjson

from freshet.seams.eventlog import EventLog
from freshet.seams.versions.moves import PEOPLE
from freshet.types import TopicPartition

__all__ = ["Pins"]


class Pins:
    """Follows the alias moves; the last one by a person counts. Used by one thread."""

    def __init__(self, log: EventLog, topic: str) -> None:
        self._log = log
        self._at = TopicPartition(topic, 0)
        self._next = log.bounds(self._at).start
        self._reader = log.reader()
        self._reader.assign({self._at: self._next})
        self._reason: str | None = None

    def reason(self) -> str | None:
        """Why the gate may promote nothing now; None if it may."""
        end = self._log.bounds(self._at).end
        while self._next < end:
            for _, records in self._reader.poll(1000, 1.0):
                for value in records.values:
                    self._take(orjson.loads(value))
                self._next = records.next_offset
        return self._reason

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _take(self, record: dict[str, object]) -> None:
        if record.get("kind") == "alias" and record.get("by") in PEOPLE:
            self._reason = (
                f"an operator rolled back to version {record['number']}; "
                "`freshet version promote` lets the gate go on"
                if record.get("pinned")
                else None
            )
