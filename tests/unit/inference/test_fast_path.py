"""The fast path reads rank requests as text. It yields the result of reading member by member, and declines
invalid requests."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import parse_schema, served_schema
from freshet.config.spec.parse import load_spec
from freshet.errors import BadInput, TooLarge
from freshet.features import JsonTranscoder
from freshet.inference.pipeline import Pipeline, Scored
from freshet.inference.rank import FastPath
from freshet.inference.requests import Filling, Order, events_of, parse_rank
from freshet.inference.served_log import Served, served_events
from freshet.types import BytesColumn
from tests.fixtures.serving import FEED, schema

SPEC, RANKED = load_spec(FEED / "freshet.toml"), schema("ranked")
PIPELINE, FILLING = Pipeline(SPEC, RANKED), Filling.of(SPEC.events.served, RANKED)
NEWS = Path(__file__).parents[3] / "examples" / "quickstart"
MOST, NOW_MS = 4, 1_700_000_000_000
PLAIN = FastPath(SPEC, PIPELINE.transcoder, FILLING, MOST)
SERVED = JsonTranscoder(served_schema(RANKED, SPEC.events.served.explode), schema_id=7, ignore_unknown=True)
USER = {"id": 5, "country": "DE", "last_items": [1, 2]}

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)
USERS = st.fixed_dictionaries({}, optional={"id": st.integers(0, 9), "country": st.text(max_size=3) | ODD})
CONTEXTS = st.fixed_dictionaries(
    {},
    optional={
        "user": USERS | ODD,
        "device": st.text(max_size=3),
        "request_id": st.integers(0, 2**53) | ODD,
        "ts": st.just(NOW_MS - 5) | ODD,
        "items": ODD,
        "experiment": st.just({"a": "b"}),
        "nobody knows": ODD,
    },
)
CANDIDATES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.integers(0, 9),
        "age_s": st.floats(0, 1e6) | ODD,
        "ctr_1h": st.floats(0, 1) | st.integers(),
        "pos": st.integers(0, 9) | st.none(),
        "freshet_served": ODD,
        "name": st.text(max_size=3),
    },
)
BODIES = st.fixed_dictionaries(
    {"candidates": st.lists(CANDIDATES | ODD, max_size=MOST + 1) | ODD},
    optional={
        "context": CONTEXTS | ODD,
        "k": st.integers(-1, 6) | ODD,
        "request_id": st.integers(0, 99) | ODD,
        "dry_run": ODD,
        "explain": ODD,
        "other": ODD,
    },
)


def order_of(count: int, k: int) -> tuple[Order, Scored]:
    rng = np.random.default_rng(count)
    scores = rng.random(count, np.float32)
    scores[0] = np.nan
    predictions = rng.random((count, len(SPEC.labels)), np.float32)
    chosen = rng.permutation(count)[:k]
    found = Order(chosen, rng.random(k, np.float32), explored=bool(count % 2))
    return found, Scored(predictions, scores, {"user": 3})


def logged(served: Served) -> tuple[bytes, int]:
    """What the log takes of it, and how many events do not fit the schema."""
    made = SERVED.column(BytesColumn.of(served.texts))
    return bytes(made.records.data), len(made.bad)


def member_by_member(body: bytes, context: Mapping[str, Any] | None = None) -> Any:
    """(request, completed context, encoded), as `ranking` makes them."""
    asked = parse_rank(body, MOST)
    filled = FILLING.filled(asked.context, asked.request_id, NOW_MS)
    if context is not None:
        filled = {**filled, **context}
    events = events_of(SPEC, filled, asked.candidates)
    return asked, filled, PIPELINE.encoded(events, len(asked.candidates))


def check_one(body: bytes) -> bool:
    """Whether a body is plain; what it is then taken for is compared."""
    plain = PLAIN.read(body, NOW_MS)
    if plain is None:
        return False
    found, scored = order_of(plain.encoded.candidates, plain.k)
    answer, served = plain.answer(found, scored, 3, None, log=True)
    said = orjson.loads(answer)
    made_id = {
        "request_id": said["request_id"]
    }  # which may have been made, and then differs from time to time
    asked, context, encoded = member_by_member(body, made_id)

    assert not asked.explain
    assert (plain.k, plain.dry_run, plain.encoded.candidates) == (
        asked.k,
        asked.dry_run,
        len(asked.candidates),
    )
    assert bytes(plain.encoded.events.data) == bytes(encoded.events.data)
    events = served_events(SPEC, context, asked.candidates, found, scored.scores, scored.predictions, 3)
    expected = Served.of(SPEC, events)
    assert served is not None
    assert served.keys == expected.keys
    assert logged(served) == logged(expected)
    assert [len(text.splitlines()) for text in served.texts] == [1]
    assert [item["index"] for item in said["items"]] == found.indices.tolist()
    return True


@given(BODIES, st.booleans(), st.integers(0, 2))
def test_fast_path_equals_reading_member_by_member(body: dict[str, Any], escaped: bool, indent: int) -> None:
    check_one(json.dumps(body, ensure_ascii=escaped, indent=indent or None).encode("utf-8", "surrogatepass"))


def test_usual_request_takes_the_fast_path() -> None:
    candidates = [{"id": 1, "age_s": 2.5, "pos": 4}, {"id": 2, "ctr_1h": 1}]
    for context in ({"user": USER}, {"user": USER, "ts": NOW_MS, "request_id": 9}, {}):
        for more in ({}, {"k": 1}, {"dry_run": True}, {"explain": False}):
            assert check_one(orjson.dumps({"context": context, "candidates": candidates, **more}))
    assert check_one(orjson.dumps({"candidates": candidates, "request_id": 77}))


def test_an_empty_id_is_not_plain() -> None:
    """It is left to `Filling`, which refuses it."""
    spec = load_spec(NEWS / "freshet.toml")
    ranked = parse_schema(json.loads((NEWS / "impressions.avsc").read_text()))
    transcoder = Pipeline(spec, ranked).transcoder
    plain = FastPath(spec, transcoder, Filling.of(spec.events.served, ranked), MOST)
    candidates = [{"article": "a", "topic": "t"}]
    for request_id, taken in (("r", True), ("", False)):
        top = {"context": {"reader": "u"}, "candidates": candidates, "request_id": request_id}
        within = {"context": {"reader": "u", "request_id": request_id}, "candidates": candidates}
        assert [plain.read(orjson.dumps(body), NOW_MS) is not None for body in (top, within)] == [taken] * 2


def test_answers_equal_those_of_the_slow_path() -> None:
    body = orjson.dumps({"context": {"user": USER}, "candidates": [{"id": i} for i in range(3)], "k": 2})
    plain = PLAIN.read(body, NOW_MS)
    assert plain is not None
    scored = Scored(np.array([[0.1, 1e-7, 3e9]] * 3, np.float32), np.array([0.1, np.nan, 5], np.float32), {})
    found = Order(np.array([2, 1]), np.array([1.0, 0.25], np.float32), explored=False)

    said = orjson.loads(plain.answer(found, scored, 4, 12, log=False)[0])

    predictions = dict(zip(("click", "watch", "buy"), scored.predictions[0].tolist(), strict=True))
    assert said["items"] == [
        {"index": 2, "score": 5.0, "predictions": predictions, "propensity": 1.0},
        {"index": 1, "score": None, "predictions": predictions, "propensity": 0.25},
    ]
    assert (said["version"], said["freshness_ms"], said["unknown_rows"], said["explored"]) == (
        4,
        12,
        {},
        False,
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"candidates":[{"id":1}]} x',
        b'{"candidates":[{"id":1}],"candidates":[{"id":2}]}',
        b'{"candidates":[{"id":1}],"explain":true}',
        b'{"candidates":[{"id":1}],"k":1.0}',
        b'{"candidates":[{"id":1}],"k":99999999999999999999}',
        b'{"candidates":[{"id":1}],"request_id":1,"context":{"request_id":1}}',
        b'{"candidates":[{"id":1}],"context":{"request_id":1,"request_id":2}}',
        b'{"candidates":[{"id":1}],"context":{"device":"a","experiment":"b","experiment":"c"}}',
        b'{"candidates":[{"id":1}],"context":{"user":{"id":5,"city":1,"city":2}}}',
        b'{"candidates":[{"id":1,"name":"a","name":"b"}]}',
        b'{"candidates":[{"id":1}],"context":{"\\u0069tems":[]}}',
        b'{"candidates":[{"id":1,"freshet_served":{}}]}',
        b'{"candidates":[{"id":1}],"context":{"request_id":-0}}',
        b'{"candidates":[{"id":1},{"id":1},{"id":1},{"id":1},{"id":1}]}',
        b'{"candidates":[{"id":1}],"context":{"device":"\xff"}}',
        b'{"candidates":[{"id":1,\n"pos":2}]}',
        b'{"candidates":[{"id":1},{"id":2\r}]}',
        b'{"candidates":[{"id":1}],"context":{\r\n"device":"a"}}',
        b'{"candidates":[{"id":1}],"context":{"user":{"id":5,\n"country":"DE"}}}',
        b'{"candidates":[{"id":1,"unknown":1e999}]}',
    ],
)
def test_what_is_not_plain_is_left_to_the_other_way(body: bytes) -> None:
    assert PLAIN.read(body, NOW_MS) is None


def test_line_breaks_outside_of_what_is_logged_are_plain() -> None:
    body = b'{"context":\r\n{"device": "a\\nb"},\n"candidates":[\n{"id":1} ,\n{"id":2}\n]\r\n}\n'
    assert check_one(body)


@pytest.mark.parametrize(
    "number", [b"1e999", b"-1E999", b"1.7976931348623159e308", b"1" + 309 * b"0", b"-1" + 400 * b"0" + b".5"]
)
@pytest.mark.parametrize(
    "body",
    [
        b'{"candidates":[{"id":1,"unknown":%b}]}',
        b'{"candidates":[{"id":1,"age_s":%b}]}',
        b'{"candidates":[{"id":1}],"context":{"unknown":[{"a":[%b]}]}}',
        b'{"candidates":[{"id":1}],"k":%b}',
    ],
)
def test_number_that_is_not_finite_is_refused_anywhere(body: bytes, number: bytes) -> None:
    assert PLAIN.read(body % number, NOW_MS) is None
    with pytest.raises(BadInput):
        member_by_member(body % number)


@pytest.mark.parametrize("number", [b"1.7976931348623157e308", b"-1e-300", b"0e9999", b"0." + 400 * b"3"])
def test_numbers_at_the_ends_of_what_a_double_holds_are_plain(number: bytes) -> None:
    assert check_one(b'{"candidates":[{"id":1,"unknown":%b}]}' % number)


def test_what_the_other_way_refuses_is_never_plain() -> None:
    rng = random.Random(5)
    good = bytearray(orjson.dumps({"context": {"user": USER}, "candidates": [{"id": 1}, {"id": 2}], "k": 2}))
    refused = 0
    for _ in range(3_000):
        body = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.choice(b'{}[]",:0123456789eE.+-\\ untrfals\x00\xe2')
        try:
            member_by_member(bytes(body))
        except (BadInput, TooLarge):
            refused += 1
            assert PLAIN.read(bytes(body), NOW_MS) is None, bytes(body)
        else:
            check_one(bytes(body))
    assert refused > 1_000
