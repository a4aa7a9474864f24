"""Requests decoded with what their candidates share kept once, against samples decoded one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.config.avro.schema import parse_schema, sample_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec
from freshet.features import (
    Decoded,
    DecodedRequests,
    EventExtractor,
    JsonTranscoder,
    RequestDecoder,
    SampleDecoder,
)
from freshet.inference.schemas import request_schema
from freshet.types import BytesColumn
from tests.fixtures.effort import examples

FEED = Path(__file__).parents[3] / "examples" / "feed"
FLAT = """
name = "flat"
[events]
served = { key = ["request", "item"], time = "at:iso" }
action = { key = ["request", "item"], time = "at:iso" }
[labels]
buy = { on = "action.kind == 'buy'", window = "1h" }
[tables]
item = { dim = 4 }
[features]
item = { field = "item", table = "item" }
tags = { field = "tags", table = "item", max = 2 }
hour = { time = "hour", table = "item" }
place = { field = "place", table = "item", serve_as = 0 }
price = { field = "price", dense = "log1p" }
[model]
crosses = [["item", "hour"]]
"""
FLAT_SCHEMA = {
    "type": "record",
    "name": "F",
    "fields": [
        {"name": "request", "type": "string"},
        {"name": "item", "type": "long"},
        {"name": "at", "type": "string"},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "place", "type": "int"},
        {"name": "price", "type": "double"},
    ],
}


class Case:
    """A spec with both ways to decode a request."""

    def __init__(self, spec: Spec, served: Any) -> None:
        self.spec, explode = spec, spec.events.served.explode
        schema, layout = request_schema(spec, served), layout_of(spec)
        self.transcoder = JsonTranscoder(schema, ignore_unknown=True)
        self.extractor = EventExtractor(spec.events.served, schema)
        self.samples = SampleDecoder(spec, layout, lambda _: sample_schema(schema, explode))
        self.requests = RequestDecoder(spec, layout, schema)

    def encoded(self, events: list[dict[str, Any]]) -> BytesColumn:
        made = self.transcoder.body(orjson.dumps(events))
        assert not made.bad, made.bad
        return made.records

    def both(
        self, requests: list[list[dict[str, Any]]], counts: list[int]
    ) -> tuple[Decoded, DecodedRequests]:
        encoded = self.encoded([event for request in requests for event in request])
        found = self.extractor.extract(encoded, framed=False)
        assert not len(found.bad), found.why
        one_by_one = self.samples.decode(found.samples(encoded), 0, found.times_ms, serving=True)
        return one_by_one, self.requests.decode(encoded, np.array(counts, np.uint32))


FEED_CASE = Case(load_spec(FEED / "freshet.toml"), parse_schema((FEED / "ranked.avsc").read_text(), "ranked"))
FLAT_CASE = Case(parse_spec(FLAT), parse_schema(FLAT_SCHEMA))


def per_sample(decoded: DecodedRequests) -> list[list[list[int]]]:
    """Keys of each group, feature and candidate."""
    counts = np.diff(decoded.request_ends, prepend=0)
    request_of = np.repeat(np.arange(len(counts)), counts).tolist()
    out = []
    for group, shared in zip(decoded.groups, decoded.shared, strict=True):
        for f, ends in enumerate(group.list_ends):
            span = group.keys[group.feature_starts[f] : group.feature_starts[f + 1]]
            parts = [p.tolist() for p in (np.split(span, ends[:-1]) if ends is not None else span[:, None])]
            out.append([parts[r] for r in request_of] if shared[f] else parts)
    return out


def assert_equal(one_by_one: Decoded, together: DecodedRequests) -> None:
    assert together.size == one_by_one.size
    expected = []
    for group in one_by_one.groups:
        for f, ends in enumerate(group.list_ends):
            span = group.keys[group.feature_starts[f] : group.feature_starts[f + 1]]
            expected.append(
                [p.tolist() for p in (np.split(span, ends[:-1]) if ends is not None else span[:, None])]
            )
    assert per_sample(together) == expected
    np.testing.assert_array_equal(together.dense, one_by_one.dense)


ids = st.integers(0, 2**40)
candidates = st.lists(
    st.fixed_dictionaries(
        {"id": ids},
        optional={
            "age_s": st.floats(width=32, allow_nan=False, allow_infinity=False),
            "ctr_1h": st.floats(0, 1) | st.none(),
            "pos": st.integers(0, 50),
        },
    ),
    min_size=1,
    max_size=5,
)
contexts = st.fixed_dictionaries(
    {"ts": st.integers(0, 2**41), "request_id": ids},
    optional={
        "user": st.fixed_dictionaries(
            {},
            optional={
                "id": ids,
                "country": st.sampled_from(["DE", "é"]) | st.none(),
                "last_items": st.lists(ids, max_size=60),
            },
        )
    },
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(contexts, candidates), min_size=1, max_size=4))
def test_a_request_decodes_to_what_its_samples_would(
    requests: list[tuple[dict[str, Any], list[Any]]],
) -> None:
    events = [[{**context, "items": items}] for context, items in requests]

    assert_equal(*FEED_CASE.both(events, [len(items) for _, items in requests]))


flat_candidates = st.lists(
    st.fixed_dictionaries(
        {"item": ids},
        optional={
            "tags": st.lists(st.text(max_size=4), max_size=4),
            "price": st.floats(0, 1e9),
            "place": st.integers(0, 9),
        },
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(flat_candidates, min_size=1, max_size=4))
def test_candidates_that_are_events_share_constants_only(
    requests: list[list[dict[str, Any]]],
) -> None:
    envelope = {"request": "r", "at": "2026-11-21T13:10:33Z"}
    events = [[{**envelope, **one} for one in request] for request in requests]

    one_by_one, together = FLAT_CASE.both(events, [len(r) for r in requests])

    assert_equal(one_by_one, together)
    assert sum(int(s.sum()) for s in together.shared) == 1


def test_what_the_candidates_share_has_one_key_a_request() -> None:
    context = {"ts": 5, "request_id": 1, "user": {"id": 9, "last_items": [1, 2, 3]}}
    items = [{"id": i} for i in range(100)]

    _, decoded = FEED_CASE.both([[{**context, "items": items}]], [100])

    # user, recent (3), country, hour, position; item and the two crosses with it
    assert sum(len(group.keys) for group in decoded.groups) == 7 + 3 * 100


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"ts": 5, "items": [{"id": 1}]}, "key"),
        ({"ts": 5, "request_id": 1, "items": [{"id": 1}, {}]}, "key"),
        ({"request_id": 1, "items": [{"id": 1}]}, "time"),
        ({"ts": 2**60, "request_id": 1, "items": [{"id": 1}]}, "time"),
    ],
)
def test_only_events_without_key_or_time_are_named(event: dict[str, Any], why: str) -> None:
    good = {"ts": 5, "request_id": 1, "items": [{"id": 1}]}
    encoded = FEED_CASE.encoded([good, event, good])

    decoded = FEED_CASE.requests.decode(encoded, np.array([1, len(event["items"]), 1], np.uint32))

    assert decoded.bad.tolist() == [1]
    assert why in decoded.why[0]
    assert FEED_CASE.extractor.extract(encoded, framed=False).bad.tolist() == [1]


def test_a_record_that_is_cut_off_is_named() -> None:
    good = FEED_CASE.encoded([{"ts": 5, "request_id": 1, "items": [{"id": 1}]}])
    cut = BytesColumn(good.data[:-3], good.ends - 3)

    decoded = FEED_CASE.requests.decode(cut, np.array([1], np.uint32))

    assert decoded.bad.tolist() == [0]


@pytest.mark.parametrize("counts", [[1], [3], [2, 0], [0]])
def test_counts_that_do_not_fit_the_events_are_refused(counts: list[int]) -> None:
    encoded = FEED_CASE.encoded([{"ts": 5, "request_id": 1, "items": [{"id": 1}, {"id": 2}]}])

    with pytest.raises(ValueError, match="candidates"):
        FEED_CASE.requests.decode(encoded, np.array(counts, np.uint32))
