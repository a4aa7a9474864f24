"""Validation, encoding and framing of the events of one stream.

JSON is encoded by the stream's schema; Avro is passed on byte for byte. Both are then read by the joiner's
extractor, so that every acknowledged event can be joined. `accept_json` and `accept_avro` read many bodies in
one native call and accept those without an invalid event; `from_json` and `from_avro` read one of the other
bodies event by event, for the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from freshet.config.avro.schema import Record, Written
from freshet.config.spec.model import Spec, Stream
from freshet.config.spec.schemas import fields_read
from freshet.errors import BadInput, ConfigError, TooLarge, Unavailable
from freshet.features import (
    AcceptedBodies,
    EventExtractor,
    EventIntake,
    JsonTranscoder,
    frame_ids,
    rows_by_id,
    take,
)
from freshet.log.records import letter
from freshet.log.schema_ids import FRAME_BYTES, SchemaRegistry, SchemasUnread
from freshet.types import I64, U64, BytesColumn

LENGTH_BYTES = 4
"""Bytes of the length (u32, big-endian) before each record of an Avro batch."""


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
class Accepted:
    """A valid event with its log record."""

    index: int  # position in the request
    key: bytes  # request id as text: the record's key
    time_ms: int  # of its newest impression; 0 if it holds none
    record: bytes
    sent: bytes  # the bytes that the client sent
    first_ms: int  # time of its oldest impression, or 0


@dataclass(frozen=True, slots=True)
class Checked:
    """Accepted and refused events of one request."""

    good: Sequence[Accepted]
    bad: Sequence[Refusal]


class StreamCodec:
    """Validates events of one stream against the user's schema. Not thread-safe."""

    def __init__(
        self,
        spec: Spec,
        stream: Stream,
        schema: Record,
        registry: SchemaRegistry,
        *,
        reader: Record | None = None,
        fits: Callable[[Written, Record], None] = lambda written, reader: None,
    ) -> None:
        """Register the stream's schema.

        Args:
            spec: the model's.
            stream: one of its streams.
            schema: the stream's schema in the spec; JSON is encoded by it.
            registry: source of writers' schemas.
            reader: the reader's schema for events of any writer's schema; None: `schema`.
            fits: raises ConfigError if the spec does not fit a writer's schema, read with the reader's.

        Raises:
            ConfigError: the schema lacks fields that the spec reads, or has them with unsuitable types.
        """
        self._stream, self._registry, self._fits = stream, registry, fits
        self._partitions, self._reader = spec.partitions, reader or schema
        columns, checked = fields_read(spec, stream.role)
        self._extractor = partial(
            EventExtractor, stream, columns=columns, reader=self._reader, checked=checked
        )
        fits(schema, self._reader)
        self._extractors: dict[int, EventExtractor | ConfigError] = {}
        self.schema_id = registry.register(schema)
        # A JSON topic keeps events as they were sent, so fields beyond the schema are allowed.
        self._transcoder = JsonTranscoder(
            schema, schema_id=self.schema_id, ignore_unknown=stream.format == "json"
        )
        self._extractors[self.schema_id] = self._extractor(schema)

    def accept_json(self, bodies: list[bytes], *, latest_ms: int, max_events: int) -> AcceptedBodies:
        """Encode JSON bodies of at most `max_events` events, all valid and dated up to `latest_ms`.

        Other bodies have a negative count in the result.
        """
        return self._intake(self.schema_id, max_events).json(
            self._transcoder, bodies, latest_ms=latest_ms, keep_text=self._stream.format == "json"
        )

    def accept_avro(
        self, bodies: list[bytes], *, lengths: bool, latest_ms: int, max_events: int
    ) -> AcceptedBodies | None:
        """Accept bodies of framed Avro without an invalid event; `lengths`: a length precedes each record.

        All are read with the schema of the first record; bodies of another schema are not accepted. Returns
        None if the topic holds JSON or `from_avro` has not compiled that schema yet.
        """
        at = LENGTH_BYTES if lengths else 0
        schema_id = int.from_bytes(bodies[0][at + 1 : at + FRAME_BYTES], "big")
        known = isinstance(self._extractors.get(schema_id), EventExtractor)
        if self._stream.format == "json" or not known:
            return None
        return self._intake(schema_id, max_events).avro(bodies, lengths=lengths, latest_ms=latest_ms)

    @property
    def role(self) -> str:
        """Role of the stream: served, shown or action."""
        return self._stream.role

    def requests(self, records: BytesColumn) -> U64:
        """Hash the request id of each of N records, as samples have it: (N,) uint64, 0 for none."""
        found = np.zeros(len(records), np.uint64)
        if self._stream.format == "json":
            transcoded = self._transcoder.column(records)
            self._fill(found, transcoded.events, self.schema_id, transcoded.records)
            return found
        ids = frame_ids(records)
        for schema_id, rows in rows_by_id(ids):
            self._fill(found, rows, schema_id, records if len(rows) == len(ids) else take(records, rows))
        return found

    def sample_bytes(self, record: bytes) -> tuple[int, int]:
        """Measure the samples of an accepted served event, for one label.

        Returns bytes of the largest sample's payload, and of all payloads.
        """
        values = BytesColumn.of([record])
        schema_id = self.schema_id
        if self._stream.format == "json":
            values = self._transcoder.column(values).records
        else:
            schema_id = int(frame_ids(values)[0])
        extractor = self._extractors[schema_id]
        assert isinstance(extractor, EventExtractor), "the record was accepted with this schema"
        spans = extractor.extract(values, framed=True).spans
        sizes = (spans[:, 1::2] - spans[:, ::2]).sum(axis=1)
        return int(sizes.max(initial=0)), int(sizes.sum())

    def _fill(self, found: U64, rows: I64, schema_id: int, records: BytesColumn) -> None:
        extractor = self._extractors[schema_id]
        assert isinstance(extractor, EventExtractor), "the records were accepted with this schema"
        columns = extractor.extract(records, framed=True)
        found[rows[columns.event_index]] = columns.request

    def _intake(self, schema_id: int, max_events: int) -> EventIntake:
        extractor = self._extractors[schema_id]
        assert isinstance(extractor, EventExtractor), "checked by the caller"
        return EventIntake(extractor, schema_id=schema_id, partitions=self._partitions, max_events=max_events)

    def from_json(self, body: bytes, *, max_events: int) -> Checked:
        """Encode the events of a body one by one; refuse those that do not fit the schema.

        Raises BadInput if there are no events, TooLarge if there are too many.
        """
        transcoded = self._transcoder.body(body, max_events)
        check_count(transcoded.total, max_events)
        places = zip(transcoded.begins.tolist(), transcoded.ends.tolist(), strict=True)
        texts = [body[begin:end] for begin, end in places]
        bad = [Refusal(r.index, r.path, r.expected, r.found, texts[r.index]) for r in transcoded.bad]
        indexes = transcoded.events.tolist()
        checked = self._validate(
            self.schema_id, indexes, list(transcoded.records), [texts[i] for i in indexes]
        )
        bad += checked.bad
        if self._stream.format == "json":
            return Checked([replace(event, record=event.sent) for event in checked.good], bad)
        return Checked(checked.good, bad)

    def from_avro(self, records: Sequence[bytes]) -> Checked:
        """Validate framed records; valid ones are passed on byte for byte.

        Raises Unavailable if a schema id is not known yet, or cannot be looked up.
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
            checked = self._validate(schema_id, indexes, chosen, chosen)
            good += checked.good
            bad += checked.bad
        return Checked(sorted(good, key=lambda a: a.index), sorted(bad, key=lambda r: r.index))

    def _problems(self, schema_ids: Sequence[int]) -> dict[int, tuple[str, str] | None]:
        """Return `_problem_of` for each schema id.

        All ids are looked up before Unavailable is raised for one, so that a repeated request finds all; but
        none after the topic of schemas could not be read, as each attempt may block for seconds.
        """
        came_s = self._registry.clock.monotonic()
        problems: dict[int, tuple[str, str] | None] = {}
        later: Unavailable | None = None
        for schema_id in schema_ids:
            try:
                problems[schema_id] = self._problem_of(schema_id, came_s)
            except SchemasUnread:
                raise
            except Unavailable as error:
                later = error
        if later is not None:
            raise later
        return problems

    def _problem_of(self, schema_id: int, came_s: float) -> tuple[str, str] | None:
        """Return (expected, found) if records of this schema id are refused, else None."""
        if schema_id < 0:
            return "a Confluent frame: a zero byte and a 4-byte schema id", "other bytes"
        if schema_id not in self._extractors:
            try:
                schema = self._registry.find(schema_id, came_s)
            except KeyError:  # not cached: the schema may be registered later
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
            return self._extractor(written)
        except ConfigError as error:
            return error

    def _validate(
        self, schema_id: int, indexes: Sequence[int], records: Sequence[bytes], sent: Sequence[bytes]
    ) -> Checked:
        """Read framed records with the joiner's extractor; `sent`: each as its client sent it."""
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
            self._with_time_field(refusal_of(indexes[at], why, sent[at]))
            for at, why in zip(found.bad.tolist(), found.why, strict=True)
        ]
        bad += [
            self._refuse_early(indexes[at], int(early[at]), sent[at])
            for at in np.flatnonzero(early < 0).tolist()
        ]
        return Checked(good, bad)

    def _with_time_field(self, refusal: Refusal) -> Refusal:
        """Add the path of the time field if the refusal is about the event's time."""
        time = self._stream.time
        if refusal.path or not refusal.found.startswith("an event time"):
            return refusal
        return replace(refusal, path=time.path, expected=f"a time since 1970 (unit {time.unit})")

    def _refuse_early(self, index: int, time_ms: int, sent: bytes) -> Refusal:
        """Refuse a time before 1970, which the joiner would refuse."""
        time = self._stream.time
        return Refusal(
            index, time.path, f"a time since 1970 (unit {time.unit})", f"{-time_ms} ms before 1970", sent
        )


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
