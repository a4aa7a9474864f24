"""A few of the newest served events, decoded: texts of segment values, and requests to try again.

The measures know a segment's value by its key only. The keys of texts that were seen in served events are
computed here as `features.hashing` does, so that the page can say "DE" for 0x9e….
"""

from __future__ import annotations

import io
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import fastavro
import orjson

from freshet.console.following import newest
from freshet.errors import ConfigError, Corrupt
from freshet.features import key_of
from freshet.seams.eventlog import EventLog
from freshet.spec.avro import SERVED_FIELD, canonical
from freshet.spec.model import Feature, Spec
from freshet.types import TopicPartition
from freshet.wire.schemas import FRAME_BYTES, SchemaRegistry, framed_id

__all__ = ["ServedSample", "grouped", "leaves", "request_of", "texts_of_buckets", "texts_of_times"]

READ_RECORDS = 5
"""Of one partition at a look: decoding is Python's, a look must stay cheap whatever passes."""

KEPT_REQUESTS = 12
LARGEST_EVENT = 256 << 10
"""Bytes of an event that is decoded; a larger one is left out."""

MOST_TEXTS = 2_000
"""Values of one segment that are known by text; the measures tell 100 apart."""

MOST_SEEN = 10_000
LONGEST_TEXT = 60
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class ServedSample:
    """What is known of served events by looking at some. Used by one thread, but `requests` by any."""

    def __init__(self, spec: Spec, log: EventLog, topic: str) -> None:
        self._spec, self._log, self._topic = spec, log, topic
        self._schemas: dict[int, Any] = {}
        self._registry = SchemaRegistry(log)
        self._ends: dict[int, int] = {}
        self._turn = 0
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT_REQUESTS)  # explode: requests; else events
        if spec.events.served.explode is None:
            self._kept = deque(maxlen=KEPT_REQUESTS * 20)
        segments = [spec.feature(name) for name in spec.train.segments]
        self._fields = [f for f in segments if f.kind == "id" and f.field is not None]
        self._texts: dict[str, OrderedDict[int, str]] = {f.name: OrderedDict() for f in segments}
        self._seen: dict[str, set[Any]] = {f.name: set() for f in segments}
        for feature in segments:
            self._texts[feature.name].update(_fixed_texts(feature))

    @property
    def requests(self) -> Sequence[Mapping[str, Any]]:
        """Recent requests as they could be asked again, newest first."""
        served, kept = self._spec.events.served, list(self._kept)[::-1]
        return kept if served.explode is not None else grouped(kept, served.key[0])[:KEPT_REQUESTS]

    def text(self, segment: str, value: int) -> str | None:
        """What stands for a segment's value; None if it was not seen in the events looked at."""
        if value == 0:
            return "(other, or none)"
        texts = self._texts.get(segment)
        return texts.get(value) if texts is not None else None

    def look(self) -> None:
        """Look at the newest events of one partition, the next one in turn that has some."""
        for _ in range(self._spec.partitions):
            self._turn = (self._turn + 1) % self._spec.partitions
            at = TopicPartition(self._topic, self._turn)
            bounds = self._log.bounds(at)
            fresh = bounds.end - max(bounds.start, self._ends.get(self._turn, 0))
            self._ends[self._turn] = bounds.end
            if fresh > 0:
                for _, value in newest(self._log, at, min(fresh, READ_RECORDS)):
                    self._take(value)
                return

    def _take(self, value: bytes) -> None:
        event = self._decoded(value)
        if event is None:
            return
        for feature in self._fields:
            self._note(feature, leaves(event, (feature.field or "").split(".")))
        served = self._spec.events.served
        request = event if served.explode is None else request_of(event, served.explode, served.key[0])
        if request is not None:
            self._kept.append(request)

    def _note(self, feature: Feature, values: Iterator[Any]) -> None:
        seen, texts = self._seen[feature.name], self._texts[feature.name]
        if len(seen) >= MOST_SEEN:
            seen.clear()
        for value in values:
            if value in seen or not isinstance(value, (str, bytes, int, float, bool)):
                continue
            seen.add(value)
            text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            texts[key_of(value, 0)] = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
            if len(texts) > MOST_TEXTS:
                texts.popitem(last=False)

    def _decoded(self, value: bytes) -> dict[str, Any] | None:
        """The event as fields; None for what cannot be read, which is the joiner's to report."""
        if len(value) > LARGEST_EVENT:
            return None
        try:
            if self._spec.events.served.format == "json":
                event = orjson.loads(value)
            else:
                event = fastavro.schemaless_reader(
                    io.BytesIO(value[FRAME_BYTES:]), self._schema(framed_id(value)), None
                )
        except (Corrupt, ConfigError, KeyError, ValueError, EOFError, IndexError, TypeError, StopIteration):
            return None
        return event if isinstance(event, dict) else None

    def _schema(self, schema_id: int) -> Any:
        if schema_id not in self._schemas:
            text = canonical(
                self._registry.get(schema_id)
            )  # without logical types: values as they are written
            self._schemas[schema_id] = fastavro.parse_schema(orjson.loads(text))
        return self._schemas[schema_id]


