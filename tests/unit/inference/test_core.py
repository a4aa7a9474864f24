"""What a rank request asks, how candidates are ordered, which deltas count."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.spec.model import Explore, Spec, TimeField
from freshet.config.spec.parse import parse_spec
from freshet.errors import BadInput, Corrupt, TooLarge, first_line
from freshet.inference.requests import (
    events_of,
    get_path,
    merged,
    order,
    parse_rank,
    set_path,
    time_value,
)
from freshet.inference.rows import BucketView
from freshet.inference.scoring import freshness_ms
from freshet.inference.service import label_delay_ms
from freshet.types import Fence
from freshet.versions.weights import not_finite

GREEDY = Explore()
HALF = Explore(policy="epsilon", share=0.5)

SPEC = """
name = "shop"
[events]
served = {{ {explode} key = ["request_id", "{item}"], time = "ts:ms" }}
action = {{ key = ["request_id", "item"], time = "ts:ms" }}
[labels]
buy = {{ on = "action.type == 'buy'" }}
[tables]
item = {{ dim = 4 }}
[features]
item = {{ field = "{item}", table = "item" }}
"""


def spec(*, explode: bool) -> Spec:
    text = SPEC.format(explode='explode = "items",' if explode else "", item="items.id" if explode else "id")
    return parse_spec(text)


def asked(**request: Any) -> bytes:
    return orjson.dumps({"context": {"user": 1}, "candidates": [{"id": 1}, {"id": 2}], **request})


def test_label_delay_is_the_shortest_window_of_a_common_label() -> None:
    text = SPEC.format(explode="", item="id") + '[join]\ngrace = "5s"\n'
    labels = """[labels]
