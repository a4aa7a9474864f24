"""A few of the newest served events, decoded: texts of segment values, and requests to try again.

The measures know a segment's value by its key only. The keys of texts that were seen in served events are
computed here as `features.hashing` does, so that the page can say "DE" for 0x9e….
"""

from __future__ import annotations

import io
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fastavro
import orjson
import structlog
from fastavro.read import SchemaResolutionError
from fastavro.schema import SchemaParseException

from freshet.config.avro.schema import SERVED_FIELD, Record, canonical, to_json, without_defaults
from freshet.config.spec.model import Feature, Spec, Stream
from freshet.console.segments import fixed_texts
from freshet.errors import Corrupt, Unavailable
from freshet.features import key_of
from freshet.log import EventLog
from freshet.log.schema_ids import FRAME_BYTES, SchemaRegistry, framed_id
from freshet.log.tail import newest
from freshet.types import TopicPartition

__all__ = ["ServedSample", "grouped", "leaves", "plain", "request_of", "without_logical_types"]

# --- Served events as people see them: values at paths, and events as rank requests again. Pure.


def without_logical_types(schema: Any) -> Any:
    """The schema with values as they are written: a time stays the number that rank requests take."""
    if isinstance(schema, dict):
        return {key: without_logical_types(v) for key, v in schema.items() if key != "logicalType"}
    return [without_logical_types(each) for each in schema] if isinstance(schema, list) else schema


