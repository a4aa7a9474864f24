"""A shop that was there before freshet: what its search pages showed, what was seen, and what was done.

    python shop.py --out data --pages 2000             results.jsonl, viewport.jsonl and events.jsonl, by time
    python shop.py --kafka 127.0.0.1:9092 --pages 2000 the same on three Kafka topics, as the shop's own
                                                       services would write them, at the present time

Seeded: the same pages, tastes and orders each time. Visitors prefer three of twelve brands and cheap things.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TOPICS = {"served": "search.results", "shown": "web.viewport", "action": "shop.events"}
FILES = {"served": "results.jsonl", "shown": "viewport.jsonl", "action": "events.jsonl"}
CATEGORIES = ("shoes", "bags", "coats")
BRANDS = tuple(f"brand-{n}" for n in range(12))
PAGE_EVERY_MS = 500
RESULTS, SEEN = 12, 6  # on a page, and scrolled into view on average
SCHEMA_ID = 41
"""Under which a schema registry would hold results.avsc; only the frame of the Avro messages says it."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Product:
    """One thing on sale."""

    sku: str
    brand: str
    category: str
    price_cents: int


class Shop:
    """Products, and visitors with tastes."""

    def __init__(self, seed: int = 7, start_ms: int = 1_767_225_600_000) -> None:
        self._rng = random.Random(seed)
        rng = self._rng
        self._now_ms = start_ms
        self.products = [
            Product(f"sku-{n}", rng.choice(BRANDS), rng.choice(CATEGORIES), rng.randrange(900, 30_000))
            for n in range(600)
        ]
        self.favourites = {visitor: set(rng.sample(BRANDS, 3)) for visitor in range(1, 61)}
        self.recent: dict[int, list[str]] = {visitor: [] for visitor in self.favourites}

    def pages(self, count: int) -> Iterator[tuple[int, str, Event]]:
        """(time in ms, stream, event) of so many pages, in the order of time within a page."""
        for number in range(count):
            self._now_ms += PAGE_EVERY_MS
            yield from self._page(number)

    def _page(self, number: int) -> Iterator[tuple[int, str, Event]]:
        rng, at_ms = self._rng, self._now_ms
        visitor = rng.choice(tuple(self.favourites))
        category = rng.choice(CATEGORIES)
        shown = rng.sample([p for p in self.products if p.category == category], RESULTS)
        request = f"q-{number}-{rng.randrange(1 << 32):08x}"
        yield (
            at_ms,
            "served",
            {
                "requestId": request,
                "servedAt": at_ms,
                "visitor": {
                    "id": visitor,
                    "country": rng.choice(("DE", "FR", None)),
                    "recent": list(self.recent[visitor]),
                },
                "query": {"category": category, "device": rng.choice(("phone", "tablet", "desktop"))},
                "results": [
                    {
                        "product": {"sku": p.sku, "brand": p.brand, "priceCents": p.price_cents},
                        "rank": rank,
                    }
                    for rank, p in enumerate(shown)
                ],
            },
        )
        for product in shown[: rng.randrange(SEEN - 3, SEEN + 4)]:
            at_ms += rng.randrange(200, 1_500)
            yield at_ms, "shown", {**self._common(request, product), "seenAt": iso(at_ms), "page": "/search"}
            yield from self._done(request, product, visitor, at_ms)

    def _done(
        self, request: str, product: Product, visitor: int, at_ms: int
    ) -> Iterator[tuple[int, str, Event]]:
        """A click, and perhaps an order some minutes later."""
        rng = self._rng
        liked = product.brand in self.favourites[visitor]
        if rng.random() >= (0.4 if liked else 0.05):
            return
        at_ms += rng.randrange(500, 20_000)
        yield at_ms, "action", self._action("click", request, product, at_ms)
        self.recent[visitor] = [product.sku, *self.recent[visitor]][:20]
        if rng.random() < (0.3 if product.price_cents < 10_000 else 0.1):
            at_ms += rng.randrange(60_000, 900_000)
            order = self._action("order", request, product, at_ms)
            yield at_ms, "action", {**order, "amount": product.price_cents / 100}

    def _action(self, kind: str, request: str, product: Product, at_ms: int) -> Event:
        return {
            "uuid": f"{self._rng.randrange(1 << 64):016x}",
            "kind": kind,
            **self._common(request, product),
            "happenedAt": iso(at_ms),
            "client": {"app": "web", "build": 812},  # a field that no reader of this example needs
        }

    @staticmethod
    def _common(request: str, product: Product) -> Event:
        return {"req": request, "product": {"sku": product.sku}}


def iso(at_ms: int) -> str:
    """As many services write times: ISO 8601, UTC, milliseconds."""
    return datetime.fromtimestamp(at_ms / 1e3, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_files(folder: Path, pages: int, seed: int = 7) -> None:
    """The three streams as files of a JSON object a line, each in order of time."""
    streams: dict[str, list[tuple[int, Event]]] = {stream: [] for stream in FILES}
    for at_ms, stream, event in Shop(seed).pages(pages):
        streams[stream].append((at_ms, event))
    folder.mkdir(parents=True, exist_ok=True)
    for stream, events in streams.items():
        lines = (json.dumps(event) for _, event in sorted(events, key=lambda e: e[0]))
        (folder / FILES[stream]).write_text("\n".join(lines) + "\n", encoding="utf-8")


def framed(event: Event, schema: Any, schema_id: int = SCHEMA_ID) -> bytes:
    """Avro as a schema registry's serializer writes it: 0, the schema's id, the record."""
    import fastavro  # noqa: PLC0415 - only who writes Avro needs it

    out = io.BytesIO()
    out.write(b"\0" + schema_id.to_bytes(4, "big"))
    fastavro.schemaless_writer(out, schema, event)
    return out.getvalue()


def produce(bootstrap: str, pages: int, seed: int = 7) -> dict[str, int]:
    """Write the pages to Kafka as if they happened just now; returns how many messages went to each topic."""
    import fastavro  # noqa: PLC0415
    from confluent_kafka import KafkaError, KafkaException, Producer  # noqa: PLC0415 - not needed for files
    from confluent_kafka.admin import AdminClient, NewTopic  # noqa: PLC0415

    admin = AdminClient({"bootstrap.servers": bootstrap})
    wanted = [NewTopic(topic, num_partitions=4, replication_factor=1) for topic in TOPICS.values()]
    for created in admin.create_topics(wanted).values():
        try:
            created.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    schema = fastavro.schema.load_schema(str(Path(__file__).with_name("results.avsc")))
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    counts = dict.fromkeys(TOPICS.values(), 0)
    # Orders come up to 15 minutes after their page: the last of them is now.
    start_ms = int(time.time() * 1000) - pages * PAGE_EVERY_MS - 960_000
    for at_ms, stream, event in sorted(Shop(seed, start_ms).pages(pages), key=lambda e: e[0]):
        value = framed(event, schema) if stream == "served" else json.dumps(event).encode()
        key = str(event.get("requestId") or event["req"])
        while True:
            try:
                producer.produce(TOPICS[stream], value, key, timestamp=at_ms)
                break
            except BufferError:
                producer.poll(0.1)
        counts[TOPICS[stream]] += 1
    producer.flush()
    return counts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder for files")
    where.add_argument("--kafka", help="host:port of a broker")
    parser.add_argument("--pages", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    if options.out:
        write_files(options.out, options.pages, options.seed)
        print(f"wrote {', '.join(FILES.values())} to {options.out}")
    else:
        print(produce(options.kafka, options.pages, options.seed))


if __name__ == "__main__":
    main()
