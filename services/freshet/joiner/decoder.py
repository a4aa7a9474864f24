"""Interface of event decoders, and the checks that follow decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.avro.schema import Record, Written, sample_schema
from freshet.config.expression import Column
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec, Stream
from freshet.config.spec.schemas import fields_read
from freshet.config.spec.topics import RecordLimits
from freshet.errors import ConfigError
from freshet.features import (
    EventColumns,
    EventExtractor,
    frame_ids,
    rows_by_id,
    take,
    written_path,
)
from freshet.features.decoder import columns_of
from freshet.features.transcode import JsonTranscoder
from freshet.joiner.core import ActionColumns, ImpressionColumns, ShownColumns
from freshet.joiner.plan import JoinPlan
from freshet.types import F64, I64, U8, U32, Records

_log = structlog.get_logger("freshet.joiner")

BAD_IN_A_ROW = 100
"""Consecutive refused events of a stream from which on the joiner is not ready."""

LOG_AGAIN_S = 60.0
"""Time between two log lines about the same stream and reason."""


@dataclass(slots=True)
class RefusalStreaks:
    """Counts each stream's refused events since its last good one. Used by one thread."""

    monotonic: Callable[[], float]  # seconds
    _in_a_row: dict[str, int] = field(default_factory=dict)  # role -> events
    _last: dict[str, str] = field(default_factory=dict)  # role -> reason of the last refusal
    _logged_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (role, word) -> when

    def count_batch(self, role: str, topic: str, records: int, refused: Refused) -> None:
        """Count a batch of `records` records of a stream, of which `refused` were refused."""
        if not len(refused):
            if records and self._in_a_row.get(role):
                self._in_a_row[role] = 0
            return
        good = records > len(set(refused.rows))
        self._in_a_row[role] = 0 if good else self._in_a_row.get(role, 0) + len(refused)
        self._last[role] = refused.reasons[-1]
        now = self.monotonic()
        for word, events in refused.by_reason().items():
            if events and now - self._logged_s.get((role, word), float("-inf")) >= LOG_AGAIN_S:
                self._logged_s[role, word] = now
                _log.warning(
                    "events were refused", topic=topic, why=word, records=events, reason=refused.reasons[-1]
                )

    def trouble(self) -> str | None:
        """Return which stream has only refused events, and why; None if none has."""
        for role, events in self._in_a_row.items():
            if events >= BAD_IN_A_ROW:
                return f"the last {events} events of {role} were all refused: {self._last[role]}"
        return None


@dataclass(frozen=True, slots=True)
class Disputed:
    """A record dated ahead of the known time while another clock says that it is not.

    It is not joined before one of the clocks has proved wrong.
    """

    offset: int
    ahead_ms: int  # of the known time
    logged_ms: int  # the log's time of this record
    newest_ms: int  # the log's time of the last record that was read after it, or of this one


@dataclass(slots=True)
class Refused:
    """Records that cannot be decoded or joined, with the reasons; they go to dead letters."""

    rows: list[int] = field(default_factory=list)  # indices of the records read
    reasons: list[str] = field(default_factory=list)
    no_schema: int = 0  # refused for their schema
    bad_time: int = 0  # refused for their time
    too_large: int = 0  # refused for the size of their samples
    first_bad_time: str = ""  # offset and reason of the first record refused for its time
    disputed: Disputed | None = None  # the record on which clocks disagree; no record from it on is refused

    def by_reason(self) -> dict[str, int]:
        """Return {reason of REFUSALS: records}."""
        others = self.no_schema + self.bad_time + self.too_large
        return {
            "unreadable": len(self) - others,
            "no_schema": self.no_schema,
            "bad_time": self.bad_time,
            "too_large": self.too_large,
        }

    def add(self, rows: I64, reason: str) -> None:
        """Refuse rows for one reason. `rows`: (N,) int64."""
        self.rows.extend(rows.tolist())
        self.reasons.extend([reason] * len(rows))

    def before(self, row: int) -> Refused:
        """Return the refusals of earlier rows; the counts by reason are at most their number."""
        kept = [i for i, at in enumerate(self.rows) if at < row]
        n = len(kept)
        bad_time = min(self.bad_time, n)
        return Refused(
            [self.rows[i] for i in kept],
            [self.reasons[i] for i in kept],
            min(self.no_schema, n - bad_time),
            bad_time,
            min(self.too_large, n - bad_time),
            self.first_bad_time,
        )

    def __len__(self) -> int:
        return len(self.rows)


