"""Events of one stream between what clients send and what the log holds: checked, encoded, framed.

JSON is encoded by the stream's schema, Avro is passed on byte for byte; both are then read as the joiner
will read them, so that what is acknowledged can be joined. Bodies that are good in all go through `take_json`
and `take_avro`, many in one native call; a body that these leave is read again alone, for the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from freshet.config.avro.schema import Record, Written
from freshet.config.spec.model import Stream
from freshet.errors import ConfigError, Unavailable
from freshet.features import (
    EventExtractor,
    EventIntake,
    JsonTranscoder,
    TakenBodies,
    frame_ids,
    rows_by_id,
    take,
)
from freshet.gateway.core import Refusal, check_count, refusal_of
from freshet.log.schema_ids import FRAME_BYTES, SchemaRegistry
from freshet.types import I64, U64, BytesColumn

__all__ = ["Accepted", "Checked", "StreamCodec"]

LENGTH_BYTES = 4
"""Before each record of a batch of Avro: its length, u32 big-endian."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An event as the log takes it."""

    index: int  # within the request
    key: bytes  # request id as text: the record's key
    time_ms: int  # its newest impression's; 0 if it holds none
    record: bytes
    sent: bytes  # as its client sent it
    first_ms: int  # its oldest impression's time, or 0


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of a request's events."""

    good: Sequence[Accepted]
    bad: Sequence[Refusal]


