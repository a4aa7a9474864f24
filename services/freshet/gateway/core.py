"""The gateway's decisions: batches of Avro into records, refusals into dead letters, queue accounts, answers.

JSON is read by the native core alone (`freshet.features.transcode`), many bodies at once or one with reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freshet.errors import BadInput, TooLarge
from freshet.log.dead_letters import letter
from freshet.types import Append, BytesColumn

__all__ = [
    "Entry",
    "Limits",
    "QueueAccount",
    "Refusal",
    "answer",
    "check_count",
    "dead_letter",
    "group_entries",
    "offsets_of",
    "refusal_of",
    "split_avro_batch",
    "too_far_ahead",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one event of a request is not taken."""

    index: int  # of the event within the request
    path: str  # field, "" for the event as a whole
    expected: str
    found: str
    raw: bytes = b""  # the event as it came, for the dead letter

    def as_json(self) -> dict[str, Any]:
        """As a client is told it."""
        return {"index": self.index, "path": self.path, "expected": self.expected, "found": self.found}


@dataclass(frozen=True, slots=True)
class Entry:
    """One record to be appended."""

    topic: str
    partition: int
    key: bytes
    value: bytes

    @property
    def size(self) -> int:
        """Bytes it accounts for in the queue."""
        return len(self.key) + len(self.value)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may wait for the log."""

    events: int
    bytes: int


@dataclass(slots=True)
class QueueAccount:
    """What waits for the log's acknowledgement, against its limits."""

    limits: Limits
    events: int = 0
    bytes: int = 0

    def take(self, events: int, size: int) -> bool:
        """Enter this much; False, and nothing entered, if it does not fit. An empty queue takes anything."""
        if self.events and (
            self.events + events > self.limits.events or self.bytes + size > self.limits.bytes
        ):
            return False
        self.events += events
        self.bytes += size
        return True

    def release(self, events: int, size: int) -> None:
        """Leave the queue."""
        self.events -= events
        self.bytes -= size


def check_count(count: int, max_events: int) -> None:
    """Raises BadInput for no events in a request, TooLarge for more than it may hold."""
    if count == 0:
        raise BadInput(f"expected from 1 to {max_events} events in a request, found 0")
    if count > max_events:
        raise TooLarge(f"expected at most {max_events} events in a request, found more")


def split_avro_batch(body: bytes, max_events: int) -> list[bytes]:
    """Records of a batch: each its length (u32, big-endian) and its bytes.

    Raises BadInput if the lengths do not add up to the body, or there are no records or too many.
    """
    records: list[bytes] = []
    at = 0
    while at < len(body):
        if at + 4 > len(body):
            raise BadInput(
                "expected records, each a 4-byte big-endian length and its bytes; "
                f"found {len(body) - at} bytes after record {len(records)}"
            )
        check_count(len(records) + 1, max_events)
        size = int.from_bytes(body[at : at + 4], "big")
        if at + 4 + size > len(body):
            raise BadInput(
                f"record {len(records)} at byte {at} says it is {size} bytes long, "
                f"but only {len(body) - at - 4} follow"
            )
        records.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    check_count(len(records), max_events)
    return records


def too_far_ahead(time_ms: int, now_ms: int, max_ahead_ms: int) -> bool:
    """Whether an event is dated further ahead than the joiner can bear (PROTOCOL 19)."""
    return time_ms > now_ms + max_ahead_ms


def refusal_of(index: int, why: str, raw: bytes) -> Refusal:
    """A refusal from the native core's words, `record 3: user.id (long): what is wrong, at byte 12`."""
    match = _WHY.fullmatch(why)
    if match is None:
        return Refusal(index, "", "an event that fits the schema", why, raw)
    path, type_, found = match.groups()
    return Refusal(index, path or "", type_ or "an event that fits the schema", found, raw)


_WHY = re.compile(r"record \d+: (?:(\S+) \((.*?)\): )?(.*)", re.DOTALL)


def dead_letter(refusal: Refusal, *, topic: str, now_ms: int, max_bytes: int) -> bytes:
    """The record of a refused event, of at most `max_bytes`: the event, why, and where it was meant to
    go."""
    said = {
        "v": 1,
        "kind": "refused",
        "time_ms": now_ms,
        "topic": topic,
        "index": refusal.index,
        "path": refusal.path,
        "expected": refusal.expected,
        "found": refusal.found,
    }
    return letter(said, refusal.raw, key="value", max_bytes=max_bytes)


def group_entries(entries: Sequence[Entry]) -> tuple[list[Append], list[tuple[int, int]]]:
    """Appends, one a partition, and for each entry (append, position in it); a partition keeps its order."""
    members: dict[tuple[str, int], list[Entry]] = {}
    order: dict[tuple[str, int], int] = {}
    places: list[tuple[int, int]] = []
    for entry in entries:
        where = (entry.topic, entry.partition)
        list_ = members.setdefault(where, [])
        places.append((order.setdefault(where, len(order)), len(list_)))
        list_.append(entry)
    appends = [
        Append(topic, partition, BytesColumn.of(e.value for e in group), BytesColumn.of(e.key for e in group))
        for (topic, partition), group in members.items()
    ]
    return appends, places


def offsets_of(first: Sequence[int], places: Iterable[tuple[int, int]]) -> list[int]:
    """Offset of each entry, from the first offset of each append."""
    return [first[append] + position for append, position in places]


def answer(
    accepted: Sequence[Mapping[str, Any]], refusals: Sequence[Refusal], *, total: int
) -> tuple[int, dict[str, Any]]:
    """Status and body: 202 if all events were taken; 422 with the reasons if any was not, others are."""
    body: dict[str, Any] = {"accepted": len(accepted), "acks": list(accepted)}
    if not refusals:
        return 202, body
    first = refusals[0]
    body["error"] = {
        "code": "events_refused",
        "message": f"{len(refusals)} of {total} events were refused; the others are accepted and durable",
        "expected": first.expected,
        "found": first.found,
        "hint": "mend the events listed in `refused` and send only these again",
    }
    body["refused"] = [r.as_json() for r in sorted(refusals, key=lambda r: r.index)]
    return 422, body
