"""Whether an operator has put `stable` where it must stay: read from `<model>.versions`, which every alias
move goes to."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from freshet.log import EventLog
from freshet.observability.skipped import skip
from freshet.types import TopicPartition
from freshet.versions.promotions import PEOPLE
from freshet.versions.weights import MOST_DIGITS

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
        self._stable: int | None = None

    def pin(self) -> Pin | None:
        """Where `stable` must stay now; None if the gate may promote."""
        end = self._log.bounds(self._at).end
        while self._next < end:
            for _, records in self._reader.poll(1000, 1.0):
                for offset, value in zip(records.offsets.tolist(), records.values, strict=True):
                    self._take(value, f"{self._at} at offset {offset}")
                self._next = records.next_offset
        return self._pin

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    @property
    def stable(self) -> int | None:
        """Where the newest move in the log put `stable`; None if there was none. As of the last `pin`."""
        return self._stable

    def _take(self, value: bytes | None, where: str) -> None:
        if not value:
            return
        try:
            record = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            skip("versions", where, f"{where}: expected a record in JSON, found {value[:60]!r}: {error}")
            return
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            skip("versions", where, f"{where}: expected an object with `kind`, found {value[:60]!r}")
            return
        if record["kind"] != "alias" or record.get("alias") != "stable":
            return
        number, by = record.get("number"), record.get("by")
        if type(number) is not int or not 0 <= number < 10**MOST_DIGITS or not isinstance(by, str):
            skip("versions", where, f"{where}: expected `number` and `by` of an alias, found {value[:120]!r}")
            return
        self._stable = number
        if by in PEOPLE:
            self._pin = Pin(number) if record.get("pinned") is True else None
