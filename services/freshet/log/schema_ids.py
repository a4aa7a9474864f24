"""Schema ids: a registry in the topic `schemas`, which every process reads alike.

An id is 1 plus the offset of the first record with the schema's canonical JSON. Registering a schema twice,
or from two processes at once, yields one id, as the second process reads the first one's offset.
"""

from __future__ import annotations

import threading

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.avro.schema import Written, canonical, parse_written
from freshet.config.spec.topics import SCHEMAS_TOPIC
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.log import EventLog
from freshet.types import Append, BytesColumn, Records, TopicPartition

FRAME_BYTES = 5
"""Confluent framing: a zero byte and the schema id, big-endian."""

_PARTITION = TopicPartition(SCHEMAS_TOPIC, 0)
_POLL_RECORDS = 1_000

MAX_SILENT_POLLS = 10
"""Silent polls of the log after which registering a schema fails. A reader of Kafka treats one second without
an answer as silence, and brokers on a machine where everything starts at once are silent for longer; most
processes register schemas when they start, and would end."""

REREAD_S = 0.5
"""Time after a read that did not find an id during which the topic is not read again for any id: each read
delays a server's event loop by up to some milliseconds, and records may name any id. A registered schema is
found after this time at the latest, and at once if no unknown id was requested before.

A read that failed, as brokers were away, is not repeated during this time either, nor for as long as it took:
each takes up to some seconds."""

MAX_MISSED_IDS = 1_000
"""Number of remembered ids that were requested and not found."""


def frame(schema_id: int, payload: bytes) -> bytes:
    """Return a Confluent-framed record."""
    return b"\x00" + schema_id.to_bytes(4, "big") + payload


def framed_id(record: bytes | memoryview) -> int:
    """Return the schema id of a framed record. Raises Corrupt if it has no frame."""
    if len(record) < FRAME_BYTES or record[0] != 0:
        raise Corrupt(
            f"event: expected a zero byte and a 4-byte schema id, found {bytes(record[:FRAME_BYTES])!r} "
            f"({len(record)} bytes); is it Confluent-framed Avro?"
        )
    return int.from_bytes(record[1:FRAME_BYTES], "big")


class SchemasUnread(Unavailable):
    """The topic could not be read: until it can be, no unknown id is found."""


