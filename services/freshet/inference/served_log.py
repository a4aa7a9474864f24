"""The served log: impressions with their scores and predictions, for training.

A thread appends the impressions of many requests together, from a bounded queue. If the queue is full, an
impression is dropped and counted, and the request is answered anyway. A partition that cannot be written is
tried again; its impressions wait in the queue, in order, and those of other partitions are appended
meanwhile. `log_limits` refuses requests that do not fit the schema before they are scored. Letters: C
candidates, L labels.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import structlog
from prometheus_client import CollectorRegistry

from freshet import _native
from freshet.config.avro.schema import (
    SERVED_FIELD,
    Array,
    AvroField,
    Primitive,
    Record,
    Type,
    Union,
    served_schema,
)
from freshet.config.spec.inputs import unit_hint, written_in_larger_unit
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import RecordLimits
from freshet.errors import BadInput, TooLarge, Unavailable, first_line
from freshet.features import EventColumns, EventExtractor, JsonTranscoder, Transcoded, partition_of
from freshet.inference import metrics
from freshet.inference.pipeline import finite
from freshet.inference.requests import Order, get_path, merged
from freshet.json_text import written
from freshet.log import GroupOutcome, GroupWriter
from freshet.log.schema_ids import FRAME_BYTES
from freshet.observability.losses import INFERENCE_FIGURES, RECENT_S, Recent, counted
from freshet.observability.spans import RankAnswer, record_served_sends, request_text
from freshet.observability.tracing import now_ns, traced
from freshet.types import F32, U64, Append, BytesColumn

if TYPE_CHECKING:
    from freshet.observability.tracer import Tracer

log = structlog.get_logger(__name__)

APPEND_EVENTS = 5_000
RETRY_S = 0.2
NOT_ACKNOWLEDGED = "the server stopped before the log had acknowledged them"

TURN_S = 0.02
"""Longest wait for the log, or for more events, while events wait for the log."""

WHYS = ("queue", "stopped", "error", "log", "schema", "too_large")
"""Reasons why events are not logged."""

GATHER_S = 0.05
"""Seconds for which the first event waits for others: an append of many costs little more than of one."""


@dataclass(frozen=True, slots=True)
class Served:
    """Events of an answered request: one, or one per item if the spec explodes no array."""

    keys: Sequence[bytes]  # request id as text, per event
    texts: Sequence[bytes]  # JSON, per event
    answer: RankAnswer | None = None  # for tracing; None while it is off

    @property
    def size(self) -> int:
        """Bytes that count against the queue's limit."""
        return sum(map(len, self.texts)) + sum(map(len, self.keys))

    @classmethod
    def of(cls, spec: Spec, events: Sequence[Mapping[str, Any]]) -> Served:
        """Encode events of `served_events`."""
        path = spec.events.served.key[0]
        keys = [str(get_path(event, path)).encode() for event in events]
        return cls(keys, [orjson.dumps(event) for event in events])


def places_of(spec: Spec) -> list[str]:
    """Return paths, within an item, of fields that hold its position unless the client sent them."""
    explode = spec.events.served.explode
    prefix = f"{explode}." if explode else ""
    return [
        f.field[len(prefix) :]
        for f in spec.features
        if isinstance(f.serve_as, int) and f.field is not None and f.field.startswith(prefix)
    ]


def placed(candidate: Mapping[str, Any], place: int, places: Sequence[str]) -> dict[str, Any]:
    """Copy a candidate; set its position, from 0, in each field of `places` that it lacks."""
    item = dict(candidate)
    for path in places:
        if "." in path:
            item = merged(_at(path, place), item)
        else:
            item.setdefault(path, place)
    return item


