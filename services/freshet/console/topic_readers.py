"""Readers of topics for the page: records as they come, the joiner's commits, dead letters and versions."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from freshet.console.history import POINTS, parsed, version_event
from freshet.errors import DataLost, FreshetError
from freshet.log import EventLog
from freshet.log.records import newest
from freshet.types import TopicPartition
from freshet.versions import Manifest, VersionStore
from freshet.versions.promotions import PEOPLE, Pins

READ_COMMITS = 5_000


class Follower:
    """Reads the records of one partition as they are appended. Not thread-safe."""

    def __init__(
        self, log: EventLog, at: TopicPartition, *, span_ms: int | None = None, now_ms: int = 0
    ) -> None:
        """Begin at the partition's start, or with the records of the `span_ms` before `now_ms`."""
        self._log, self.at = log, at
        start = log.bounds(at).start
        self.next = start if span_ms is None else max(start, log.offset_at(at, now_ms - span_ms))
        self._reader = log.reader()
        self._reader.assign({at: self.next})

    def read(self, most: int) -> tuple[list[tuple[int, bytes]], bool]:
        """Return (offset, value) of up to `most` new records, and whether the log began anew.

        Records that retention removed before they were read are skipped.
        """
        try:
            found = self._reader.poll(most, 0.0)
        except DataLost:
            return [], self._restart()
        records: list[tuple[int, bytes]] = []
        for _, each in found:
            records += zip(each.offsets.tolist(), each.values, strict=True)
            self.next = each.next_offset
        return records, False

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _restart(self) -> bool:
        bounds = self._log.bounds(self.at)
        anew = self.next > bounds.end
        self.next = bounds.start
        self._reader.close()
        self._reader = self._log.reader()
        self._reader.assign({self.at: self.next})
        return anew


class Commits:
    """Events of each stream that the joiner has read, by its newest commit of each partition."""

    def __init__(self, log: EventLog, topic: str) -> None:
        self._log, self._topic = log, topic
        self._count = log.partition_counts([topic]).get(topic, 0)
        self._reader = log.reader()
        self._next: dict[int, dict[str, int]] = {}  # partition -> role -> next offset
        self._assign()

    def read(self) -> dict[str, int]:
        """Return {role: events read by the joiner}, summed over partitions; empty before the first commit."""
        try:
            while found := self._reader.poll(READ_COMMITS, 0.0):
                for at, records in found:
                    if len(records):
                        self._add_commit(at.partition, records.values[-1])
        except DataLost:  # the joiner removes commits that no restart needs, also unread ones
            self._assign()
        totals: dict[str, int] = {}
        for following in self._next.values():
            for role, offset in following.items():
                totals[role] = totals.get(role, 0) + offset
        return totals

    def cover(self, partitions: int) -> None:
        """Read this many partitions from now on: the topic of commits grows with the joiner's inputs."""
        if partitions > self._count:
            self._count = partitions
            self._assign()

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _assign(self) -> None:
        places = [TopicPartition(self._topic, p) for p in range(self._count)]
        self._reader.assign({at: self._last(at) for at in places})

    def _last(self, at: TopicPartition) -> int:
        for offset, _ in newest(self._log, at, 1):
            return offset
        return self._log.bounds(at).end

    def _add_commit(self, partition: int, value: bytes) -> None:
        commit = parsed(value)
        following = commit.get("next") if commit is not None else None
        if isinstance(following, dict):
            self._next[partition] = {str(role): n for role, n in following.items() if type(n) is int}


SHOWN_DEAD_LETTERS = 20
LONGEST_TEXT = 400
"""Characters of an event's text that are shown; `freshet peek` shows all."""


