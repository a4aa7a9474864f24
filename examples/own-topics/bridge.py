"""A bridge from Kafka topics to freshet's gateway, until the Kafka adapter of the event log is released.

    python bridge.py freshet.toml --kafka 127.0.0.1:9092 --gateway http://127.0.0.1:7000 \\
        --registry http://127.0.0.1:8081

The spec says which topics, in which format, and which of their fields are read. Messages are merged by time
(`in_order`), decoded, cut down to those fields, and sent in batches. Offsets are committed only after the
gateway answered 202, so a bridge that dies sends some events again. That is harmless: impressions are known
by their key, actions by their id. What cannot be decoded, or not sent as an event (a NaN, an event larger
than a request may be), is sent as its bytes and the reason: the gateway refuses that event and keeps it in
`<model>.refused` with its place, and the topic goes on. The bridge ends if the gateway takes no such request
either, as with 401 or 403.

Needs confluent-kafka, fastavro for topics in Avro, and freshet with its extra `client`. Several bridges may
share a group.
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from in_order import InOrder, Message, Place, place_of

from freshet.client import Client, EventsRefused, Receipt, RetryPolicy
from freshet.config.avro.schema import Array, Map, Record, Type, Union
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.schemas import load_schemas, streams_of
from freshet.errors import BadInput, Overloaded, Unavailable

CONSUME_MESSAGES, CONSUME_WAIT_S = 1_000, 0.2
REQUEST_EVENTS = 500
AWAY_PAUSE_S = 2.0
"""How long to wait for a gateway or registry that is away, beyond the client's own retries."""
ORDER = ("served", "shown", "action")
"""Causes before their effects, though the joiner waits for either."""

T = TypeVar("T")
Event = dict[str, Any]
Read = tuple[Event, Message | None]
"""What to send, and the message that it was read from; None: it is the message's bytes already."""
SchemaById = Callable[[int], Any]


class Source(Protocol):
    """The part of a consumer that the bridge uses. It must not commit by itself."""

    def consume(self, messages: int, timeout_s: float) -> tuple[Sequence[Message], Sequence[Place]]:
        """Wait for at most so many messages; returns them, and the partitions that are read to their end."""

    def places(self) -> Collection[Place]:
        """Return the partitions that are assigned to this bridge now."""

    def hold(self, places: Collection[Place]) -> None:
        """Read on everywhere but here."""

    def commit(self, next_offsets: Mapping[Place, int]) -> None:
        """Commit the offset after the last message sent of each partition. May fail: they come again."""


@dataclass
class Counts:
    """What a bridge has done, by stream."""

    sent: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


