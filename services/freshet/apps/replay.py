"""Replay of recorded events: joined and learned in one process, or sent to a running gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from freshet.apps.pipeline import Pipeline
from freshet.apps.results import Outcome, pass_folder
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.avro.schema import Record
from freshet.config.spec import Spec
from freshet.config.spec.model import Stream
from freshet.config.spec.schemas import Schemas, load_schemas, readers_of
from freshet.errors import BadInput, ConfigError, FreshetError
from freshet.features import EventColumns, EventExtractor, JsonTranscoder, add_frames, partition_of, take
from freshet.log import EventLog
from freshet.recordings.event_times import SetAside
from freshet.recordings.sources import AvroRecords, Piece, Role, json_events
from freshet.types import I64, Append, BytesColumn

if TYPE_CHECKING:
    from freshet.joiner.service import JoinerStatus

DAY_MS = 86_400_000


def replay(
    spec: Spec,
    pieces: Iterable[Piece],
    *,
    keep: str | Path | None = None,
    lanes: int | None = None,
    speed: float | None = None,
    window_ms: int = DAY_MS,
    progress: Callable[[str, int], None] = lambda stage, done: None,
    set_aside: SetAside | None = None,
) -> Outcome:
    """Encode events, join them and learn from the samples, each stage through a log; return the measures.

    Args:
        pieces:    events in order of time, such as those of `freshet.recordings.sources.events_of_files`.
        keep:      new or empty folder for log, rows and versions; None: they are deleted at the end.
        lanes:     1 gives the same result each time; None: as live.
        speed:     events a second; None: as fast as possible.
        window_ms: length of a window of measures, in event time.
        progress:  called with the stage's name and the events, or percent, done.
        set_aside: the counts of unreadable events that `pieces` share; part of the outcome.

    Raises BadInput if an event does not match the spec's schemas (with `set_aside`: if no event of a stream
    does), ConfigError if a schema is missing.
    """
    spec = replace(spec, train=replace(spec.train, measure_window_ms=window_ms))
    with pass_folder(keep) as folder:
        schemas = load_schemas(spec)
        pipeline = Pipeline(spec, folder, lanes, schemas)
        try:
            ingest = _Ingest(pipeline, schemas)
            began = time.perf_counter()
            for piece in paced(pieces, speed):
                ingest.append(piece)
                progress("events", ingest.events)
            if set_aside is not None:
                set_aside.refuse_bad_streams()
            appended = time.perf_counter()
            status = join_all(spec, pipeline.log)
            joined = time.perf_counter()
            outcome = pipeline.train(lambda share: progress("training, percent", int(100 * share)))
            stages = {
                "events encoded and appended": ingest.events / (appended - began),
                "of that, encoding and appending alone": ingest.events / max(ingest.seconds, 1e-9),
                "events joined": status.events / (joined - appended),
                "samples joined": status.samples / (joined - appended),
            }
            return replace(
                outcome,
                stages={**stages, **outcome.stages},
                ledger=status.ledger.to_json(),
                set_aside=set_aside,
            )
        finally:
            pipeline.close()


def join_all(spec: Spec, log: EventLog, clock: Clock = SYSTEM_CLOCK) -> JoinerStatus:
    """Join all events of the log, and close every window.

    A block of samples ends with each poll, and ended streams do not advance event time by the clock, so the
    same events give the same blocks on a fast and on a slow machine.
    """
    from freshet.joiner.service import Intervals
    from freshet.joiner.start import make

    joiner = make(
        spec, log, clock=clock, intervals=Intervals(flush_interval_ms=0, end_check_interval_ms=DAY_MS)
    )
    joiner.run(until_end=True)
    assert joiner.status is not None, "a joiner that ran to the end has reported its status"
    return joiner.status


def paced(pieces: Iterable[Piece], speed: float | None) -> Iterable[Piece]:
    """Yield the pieces at `speed` events a second; None or 0: without delay."""
    began = time.monotonic()
    sent = 0
    for piece in pieces:
        if speed:
            time.sleep(max(0.0, began + sent / speed - time.monotonic()))
        yield piece
        sent += piece.events


@dataclass
class _Ingest:
    """Encodes events by the spec's schemas and appends them to the joiner's inputs, as the gateway does, a
    piece at a time."""

    pipeline: Pipeline
    schemas: Schemas
    events: int = 0
    seconds: float = 0.0  # time of encoding and appending, without reading the source
    _extractors: dict[tuple[Role, int], EventExtractor | ConfigError] = field(default_factory=dict)
    _streams: Mapping[Role, tuple[Stream, JsonTranscoder, EventExtractor]] = field(init=False)
    _readers: Mapping[str, Record] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.pipeline.spec
        self._streams, self._readers = {}, readers_of(spec, self.schemas)
        for stream in streams_of(spec):
            schema = self.schemas.of(stream.role)
            schema_id = self.pipeline.registry.register(schema)
            transcoder = JsonTranscoder(schema, schema_id=schema_id, ignore_unknown=stream.format == "json")
            self._streams[stream.role] = (stream, transcoder, EventExtractor(stream, schema))

    def append(self, piece: Piece) -> None:
        """Append one piece, impressions first, so that an action is never read long before its impression."""
        began = time.perf_counter()
        appends: list[Append] = []
        for role, lines in piece.lines.items():
            texts = BytesColumn.of([line for line in lines.split(b"\n") if line.strip()])
            appends += self._encode(role, texts, piece)
        for role, texts in piece.texts.items():
            appends += self._encode(role, texts, piece)
        for part in piece.records:
            appends += self._reframe(part, piece)
        if appends:
            self.pipeline.writer.append(appends)
        self.seconds += time.perf_counter() - began

    def _encode(self, role: Role, texts: BytesColumn, piece: Piece) -> Sequence[Append]:
        if not len(texts):
            return ()
        stream, transcoder, extractor = self._streams[role]
        made = transcoder.column(texts)
        for bad in made.bad:
            said = f"{bad.path or 'the event'}: expected {bad.expected}, found {bad.found}"
            if piece.set_aside is None:
                hint = "\n  the spec's schema of this stream says what fits"
                raise BadInput(f"{piece.place(role, bad.index)}: {said}{hint}")
            piece.set_aside.add(role, "unreadable", f"{piece.place(role, bad.index)}: {said}")
        good = np.delete(np.arange(len(texts)), [bad.index for bad in made.bad])
        events = self._read(stream, extractor, made.records, piece, good)
        self.events += len(events.events)
        # A topic in JSON holds the texts unchanged, as from the gateway.
        values = take(texts, good) if stream.format == "json" else made.records
        return self._by_partition(stream, events, take(values, events.events))

    def _reframe(self, part: AvroRecords, piece: Piece) -> Sequence[Append]:
        """Frame records of another log with schema ids of this one."""
        schema_id = self.pipeline.registry.register(part.schema)
        if (part.role, schema_id) not in self._extractors:
            stream = next(s for s in streams_of(self.pipeline.spec) if s.role == part.role)
            try:
                extractor = EventExtractor(stream, part.schema, reader=self._readers[part.role])
            except ConfigError as error:  # due to the writer's schema: the spec's own compiled at the start
                self._extractors[part.role, schema_id] = error
            else:
                self._extractors[part.role, schema_id] = extractor
        found = self._extractors[part.role, schema_id]
        if isinstance(found, ConfigError):
            if piece.set_aside is None:
                raise found
            example = f"{piece.place(part.role, 0)}: {found}"
            piece.set_aside.add(part.role, "no_schema", example, len(part.payloads))
            return ()
        stream = self._streams[part.role][0]
        records = add_frames(part.payloads, schema_id)
        events = self._read(stream, found, records, piece, np.arange(len(records)))
        self.events += len(events.events)
        values = take(records, events.events)
        if stream.format == "json":
            payloads = take(part.payloads, events.events)
            values = BytesColumn.of(json_events(payloads, part.schema, self.schemas.of(part.role)))
        return self._by_partition(stream, events, values)

    @staticmethod
    def _read(
        stream: Stream, extractor: EventExtractor, records: BytesColumn, piece: Piece, index: I64
    ) -> EventColumns:
        """Extract events of framed records and set unreadable ones aside. `index`: (N,) int64, numbers in the
        piece."""
        events = extractor.extract(records, framed=True)
        for bad, why in zip(events.bad.tolist(), events.why, strict=True):
            example = f"{piece.place(stream.role, int(index[bad]))}: {why}"
            if piece.set_aside is None:
                raise BadInput(example)
            piece.set_aside.add(stream.role, "unreadable", example)
        return events

    def _by_partition(self, stream: Stream, events: EventColumns, values: BytesColumn) -> Sequence[Append]:
        """Group (E,) values of E events by the partition of their keys, an append for each."""
        partitions = partition_of(events.request_keys, self.pipeline.spec.partitions)
        appends = []
        for p in np.unique(partitions).tolist():
            mine = np.flatnonzero(partitions == p)
            appends.append(Append(stream.topic, p, take(values, mine), take(events.request_keys, mine)))
        return appends


def send(
    spec: Spec,
    pieces: Iterable[Piece],
    gateway: str,
    speed: float | None,
    progress: Callable[[str, int], None],
    token: str = "",  # nosec B107  # none
) -> int:
    """Send all events to a running gateway; return the number that it acknowledged.

    Raises:
        EventsRefused: an event does not fit; the error has its place in the file.
        BadInput, Unavailable: as the client. These errors, too, say how many events were acknowledged before.
    """
    import orjson

    from freshet.client import Client, EventsRefused  # httpx is only needed here
    from freshet.http import tls

    sent, schemas = 0, load_schemas(spec)
    with Client(gateway=gateway, token=token, **tls.client_files()) as client:
        send = {"served": client.impressions, "shown": client.shown, "action": client.actions}
        for piece in paced(pieces, speed):
            texts = {role: lines.split(b"\n") for role, lines in piece.lines.items()}
            for part in piece.records:
                texts.setdefault(part.role, [])
                texts[part.role] += json_events(part.payloads, part.schema, schemas.of(part.role))
            for role in (r for r in send if r in texts):
                events: list[Any] = [orjson.Fragment(line) for line in texts[role] if line.strip()]
                for start in range(0, len(events), SEND_EVENTS):
                    try:
                        sent += len(send[role](events[start : start + SEND_EVENTS]).acks)
                    except FreshetError as error:
                        said = str(error)
                        if isinstance(error, EventsRefused):
                            sent += len(error.receipt.acks)
                            place = piece.place(role, start + error.receipt.refused[0]["index"])
                            said = f"{place}: {said.partition(': ')[2]}"
                        error.args = (f"{said}\n  until then the gateway acknowledged {sent:,} events",)
                        raise
            progress("events", sent)
    return sent


SEND_EVENTS = 500
"""Events of a request: far below the gateway's limit, and enough to make the cost of a request negligible."""


def streams_of(spec: Spec) -> list[Any]:
    """Return the streams of a spec."""
    events = spec.events
    return [s for s in (events.served, events.shown, events.action) if s is not None]