class DeadLetters:
    """Newest records of the topics of refused events, read only when they have grown."""

    def __init__(self, log: EventLog, *, refused: str, dead_letters: str) -> None:
        """Read nothing yet. `refused`: topic of gateway and trainer; `dead_letters`: topic of the joiner."""
        self._log = log
        self._topics = {"gateway": TopicPartition(refused, 0), "joiner": TopicPartition(dead_letters, 0)}
        self._ends: dict[str, int] = {}
        self._newest: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return {refused: n, joiner: n, newest: [...]}: records in the log, and the newest, latest first."""
        bounds = {role: self._log.bounds(at) for role, at in self._topics.items()}
        ends = {role: b.end for role, b in bounds.items()}
        if ends != self._ends:
            found = [
                dead_letter_of(value, role)
                for role, at in self._topics.items()
                for _, value in newest(self._log, at, SHOWN_DEAD_LETTERS, bounds[role])
            ]
            self._newest = sorted((x for x in found if x), key=lambda x: x["time_ms"] or 0, reverse=True)[
                :SHOWN_DEAD_LETTERS
            ]
            self._ends = ends
        counts = {role: b.end - b.start for role, b in bounds.items()}
        return {"refused": counts["gateway"], "joiner": counts["joiner"], "newest": self._newest}


def dead_letter_of(value: bytes, role: str) -> dict[str, Any] | None:
    """Return a record of a role's dead-letter topic for the page; None if it is malformed."""
    record = parsed(value)
    if record is None:
        return None
    reason = record.get("reason")
    if reason is None and "expected" in record:
        where = f"{record['path']}: " if record.get("path") else ""
        reason = f"{where}expected {record['expected']}, found {record.get('found')}"
    time_ms = record.get("time_ms")
    return {
        "time_ms": time_ms if type(time_ms) is int else None,
        "from": "trainer" if record["kind"] in ("sample", "block") else role,
        "topic": str(record.get("topic") or ""),
        "reason": str(reason or "")[:LONGEST_TEXT],
        "text": _text(record.get("value", record.get("bytes"))),
    }


def _text(encoded: Any) -> str:
    """Return the event as text; binary events as hexadecimal digits."""
    try:
        raw = base64.b64decode(encoded or "", validate=True)
    except (TypeError, ValueError, binascii.Error):
        return ""
    try:
        text = raw.decode()
        printable = text.isprintable() or all(c.isprintable() or c.isspace() for c in text)
    except UnicodeDecodeError:
        printable = False
    if not printable:
        text = f"{len(raw)} bytes: {raw[: LONGEST_TEXT // 4].hex(' ')}"
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


SHOWN_VERSIONS = 20
"""Newest versions that are listed, beside those that aliases point to."""

READ_AT_ONCE = 5_000


class Versions:
    """Follows the version store and its topic. Not thread-safe."""

    def __init__(self, store: VersionStore, log: EventLog, topic: str, *, span_ms: int, now_ms: int) -> None:
        """Begin with the records of the `span_ms` before `now_ms`; a pin may be older."""
        self._store = store
        self._manifests: dict[int, Manifest] = {}
        with contextlib.closing(Pins(log, topic)) as pins:
            self.pinned = pins.pin() is not None
        self._follower = Follower(log, TopicPartition(topic, 0), span_ms=span_ms, now_ms=now_ms)

    def events(self) -> Sequence[Mapping[str, Any]]:
        """Return events of versions since the last call, as `version_event`; the newest POINTS at most."""
        found: deque[Mapping[str, Any]] = deque(maxlen=POINTS)
        while True:
            records, anew = self._follower.read(READ_AT_ONCE)
            if anew:
                self.pinned, self._manifests = False, {}
            for _, value in records:
                record = parsed(value)
                if record is None:
                    continue
                if record["kind"] == "alias" and record.get("by") in PEOPLE:
                    self.pinned = bool(record.get("pinned"))
                event = version_event(record)
                if event is not None:
                    found.append(event)
            if not records and not anew:
                return found

    def to_json(self, serving: int | None) -> dict[str, Any]:
        """Return the aliases and the versions, newest first. Raises Unavailable as the store does."""
        aliases = dict(self._store.aliases())
        numbers = list(self._store.numbers())
        chosen = sorted(
            {*numbers[-SHOWN_VERSIONS:], *(n for n in aliases.values() if n in numbers)}, reverse=True
        )
        self._manifests = {n: m for n, m in self._manifests.items() if n in chosen}
        listed = [self._listed(number, aliases) for number in chosen]
        return {"serving": serving, "aliases": aliases, "pinned": self.pinned, "list": listed}

    def close(self) -> None:
        """Close the reader, but not the store."""
        self._follower.close()

    def _listed(self, number: int, aliases: Mapping[str, int]) -> dict[str, Any]:
        names = sorted(alias for alias, target in aliases.items() if target == number)
        try:
            manifest = self._manifest(number)
        except (FreshetError, KeyError, FileNotFoundError) as error:
            reason = f"its manifest cannot be read: {error}"
            return {"number": number, "created_ms": None, "step": None, "verdict": None, "reason": reason,
                    "aliases": names, "measures": {}}  # fmt: skip
        return {
            "number": number,
            "created_ms": manifest.created_ms,
            "step": manifest.step,
            "verdict": manifest.verdict,
            "reason": manifest.reason,
            "aliases": names,
            "measures": manifest.measures,
        }

    def _manifest(self, number: int) -> Manifest:
        known = self._manifests.get(number)
        if known is None or known.verdict == "pending":
            known = self._manifests[number] = self._store.manifest(number)
        return known