click = { on = "action.type == 'click'", window = "30s" }
read = { on = "action.type == 'read'", window = "1m" }
buy = { on = "action.type == 'buy'", window = "10s", given = "click" }
"""
    several = text.replace("[labels]\n", labels).replace("buy = { on = \"action.type == 'buy'\" }\n", "")

    assert label_delay_ms(parse_spec(several)) == 35_000
    assert label_delay_ms(parse_spec(several.replace('"30s"', '"10m"'))) == 65_000


def test_a_request_without_k_asks_for_all() -> None:
    request = parse_rank(asked(), 10)

    assert (request.k, request.request_id) == (2, None)
    assert request.context == {"user": 1}


def test_k_beyond_the_candidates_is_all_of_them() -> None:
    assert parse_rank(asked(k=7), 10).k == 2


def test_request_is_logged_and_not_explained_by_default() -> None:
    assert (parse_rank(asked(), 10).dry_run, parse_rank(asked(), 10).explain) == (False, False)
    asking = parse_rank(asked(dry_run=True, explain=True), 10)
    assert (asking.dry_run, asking.explain) == (True, True)


def test_a_request_without_context_has_an_empty_one() -> None:
    assert parse_rank(b'{"candidates": [{}]}', 10).context == {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "an object with context and candidates, found an array"),
        (asked(candidates=[]), "candidates: expected a list of 1 to 10 objects, found none"),
        (asked(candidates={}), "found an object"),
        (asked(candidates=[1]), r"candidates\[0\]: expected an object, found a number"),
        (asked(context=[]), "context: expected an object, found an array"),
        (asked(k=0), "k: expected an integer of 1 or more, found 0"),
        (asked(k=True), "k: expected"),
        (asked(k="2"), "k: expected"),
        (asked(request_id=1.5), "request_id: expected"),
        (asked(request_id=False), "request_id: expected"),
        (asked(dry_run=1), "dry_run: expected true or false, found 1"),
        (asked(explain="yes"), "explain: expected true or false, found 'yes'"),
        (asked(canditates=[]), "found 'canditates'"),
    ],
)
def test_a_bad_request_says_what_is_wrong(body: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_rank(body, 10)


def nested(opening: bytes, closing: bytes, levels: int = 990) -> bytes:
    return opening * levels + b"1" + closing * levels


@pytest.mark.parametrize("key", ["k", "request_id", "dry_run", "explain"])
def test_what_is_nested_deep_is_shown_by_its_beginning(key: str) -> None:
    body = b'{"candidates":[{}],"%b":%b}' % (key.encode(), nested(b"[", b"]"))
    with pytest.raises(BadInput, match=key) as refused:
        parse_rank(body, 10)
    assert len(str(refused.value)) < 200


def test_deeply_nested_context_and_candidate_are_refused() -> None:
    deep = nested(b'{"a":', b"}")
    request = parse_rank(b'{"context":%b,"candidates":[%b]}' % (deep, deep), 10)
    with pytest.raises(BadInput, match="context and a candidate: nested too deep"):
        events_of(spec(explode=False), request.context, request.candidates)


def test_too_many_candidates_are_too_large() -> None:
    with pytest.raises(TooLarge, match="at most 1, found 2"):
        parse_rank(asked(), 1)


@given(st.binary(max_size=100))
def test_random_bytes_are_bad_input(body: bytes) -> None:
    with pytest.raises(BadInput):
        parse_rank(body, 10)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["context", "candidates", "k", "request_id", "dry_run", "explain", "x"]),
        json_values | st.just([{}]),
    )
)
def test_any_json_is_a_request_or_bad_input(tree: Any) -> None:
    try:
        request = parse_rank(orjson.dumps(tree), 10)
    except BadInput:
        return
    assert 1 <= request.k <= len(request.candidates)


def test_paths_are_set_without_changing_the_original() -> None:
    tree = {"a": {"b": 1}}

    made = set_path(set_path(tree, "a.c", 2), "d.e", 3)

    assert made == {"a": {"b": 1, "c": 2}, "d": {"e": 3}}
    assert tree == {"a": {"b": 1}}
    assert get_path(made, "d.e") == 3
    assert get_path(made, "d.e.f") is None
    assert get_path(made, "x") is None


def test_a_path_through_what_is_no_object_is_bad_input() -> None:
    with pytest.raises(BadInput, match="a: expected an object, found a number"):
        set_path({"a": 1}, "a.b", 2)


def test_candidates_stand_in_the_exploded_array() -> None:
    assert events_of(spec(explode=True), {"user": 1}, [{"id": 1}, {"id": 2}]) == [
        {"user": 1, "items": [{"id": 1}, {"id": 2}]}
    ]


def test_without_explode_each_candidate_makes_an_event() -> None:
    assert events_of(
        spec(explode=False), {"user": 1, "n": {"a": 1}}, [{"id": 1, "n": {"b": 2}}, {"id": 2}]
    ) == [
        {"user": 1, "n": {"a": 1, "b": 2}, "id": 1},
        {"user": 1, "n": {"a": 1}, "id": 2},
    ]


def test_where_both_say_something_the_candidate_wins() -> None:
    assert merged({"a": 1, "b": {"c": 1}}, {"a": 2, "b": 3}) == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("ms", 1_500), ("s", 1), ("us", 1_500_000), ("iso", "1970-01-01T00:00:01.500+00:00")],
)
def test_now_is_written_as_the_spec_says(unit: Any, expected: Any) -> None:
    assert time_value(1_500, TimeField(path="t", unit=unit)) == expected


def test_candidates_are_ordered_by_score_and_ties_by_their_place() -> None:
    found = order(np.array([0.1, 0.5, 0.5, 0.9], np.float32), 3, GREEDY, random.Random(0))

    assert found.indices.tolist() == [3, 1, 2]
    assert found.propensity.tolist() == [1, 1, 1]
    assert not found.explored


def test_a_score_that_is_no_number_comes_last() -> None:
    found = order(np.array([np.nan, -np.inf, 0.5], np.float32), 3, GREEDY, random.Random(0))

    assert found.indices[0] == 2
    assert sorted(found.indices.tolist()) == [0, 1, 2]


def test_the_stated_propensity_is_the_frequency_of_the_policy() -> None:
    scores = np.array([0.3, 0.1, 0.2], np.float32)
    rng = random.Random(7)
    rounds = 20_000
    counts = np.zeros((3, 3))
    stated = np.zeros((3, 3))
    for _ in range(rounds):
        found = order(scores, 3, HALF, rng)
        counts[np.arange(3), found.indices] += 1
        stated[np.arange(3), found.indices] = found.propensity

    np.testing.assert_allclose(counts / rounds, stated, atol=0.015)


@given(st.integers(1, 30), st.integers(0, 2**32))
def test_an_explored_order_is_a_permutation(count: int, seed: int) -> None:
    found = order(
        np.zeros(count, np.float32), count, Explore(policy="epsilon", share=1.0), random.Random(seed)
    )

    assert found.explored
    assert sorted(found.indices.tolist()) == list(range(count))
    np.testing.assert_allclose(found.propensity, 1 / count, rtol=1e-6)


def test_freshness_is_that_of_the_newest_event_learned() -> None:
    assert freshness_ms(1_000, 400, 900) == 100
    assert freshness_ms(1_000, 2_000, 900) == 0
    assert freshness_ms(1_000, 0, 0) is None


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    good, bad = np.ones(2), np.array([1.0, np.inf])

    assert not_finite({"a": good, "n": np.array([1])}) is None
    assert not_finite({"a": good, "b": bad}) == "b"


def keys_of(*buckets: int) -> Any:
    return np.array([b << 62 | 1 for b in buckets], np.uint64)  # four buckets


def test_deltas_of_a_lower_fence_are_dropped_per_bucket() -> None:
    view = BucketView(4)
    view.scanned(0, fence=5, rows_offset=0)

    assert view.wanted(0, Fence(5), keys_of(0, 1)).tolist() == [True, True]
    assert view.wanted(1, Fence(4), keys_of(0, 1, 2)).tolist() == [False, False, True]
    assert view.wanted(2, Fence(9), keys_of(0, 1, 2)).tolist() == [True, True, True]
    assert view.wanted(3, Fence(5), keys_of(0)).tolist() == [False]


def test_deltas_that_a_buckets_scan_has_brought_are_left_out() -> None:
    view = BucketView(4)
    view.scanned(0, fence=1, rows_offset=10)

    assert view.wanted(9, Fence(1), keys_of(0, 1)).tolist() == [False, True]
    assert view.wanted(10, Fence(1), keys_of(0, 1)).tolist() == [True, True]


def test_an_error_is_explained_in_one_line() -> None:
    assert first_line(Corrupt("weights\n  more")) == "weights"
    assert first_line(ValueError("odd")) == "ValueError: odd"


@pytest.mark.parametrize(
    "body",
    [
        b'{"context": {}, "context": {}, "candidates": [{}]}',
        b'{"context": {"user": 1, "us\\u0065r": 2}, "candidates": [{}]}',
        b'{"context": {}, "candidates": [{"a": 1}, {"a": {"user": 1, "user": 1}}]}',
    ],
)
def test_a_name_that_stands_twice_is_refused(body: bytes) -> None:
    with pytest.raises(BadInput, match="expected each name once in an object, found it again"):
        parse_rank(body, 10)