class EventDecoder(Protocol):
    """Decodes records of one stream to columns. Refuses records that it cannot decode, without error."""

    def served(self, records: Records) -> tuple[ImpressionColumns, Refused]:
        """Decode served events to impressions with the spans of their bytes."""

    def fitting(self, served: ImpressionColumns, records: Records, refused: Refused) -> ImpressionColumns:
        """Drop and refuse events with samples that no trainer of the spec can decode.

        Called for new events only: a replay joins the events that earlier releases joined (PROTOCOL 18).
        """

    def shown(self, records: Records) -> tuple[ShownColumns, Refused]:
        """Decode shown events. Called only if the spec has that stream."""

    def actions(self, records: Records) -> tuple[ActionColumns, Refused]:
        """Decode actions, with the labels that they match and their values for each aggregate."""


class SampleSizes:
    """Limits of the samples that an event may make."""

    def __init__(self, limits: RecordLimits, labels: int) -> None:
        """Apply the log's limits; `labels`: samples of an impression."""
        self._limits, self._labels = limits, labels
        self._safe_bytes = min(limits.sample_bytes, limits.safe_event_bytes(labels))

    def refuse_too_large(
        self, columns: ImpressionColumns, records: Records, refused: Refused
    ) -> ImpressionColumns:
        """Drop and refuse events with a sample beyond a record's limit, or with samples beyond an append's.

        The gateway refuses such events before it acknowledges them; topics of other writers may hold them.
        """
        if not len(columns):
            return columns
        longest = int((columns.ends - columns.begins).max())
        # The usual case. Each element has bytes, so more elements than bytes are damage.
        if longest <= self._safe_bytes and len(columns) <= len(columns.data):
            return columns
        limits = self._limits
        context = columns.prefix_ends - columns.begins + columns.ends - columns.suffix_begins  # (E,)
        sizes = context[columns.events] + columns.element_ends - columns.element_begins  # (N,)
        largest = np.zeros(len(context), np.int64)
        np.maximum.at(largest, columns.events, sizes)
        together = np.bincount(columns.events, sizes.astype(np.float64), len(context)) * self._labels
        too_large = largest > limits.sample_bytes
        bad = np.flatnonzero(too_large | (together > limits.expanded_bytes))
        for event in bad.tolist():
            refused.too_large += 1
            refused.rows.append(int(np.searchsorted(records.offsets, columns.offsets[event])))
            if too_large[event]:
                reason = (
                    f"a sample of it would have {int(largest[event]):,} bytes, more than the "
                    f"{limits.sample_bytes:,} that the log accepts"
                )
            else:
                reason = (
                    f"its samples would have {int(together[event]):,} bytes together, as its context is "
                    f"copied into each; at most {limits.expanded_bytes:,} are accepted"
                )
            refused.reasons.append(reason)
        return columns.where(~np.isin(columns.events, bad)) if len(bad) else columns


class Schemas(Protocol):
    """Source of schemas by id (`freshet.log.schema_ids.SchemaRegistry`)."""

    def get(self, schema_id: int, came_s: float | None = None) -> Written:
        """Return the schema, if it was registered before a record that names it came at `came_s` (monotonic).

        Raises:
            KeyError: no schema has that id.
            ConfigError: the schema cannot be used.
            Unavailable: the source cannot be read now.
        """

    def register(self, schema: Written) -> int:
        """Return the id of a schema, which is added if it is not registered yet."""


class ExternalSchemas(Protocol):
    """Source of schemas of external topics (`freshet.log.schema_registry.RestRegistry`)."""

    def get(self, schema_id: int) -> Written:
        """Return the schema. Raises as `Schemas.get`; the source decides when to retry a missing one."""