def leaves(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """Values at a path, through every element of the arrays on the way."""
    if isinstance(value, list):
        for element in value:
            yield from leaves(element, path)
    elif not path:
        yield value
    elif isinstance(value, Mapping) and path[0] in value:
        yield from leaves(value[path[0]], path[1:])


def request_of(event: Mapping[str, Any], stream: Stream) -> dict[str, Any] | None:
    """A served event as a rank request, {request_id, context, candidates}; None if it served nothing.

    Without what serving adds, and without the id and the time of then, which are filled in anew.
    """
    context = _copied(plain(event))
    *parents, array = (stream.explode or "").split(".")
    holder: Any = context
    for part in parents:
        holder = holder.get(part) if isinstance(holder, dict) else None
    candidates = holder.pop(array, None) if isinstance(holder, dict) else None
    if not isinstance(candidates, list) or not candidates:
        return None
    request_id = _without(context, stream.key[0])
    _without(context, stream.time.path)
    stripped = [{k: v for k, v in c.items() if k != SERVED_FIELD} for c in candidates if isinstance(c, dict)]
    return {"request_id": request_id, "context": context, "candidates": stripped}


def grouped(events: Sequence[Mapping[str, Any]], stream: Stream) -> list[dict[str, Any]]:
    """Served events of one item each as rank requests: what all events of a request share is its context."""
    by_request: dict[str, tuple[Any, list[dict[str, Any]]]] = {}
    for event in events:
        item = _copied(plain(event))
        item.pop(SERVED_FIELD, None)
        request_id = _without(item, stream.key[0])
        _without(item, stream.time.path)
        by_request.setdefault(str(request_id), (request_id, []))[1].append(item)
    found = []
    for request_id, items in by_request.values():
        alike = {n: v for n, v in items[0].items() if all(n in i and i[n] == v for i in items)}
        shared = alike if len(items) > 1 else {}
        candidates = [{n: v for n, v in item.items() if n not in shared} for item in items]
        found.append({"request_id": request_id, "context": shared, "candidates": candidates})
    return found


def _without(tree: dict[str, Any], path: str) -> Any:
    """Take away what stands at a dotted path, and return it; None if there is nothing."""
    *parents, last = path.split(".")
    for part in parents:
        below = tree.get(part)
        if not isinstance(below, dict):
            return None
        tree = below
    return tree.pop(last, None)


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


log = structlog.get_logger(__name__)

READ_RECORDS = 5
"""Of one partition at a look: decoding is Python's, a look must stay cheap whatever passes."""

KEPT_REQUESTS = 12
LARGEST_REQUEST = 256 << 10
"""Bytes of an event, the whole of a request, that is decoded; a larger one is left out."""

KEPT_ITEMS, LARGEST_ITEM = 240, LARGEST_REQUEST // 20
"""Events of one item each that are kept, and bytes of one: about as much memory."""

MOST_TEXTS = 2_000
"""Values of one segment that are known by text; the measures tell 100 apart."""

MOST_SEEN = 10_000
LONGEST_TEXT = 60


class ServedSample:
    """What is known of served events by looking at some. Used by one thread, but `requests` by any."""

    def __init__(
        self,
        spec: Spec,
        log: EventLog,
        topic: str,
        unreadable: Callable[[], None] = lambda: None,
        reader: Record | None = None,
    ) -> None:
        """`unreadable` is called for each event that cannot be shown; `reader` is what events are read as,
        whatever schema they were written by."""
        tree = None if reader is None else without_logical_types(to_json(reader, aliases=True))
        self._reader = None if tree is None else _parsed(tree)
        self._spec, self._log, self._topic, self._unreadable = spec, log, topic, unreadable
        self._schemas: dict[int, Any] = {}
        self._registry = SchemaRegistry(log)
        self._ends: dict[int, int] = {}
        self._turn = 0
        whole = spec.events.served.explode is not None
        self._largest = LARGEST_REQUEST if whole else LARGEST_ITEM
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT_REQUESTS if whole else KEPT_ITEMS)
        segments = [spec.feature(name) for name in spec.train.segments]
        self._fields = [f for f in segments if f.kind == "id" and f.field is not None]
        self._texts: dict[str, OrderedDict[int, str]] = {f.name: OrderedDict() for f in segments}
        self._seen: dict[str, set[Any]] = {f.name: set() for f in segments}
        for feature in segments:
            self._texts[feature.name].update(fixed_texts(feature))

    @property
    def requests(self) -> Sequence[Mapping[str, Any]]:
        """Recent requests as they could be asked again, newest first."""
        served, kept = self._spec.events.served, list(self._kept)[::-1]
        return kept if served.explode is not None else grouped(kept, served)[:KEPT_REQUESTS]

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
                    if len(value) <= self._largest and not self._spec.events.served.theirs:
                        self._look_at(value)
                return

    def _look_at(self, value: bytes) -> None:
        """Take an event; one that cannot be read (the joiner tells of it) leaves the others as they are."""
        try:
            self._take(self._decoded(value))
        except Unavailable:  # its schema is not known now: nothing is wrong with the event
            raise
        except Exception as error:  # bytes of others: the decoder promises nothing of what it raises
            log.debug("a served event cannot be shown", reason=repr(error))
            self._unreadable()

    def _take(self, event: dict[str, Any]) -> None:
        for feature in self._fields:
            self._note(feature, leaves(event, (feature.field or "").split(".")))
        request = (
            event if self._spec.events.served.explode is None else request_of(event, self._spec.events.served)
        )
        if request is not None:
            self._kept.append(request)

    def _note(self, feature: Feature, values: Iterator[Any]) -> None:
        seen, texts = self._seen[feature.name], self._texts[feature.name]
        if len(seen) >= MOST_SEEN:
            seen.clear()
        for value in values:
            if not isinstance(value, (str, bytes, int, float)) or (type(value), value) in seen:
                continue
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                continue  # of JSON alone, and no value of a feature
            seen.add((type(value), value))
            text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            texts[key_of(value, 0)] = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
            if len(texts) > MOST_TEXTS:
                texts.popitem(last=False)

    def _decoded(self, value: bytes) -> dict[str, Any]:
        """The event as fields."""
        if self._spec.events.served.format == "json":
            event = orjson.loads(value)
        else:
            event = self._read(value[FRAME_BYTES:], self._schema(framed_id(value)))
        if not isinstance(event, dict):
            raise Corrupt(f"an event: expected a record, found {type(event).__name__}")
        return event

    def _read(self, record: bytes, written: Any) -> Any:
        """A record as the spec's schema has it; as it was written, where a field that nothing reads is in the
        way."""
        try:
            return fastavro.schemaless_reader(io.BytesIO(record), written, self._reader)
        except SchemaResolutionError:
            return fastavro.schemaless_reader(io.BytesIO(record), written, None)

    def _schema(self, schema_id: int) -> Any:
        if schema_id not in self._schemas:
            tree = orjson.loads(canonical(self._registry.get(schema_id)))
            written = without_defaults(without_logical_types(tree))
            self._schemas[schema_id] = fastavro.parse_schema(written)
        return self._schemas[schema_id]


def _parsed(reader: Any) -> Any:
    """What events are read as. Without defaults, if a field cannot have its own: an event that lacks one is
    shown as it was written."""
    try:
        return fastavro.parse_schema(reader)
    except SchemaParseException as error:
        log.warning("events without a field are shown without its default", reason=str(error))
        return fastavro.parse_schema(without_defaults(reader))
