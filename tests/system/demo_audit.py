"""What a demo's log must say after kills: every impression once a label, true if it was acted on; all of it
trained on. Records are read with fastavro and counted with sets: nothing of the training path is believed."""

from __future__ import annotations

import io
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fastavro
import orjson

from freshet.client import Client
from freshet.config.avro.schema import canonical
from freshet.features import read_blocks
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.testing.contracts.eventlog import answered
from freshet.types import Records, TopicPartition
from tests.fixtures.traffic import PATIENCE

LABELS = ("click", "purchase")
Key = tuple[str, str]  # request, item


@dataclass
class Tracked:
    """Pages and clicks of our own beside the readers': each is sent until the gateway has acknowledged it."""

    gateway: str
    pause_s: float = 0.1

    def __post_init__(self) -> None:
        self.pages: set[Key] = set()  # acknowledged
        self.clicks: set[Key] = set()
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more; returns when everything that was begun is acknowledged."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the gateway acknowledges nothing any more"

    def _work(self) -> None:
        rng = random.Random(1)
        number = 0
        with Client(gateway=self.gateway, timeout_s=5.0, retries=PATIENCE) as client:
            try:
                while not self._stop.wait(self.pause_s):
                    number += 1
                    self._visit(client, f"tracked-{number}", rng)
            except BaseException as error:
                self.errors.append(error)

    def _visit(self, client: Client, request: str, rng: random.Random) -> None:
        items = [f"tracked-item-{n}" for n in rng.sample(range(50), 3)]
        about = {"topic": "sport", "format": "video", "age_s": 60.0, "place": 1}
        page = {"request_id": request, "ts": _now_ms(), "reader": "tracked", "age_group": "25-34"}
        client.impressions(
            {**page, "device": "phone", "hour": 9, "items": [{"item": item, **about} for item in items]}
        )
        self.pages |= {(request, item) for item in items}
        if rng.random() < 0.5:
            action = {"event_id": f"click-{request}", "request_id": request, "item": items[0]}
            client.actions({**action, "type": "click", "ts": _now_ms()})
            self.clicks.add((request, items[0]))


@dataclass
class DemoBooks:
    """What stands in a demo's log."""

    shown: Counter[Key] = field(default_factory=Counter)
    acted: Mapping[str, set[Key]] = field(default_factory=lambda: {name: set() for name in LABELS})
    samples: Mapping[str, dict[Key, float]] = field(default_factory=lambda: {name: {} for name in LABELS})
    late: set[tuple[str, Key]] = field(default_factory=set)
    doubles: list[tuple[str, Key]] = field(default_factory=list)

    def differences(self, tracked: Tracked, *, excused: int) -> Iterator[str]:
        """What is lost, doubled, or labelled otherwise than it was acted on, in words.

        `excused`: actions that the joiner says came after their window; so many may be learned as none.
        """
        clicked = self.samples["click"]
        late = {key for label, key in self.late if label == "click"}
        yield from _some("acknowledged, and not in the log", tracked.pages - self.shown.keys())
        yield from _some("a click acknowledged, and not in the log", tracked.clicks - self.acted["click"])
        yield from _some("shown, and no sample", self.shown.keys() - clicked.keys() - late)
        yield from _some("a sample of what nobody was shown", clicked.keys() - self.shown.keys())
        yield from _some("a sample twice", self.doubles)
        positive = {key for key, value in clicked.items() if value == 1.0}
        wrong = tracked.clicks - positive - late
        if len(wrong) > excused:
            yield from _some(f"a click learned as none ({excused} may be)", wrong)
        yield from _some("learned as a click, and none was sent", positive - self.acted["click"])
        bought = self.samples["purchase"]
        yield from _some("a purchase label without a click (it is given click)", bought.keys() - positive)


def read_demo(log: EventLog) -> DemoBooks:
    """All impressions, actions and samples of a demo's log."""
    books, schemas = DemoBooks(), _Schemas(SchemaRegistry(log))
    for page in _events(log, "impressions", schemas):
        books.shown.update({(page["request_id"], item["item"]) for item in page["items"]})
    for action in _events(log, "actions", schemas):
        books.acted[action["type"]].add((action["request_id"], action["item"]))
    for label, key, value in _samples(log, "demo.samples", schemas):
        if key in books.samples[label]:
            books.doubles.append((label, key))
        books.samples[label][key] = value
    books.late |= {(label, key) for label, key, _ in _samples(log, "demo.samples.late", schemas)}
    return books


@dataclass
class _Schemas:
    """Schemas by the ids that records carry, as fastavro wants them."""

    registry: SchemaRegistry
    _known: dict[int, Any] = field(default_factory=dict)

    def get(self, schema_id: int) -> Any:
        if schema_id not in self._known:
            schema = orjson.loads(canonical(self.registry.get(schema_id)))
            self._known[schema_id] = fastavro.parse_schema(schema)
        return self._known[schema_id]


def _samples(log: EventLog, topic: str, schemas: _Schemas) -> Iterator[tuple[str, Key, float]]:
    for records in _records(log, topic):
        blocks = read_blocks(records.values)
        for i in range(len(blocks)):
            schema = schemas.get(int(blocks.schema_ids[i]))
            made: Any = fastavro.schemaless_reader(io.BytesIO(blocks.payloads[i]), schema, None)
            key = (made["request_id"], made["items"]["item"])
            yield LABELS[int(blocks.labels[i])], key, float(blocks.values[i])


def _events(log: EventLog, topic: str, schemas: _Schemas) -> Iterator[Any]:
    for records in _records(log, topic):
        for value in records.values:
            schema = schemas.get(int.from_bytes(value[1:5], "big"))
            yield fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None)


def _records(log: EventLog, topic: str) -> Iterator[Records]:
    ends = {
        TopicPartition(topic, p): log.bounds(TopicPartition(topic, p)).end
        for p in range(log.topics()[topic].partitions)
    }
    at = {partition: log.bounds(partition).start for partition in ends}
    assert not any(at.values()), f"{topic}: the log has forgotten records, nothing can be audited"
    reader = log.reader()
    reader.assign(at)
    try:
        while any(at[partition] < end for partition, end in ends.items()):
            for partition, records in answered(reader, 10_000, 1.0):
                at[partition] = records.next_offset
                yield records
    finally:
        reader.close()


def _some(what: str, found: Any) -> Iterator[str]:
    if found:
        yield f"{len(found)} times {what}; such as {next(iter(found))}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