class Bridge:
    """Takes messages from a source to a gateway. Used by one thread."""

    def __init__(
        self,
        spec: Spec,
        source: Source,
        client: Client,
        schema_of: SchemaById,
        stop: threading.Event,
        tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        schemas = load_schemas(spec)
        self._streams = {s.topic: s for s in streams_of(spec)}
        self._schemas = {s.role: schemas.of(s.role) for s in streams_of(spec)}
        self._send = {"served": client.impressions, "shown": client.shown, "action": client.actions}
        self._source, self._schema_of, self._stop, self._tell = source, schema_of, stop, tell
        self.counts = Counts()

    def run(self) -> Counts:
        """Until `stop` is set; what is being sent then is committed first, if the gateway is there."""
        waiting = InOrder()
        while not self._stop.is_set():
            messages, ended = self._source.consume(CONSUME_MESSAGES, CONSUME_WAIT_S)
            waiting.assign(self._source.places())
            waiting.take(messages)
            waiting.ended(ended)
            ready = waiting.ready()
            self._source.hold(waiting.full())
            if ready and self._deliver(ready):
                self._source.commit(_next_offsets(ready))
        return self.counts

    def _deliver(self, messages: Sequence[Message]) -> bool:
        """Send them all; False if the bridge is to stop before that could be done."""
        events: dict[str, list[Read]] = {}
        for message in messages:
            if message.value() is None:  # a tombstone of a compacted topic
                continue
            decoded = self._patiently(partial(self._decode, message))
            if decoded is None:
                return False
            events.setdefault(self._streams[message.topic()].role, []).append(decoded)
        for role in ORDER:
            ready = events.get(role, [])
            for start in range(0, len(ready), REQUEST_EVENTS):
                if self._patiently(partial(self._post, role, ready[start : start + REQUEST_EVENTS])) is None:
                    return False
        return True

    def _post(self, role: str, events: Sequence[Read]) -> bool:
        """Send; True once the log has them. Events that the gateway refuses are in its dead letters."""
        try:
            receipt: Receipt = self._send[role]([event for event, _ in events])
        except EventsRefused as error:
            receipt = error.receipt
            self._tell(f"{role}: {error}")
        except BadInput as error:
            if len(events) == 1:
                message = events[0][1]
                if message is None:  # no event is the reason: a token, an address
                    raise
                return self._post(role, [undecodable(message, error)])
            half = len(events) // 2  # larger than the gateway takes in one request, or one of them is bad
            return self._post(role, events[:half]) and self._post(role, events[half:])
        self.counts.sent[role] = self.counts.sent.get(role, 0) + len(receipt.acks)
        self.counts.refused[role] = self.counts.refused.get(role, 0) + len(receipt.refused)
        return True

    def _patiently(self, act: Callable[[], T]) -> T | None:
        """Do it, as often as it takes while the other side is away; None if the bridge is to stop."""
        while True:
            try:
                return act()
            except (Unavailable, Overloaded) as error:
                self._tell(f"waiting: {error}")
                if self._stop.wait(AWAY_PAUSE_S):
                    return None

    def _decode(self, message: Message) -> Read:
        stream = self._streams[message.topic()]
        value = bytes(message.value())
        try:
            event = orjson.loads(value) if stream.format == "json" else _avro(value, self._schema_of)
            if not isinstance(event, dict):
                raise BadInput(f"expected an object, found {type(event).__name__}")
            found = cut_down(event, self._schemas[stream.role])
        except (BadInput, ValueError, TypeError, KeyError, IndexError, EOFError) as error:
            return undecodable(message, error)
        return found, message


def undecodable(message: Message, error: Exception) -> Read:
    """What is sent in the place of an event: where it lies, why it is none, and its first 64 KiB."""
    place = f"{message.topic()} {message.partition()}:{message.offset()}"
    return {"undecodable": f"{place}: {error}", "bytes": bytes(message.value())[:65_536].hex()}, None


def cut_down(value: Any, type_: Type) -> Any:
    """A decoded value with only those fields that the spec's schema has: topics hold more than is read."""
    match type_:
        case Record() if isinstance(value, Mapping):
            return {f.name: cut_down(value[f.name], f.type) for f in type_.fields if f.name in value}
        case Array() if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return [cut_down(item, type_.items) for item in value]
        case Map() if isinstance(value, Mapping):
            return {key: cut_down(item, type_.values) for key, item in value.items()}
        case Union() if value is not None and len(type_.others) == 1:
            return cut_down(value, type_.others[0])
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _avro(value: bytes, schema_of: SchemaById) -> Any:
    """A message as a schema registry's serializer frames it."""
    import fastavro  # noqa: PLC0415 - topics in JSON do without

    if len(value) < 5 or value[0] != 0:
        raise BadInput("expected Confluent framing: a zero byte and a 4-byte schema id")
    schema = schema_of(int.from_bytes(value[1:5], "big"))
    return fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None)


def registry(url: str) -> SchemaById:
    """Writers' schemas from a Confluent-compatible registry, remembered.

    The function raises Unavailable while it does not answer, BadInput for an id that it does not have.
    """
    import fastavro  # noqa: PLC0415

    known: dict[int, Any] = {}

    def schema_of(schema_id: int) -> Any:
        if schema_id not in known:
            try:
                with urllib.request.urlopen(
                    f"{url.rstrip('/')}/schemas/ids/{schema_id}", timeout=5
                ) as answer:
                    text = orjson.loads(answer.read())["schema"]
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    raise BadInput(f"the registry has no schema {schema_id}") from None
                raise Unavailable(f"{url}: {error}") from error
            except OSError as error:
                raise Unavailable(f"{url}: {error}") from error
            known[schema_id] = fastavro.parse_schema(as_stored(orjson.loads(text)))
        return known[schema_id]

    return schema_of


