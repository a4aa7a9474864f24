"""Events of another run's topics, as they were acknowledged: how a new model learns from an old one's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freshet.errors import ConfigError, Corrupt, Mismatch
from freshet.features import frame_ids, take
from freshet.recordings.sources import AvroRecords, Piece, Role
from freshet.seams.eventlog import EventLog
from freshet.spec.schemas import streams_of
from freshet.types import BytesColumn, TopicPartition
from freshet.wire.schemas import FRAME_BYTES, SchemaRegistry

if TYPE_CHECKING:
    from freshet.spec import Spec

__all__ = ["events_of_topics"]

POLL_RECORDS = 4_096


@dataclass(frozen=True, slots=True)
class _Stream:
    role: Role
    json: bool


def events_of_topics(
    log: EventLog, spec: Spec, *, since_ms: int | None = None, until_ms: int | None = None
) -> Iterator[Piece]:
    """Everything that the log holds in the spec's event topics now, or what it took in a range of time.

    Args:
        log:      of the run that has the events; topics are named as in `spec`.
        since_ms: records that the log took from then on; without it, from its start.
        until_ms: and before then; without it, to its present end.

    Raises:
        Mismatch: the log has no topic of that name.
        ConfigError: others alone write a stream: its schemas are not in the log.
        Corrupt: a record is no framed Avro, or its schema is not in the log.
    """
    events = spec.events
    for stream in streams_of(spec):
        if stream.theirs:
            raise ConfigError(
                "replay topics", f"events.{stream.role}.format", stream.format, "avro or json",
                "what others write is read again from their topic: let a joiner begin at its start",
            )  # fmt: skip
    streams = {
        s.topic: _Stream(s.role, s.format == "json")
        for s in (events.served, events.shown, events.action)
        if s is not None
    }
    ends, position = _range(log, streams, since_ms, until_ms)
    registry = SchemaRegistry(log)
    reader = log.reader()
    reader.assign(position)
    try:
        while any(position[at] < ends[at] for at in ends):
            for at, records in reader.poll(POLL_RECORDS, 1.0):
                wanted = int(np.searchsorted(records.offsets, ends[at]))
                position[at] = records.next_offset
                if wanted:
                    yield _piece(streams[at.topic], records.values.slice(0, wanted), registry, at)
    finally:
        reader.close()


def _range(
    log: EventLog, streams: Mapping[str, _Stream], since_ms: int | None, until_ms: int | None
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    known = log.topics()
    missing = [topic for topic in streams if topic not in known]
    if missing:
        raise Mismatch(
            f"the log has no topic {missing[0]!r}; it has {', '.join(sorted(known))}\n"
            "  is this the run folder of the model whose events the spec names?"
        )
    places = [TopicPartition(topic, p) for topic in streams for p in range(known[topic].partitions)]
    ends = {at: log.bounds(at).end if until_ms is None else log.offset_at(at, until_ms) for at in places}
    starts = {at: log.bounds(at).start if since_ms is None else log.offset_at(at, since_ms) for at in places}
    return ends, starts


def _piece(stream: _Stream, values: BytesColumn, registry: SchemaRegistry, at: TopicPartition) -> Piece:
    if stream.json:
        return Piece({stream.role: b"\n".join(values)}, len(values))
    ids = frame_ids(values)
    if (ids < 0).any():
        raise Corrupt(f"{at}: a record is no framed Avro; `freshet peek {at.topic}` shows them")
    parts = []
    for schema_id in np.unique(ids).tolist():
        try:
            schema = registry.get(schema_id)
        except KeyError as error:
            raise Corrupt(f"{at}: {error}") from None
        parts.append(
            AvroRecords(stream.role, schema, take(values, np.flatnonzero(ids == schema_id), FRAME_BYTES))
        )
    return Piece({}, len(values), tuple(parts))