class SpecDecoder:
    """Decodes the three streams of a spec. Used by one thread.

    Refuses records that do not decode, and records of a schema that is unknown or lacks fields of the spec.
    Extractors are compiled once per schema id. Unavailable, if a schema cannot be read now, is raised before
    any state changes.
    """

    def __init__(
        self,
        spec: Spec,
        plan: JoinPlan,
        schemas: Schemas,
        frameless: Mapping[str, Record] | None = None,
        external_schemas: ExternalSchemas | None = None,
        clock: Clock = SYSTEM_CLOCK,
        readers: Mapping[str, Record] | None = None,
    ) -> None:
        """Compile the extractors of streams without frames.

        Args:
            spec: the model's.
            plan: of its join.
            schemas: schemas of Avro records, by the id in their frame; schemas of samples are added.
            frameless: role -> schema of each stream of JSON or bare Avro, that is, without frames.
            external_schemas: schemas of records in the format confluent, by the id in their frame.
            clock: the same as that of `schemas`.
            readers: role -> schema as which events of the stream are read, for any writer's schema
                (`spec.schemas.readers_of`). An absent stream has its writers' schemas only.

        Raises ConfigError if the schema of a stream without frames does not fit the spec.
        """
        self._spec, self._plan, self._schemas, self._external, self._clock = (
            spec,
            plan,
            schemas,
            external_schemas,
            clock,
        )
        self._readers = readers or {}
        self._aggregates = len(plan.aggregates)
        events = spec.events
        self._served, self._shown, self._action = events.served, events.shown, events.action
        self._extractors: dict[tuple[str, int], EventExtractor | str] = {}
        self._sample_schemas: dict[int, int] = {}
        self._layout = layout_of(spec)
        self._features = columns_of(spec, self._layout)
        self._unfit: dict[int, str] = {}  # id of a samples' schema -> why the trainer cannot decode it
        self._json: dict[str, JsonTranscoder] = {}
        self._frameless: dict[str, tuple[int, EventExtractor]] = {}
        for stream in (events.served, events.shown, events.action):
            if stream is not None and stream.format in ("json", "bare"):
                schema = (frameless or {})[stream.role]
                columns, checked = fields_read(spec, stream.role)
                extractor = EventExtractor(stream, schema, columns, checked=checked)
                self._frameless[stream.role] = (schemas.register(schema), extractor)
                if stream.format == "json":
                    self._json[stream.role] = JsonTranscoder(schema, ignore_unknown=True)

    def served(self, records: Records) -> tuple[ImpressionColumns, Refused]:
        """Decode served events to impressions with the spans of their bytes."""
        parts, refused = self._extract(self._served, records)
        impressions = [
            _impressions(part, records, self._sample_schema(part.schema_id))
            for part in parts
            if len(part.columns)
        ]
        return _merged(impressions), refused

    def fitting(self, served: ImpressionColumns, records: Records, refused: Refused) -> ImpressionColumns:
        """Drop and refuse events with samples that no trainer of the spec can decode."""
        if not self._unfit or not len(served):
            return served
        for sample_schema_id, why in self._unfit.items():
            unfit = served.schemas[served.events] == sample_schema_id
            rows = np.searchsorted(records.offsets, served.offsets[np.unique(served.events[unfit])])
            refused.add(rows, why)
            refused.no_schema += len(rows)
            served = served.where(~unfit)
        return served

    def shown(self, records: Records) -> tuple[ShownColumns, Refused]:
        """Decode shown events."""
        assert self._shown is not None, "the spec has no shown stream"
        parts, refused = self._extract(self._shown, records)
        rows = np.concatenate([part.rows for part in parts]) if parts else np.empty(0, np.int64)
        order = np.argsort(rows, kind="stable")
        times = _joined([part.columns.times_ms for part in parts], order, np.int64)
        keys = _joined([part.columns.impression for part in parts], order, np.uint64, 2)
        return ShownColumns(records.offsets[rows[order]], times, keys), refused

    def actions(self, records: Records) -> tuple[ActionColumns, Refused]:
        """Decode actions, with the labels that they make true."""
        parts, refused = self._extract(self._action, records)
        rows = np.concatenate([part.rows for part in parts]) if parts else np.empty(0, np.int64)
        order = np.argsort(rows, kind="stable")
        judged = [self._judge(part.columns) for part in parts]
        return (
            ActionColumns(
                offsets=records.offsets[rows[order]],
                times_ms=_joined([part.columns.times_ms for part in parts], order, np.int64),
                keys=_joined([part.columns.impression for part in parts], order, np.uint64, 2),
                ids=_joined([part.columns.event_id for part in parts], order, np.uint64, 2),
                masks=_joined([masks for masks, _ in judged], order, np.uint32),
                values=_joined([values for _, values in judged], order, np.float64, self._aggregates),
            ),
            refused,
        )

    def _sample_schema(self, schema_id: int) -> int:
        """Return the schema id of the samples that are spliced from events of this schema."""
        if schema_id not in self._sample_schemas:
            derived = self._derived(self._schema(self._served, schema_id))
            sample_schema_id = self._sample_schemas[schema_id] = self._schemas.register(derived)
            try:
                where = f"schema {schema_id} of the served events"
                self._features.program(self._spec, derived, self._sample_reader(), where, names=False)
            except ConfigError as error:
                self._unfit[sample_schema_id] = str(error)
        return self._sample_schemas[schema_id]

    def _sample_reader(self) -> Record | None:
        """Return the schema as which samples are read."""
        reader = self._readers.get("served")
        return None if reader is None else sample_schema(reader, self._served.explode)

    def _derived(self, written: Written) -> Written:
        """Return the schema of the samples that are spliced from events of this schema."""
        explode, reader = self._served.explode, self._readers.get("served")
        there = written_path(written, reader, explode) if reader is not None and explode else explode
        return sample_schema(written, there)

    def _schema(self, stream: Stream, schema_id: int, came_s: float | None = None) -> Written:
        """Return the schema by which a record of the stream, read at `came_s`, was written."""
        if stream.format != "confluent":
            return self._schemas.get(schema_id, came_s)
        assert self._external is not None, "given with a stream of this format"
        return self._external.get(schema_id)

    def _judge(self, events: EventColumns) -> tuple[U32, F64]:
        """Return (N,) uint32 masks of the labels that each action makes true, and (N, A) float64 values for
        the aggregates."""
        n = len(events)
        columns = {path: Column(c.values, c.null) for path, c in events.columns.items()}
        masks = np.zeros(n, np.uint32)
        values = np.full((n, self._aggregates), np.nan)
        at = 0
        for index, label in enumerate(self._plan.labels):
            masks |= label.condition.true(columns, n).astype(np.uint32) << np.uint32(index)
            for argument in label.value.argument_columns(columns, n) if label.value else ():
                values[:, at] = argument.filled(np.nan)
                at += 1
        return masks, values

    def _extract(self, stream: Stream, records: Records) -> tuple[list[_Part], Refused]:
        """Decode records to one part per schema, and refuse those that cannot be read."""
        match stream.format:
            case "json":
                return self._from_json(stream, records)
            case "bare":
                return self._from_bare(stream, records)
            case _:
                return self._from_avro(stream, records)

    def _from_bare(self, stream: Stream, records: Records) -> tuple[list[_Part], Refused]:
        schema_id, extractor = self._frameless[stream.role]
        columns = extractor.extract(records.values, framed=False)
        refused = Refused(columns.bad.tolist(), list(columns.why))
        return [_Part(schema_id, columns, columns.event_index, records.values.data)], refused

    def _from_json(self, stream: Stream, records: Records) -> tuple[list[_Part], Refused]:
        schema_id, extractor = self._frameless[stream.role]
        refused, transcoded = Refused(), self._json[stream.role].column(records.values)
        for bad in transcoded.bad:
            refused.rows.append(bad.index)
            refused.reasons.append(f"{bad.path or 'the event'}: expected {bad.expected}, found {bad.found}")
        columns = extractor.extract(transcoded.records, framed=False)
        for at, why in zip(columns.bad.tolist(), columns.why, strict=True):
            refused.rows.append(int(transcoded.events[at]))
            refused.reasons.append(why)
        rows = transcoded.events[columns.event_index]
        return [_Part(schema_id, columns, rows, transcoded.records.data)], refused

    def _from_avro(self, stream: Stream, records: Records) -> tuple[list[_Part], Refused]:
        refused, parts = Refused(), []
        ids = frame_ids(records.values)
        came_s = self._clock.monotonic()
        for schema_id, rows in rows_by_id(ids):
            extractor = self._extractor(stream, schema_id, came_s)
            if isinstance(extractor, str):
                refused.add(rows, extractor)
                refused.no_schema += len(rows) if schema_id >= 0 else 0
                continue
            values = records.values if len(rows) == len(ids) else take(records.values, rows)
            columns = extractor.extract(values, framed=True)
            for row, why in zip(rows[columns.bad].tolist(), columns.why, strict=True):
                refused.rows.append(row)
                refused.reasons.append(why)
            parts.append(_Part(schema_id, columns, rows[columns.event_index], values.data))
        return parts, refused

    def _extractor(self, stream: Stream, schema_id: int, came_s: float) -> EventExtractor | str:
        """Return the extractor of a schema, or why there is none; a schema may be registered later."""
        if schema_id < 0:
            return "expected Confluent-framed Avro (a zero byte, a 4-byte schema id), found something else"
        known = self._extractors.get((stream.role, schema_id))
        if known is not None:
            return known
        try:
            extractor: EventExtractor | str = self._compiled(stream, self._schema(stream, schema_id, came_s))
        except KeyError:
            place = (
                "the schema registry, or one that it refers to" if stream.external else "the topic of schemas"
            )
            return f"its schema id {schema_id} is not in {place}"
        except ConfigError as error:
            extractor = str(error)
        self._extractors[stream.role, schema_id] = extractor
        return extractor

    def _compiled(self, stream: Stream, written: Written) -> EventExtractor:
        """Compile an extractor. Raises ConfigError if the schema lacks fields that the spec reads."""
        reader = self._readers.get(stream.role)
        if stream.role == "served":
            self._derived(written)
        columns, checked = fields_read(self._spec, stream.role)
        return EventExtractor(stream, written, columns, reader=reader, checked=checked)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Events of one schema among the records."""

    schema_id: int
    columns: EventColumns
    rows: I64  # (M,) index of each event's record
    data: U8  # the bytes in which spans count


def _impressions(part: _Part, records: Records, sample_schema_id: int) -> tuple[I64, ImpressionColumns]:
    """Return the (N,) index of each impression's record, and the impressions of one schema."""
    columns, spans = part.columns, part.columns.spans
    rows, first, events = np.unique(part.rows, return_index=True, return_inverse=True)
    return part.rows, ImpressionColumns(
        data=part.data,
        offsets=records.offsets[rows],
        requests=columns.request[first],
        schemas=np.full(len(rows), sample_schema_id, np.uint32),
        begins=spans[first, 0],
        prefix_ends=spans[first, 1],
        suffix_begins=spans[first, 4],
        ends=spans[first, 5],
        events=events.astype(np.uint32),
        times_ms=columns.times_ms,
        keys=columns.impression,
        element_begins=spans[:, 2],
        element_ends=spans[:, 3],
    )


