"""A sample of the newest served events, decoded: texts of segment values, and requests to send again.

Measures have only the key of a segment's value. The keys of texts in served events are computed here as
`features.hashing` does, so that the page can show "DE" for 0x9e….
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
from freshet.log.records import newest
from freshet.log.schema_ids import FRAME_BYTES, SchemaRegistry, framed_id
from freshet.types import TopicPartition

# --- Values at paths of served events, and rank requests of them. Pure.


def without_logical_types(schema: Any) -> Any:
    """Return the schema without logical types, so that a time stays the number that rank requests have."""
    if isinstance(schema, dict):
        return {key: without_logical_types(v) for key, v in schema.items() if key != "logicalType"}
    return [without_logical_types(each) for each in schema] if isinstance(schema, list) else schema


def leaves(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield the values at a path, of every element of the arrays on it."""
    if isinstance(value, list):
        for element in value:
            yield from leaves(element, path)
    elif not path:
        yield value
    elif isinstance(value, Mapping) and path[0] in value:
        yield from leaves(value[path[0]], path[1:])


def request_of(event: Mapping[str, Any], stream: Stream) -> dict[str, Any] | None:
    """Return a served event as a rank request, {request_id, context, candidates}; None without candidates.

    Fields that serving adds, the id and the time are left out; they are filled in anew.
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
    """Return rank requests of served events of one item each; fields that a request's events share are its
    context."""
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
    """Remove and return the value at a dotted path; None if there is none."""
    *parents, last = path.split(".")
    for part in parents:
        below = tree.get(part)
        if not isinstance(below, dict):
            return None
        tree = below
    return tree.pop(last, None)


def plain(value: Any) -> Any:
    """Return a value for JSON: bytes become text, one character a byte, as in Avro's JSON encoding."""
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
"""Records of one partition that a look reads: they are decoded in Python, and a look must stay cheap."""

KEPT_REQUESTS = 12
LARGEST_REQUEST = 256 << 10
"""Bytes of an event with a whole request; larger ones are left out."""

KEPT_ITEMS, LARGEST_ITEM = 240, LARGEST_REQUEST // 20
"""Kept events of one item each, and their largest size: about the same memory."""

MOST_TEXTS = 2_000
"""Values of one segment with a known text; the measures distinguish 100."""

MOST_SEEN = 10_000
LONGEST_TEXT = 60


class ServedSample:
    """Texts and requests of sampled served events. Not thread-safe, but for `requests`."""

    def __init__(
        self,
        spec: Spec,
        log: EventLog,
        topic: str,
        unreadable: Callable[[], None] = lambda: None,
        reader: Record | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            unreadable: called for each event that cannot be shown.
            reader: schema to which events are resolved.
        """
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
        """Recent requests that can be sent again, newest first."""
        served, kept = self._spec.events.served, list(self._kept)[::-1]
        return kept if served.explode is not None else grouped(kept, served)[:KEPT_REQUESTS]

    def text(self, segment: str, value: int) -> str | None:
        """Return the text of a segment's value; None if no sampled event had it."""
        if value == 0:
            return "(other, or none)"
        texts = self._texts.get(segment)
        return texts.get(value) if texts is not None else None

    def look(self) -> None:
        """Read the newest events of the next partition."""
        for _ in range(self._spec.partitions):
            self._turn = (self._turn + 1) % self._spec.partitions
            at = TopicPartition(self._topic, self._turn)
            bounds = self._log.bounds(at)
            fresh = bounds.end - max(bounds.start, self._ends.get(self._turn, 0))
            self._ends[self._turn] = bounds.end
            if fresh > 0:
                for _, value in newest(self._log, at, min(fresh, READ_RECORDS), bounds):
                    if len(value) <= self._largest and not self._spec.events.served.external:
                        self._add_event(value)
                return

    def _add_event(self, value: bytes) -> None:
        """Add an event, or skip it if it cannot be read, which the joiner reports."""
        try:
            self._keep(self._decoded(value))
        except Unavailable:  # of its schema; the event may be valid
            raise
        except Exception as error:  # the decoder may raise any exception for damaged bytes
            log.debug("a served event cannot be shown", reason=repr(error))
            self._unreadable()

    def _keep(self, event: dict[str, Any]) -> None:
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
                continue  # possible in JSON only, and no value of a feature
            seen.add((type(value), value))
            text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            texts[key_of(value, 0)] = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
            if len(texts) > MOST_TEXTS:
                texts.popitem(last=False)

    def _decoded(self, value: bytes) -> dict[str, Any]:
        """Decode an event. Raises Corrupt if it is no record, and exceptions of the decoders."""
        if self._spec.events.served.format == "json":
            event = orjson.loads(value)
        else:
            event = self._read(value[FRAME_BYTES:], self._schema(framed_id(value)))
        if not isinstance(event, dict):
            raise Corrupt(f"an event: expected a record, found {type(event).__name__}")
        return event

    def _read(self, record: bytes, written: Any) -> Any:
        """Decode a record to the spec's schema, or as written if an unused field cannot be resolved."""
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
    """Return the parsed reader schema, without defaults if one is invalid.

    An event without such a field is then shown as it was written.
    """
    try:
        return fastavro.parse_schema(reader)
    except SchemaParseException as error:
        log.warning("events without a field are shown without its default", reason=str(error))
        return fastavro.parse_schema(without_defaults(reader))