def served_events(
    spec: Spec,
    context: Mapping[str, Any],
    candidates: Sequence[Mapping[str, Any]],
    order: Order,
    scores: F32,
    predictions: F32,
    version: int,
) -> list[dict[str, Any]]:
    """Make the events of a request: the items in order, each with `freshet_served`.

    It is null for an item with a score or a prediction that is not finite: the schema takes none. A field
    with an integer `serve_as` that the client did not send gets the item's position, from 0.

    Args:
        scores: (C,) float32.
        predictions: (C, L) float32.
    """
    explode = spec.events.served.explode
    places = places_of(spec)
    items: list[dict[str, Any]] = []
    indices = order.indices
    logged = finite(scores, predictions)[indices]
    columns = (indices, scores[indices], predictions[indices], order.propensity, logged)
    for place, (c, score, predicted, propensity, is_logged) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        item = placed(candidates[c], place, places)
        item[SERVED_FIELD] = None
        if is_logged:
            item[SERVED_FIELD] = {
                "version": version,
                "score": score,
                "predictions": predicted,
                "propensity": propensity,
                "explored": order.explored,
            }
        items.append(item)
    if explode is None:
        return [merged(context, item) | {SERVED_FIELD: item[SERVED_FIELD]} for item in items]
    return [merged(context, _at(explode, items))]