EMPTY = ImpressionColumns(
    data=np.empty(0, np.uint8),
    requests=np.empty(0, np.uint64),
    schemas=np.empty(0, np.uint32),
    events=np.empty(0, np.uint32),
    keys=np.empty((0, 2), np.uint64),
    **{name: np.empty(0, np.int64) for name in ("offsets", "begins", "prefix_ends", "suffix_begins", "ends")},
    **{name: np.empty(0, np.int64) for name in ("times_ms", "element_begins", "element_ends")},
)


def _merged(parts: Sequence[tuple[I64, ImpressionColumns]]) -> ImpressionColumns:
    """Merge impressions of several schemas in the order of their records."""
    if len(parts) == 1:
        return parts[0][1]
    if not parts:
        return EMPTY
    shifts = np.cumsum([0, *(len(part.data) for _, part in parts[:-1])])
    numbers = np.cumsum([0, *(len(part.offsets) for _, part in parts[:-1])])
    columns_of_parts = [part for _, part in parts]

    def of(name: str, shift: I64 | None = None) -> Any:
        columns = [getattr(part, name) for part in columns_of_parts]
        if shift is not None:
            columns = [column + by for column, by in zip(columns, shift, strict=True)]
        return np.concatenate(columns)

    by_event = np.argsort(of("offsets"), kind="stable")
    place = np.empty(len(by_event), np.int64)
    place[by_event] = np.arange(len(by_event))
    by_element = np.argsort(np.concatenate([rows for rows, _ in parts]), kind="stable")
    columns = {
        **{name: of(name)[by_event] for name in ("offsets", "requests", "schemas")},
        **{name: of(name, shifts)[by_event] for name in ("begins", "prefix_ends", "suffix_begins", "ends")},
        **{name: of(name)[by_element] for name in ("times_ms", "keys")},
        **{name: of(name, shifts)[by_element] for name in ("element_begins", "element_ends")},
    }
    return ImpressionColumns(
        data=of("data"), events=place[of("events", numbers)][by_element].astype(np.uint32), **columns
    )


def _joined(parts: Sequence[NDArray[Any]], order: I64, kind: type, width: int = 0) -> Any:
    """Merge columns of several schemas in the order of their records. `order`: (N,) int64."""
    if not parts:
        return np.empty((0, width) if width else 0, kind)
    return np.ascontiguousarray((parts[0] if len(parts) == 1 else np.concatenate(parts))[order])
