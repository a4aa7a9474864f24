"""Events as JSON by every way in: each case of docs/reference/json.md has the answer that stands there."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import fastavro
import numpy as np
import pytest

from freshet.client import Client, RetryPolicy
from freshet.config.avro.schema import Record, Union, to_json
from freshet.config.spec.model import TimeField
from freshet.config.spec.parse import parse_spec
from freshet.errors import BadInput
from freshet.features import JsonTranscoder, hash_text
from freshet.joiner.decoder import SpecDecoder
from freshet.joiner.plan import join_plan
from freshet.recordings.sources import Piece, events_of_files
from freshet.types import BytesColumn, Records
from ops.reference.json_page import BODIES, EVENTS, SCHEMA, Body, Event
from tests.fuzz.doors import Doors, opened

TEXT = """
name = "ways"
[events]
served = { topic = "served", schema = "s.avsc", key = ["request_id"], time = "ts:ms" }
action = { topic = "action", schema = "a.avsc", key = ["request_id"], time = "ts:ms", format = "json" }
[labels]
click = { on = "action.note == 'x'", window = "2m" }
[tables]
t = { dim = 4 }
[features]
hour = { time = "hour", table = "t" }
"""
SPEC = parse_spec(TEXT)


class Registered:
    """The registry of a spec whose streams of JSON have one schema."""

    def get(self, schema_id: int, came_s: float | None = None) -> Record:
        return SCHEMA

    def register(self, schema: Record | Union) -> int:
        return 1


GOOD = b'{"request_id":"good","item":1,"ts":1}'


def records(*values: bytes) -> Records:
    n = len(values)
    offsets, times = np.arange(n, dtype=np.int64), np.zeros(n, np.int64)
    return Records(offsets, times, BytesColumn.of([b""] * n), BytesColumn.of(values), n)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with opened(tmp_path_factory.mktemp("log"), SPEC, {"served": SCHEMA, "action": SCHEMA}) as made:
        yield made


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.about)
def test_an_event_gets_one_answer_at_every_endpoint(doors: Doors, event: Event) -> None:
    bodies = {"action": b"[" + event.text + b"]"}
    if event.text[:1] != b"[":  # alone on its line that is an array of events
        bodies["served"] = b"\n".join((GOOD, event.text, GOOD))
    for role, body in bodies.items():
        good = body.count(GOOD) + event.taken
        for way, send in doors.ways.items():
            told = send(role, body)
            assert told is not None, (way, body)
            assert (told[0], len(told[1])) == (good, not event.taken), (way, body)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.about)
def test_a_body_gets_one_answer_at_every_endpoint(doors: Doors, body: Body) -> None:
    for way, send in doors.ways.items():
        told = send("action", body.body)
        if not body.taken and not body.refused:
            assert told is None, way
            continue
        assert told is not None, way
        assert told[0] == len(body.taken), way
        assert sorted([*body.taken, *(index for index, *_ in told[1])]) == list(range(told[0] + len(told[1])))


def test_what_is_taken_stands_in_a_topic_of_json_as_it_was_sent(doors: Doors) -> None:
    for event in EVENTS:
        before = doors.values("action")
        doors.ways["application/json"]("action", b" [" + event.text + b"]\n")
        assert list((doors.values("action") - before).elements()) == [event.text] * event.taken


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.about)
def test_a_topic_of_others_has_the_same_answer(event: Event) -> None:
    decoder = SpecDecoder(SPEC, join_plan(SPEC, hash_text), Registered(), {"action": SCHEMA})
    actions, refused = decoder.actions(records(GOOD, event.text, b"\xef\xbb\xbf" + event.text))

    assert len(actions.offsets) == 1 + 2 * event.taken
    assert refused.rows == ([] if event.taken else [1, 2])


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.about)
def test_a_file_of_lines_has_the_same_answer(event: Event, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + event.text + b"\r\n\n")
    time = TimeField(path="ts", unit="ms")
    pieces = events_of_files({"action": file}, {"action": time}, {"action": SCHEMA})
    found = piece_or_error(pieces)
    if isinstance(found, str):
        assert not event.taken
        assert str(file) in found
        return
    assert found.lines["action"] == event.text
    made = JsonTranscoder(SCHEMA).column(BytesColumn.of([event.text]))
    assert len(made.records) == event.taken


def piece_or_error(pieces: Iterator[Piece]) -> Piece | str:
    try:
        return next(pieces)
    except BadInput as error:
        return str(error)


@pytest.mark.parametrize("number", [1, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63)])
def test_whole_numbers_of_64_bits_are_kept_exactly(number: int) -> None:
    [record] = JsonTranscoder(SCHEMA).body(b'[{"request_id":"r","ts":1,"item":%d}]' % number).records
    read = fastavro.schemaless_reader(io.BytesIO(record), fastavro.parse_schema(to_json(SCHEMA)), None)
    assert isinstance(read, dict)
    assert read["item"] == number


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1 << 64, "\ud83d", np.array([1.0, np.nan])])
def test_the_client_sends_nothing_that_is_no_json(value: object) -> None:
    with Client("http://127.0.0.1:9", retries=RetryPolicy(attempts=1)) as client:  # nothing answers there
        with pytest.raises(BadInput, match=r"expected .*found"):
            client.actions([{"request_id": "r", "note": None, "scores": {"a": [value]}}])
        with pytest.raises(BadInput, match=r"expected .*found"):
            client.rank({"user": value}, [])
