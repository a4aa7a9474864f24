"""Events a second that one core joins: decoding, state, splicing and blocks, without the log.

    python -m bench.join [--events 300000] [--quick] [--json]

Bound by the cache misses of its hash tables of open windows and by copying payloads. Rates are per second of
processor time: a joiner shares its core with other services. Events have the retail stream's shape: a request
with 8 items (an event), every tenth item is bought. Requests of one item are measured, too.
"""

from __future__ import annotations

import json
import time

import numpy as np

from bench.report import Figures, command
from freshet.config.avro.schema import Written, parse_schema
from freshet.config.spec.parse import parse_spec
from freshet.features import hash_text
from freshet.joiner.core import Joiner, encode_samples
from freshet.joiner.decoder import SpecDecoder
from freshet.joiner.plan import join_plan
from freshet.types import BytesColumn, Records

SPEC = """
name = "perf"
[events]
served = {{ topic = "served", schema = "s.avsc", explode = "items", key = ["r", "items.id"], time = "ts:ms" }}
action = {{ topic = "actions", schema = "a.avsc", key = ["r", "id"], time = "ts:ms" }}
[join]
emit = "{emit}"
grace = "1s"
[labels]
buy = {{ on = "action.type == 'buy'", window = "20s" }}
[tables]
item = {{ dim = 4 }}
[features]
item = {{ field = "items.id", table = "item" }}
[serve]
score = "buy"
"""
ITEM = {
    "name": "Item",
    "type": "record",
    "fields": [{"name": "id", "type": "long"}, {"name": "price", "type": "double"}],
}
SERVED = {
    "name": "Served",
    "type": "record",
    "fields": [
        {"name": "r", "type": "long"},
        {"name": "ts", "type": "long"},
        {"name": "country", "type": "string"},
        {"name": "items", "type": {"type": "array", "items": ITEM}},
    ],
}
ACTION = {
    "name": "Action",
    "type": "record",
    "fields": [
        {"name": "r", "type": "long"},
        {"name": "id", "type": "long"},
        {"name": "ts", "type": "long"},
        {"name": "type", "type": "string"},
    ],
}
BATCH = 8_192


class Schemas:
    """The schemas of both streams, by id."""

    def get(self, schema_id: int, came_s: float | None = None) -> Written:
        """Return the schema of an id."""
        return parse_schema(json.dumps({1: SERVED, 2: ACTION}[schema_id]))

    def register(self, schema: Written) -> int:
        """Return the id of the only schema that the joiner registers, that of its samples."""
        return 3


def varint(n: int) -> bytes:
    """Encode a long as Avro does."""
    n = (n << 1) ^ (n >> 63)
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def served(r: int, ts: int, items: range) -> bytes:
    """Return a framed served event."""
    elements = b"".join(varint(i) + b"\0" * 8 for i in items)
    head = varint(r) + varint(ts) + varint(7) + b"germany" + varint(len(items))
    return b"\0\0\0\0\1" + head + elements + b"\0"


def action(r: int, i: int, ts: int) -> bytes:
    """Return a framed action."""
    return b"\0\0\0\0\2" + varint(r) + varint(i) + varint(ts) + varint(3) + b"buy"


def records(values: list[bytes], start: int, now: int) -> Records:
    """Return records as the log does."""
    n = len(values)
    return Records(
        np.arange(start, start + n),
        np.full(n, now),
        BytesColumn(np.empty(0, np.uint8), np.zeros(n, np.int64)),
        BytesColumn.of(values),
        start + n,
    )


def join(emit: str, items: int, events: int) -> Figures:
    """Join `events` requests of `items` items each, and the actions on them."""
    plan = join_plan(parse_spec(SPEC.format(emit=emit)), hash_text)
    decoder = SpecDecoder(parse_spec(SPEC.format(emit=emit)), plan, Schemas())
    joiner = Joiner(plan)
    batches: list[tuple[Records, Records, int]] = []
    offsets = [0, 0]
    for at in range(0, events, BATCH):
        views = [served(r, 1_000 + r, range(items)) for r in range(at, min(at + BATCH, events))]
        deeds = [
            action(r, i, 3_000 + r)
            for r in range(at, min(at + BATCH, events))
            for i in range(items)
            if (r * items + i) % 10 == 0
        ]
        batches.append((records(views, offsets[0], 10**7), records(deeds, offsets[1], 10**7), 1_000 + at))
        offsets = [offsets[0] + len(views), offsets[1] + len(deeds)]
    spent = dict.fromkeys(("decode", "join", "blocks"), 0.0)
    samples = 0
    for views_, deeds_, watermark in [*batches, (records([], 0, 0), records([], 0, 0), 10**9)]:
        t0 = time.process_time()
        impressions, _ = decoder.served(views_)
        acts, _ = decoder.actions(deeds_)
        t1 = time.process_time()
        if len(impressions):
            joiner.on_served(impressions)
            joiner.on_actions(acts)
        joiner.advance(watermark)
        out = joiner.take_samples()
        t2 = time.process_time()
        encode_samples(out)
        t3 = time.process_time()
        samples += len(out)
        for name, seconds in zip(spent, (t1 - t0, t2 - t1, t3 - t2), strict=True):
            spent[name] += seconds
    total, n = sum(spent.values()), sum(offsets)
    assert samples == events * items, (samples, events * items)
    return {
        "events_per_s": n / total,
        "samples_per_s": samples / total,
        **{f"{name}_share": seconds / total for name, seconds in spent.items()},
    }


def measure(quick: bool = False, events: int | None = None) -> Figures:
    """Measure both shapes with both kinds of emission."""
    events = events or (100_000 if quick else 300_000)
    return {
        f"{emit}_{items}_{'item' if items == 1 else 'items'}": join(emit, items, events // items)
        for emit in ("early", "window")
        for items in (1, 8)
    }


if __name__ == "__main__":
    command(measure, __doc__)