class StreamCodec:
    """Checks events of one stream against the user's schema. Used by one thread."""

    def __init__(
        self,
        stream: Stream,
        schema: Record,
        registry: SchemaRegistry,
        *,
        partitions: int,
        reader: Record | None = None,
        checked: Sequence[str] = (),
        fits: Callable[[Written, Record], None] = lambda written, reader: None,
    ) -> None:
        """Register the stream's schema.

        Args:
            schema: of the stream's events, as the spec names it: JSON is encoded by it.
            partitions: of the stream's topic.
            reader: what events of any writer's schema are read as; None: `schema`.
            checked: fields that features read, see `EventExtractor`.
            fits: raises ConfigError for a writer's schema that the spec does not fit, read as the reader's.

        Raises ConfigError if the schema lacks the envelope's fields, or the spec does not fit it.
        """
        self._stream, self._registry, self._fits = stream, registry, fits
        self._partitions, self._reader, self._checked = partitions, reader or schema, checked
        fits(schema, self._reader)
        self._extractors: dict[int, EventExtractor | ConfigError] = {}
        self.schema_id = registry.register(schema)
        # A topic in JSON keeps the events as they came: fields beyond the schema are left alone there.
        self._transcoder = JsonTranscoder(
            schema, schema_id=self.schema_id, ignore_unknown=stream.format == "json"
        )
        self._extractors[self.schema_id] = EventExtractor(stream, schema, reader=self._reader)

    def take_json(self, bodies: list[bytes], *, latest_ms: int, max_events: int) -> TakenBodies:
        """Take bodies of JSON that are good in all: of up to `max_events` events, dated up to `latest_ms`."""
        return self._intake(self.schema_id, max_events).json(
            self._transcoder, bodies, latest_ms=latest_ms, keep_text=self._stream.format == "json"
        )

    def take_avro(
        self, bodies: list[bytes], *, lengths: bool, latest_ms: int, max_events: int
    ) -> TakenBodies | None:
        """Take bodies of framed Avro that are good in all; `lengths`: each record after its length.

        All are read by the first one's schema, others are left. None if no record of it can be taken, or
        `from_avro` has not seen any yet.
        """
        at = LENGTH_BYTES if lengths else 0
        schema_id = int.from_bytes(bodies[0][at + 1 : at + FRAME_BYTES], "big")
        known = isinstance(self._extractors.get(schema_id), EventExtractor)
        if self._stream.format == "json" or not known:
            return None
        return self._intake(schema_id, max_events).avro(bodies, lengths=lengths, latest_ms=latest_ms)

    @property
    def role(self) -> str:
        """Of its stream: served, shown or action."""
        return self._stream.role

    def requests(self, records: BytesColumn) -> U64:
        """(N,) hash of each record's request id, as samples will have it; 0 where a record has none."""
        found = np.zeros(len(records), np.uint64)
        if self._stream.format == "json":
            made = self._transcoder.column(records)
            self._fill(found, made.events, self.schema_id, made.records)
            return found
        ids = frame_ids(records)
        for schema_id, rows in rows_by_id(ids):
            self._fill(found, rows, schema_id, records if len(rows) == len(ids) else take(records, rows))
        return found

    def sample_bytes(self, record: bytes) -> tuple[int, int, int]:
        """Payload bytes of the largest sample of a served event that was taken, of all of them together, one
        label each, and how many there are."""
        values = BytesColumn.of([record])
        schema_id = self.schema_id
        if self._stream.format == "json":
            values = self._transcoder.column(values).records
        else:
            schema_id = int(frame_ids(values)[0])
        extractor = self._extractors[schema_id]
        assert isinstance(extractor, EventExtractor), "this record was taken"
        spans = extractor.extract(values, framed=True).spans
        sizes = (spans[:, 1::2] - spans[:, ::2]).sum(axis=1)
        return int(sizes.max(initial=0)), int(sizes.sum()), len(sizes)

    def _fill(self, found: U64, rows: I64, schema_id: int, records: BytesColumn) -> None:
        extractor = self._extractors[schema_id]
        assert isinstance(extractor, EventExtractor), "these records were taken"
        columns = extractor.extract(records, framed=True)
        found[rows[columns.event_index]] = columns.request

    def _intake(self, schema_id: int, max_events: int) -> EventIntake:
        extractor = self._extractors[schema_id]
        assert isinstance(extractor, EventExtractor), "checked by the caller"
        return EventIntake(extractor, schema_id=schema_id, partitions=self._partitions, max_events=max_events)

    def from_json(self, body: bytes, *, max_events: int) -> Checked:
        """Encode the events of a body, as `JsonTranscoder.body` finds them; what does not fit the schema is
        refused, each as it was sent.

        Raises BadInput if there are no events, TooLarge for too many.
        """
        made = self._transcoder.body(body, max_events)
        check_count(made.total, max_events)
        places = zip(made.begins.tolist(), made.ends.tolist(), strict=True)
        texts = [body[begin:end] for begin, end in places]
        bad = [Refusal(r.index, r.path, r.expected, r.found, texts[r.index]) for r in made.bad]
        indexes = made.events.tolist()
        checked = self._read(self.schema_id, indexes, list(made.records), [texts[i] for i in indexes])
        bad += checked.bad
        if self._stream.format == "json":
            return Checked([replace(event, record=event.sent) for event in checked.good], bad)
        return Checked(checked.good, bad)

    def from_avro(self, records: Sequence[bytes]) -> Checked:
        """Check framed records; the good ones are passed on byte for byte.

        Raises Unavailable for a schema id that is not known yet.
        """
        if self._stream.format == "json":
            expected = f"JSON, the format of topic {self._stream.topic}"
            return Checked([], [Refusal(i, "", expected, "Avro", r) for i, r in enumerate(records)])
        good: list[Accepted] = []
        bad: list[Refusal] = []
        by_id = list(rows_by_id(frame_ids(BytesColumn.of(records))))
        problems = self._problems([schema_id for schema_id, _ in by_id])
        for schema_id, rows in by_id:
            indexes = rows.tolist()
            chosen = [records[i] for i in indexes]
            problem = problems[schema_id]
            if problem is not None:
                bad += [
                    Refusal(i, "", problem[0], problem[1], r) for i, r in zip(indexes, chosen, strict=True)
                ]
                continue
            checked = self._read(schema_id, indexes, chosen, chosen)
            good += checked.good
            bad += checked.bad
        return Checked(sorted(good, key=lambda a: a.index), sorted(bad, key=lambda r: r.index))

    def _problems(self, schema_ids: Sequence[int]) -> dict[int, tuple[str, str] | None]:
        """`_problem` of each. All are asked for before one that is not known yet is told, so that all are
        known when they come again."""
        came_s = self._registry.clock.monotonic()
        problems: dict[int, tuple[str, str] | None] = {}
        later: Unavailable | None = None
        for schema_id in schema_ids:
            try:
                problems[schema_id] = self._problem(schema_id, came_s)
            except Unavailable as error:
                later = error
        if later is not None:
            raise later
        return problems

    def _problem(self, schema_id: int, came_s: float) -> tuple[str, str] | None:
        """(expected, found) if records of this schema id cannot be taken."""
        if schema_id < 0:
            return "a Confluent frame: a zero byte and a 4-byte schema id", "other bytes"
        if schema_id not in self._extractors:
            try:
                schema = self._registry.find(schema_id, came_s)
            except KeyError:  # it may yet be registered: not remembered
                return f"a schema id of the topic `schemas`, such as {self.schema_id}", str(schema_id)
            except ConfigError as error:
                self._extractors[schema_id] = error
            else:
                self._extractors[schema_id] = self._compiled(schema)
        found = self._extractors[schema_id]
        if isinstance(found, ConfigError):
            return "a schema that the spec fits", f"schema {schema_id}: {found}"
        return None

    def _compiled(self, written: Written) -> EventExtractor | ConfigError:
        try:
            self._fits(written, self._reader)
            return EventExtractor(self._stream, written, reader=self._reader, checked=self._checked)
        except ConfigError as error:
            return error

    def _read(
        self, schema_id: int, indexes: Sequence[int], records: Sequence[bytes], sent: Sequence[bytes]
    ) -> Checked:
        """Framed records as the joiner will see them; `sent`: each as its client sent it."""
        if not records:
            return Checked([], [])
        extractor = self._extractors[schema_id]
        assert isinstance(extractor, EventExtractor), "checked by the caller"
        found = extractor.extract(BytesColumn.of(records), framed=True)
        times = np.zeros(len(records), np.int64)
        np.maximum.at(times, found.event_index, found.times_ms)
        early = np.zeros(len(records), np.int64)
        np.minimum.at(early, found.event_index, found.times_ms)
        first = times.copy()
        np.minimum.at(first, found.event_index, found.times_ms)
        good = [
            Accepted(indexes[at], key, int(times[at]), records[at], sent[at], int(first[at]))
            for at, key in zip(found.events.tolist(), found.request_keys, strict=True)
            if early[at] == 0
        ]
        bad = [
            self._named(refusal_of(indexes[at], why, sent[at]))
            for at, why in zip(found.bad.tolist(), found.why, strict=True)
        ]
        bad += [
            self._early(indexes[at], int(early[at]), sent[at]) for at in np.flatnonzero(early < 0).tolist()
        ]
        return Checked(good, bad)

    def _named(self, refusal: Refusal) -> Refusal:
        """With the field of the event's time, where the time is what is wrong."""
        time = self._stream.time
        if refusal.path or not refusal.found.startswith("an event time"):
            return refusal
        return replace(refusal, path=time.path, expected=f"a time since 1970 (unit {time.unit})")

    def _early(self, index: int, time_ms: int, sent: bytes) -> Refusal:
        """The joiner refuses times before 1970: what is acknowledged can be joined."""
        time = self._stream.time
        return Refusal(
            index, time.path, f"a time since 1970 (unit {time.unit})", f"{-time_ms} ms before 1970", sent
        )