def leaves(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """Values at a path, through every element of the arrays on the way."""
    if isinstance(value, list):
        for element in value:
            yield from leaves(element, path)
    elif not path:
        yield value
    elif isinstance(value, Mapping) and path[0] in value:
        yield from leaves(value[path[0]], path[1:])


def request_of(event: Mapping[str, Any], explode: str, key: str) -> dict[str, Any] | None:
    """A served event as a rank request: {request_id, context, candidates}, without what serving added."""
    context = _copied(plain(event))
    *parents, array = explode.split(".")
    holder: Any = context
    for part in parents:
        holder = holder.get(part) if isinstance(holder, dict) else None
    candidates = holder.pop(array, None) if isinstance(holder, dict) else None
    if not isinstance(candidates, list) or not candidates:
        return None
    stripped = [{k: v for k, v in c.items() if k != SERVED_FIELD} for c in candidates if isinstance(c, dict)]
    return {
        "request_id": next(leaves(event, key.split(".")), None),
        "context": context,
        "candidates": stripped,
    }


def grouped(events: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Served events of one item each as rank requests: what all events of a request share is its context."""
    by_request: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        stripped = {name: value for name, value in plain(event).items() if name != SERVED_FIELD}
        by_request.setdefault(str(next(leaves(event, key.split(".")), None)), []).append(stripped)
    found = []
    for request_id, items in by_request.items():
        first = items[0]
        shared = {n: v for n, v in first.items() if len(items) > 1 and all(i.get(n) == v for i in items)}
        candidates = [{n: v for n, v in item.items() if n not in shared} for item in items]
        found.append({"request_id": request_id, "context": shared, "candidates": candidates})
    return found


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes become text, one character a byte, as Avro's JSON writes them."""
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in tree.items()}


def _fixed_texts(feature: Feature) -> Mapping[int, str]:
    """Texts of features whose values need no event to be known."""
    if feature.kind == "time":
        return texts_of_times(feature.time or "")
    return texts_of_buckets(feature.buckets) if feature.kind == "bucket" else {}


def texts_of_times(part: str) -> dict[int, str]:
    """{key: text} of every value of a part of the time (UTC; weeks begin on Monday)."""
    hours = {key_of(h, 0): f"{h:02d}:00" for h in range(24)}
    if part == "hour":
        return hours
    if part == "weekday":
        return {key_of(d, 0): day for d, day in enumerate(WEEKDAYS)}
    return {
        key_of(24 * d + h, 0): f"{day[:3]} {h:02d}:00" for d, day in enumerate(WEEKDAYS) for h in range(24)
    }


def texts_of_buckets(edges: Sequence[float]) -> dict[int, str]:
    """{key: text} of the ranges that edges cut numbers into."""
    texts = [f"below {edges[0]:g}"] if edges else []
    texts += [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    texts += [f"{edges[-1]:g} and more"] if edges else []
    return {key_of(i, 0): text for i, text in enumerate(texts)}
