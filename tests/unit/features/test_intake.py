"""Bodies to records for the log: equal to those of the parts, whole bodies only, at returned offsets."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.model import Stream, TimeField
from freshet.features import AcceptedBodies, EventExtractor, EventIntake, JsonTranscoder, partition_of
from freshet.types import BytesColumn

SCHEMA = parse_schema(
    {
        "type": "record",
        "name": "Action",
        "fields": [
            {"name": "request", "type": "string"},
            {"name": "item", "type": "long"},
            {"name": "ts", "type": "long"},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }
)
STREAM = Stream(
    role="action",
    topic="actions",
    schema="actions.avsc",
    key=("request", "item"),
    time=TimeField(path="ts", unit="ms"),
)
SCHEMA_ID, PARTITIONS, MOST, LATEST = 7, 4, 5, 1_000
EXTRACTOR = EventExtractor(STREAM, SCHEMA)
TRANSCODER = JsonTranscoder(SCHEMA, schema_id=SCHEMA_ID)
INTAKE = EventIntake(EXTRACTOR, schema_id=SCHEMA_ID, partitions=PARTITIONS, max_events=MOST)


def event(request: str = "r", ts: int = 1, **more: Any) -> dict[str, Any]:
    return {"request": request, "item": 1, "ts": ts, **more}


def taken(*bodies: object, keep_text: bool = False) -> AcceptedBodies:
    texts = [b if isinstance(b, bytes) else orjson.dumps(b) for b in bodies]
    return INTAKE.json(TRANSCODER, texts, latest_ms=LATEST, keep_text=keep_text)


def placed(made: AcceptedBodies, firsts: dict[int, int] | None = None) -> list[tuple[int, int, bytes, bytes]]:
    """(partition, offset, key, value) of each event, in the order in which they came."""
    rows = []
    for partition, position in zip(made.partitions.tolist(), made.positions.tolist(), strict=True):
        row = int(made.starts[partition]) + position
        first = (firsts or {}).get(partition, 0)
        rows.append((partition, first + position, made.keys[row], made.records[row]))
    return rows


def test_many_bodies_yield_the_same_as_one_by_one() -> None:
    events = [event(f"request-{i % 7}", i, note=f"n{i}") for i in range(12)]
    made = taken(events[0], events[1:5], b"\n".join(map(orjson.dumps, events[5:9])), events[9:])

    column = TRANSCODER.column(BytesColumn.of([orjson.dumps(e) for e in events])).records
    keys = EXTRACTOR.extract(column, framed=True).request_keys
    partitions = partition_of(keys, PARTITIONS).tolist()
    assert made.counts.tolist() == [1, 4, 4, 3]
    assert [(p, k, v) for p, _, k, v in placed(made)] == list(zip(partitions, keys, column, strict=True))


def test_a_partition_keeps_the_order_in_which_its_events_came() -> None:
    made = taken([event("a", i) for i in range(3)], [event("b", 1)], [event("a", 9)])

    [a] = {p for p, _, key, _ in placed(made) if key == b"a"}
    appends = {append.partition: append for append in made.appends("actions")}
    times = EXTRACTOR.extract(appends[a].values, framed=True).times_ms.tolist()
    assert [t for t, key in zip(times, appends[a].keys or [], strict=True) if key == b"a"] == [0, 1, 2, 9]


def test_a_partly_bad_body_leaves_nothing_and_spoils_no_other() -> None:
    good = [event("a"), event("b")]
    bad: list[object] = [
        [event(), event(item="x")],
        b"{",
        b"[]",
        b"",
        [event()] * (MOST + 1),
        [event(), event(ts=LATEST + 1)],
        [event(unknown=1)],
        b'{"request": "r", "item": 1, "ts": 1}\nnonsense',
    ]
    for body in bad:
        made = taken(good, body, good)
        assert made.counts.tolist() == [2, -1, 2], body
        assert [key for _, _, key, _ in placed(made)] == [b"a", b"b", b"a", b"b"]


def test_the_latest_time_is_still_taken() -> None:
    assert taken(event(ts=LATEST)).counts.tolist() == [1]


def test_a_topic_in_json_gets_each_event_as_it_came() -> None:
    first, second = b'{ "request":"a", "item":1.0e0 ,"ts":1}', b'{"item": 1, "request": "a", "ts": 2}'
    half = first.replace(b"1.0e0", b"1.5e0")
    assert taken(half, keep_text=True).counts.tolist() == [-1]  # an item is a whole number

    array = b" [" + first + b" , " + second + b"] "
    made = taken(array, second + b"\n" + first, first + b"\n", keep_text=True)

    assert [value for _, _, _, value in placed(made)] == [first, second, second, first, first]


def test_avro_is_passed_on_byte_for_byte() -> None:
    records = list(TRANSCODER.body(orjson.dumps([event("a"), event("b", 2)])).records)
    batch = b"".join(len(r).to_bytes(4, "big") + r for r in records)

    assert [v for *_, v in placed(INTAKE.avro([batch, batch], latest_ms=LATEST, lengths=True))] == records * 2
    assert [v for *_, v in placed(INTAKE.avro(records, latest_ms=LATEST, lengths=False))] == records


def test_avro_of_another_schema_or_cut_short_is_left() -> None:
    [record] = TRANSCODER.body(orjson.dumps(event())).records
    other = record[:4] + bytes([SCHEMA_ID + 1]) + record[5:]
    late = next(iter(TRANSCODER.body(orjson.dumps(event(ts=LATEST + 1))).records))
    made = INTAKE.avro(
        [other, record, record[:-1], record + b"x", b"", late], latest_ms=LATEST, lengths=False
    )
    assert made.counts.tolist() == [-1, 1, -1, -1, -1, -1]

    length = len(record).to_bytes(4, "big")
    bodies = [b"", length, length + record, length + record + b"x", (length + record) * (MOST + 1)]
    assert INTAKE.avro(bodies, latest_ms=LATEST, lengths=True).counts.tolist() == [-1, -1, 1, -1, -1]


def test_each_body_gets_the_places_of_its_events() -> None:
    made = taken([event(f"r{i}") for i in range(4)], b"{", event("r1"))
    firsts = {append.partition: 100 * append.partition for append in made.appends("actions")}

    answers = made.answers('"actions"', list(firsts.values()))

    told = [
        {"topic": "actions", "partition": p, "offset": offset} for p, offset, _, _ in placed(made, firsts)
    ]
    assert answers[0] == orjson.dumps({"accepted": 4, "acks": told[:4]})
    assert answers[1] == b""
    assert orjson.loads(answers[2]) == {"accepted": 1, "acks": told[4:]}


@given(st.lists(st.binary(max_size=60), max_size=4), st.booleans())
def test_any_bytes_are_taken_or_left(bodies: list[bytes], lengths: bool) -> None:
    good = orjson.dumps(event())
    assert taken(*bodies, good).counts.tolist()[-1] == 1
    counts = INTAKE.avro(bodies, latest_ms=LATEST, lengths=lengths).counts.tolist()
    assert all(count == -1 or count > 0 for count in counts)