def as_stored(schema: Any) -> Any:
    """The schema without logical types: times stay the numbers that they are, as the spec says their unit."""
    if isinstance(schema, list):
        return [as_stored(branch) for branch in schema]
    if isinstance(schema, dict):
        return {key: as_stored(part) for key, part in schema.items() if key != "logicalType"}
    return schema


def _next_offsets(messages: Sequence[Message]) -> dict[Place, int]:
    found: dict[Place, int] = {}
    for message in messages:
        found[place_of(message)] = max(found.get(place_of(message), 0), message.offset() + 1)
    return found


class Kafka:
    """The source that is a real Kafka."""

    def __init__(self, bootstrap: str, group: str, topics: Sequence[str], start: str) -> None:
        import confluent_kafka  # noqa: PLC0415 - tests do without

        self._kafka = confluent_kafka
        self._held: set[Place] = set()
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": start,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "session.timeout.ms": 10_000,  # a bridge that was killed is replaced after this
            }
        )
        self._consumer.subscribe(list(topics))

    def consume(self, messages: int, timeout_s: float) -> tuple[Sequence[Message], Sequence[Place]]:
        """See `Source`."""
        found: list[Message] = []
        ended: set[Place] = set()
        for message in self._consumer.consume(messages, timeout_s):
            error = message.error()
            if error is None:
                found.append(message)
                ended.discard(place_of(message))  # it had ended, and then there was more
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                ended.add(place_of(message))
            else:  # a rebalance, a broker that is away: the consumer goes on by itself
                print(f"kafka: {error}", file=sys.stderr, flush=True)
        return found, sorted(ended)

    def places(self) -> Collection[Place]:
        """See `Source`."""
        return {(p.topic, p.partition) for p in self._consumer.assignment()}

    def hold(self, places: Collection[Place]) -> None:
        """See `Source`."""
        assigned = set(self.places())
        self._held &= assigned
        self._consumer.pause(self._at(set(places) - self._held))
        self._consumer.resume(self._at(self._held - set(places)))
        self._held = set(places)

    def commit(self, next_offsets: Mapping[Place, int]) -> None:
        """See `Source`. After a rebalance it may fail: the new owner sends those events again."""
        places = [self._kafka.TopicPartition(*place, offset) for place, offset in next_offsets.items()]
        try:
            self._consumer.commit(offsets=places, asynchronous=False)
        except self._kafka.KafkaException as error:
            print(f"kafka: offsets not committed, these events will be sent again: {error}", file=sys.stderr)

    def _at(self, places: Collection[Place]) -> list[Any]:
        return [self._kafka.TopicPartition(*place) for place in places]

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("spec")
    parser.add_argument("--kafka", required=True, help="host:port of a broker")
    parser.add_argument("--gateway", default="http://127.0.0.1:7000")
    parser.add_argument("--registry", help="URL of the schema registry; needed for topics in Avro")
    parser.add_argument("--group", help="consumer group; freshet-MODEL without it")
    parser.add_argument("--start", choices=("earliest", "latest"), default="latest", help="of a new group")
    options = parser.parse_args()
    spec = load_spec(options.spec)
    topics = [s.topic for s in streams_of(spec)]
    if not options.registry and any(s.format == "avro" for s in streams_of(spec)):
        parser.error("a topic of the spec is Avro: --registry says who knows its schemas")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    source = Kafka(options.kafka, options.group or f"freshet-{spec.name}", topics, options.start)
    try:
        with Client(gateway=options.gateway, retries=RetryPolicy(attempts=3)) as client:
            schema_of = registry(options.registry) if options.registry else _no_registry
            counts = Bridge(spec, source, client, schema_of, stop).run()
    finally:
        source.close()
    print(f"accepted {counts.sent}, refused {counts.refused}")


def _no_registry(schema_id: int) -> Any:
    raise BadInput(f"no registry was named to look schema {schema_id} up")


if __name__ == "__main__":
    main()
