"""Some thousand mutated bodies; `ops/fuzz-bodies` sends as many as one likes through a running gateway."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.model import Stream, TimeField
from freshet.features import EventExtractor, EventIntake, JsonTranscoder
from tests.fuzz.bodies import Event, events_of, mutated, random_body

BODIES = 4_000
LATEST_MS = 1_000
MOST = 50
SCHEMA = parse_schema(
    {
        "type": "record",
        "name": "Action",
        "fields": [
            {"name": "request", "type": "string"},
            {"name": "item", "type": "long"},
            {"name": "ts", "type": "long"},
            {"name": "score", "type": ["null", "double"], "default": None},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }
)
STREAM = Stream(
    role="action", topic="a", schema="a.avsc", key=("request", "item"), time=TimeField(path="ts", unit="ms")
)
TRANSCODER = JsonTranscoder(SCHEMA, schema_id=7)
EXTRACTOR = EventExtractor(STREAM, SCHEMA)
INTAKE = EventIntake(EXTRACTOR, schema_id=7, partitions=4, max_events=MOST)


def read_one_by_one(body: bytes) -> list[Event]:
    made = TRANSCODER.body(body, MOST)
    places = list(zip(made.begins.tolist(), made.ends.tolist(), strict=True))
    found = EXTRACTOR.extract(made.records, framed=True)
    good = {
        int(made.events[row])
        for row, time in zip(found.event_index.tolist(), found.times_ms.tolist(), strict=True)
        if time <= LATEST_MS
    }
    return [Event(body[begin:end], i in good) for i, (begin, end) in enumerate(places)]


def test_mutated_bodies_are_split_and_judged_as_the_rules_say() -> None:
    random, counts = Random("suite"), Counter[str]()
    for _ in range(BODIES):
        body = mutated(random, random_body(random), random_body(random))
        expected = events_of(body, LATEST_MS)
        assert read_one_by_one(body) == expected, body
        [count] = INTAKE.json(TRANSCODER, [body], latest_ms=LATEST_MS, keep_text=True).counts.tolist()
        whole = bool(expected) and all(event.taken for event in expected)
        assert count == (len(expected) if whole else -1), body
        counts.update("taken" if event.taken else "refused" for event in expected)
        counts["broken, with others taken"] += len({event.taken for event in expected}) == 2

    assert min(counts.values()) > BODIES / 20, counts


@pytest.mark.timeout(30)
@pytest.mark.parametrize("event", [b"{x}", b'{"a":1}', b"[[\n{},\n", b"[{\n{},\n"])
def test_a_body_of_wrong_events_is_passed_once(event: bytes) -> None:
    """It took minutes: each wrong event was searched for its end to the end of the body."""
    body = b"{x\n" + event * 10_000
    made = TRANSCODER.body(body.ljust(8 << 20), 1 << 20)
    assert len(made.bad) >= 10_000