class SchemaRegistry:
    """Schemas by id, cached forever: an id never changes its meaning. Thread-safe."""

    def __init__(self, log: EventLog, clock: Clock = SYSTEM_CLOCK) -> None:
        self._log, self.clock = log, clock
        self._lock = threading.Lock()
        self._next = 0
        self._missed_s = float("-inf")  # time of the last read that did not find an id
        self._misses = 0  # number of reads that did not find an id
        self._missed_ids: dict[int, int] = {}  # requested id -> `_misses` at its first request, the newest
        self._unread_until_s, self._unread_reason = float("-inf"), ""  # after a read that failed
        self._ids: dict[str, int] = {}
        self._schemas: dict[int, Written | ConfigError] = {}
        log.create_topic(SCHEMAS_TOPIC, partitions=1, retention_ms=None)

    def register(self, schema: Written | str | bytes) -> int:
        """Return the id of a schema, parsed or as JSON text; appends it if the topic does not hold it yet.

        Raises:
            ConfigError: the text is no schema of a record.
            Unavailable: as the log does, but only after MAX_SILENT_POLLS silent polls.
        """
        text = canonical(parse_written(schema) if isinstance(schema, (str, bytes)) else schema)
        with self._lock:
            if text not in self._ids:
                self._read_to_end(MAX_SILENT_POLLS)
            if text not in self._ids:
                writer = self._log.writer()
                try:
                    writer.append([Append(SCHEMAS_TOPIC, 0, BytesColumn.of([text.encode()]))])
                finally:
                    writer.close()
                self._read_to_end(MAX_SILENT_POLLS)
            return self._ids[text]

    def get(self, schema_id: int, came_s: float | None = None) -> Written:
        """Return the schema of an id.

        Args:
            schema_id: as in a frame.
            came_s: monotonic time at which the record that names it came. A schema registered before then is
                found, even if the topic was read recently; without it, see REREAD_S.

        Raises:
            KeyError: the topic has no such id.
            ConfigError: its record is no schema that this release can read.
            SchemasUnread: the topic cannot be read, or could not shortly before.
        """
        with self._lock:
            if schema_id not in self._schemas:
                self._read_for(schema_id, came_s)
            found = self._schemas.get(schema_id)
        if found is None:
            raise KeyError(f"no schema has id {schema_id}; the topic {SCHEMAS_TOPIC} ends at {self._next}")
        if isinstance(found, ConfigError):
            raise found
        return found

    def get_now(self, schema_id: int) -> Written:
        """Return the schema of a record that was read just now; every schema registered before is found."""
        return self.get(schema_id, self.clock.monotonic())

    def find(self, schema_id: int, came_s: float) -> Written:
        """Return a schema named by an untrusted record; the topic is read at most once in REREAD_S.

        Raises:
            KeyError: the topic was read since the record came, or since the id was first requested, without
                finding it.
            Unavailable: it was not read since; the id may have been registered, and the next request may find
                it. SchemasUnread: as `get`.
        """
        with self._lock:
            recently = self.clock.monotonic() - self._missed_s < REREAD_S
            if schema_id not in self._schemas and recently and self._missed_s < came_s:
                self._remember(schema_id)
                if self._missed_ids[schema_id] == self._misses:
                    raise Unavailable(
                        f"schema id {schema_id} was not in the topic {SCHEMAS_TOPIC} when that was read less "
                        f"than {REREAD_S:g} s ago, and may have been registered since; send it again"
                    )
        return self.get(schema_id)

    def _remember(self, schema_id: int) -> None:
        self._missed_ids.setdefault(schema_id, self._misses)
        if len(self._missed_ids) > MAX_MISSED_IDS:
            del self._missed_ids[next(iter(self._missed_ids))]

    def _read_for(self, schema_id: int, came_s: float | None) -> None:
        now = self.clock.monotonic()
        recently = now - self._missed_s < REREAD_S if came_s is None else self._missed_s >= came_s
        if recently:
            return
        if now < self._unread_until_s:
            raise SchemasUnread(self._unread_reason)
        try:
            self._read_to_end()
        except (Unavailable, ConfigError) as error:  # ConfigError: of the log's user, not of the schema
            ended = self.clock.monotonic()
            self._unread_until_s = ended + max(REREAD_S, ended - now)
            self._unread_reason = f"the topic {SCHEMAS_TOPIC} could not be read: {error}"
            raise SchemasUnread(self._unread_reason) from error
        if schema_id not in self._schemas:
            self._remember(schema_id)
            self._missed_s = now
            self._misses += 1

    def _read_to_end(self, silences: int = 1) -> None:
        """Read the topic to its present end. Raises the log's Unavailable after `silences` silent polls."""
        try:
            end = self._log.bounds(_PARTITION).end
        except KeyError:  # no id is unknown as long as the topic is
            raise Unavailable(f"the log has no topic {SCHEMAS_TOPIC}; `freshet prepare` makes it") from None
        if self._next >= end:
            return
        reader = self._log.reader()
        try:
            reader.assign({_PARTITION: self._next})
            while self._next < end:
                try:
                    polled = reader.poll(_POLL_RECORDS, 1.0)
                except Unavailable:
                    silences -= 1
                    if not silences:
                        raise
                    continue
                for _, records in polled:
                    self._apply_records(records)
        finally:
            reader.close()

    def _apply_records(self, records: Records) -> None:
        for offset, value in zip(records.offsets.tolist(), records.values, strict=True):
            try:
                schema = parse_written(value, f"{SCHEMAS_TOPIC} offset {offset}")
            except ConfigError as error:  # a record of another writer does not prevent reading the others
                self._schemas[offset + 1] = error
                continue
            self._schemas[offset + 1] = schema
            self._ids.setdefault(canonical(schema), offset + 1)
        self._next = records.next_offset