def _at(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


class _Account:
    """Events and bytes in the queue, within bounds.

    One thread enters and one leaves; each has its own counters, so that no lock is needed.
    """

    def __init__(self, most_events: int, most_bytes: int) -> None:
        self._most_events, self._most_bytes = most_events, most_bytes
        self._entered = self._entered_bytes = 0  # since the start
        self._left = self._left_bytes = 0

    @property
    def events(self) -> int:
        return self._entered - self._left

    @property
    def bytes(self) -> int:
        return self._entered_bytes - self._left_bytes

    def enter(self, events: int, size: int) -> bool:
        """Add events and bytes; False, without a change, if a bound is exceeded. An empty queue has none."""
        waiting = self.events
        if waiting and (waiting + events > self._most_events or self.bytes + size > self._most_bytes):
            return False
        self._entered += events
        self._entered_bytes += size
        return True

    def leave(self, events: int, size: int) -> None:
        self._left += events
        self._left_bytes += size


@traced
def request_hashes(_tracer: Tracer, extractor: EventExtractor, records: BytesColumn) -> U64:
    """Return (N,) the hash of each framed record's request id, as samples will have it; 0 for none."""
    columns = extractor.extract(records, framed=True)
    found = np.zeros(len(records), np.uint64)
    found[columns.event_index] = columns.request
    return found


class _Event(NamedTuple):
    """An event that waits for the log."""

    key: bytes
    value: bytes
    size: int  # bytes that it has in the account
    request: int  # hash of its request id, for tracing; 0 while it is off
    answer: RankAnswer | None
    start_ns: int


@dataclass(slots=True, eq=False)
class _Backlog:
    """Events of one partition, in order; the first `sent` are with the writer, as one group."""

    partition: int
    events: list[_Event] = field(default_factory=list)
    sent: int = 0
    most: int = APPEND_EVENTS  # that are sent next
    retry_s: float = 0.0  # monotonic time before which nothing is sent
    groups: int = 0  # that were sent: the number of the last
    error: str = NOT_ACKNOWLEDGED  # why they are not appended

    def take(self, events: int) -> list[_Event]:
        """Remove the first events and return them; none is with the writer any more."""
        taken, self.events = self.events[:events], self.events[events:]
        self.sent, self.most = 0, APPEND_EVENTS
        return taken


class ServedLogger:
    """A queue of served requests and the thread that appends them."""

    def __init__(
        self,
        spec: Spec,
        writer: GroupWriter,
        transcoder: JsonTranscoder,
        registry: CollectorRegistry,
        *,
        queue_events: int,
        queue_bytes: int,
        extractor: EventExtractor | None = None,
    ) -> None:
        """Register the metrics.

        Args:
            transcoder: into framed records of the served schema with `freshet_served`.
            extractor: of these records; None while tracing is off.
        """
        self._extractor = extractor
        self._stream, self._partitions = spec.events.served, spec.partitions
        self._writer, self._transcoder = writer, transcoder
        self._queue: queue.SimpleQueue[Served] = queue.SimpleQueue()
        self._backlogs = [_Backlog(partition) for partition in range(spec.partitions)]
        self._account = _Account(queue_events, queue_bytes)
        self._logged = metrics.SERVED_LOGGED.counter(registry)
        self._dropped = metrics.SERVED_DROPPED.counter(registry)
        for why in WHYS:  # Prometheus sees no increase if a series begins with its first event
            self._dropped.labels(why)
        metrics.SERVED_QUEUE.gauge(registry, lambda: self._account.events)
        metrics.SERVED_QUEUE_BYTES.gauge(registry, lambda: self._account.bytes)
        self._counts = {"logged": 0, "unlogged": 0}
        self._recent = Recent()
        self.reason = ""  # why the last event was not logged

    def losses(self, now_s: float) -> dict[str, Any]:
        """Return the share of served events that were not logged, recently and since the start.

        Called by one thread; `now_s` is monotonic.
        """
        counts = dict(self._counts)
        return {
            "recent_s": int(RECENT_S),
            "recent": counted(INFERENCE_FIGURES, self._recent.take(counts, now_s)),
            "begun": counted(INFERENCE_FIGURES, counts),
        }

    def enqueue(self, served: Served) -> bool:
        """Queue a request's events; False, and counted, if the queue is full. Called by one thread."""
        if not self._account.enter(len(served.texts), served.size):
            self._drop(
                "queue", len(served.texts), "too many served events wait for the log, or too large ones"
            )
            return False
        self._queue.put(served)
        return True

    def run(self, stop: threading.Event, rest_s: Callable[[], float]) -> None:
        """Append until `stop` is set, then the queued events, for at most `rest_s()` more seconds."""
        deadline: float | None = None

        def late() -> bool:
            nonlocal deadline
            if stop.is_set() and deadline is None:
                deadline = time.monotonic() + rest_s()
            return deadline is not None and time.monotonic() > deadline

        while not stop.is_set():
            self._run_turn(0.1, gather=lambda: stop.wait(GATHER_S))
        while not late() and (not self._queue.empty() or self._backlogged):
            self._run_turn(0.0, gather=lambda: None)
        for backlog in self._backlogged:
            self._lose(backlog.take(len(backlog.events)), "log", backlog.error)
        if self._account.events:
            self._drop("stopped", self._account.events, "the server stopped before they were appended")

    @property
    def _backlogged(self) -> list[_Backlog]:
        return [backlog for backlog in self._backlogs if backlog.events]

    def _run_turn(self, wait_s: float, gather: Callable[[], object]) -> None:
        """Take events in, append those of partitions that wait for nothing, and process answers."""
        taken = self._next_batch(TURN_S if self._backlogged else wait_s, gather)
        try:
            if taken:
                self._take_in(taken)
        except Exception as error:  # a bug must not end the thread
            for served in taken:
                self._account.leave(len(served.texts), served.size)
            self._drop_by_bug(error, [key for served in taken for key in served.keys])
        now = time.monotonic()
        due = [b for b in self._backlogged if not b.sent and now >= b.retry_s]
        for backlog in due:
            backlog.groups += 1
        numbered = [(backlog, backlog.groups) for backlog in due]
        try:
            if due:
                self._writer.append([[self._next_append(b)] for b in due], partial(self._answer, numbered))
            if any(backlog.sent for backlog in self._backlogs):
                self._writer.wait(TURN_S)
        except Exception as error:
            for i in range(len(due)):
                self._answer(numbered, i, error)

    def _next_batch(self, wait_s: float, gather: Callable[[], object]) -> list[Served]:
        taken: list[Served] = []
        events = 0
        try:
            taken.append(self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait())
            gather()
            while events < APPEND_EVENTS:
                events += len(taken[-1].texts)
                taken.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return taken

    def _take_in(self, taken: Sequence[Served]) -> None:
        """Transcode events and add them to the backlogs of their partitions; drop those that do not fit."""
        keys = [key for served in taken for key in served.keys]
        texts = [text for served in taken for text in served.texts]
        made = self._transcode(texts)
        good = made.events.tolist()
        values = texts if self._stream.format == "json" else dict(zip(good, made.records, strict=True))
        answers = [served.answer for served in taken for _ in served.texts]
        requests = None if self._extractor is None else request_hashes(self._extractor, made.records)
        start_ns, hashes = (0, [0] * len(good)) if requests is None else (now_ns(), requests.tolist())
        partitions = partition_of(BytesColumn.of(keys[i] for i in good), self._partitions).tolist()
        for i, partition, request in zip(good, partitions, hashes, strict=True):
            size = len(texts[i]) + len(keys[i])
            event = _Event(keys[i], values[i], size, request, answers[i], start_ns)
            self._backlogs[partition].events.append(event)
        for i in {*range(len(texts))} - {*good}:
            self._account.leave(1, len(texts[i]) + len(keys[i]))

    def _next_append(self, backlog: _Backlog) -> Append:
        backlog.sent = min(len(backlog.events), backlog.most)
        events = backlog.events[: backlog.sent]
        values, keys = BytesColumn.of(e.value for e in events), BytesColumn.of(e.key for e in events)
        return Append(self._stream.topic, backlog.partition, values, keys)

    def _answer(self, groups: Sequence[tuple[_Backlog, int]], index: int, outcome: GroupOutcome) -> None:
        """Remove events that were appended or never can be; keep the others for another attempt."""
        backlog, number = groups[index]
        sent = backlog.sent
        if not sent or number != backlog.groups:  # given up
            return
        if not isinstance(outcome, Exception):
            self._logged.inc(sent)
            self._counts["logged"] += sent
            self._leave(backlog.take(sent), "")
            backlog.error = NOT_ACKNOWLEDGED
        elif isinstance(outcome, Unavailable):  # tried again: the joiner drops duplicates
            backlog.sent, backlog.retry_s, backlog.error = 0, time.monotonic() + RETRY_S, str(outcome)
        elif not isinstance(outcome, TooLarge):
            events = backlog.take(sent)
            self._drop_by_bug(outcome, [event.key for event in events])
            self._leave(events, str(outcome))
        elif sent > 1:  # until the event that is too large is alone
            backlog.sent, backlog.most = 0, sent // 2
        else:
            self._lose(backlog.take(1), "too_large", str(outcome))

    def _lose(self, events: Sequence[_Event], why: str, reason: str) -> None:
        self._drop(why, len(events), reason)
        self._leave(events, reason)

    def _leave(self, events: Sequence[_Event], error: str) -> None:
        """Release the reservations of events, and record their spans; `error`: why they were not appended."""
        self._account.leave(len(events), sum(event.size for event in events))
        if self._extractor is not None and events:
            record_served_sends(
                self._stream.topic,
                np.array([event.request for event in events], np.uint64),
                [event.key for event in events],
                [event.answer for event in events],
                events[0].start_ns,
                error,
            )

    def _drop_by_bug(self, error: Exception, keys: Iterable[bytes]) -> None:
        ids = [request_text(key)[:100] for key in keys]
        log.error("served events are lost", request_ids=list(dict.fromkeys(ids))[:10], exc_info=error)
        self._drop("error", len(ids), first_line(error))

    def _transcode(self, texts: list[bytes]) -> Transcoded:
        made = self._transcoder.column(BytesColumn.of(texts))
        if made.bad:
            self._drop("schema", len(made.bad), str(made.bad[0]))
        return made

    def _drop(self, why: str, count: int, reason: str) -> None:
        if reason != self.reason:
            log.warning("served events are not logged", why=why, reason=reason)
        self._dropped.labels(why).inc(count)
        self._counts["unlogged"] += count
        self.reason = reason


NativeRules = tuple[_native.WriterSchema | None, _native.EventPlan | None, _native.Program | None, int]
"""Writer schema, event plan, program and latest time in ms, as `RankText.read` takes them."""

_HINT = "a ranking is logged as an impression, and the log's schema needs this; a dry_run logs nothing"

_SERVED_BYTES, _PLACE_BYTES = 48, 10
"""Most bytes of `freshet_served` in Avro, without predictions, and by which a position can grow once set."""

_LONGEST = -2.2250738585072014e-308
"""A float with the longest text."""

_ADDED_BYTES = 100
"""Most bytes of an id and a time that a request lacks, as JSON, and of what separates its parts."""

_WHY = re.compile(r"record \d+: ")


class Loggable:
    """Checks rank requests of one spec against the schema of the served log. Thread-safe."""

    def __init__(self, spec: Spec, served: Record, limits: RecordLimits) -> None:
        """Compile the checks. Raises ConfigError if the schema lacks a field of the spec.

        Args:
            served: the user's schema of served events.
            limits: of records that are derived from events.
        """
        stream = spec.events.served
        self._spec, self._places = spec, places_of(spec)
        logged = served_schema(served, stream.explode)
        self._transcoder = JsonTranscoder(logged, ignore_unknown=True)
        self._extractor = EventExtractor(stream, logged)
        self._max_ahead_ms = spec.join.max_ahead_ms
        self._limits, self._labels = limits, len(spec.labels)
        self._json = stream.format == "json"
        places_bytes = _PLACE_BYTES * len(self._places)
        self._served_bytes = _SERVED_BYTES + 4 * self._labels + places_bytes
        self._text_bytes = len(_longest_text(self._labels)) + places_bytes
        names = [stream.explode or "", stream.key[0], stream.time.path]
        self._added_bytes = _ADDED_BYTES + sum(map(len, names))
        self._placing_bytes = sum(len(f',"{place}":0') for place in self._places)
        # RankText writes positions after scoring, so its check uses defaults for them.
        writer, _, _ = JsonTranscoder(
            _with_places(logged, stream.explode, self._places), ignore_unknown=True
        ).native
        self._native = (writer, *self._extractor.native)

    def is_small(self, body_bytes: int, logged_bytes: int, key: bytes, candidates: int) -> bool:
        """Return whether a request of the fast path is certainly within the limits of size.

        Args:
            logged_bytes: of its event as Avro, without a frame, `freshet_served` and positions.
        """
        limits, sample = self._limits, logged_bytes + self._served_bytes
        event = FRAME_BYTES + logged_bytes + self._served_bytes * candidates
        if self._json:
            of_items = (self._text_bytes + self._placing_bytes) * candidates
            event = body_bytes + self._added_bytes + of_items
        return (
            event + len(key) <= limits.event_bytes["served"]
            and sample <= limits.sample_bytes
            and sample * candidates * self._labels <= limits.expanded_bytes
        )

    def _refuse_too_large(self, served: Served, records: BytesColumn, columns: EventColumns) -> None:
        """Raises TooLarge if an event, with its key, or its samples would exceed the log's limits."""
        limits, spans = self._limits, columns.spans
        sizes = (spans[:, 1::2] - spans[:, ::2]).sum(axis=1) + self._served_bytes
        counts = np.bincount(columns.event_index, minlength=len(records))
        if self._json:
            events = np.array([*map(len, served.texts)]) + counts * self._text_bytes
        else:
            events = FRAME_BYTES + np.diff(records.ends, prepend=0) + counts * self._served_bytes
        events = events + np.array([*map(len, served.keys)])
        together = np.bincount(columns.event_index, sizes, len(records)) * self._labels
        for part, found, most in (
            ("the event that is logged, with its key", events, limits.event_bytes["served"]),
            ("a sample: the context and one candidate", sizes, limits.sample_bytes),
            ("samples, which have the context each, together", together, limits.expanded_bytes),
        ):
            if int(found.max(initial=0)) > most:
                raise TooLarge(
                    f"the request: expected at most {most:,} bytes of {part}, found {int(found.max()):,}\n"
                    "  send fewer candidates per request, or a smaller context"
                )

    def native(self, now_ms: int) -> NativeRules:
        """Return the rules by which the fast path makes the same check at `now_ms`."""
        return *self._native, now_ms + self._max_ahead_ms

    def placed(self, candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return candidates as they would be logged in the request's order, with positions."""
        kept = [{k: v for k, v in c.items() if k != SERVED_FIELD} for c in candidates]
        return [placed(c, place, self._places) for place, c in enumerate(kept)]

    def check(self, events: Sequence[Mapping[str, Any]], now_ms: int) -> None:
        """Check a request's events, which are made of `placed` candidates.

        Raises BadInput, with the field, if the log's schema or the joiner refuses an event, and TooLarge if
        an event or its samples exceed the log's limits.
        """
        if self._spec.events.served.explode is None:
            events = [{k: v for k, v in event.items() if k != SERVED_FIELD} for event in events]
        made = self._transcoder.body(written(events, "the request"))
        if made.bad:
            bad = made.bad[0]
            where = bad.path or "the request"
            if len(events) > 1:
                where = f"candidates[{bad.index}] with the context: {where}"
            raise BadInput(f"{where}: expected {bad.expected}, found {bad.found}; {_HINT}")
        columns = self._extractor.extract(made.records, framed=False)
        if len(columns.bad):
            raise BadInput(f"{_WHY.sub('', columns.why[0], count=1)}; {_HINT}")
        self._refuse_too_large(Served.of(self._spec, events), made.records, columns)
        if len(columns):
            self._refuse_wrong_time(int(columns.times_ms.min()), int(columns.times_ms.max()), now_ms)

    def _refuse_wrong_time(self, first_ms: int, last_ms: int, now_ms: int) -> None:
        time, latest_ms = self._spec.events.served.time, now_ms + self._max_ahead_ms
        larger = written_in_larger_unit(first_ms, time.unit, latest_ms)
        if first_ms >= 0 and last_ms <= latest_ms and not larger:
            return
        found_ms = first_ms if larger else last_ms
        raise BadInput(
            f"{time.path}: expected a time from 1970 to {self._max_ahead_ms} ms "
            f"(join.max_ahead) ahead of the server's clock, {now_ms} ms since 1970, found "
            f"{found_ms} ms; the joiner would refuse the impression"
            f"{unit_hint(time, 'served', found_ms, now_ms)}"
        )


def _longest_text(labels: int) -> bytes:
    """Return `freshet_served` as JSON, with the longest numbers."""
    numbers = {"score": _LONGEST, "predictions": [_LONGEST] * labels, "propensity": _LONGEST}
    return orjson.dumps({SERVED_FIELD: {"version": -(1 << 63), "explored": False} | numbers})


def _with_places(logged: Record, explode: str | None, places: Sequence[str]) -> Record:
    """Add a default to each field of an item that holds its position, if it has none."""
    names = {name for name in places if "." not in name}
    if explode is None or "." in explode or not names:
        return logged

    def item(record: Record) -> Record:
        fields = [
            AvroField(f.name, f.type, True, _zero(f.type)) if f.name in names and not f.has_default else f
            for f in record.fields
        ]
        return replace(record, fields=tuple(fields))

    def changed(type_: Type) -> Type:
        if isinstance(type_, Union):
            return Union(tuple(changed(branch) for branch in type_.branches))
        if isinstance(type_, Array) and isinstance(type_.items, Record):
            return Array(item(type_.items))
        return type_

    fields = [replace(f, type=changed(f.type)) if f.name == explode else f for f in logged.fields]
    return replace(logged, fields=tuple(fields))


def _zero(type_: Type) -> Any:
    """Return a default for a position's type, the first branch of which is a number or null."""
    first = type_.branches[0] if isinstance(type_, Union) else type_
    return None if first == Primitive("null") else 0
