"""Pure logic of the gateway: Avro batches, dead letters, queue accounts and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freshet.errors import BadInput, TooLarge
from freshet.log.records import letter
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
    """One refused event of a request, with the reason."""

    index: int  # position of the event in the request
    path: str  # field; "" for the whole event
    expected: str
    found: str
    raw: bytes = b""  # the event as it was sent, for the dead letter

    def as_json(self) -> dict[str, Any]:
        """Return the members that the client receives."""
        return {"index": self.index, "path": self.path, "expected": self.expected, "found": self.found}


@dataclass(frozen=True, slots=True)
class Entry:
    """A record to append."""

    topic: str
    partition: int
    key: bytes
    value: bytes

    @property
    def size(self) -> int:
        """Bytes that count against the queue's limit."""
        return len(self.key) + len(self.value)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the queue before the log."""

    events: int
    bytes: int


@dataclass(slots=True)
class QueueAccount:
    """Events and bytes that wait for the log's acknowledgement, within limits."""

    limits: Limits
    events: int = 0
    bytes: int = 0

    def reserve(self, events: int, size: int) -> bool:
        """Add events and bytes; False, without a change, if a limit is exceeded. An empty queue has none."""
        if self.events and (
            self.events + events > self.limits.events or self.bytes + size > self.limits.bytes
        ):
            return False
        self.events += events
        self.bytes += size
        return True

    def release(self, events: int, size: int) -> None:
        """Subtract events and bytes that were reserved."""
        self.events -= events
        self.bytes -= size


def check_count(count: int, max_events: int) -> None:
    """Raises BadInput if a request holds no event, TooLarge if it holds more than `max_events`."""
    if count == 0:
        raise BadInput(f"expected from 1 to {max_events} events in a request, found 0")
    if count > max_events:
        raise TooLarge(f"expected at most {max_events} events in a request, found more")


def split_avro_batch(body: bytes, max_events: int) -> list[bytes]:
    """Split a batch into records: each a length (u32, big-endian) and its bytes.

    Raises BadInput if the lengths do not add up to the body or there is no record, TooLarge if too many.
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
    """Return whether an event is dated further ahead than the joiner accepts (PROTOCOL 19)."""
    return time_ms > now_ms + max_ahead_ms


def refusal_of(index: int, why: str, raw: bytes) -> Refusal:
    """Parse a reason of the native core, such as `record 3: user.id (long): found a text, at byte 12`."""
    match = _WHY.fullmatch(why)
    if match is None:
        return Refusal(index, "", "an event that fits the schema", why, raw)
    path, type_, found = match.groups()
    return Refusal(index, path or "", type_ or "an event that fits the schema", found, raw)


_WHY = re.compile(r"record \d+: (?:(\S+) \((.*?)\): )?(.*)", re.DOTALL)


def dead_letter(refusal: Refusal, *, topic: str, now_ms: int, max_bytes: int) -> bytes:
    """Encode a refused event with the reason and its intended topic, in at most `max_bytes`."""
    head = {
        "v": 1,
        "kind": "refused",
        "time_ms": now_ms,
        "topic": topic,
        "index": refusal.index,
        "path": refusal.path,
        "expected": refusal.expected,
        "found": refusal.found,
    }
    return letter(head, refusal.raw, key="value", max_bytes=max_bytes)


def group_entries(entries: Sequence[Entry]) -> tuple[list[Append], list[tuple[int, int]]]:
    """Group entries into one append per partition, in order.

    Returns the appends, and (append, position in it) of each entry.
    """
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
    """Return the offset of each entry, given the first offset of each append."""
    return [first[append] + position for append, position in places]


def answer(
    accepted: Sequence[Mapping[str, Any]], refusals: Sequence[Refusal], *, total: int
) -> tuple[int, dict[str, Any]]:
    """Return status and body: 202 if all events are accepted, else 422 with the reasons."""
    body: dict[str, Any] = {"accepted": len(accepted), "acks": list(accepted)}
    if not refusals:
        return 202, body
    first = refusals[0]
    body["error"] = {
        "code": "events_refused",
        "message": f"{len(refusals)} of {total} events were refused; the others are accepted and durable",
        "expected": first.expected,
        "found": first.found,
        "hint": "correct the events listed in `refused` and send only these again",
    }
    body["refused"] = [r.as_json() for r in sorted(refusals, key=lambda r: r.index)]
    return 422, body
