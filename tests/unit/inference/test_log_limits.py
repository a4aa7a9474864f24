"""Rank requests that the log could not take are refused before they are scored: a property of every body,
read as text or member by member."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from freshet.config.avro.schema import Record, parse_schema, served_schema
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec
from freshet.errors import BadInput, TooLarge
from freshet.features import EventExtractor, JsonTranscoder
from freshet.inference.pipeline import Pipeline, Scored
from freshet.inference.rank import FastPath
from freshet.inference.requests import (
    Filling,
    Order,
    RankRequest,
    events_of,
    get_path,
    parse_rank,
    refuse_expanded,
)
from freshet.inference.served_log import Loggable, Served, served_events
from freshet.types import F32, BytesColumn
from tests.fixtures.effort import examples
from tests.fixtures.joiner import limits_for
from tests.fixtures.serving import FEED, schema

NOW_MS = 1_700_000_000_000
MOST = 4

NESTED = """
name = "shop"
[events]
served = { explode = "page.rows", key = ["ctx.id", "page.rows.sku"], time = "ctx.at:iso" }
action = { key = ["id", "sku"], time = "at:ms" }
[labels]
buy = { on = "action.kind == 'buy'" }
[tables]
sku = { dim = 4 }
place = { dim = 4 }
[features]
sku = { field = "page.rows.sku", table = "sku" }
place = { field = "page.rows.where.place", table = "place", serve_as = 0 }
"""
SINGLE = """
name = "ads"
[events]
served = { key = ["auction", "ad"], time = "at:s" }
action = { key = ["auction", "ad"], time = "at:s" }
[labels]
win = { on = "action.kind == 'win'" }
[tables]
ad = { dim = 4 }
[features]
ad = { field = "ad", table = "ad" }
"""


def record(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A schema; the type of a field with a default is its members."""
    made = [
        {"name": n, **(t if isinstance(t, dict) and "default" in t else {"type": t})}
        for n, t in fields.items()
    ]
    return {"type": "record", "name": name, "fields": made}


ROW = record("Row", {"sku": "string", "where": record("Where", {"place": "int"}), "price": "double"})
PAGE = record("Page", {"rows": {"type": "array", "items": ROW}})
SHOP = parse_schema(record("Shop", {"ctx": record("Ctx", {"id": "string", "at": "string"}), "page": PAGE}))
ADS = parse_schema(record("Ad", {"auction": ["null", "long"], "ad": ["null", "string"], "at": "long"}))


@dataclass(frozen=True)
class Way:
    """What serving does with the bodies of one spec, without sockets."""

    spec: Spec
    served: Record
    record_bytes: int = 16 << 20  # the log's largest record
    most: int = MOST

    def __post_init__(self) -> None:
        stream = self.spec.events.served
        logged = served_schema(self.served, stream.explode)
        filling = Filling.of(stream, self.served)
        pipeline, check = (
            Pipeline(self.spec, self.served),
            Loggable(self.spec, self.served, limits_for(self.record_bytes)),
        )
        made = {
            "filling": filling,
            "pipeline": pipeline,
            "loggable": check,
            "log": JsonTranscoder(logged, schema_id=7, ignore_unknown=True),
            "joiner": EventExtractor(stream, logged),
            "plain": FastPath(self.spec, pipeline.transcoder, filling, self.most, check)
            if FastPath.fits(self.spec)
            else None,
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def read(self, body: bytes) -> tuple[RankRequest, Mapping[str, Any]]:
        """Member by member, as `ranking` does it. Raises BadInput and TooLarge as it does."""
        asked = parse_rank(body, self.most)
        context = self.filling.filled(asked.context, asked.request_id, NOW_MS)  # type: ignore[attr-defined]
        events = events_of(self.spec, context, asked.candidates)
        self.pipeline.encoded(events, len(asked.candidates))  # type: ignore[attr-defined]
        if not asked.dry_run:
            placed = self.loggable.placed(asked.candidates)  # type: ignore[attr-defined]
            self.loggable.check(events_of(self.spec, context, placed), NOW_MS)  # type: ignore[attr-defined]
        return asked, context

    def items(self, events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The impressions of logged events."""
        explode = self.spec.events.served.explode
        return [item for event in events for item in (get_path(event, explode) if explode else [event])]

    def is_joinable(self, served: Served) -> bool:
        """Whether the log takes every event, and the joiner can read each."""
        made = self.log.column(BytesColumn.of(served.texts))  # type: ignore[attr-defined]
        read = self.joiner.extract(made.records, framed=True)  # type: ignore[attr-defined]
        in_time = (read.times_ms >= 0) & (read.times_ms <= NOW_MS + self.spec.join.max_ahead_ms)
        return not made.bad and not len(read.bad) and bool(in_time.all())


WAYS = {
    "feed": Way(load_spec(FEED / "freshet.toml"), schema("ranked")),
    "nested": Way(parse_spec(NESTED), SHOP),
    "single": Way(parse_spec(SINGLE), ADS),
}
FLOATS = st.sampled_from([0.5, 0.25, np.nan, np.inf, -np.inf])
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
)


def maybe(good: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects whose members are as they should be, odd, or not there."""
    fields = {
        name: (value if isinstance(value, st.SearchStrategy) else st.just(value))
        for name, value in good.items()
    }
    return st.fixed_dictionaries(fields) | st.fixed_dictionaries(
        {}, optional={n: v | ODD for n, v in fields.items()}
    )


TIMES = st.sampled_from([NOW_MS, NOW_MS + 59_000, NOW_MS + 61_000, -1, 0, 2**62])
ISO_TIMES = ["2023-11-14T22:13:20Z", "2099-01-01", "1969-01-01", "soon"]
CONTEXTS = {
    "feed": maybe({
        "user": maybe({"id": st.integers(0, 9), "country": "DE", "last_items": [1]}),
        "device": st.sampled_from(["phone", "watch"]), "request_id": st.integers(0, 99), "ts": TIMES,
        "experiment": {"a": "b"},
    }),
    "nested": maybe({
        "ctx": maybe({"id": "r", "at": st.sampled_from(ISO_TIMES)}),
    }),
    "single": maybe({"auction": st.integers(0, 9), "at": TIMES.map(lambda t: t // 1000)}),
}  # fmt: skip
ITEMS = {
    "feed": maybe({"id": st.integers(0, 9), "age_s": st.floats(0, 9), "ctr_1h": 0.5, "pos": st.integers(0, 9),
                   "freshet_served": None}),
    "nested": maybe({"sku": st.text(max_size=3), "where": maybe({"place": 3}), "price": st.floats(0, 9)}),
    "single": maybe({"ad": st.text(max_size=3), "freshet_served": {}}),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_request_that_is_answered_can_be_logged_and_joined(name: str, data: st.DataObject) -> None:
    way = WAYS[name]
    candidates = data.draw(st.lists(ITEMS[name] | ODD, max_size=MOST))
    body: dict[str, Any] = {"candidates": candidates, "context": data.draw(CONTEXTS[name])}
    body |= data.draw(
        st.fixed_dictionaries({}, optional={"k": st.integers(1, 4), "request_id": st.integers(0, 9)})
    )
    text = json.dumps(body).encode()
    plain = way.plain.read(text, NOW_MS) if way.plain is not None else None  # type: ignore[attr-defined]
    try:
        asked, _ = way.read(text)
    except (BadInput, TooLarge):
        assert plain is None  # the two ways agree
        return
    shape = len(asked.candidates), len(way.spec.labels)
    scores = data.draw(hnp.arrays(np.float32, shape[0], elements=FLOATS))
    check_logged(way, text, scores, data.draw(hnp.arrays(np.float32, shape, elements=FLOATS)))


def check_logged(way: Way, text: bytes, scores: F32, predictions: F32) -> bool:
    """Both ways log a request as the joiner reads it, with what is finite; returns whether it was plain."""
    asked, context = way.read(text)
    order = Order(np.arange(asked.k)[::-1].copy(), np.ones(asked.k, np.float32), explored=False)
    events = served_events(way.spec, context, asked.candidates, order, scores, predictions, 1)
    finite = (np.isfinite(scores) & np.isfinite(predictions).all(axis=1))[order.indices]
    assert way.is_joinable(Served.of(way.spec, events))
    assert [item["freshet_served"] is not None for item in way.items(events)] == finite.tolist()
    plain = way.plain.read(text, NOW_MS) if way.plain is not None else None  # type: ignore[attr-defined]
    if plain is not None:
        _, served = plain.answer(order, Scored(predictions, scores, {}), 1, None, log=True)
        assert way.is_joinable(served)
        assert way.items(map(orjson.loads, served.texts)) == way.items(orjson.loads(orjson.dumps(events)))
    return plain is not None


GOOD: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "feed": (
        {"user": {"id": 1, "last_items": []}, "device": "phone", "experiment": {}},
        {"id": 1, "age_s": 1.0, "ctr_1h": 0.5},
    ),
    "nested": ({"ctx": {"id": "r", "at": ISO_TIMES[0]}}, {"sku": "a", "where": {"place": 3}, "price": 1.0}),
    "single": (
        {"auction": 1, "at": NOW_MS // 1000, "freshet_served": {"score": 1}},
        {"ad": "a", "freshet_served": {}},
    ),
}
"""A context and a candidate that are answered."""


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", WAYS)
def test_scores_that_are_not_finite_cost_no_impression(name: str, bad: float) -> None:
    way, (context, candidate) = WAYS[name], GOOD[name]
    scores = np.array([0.5, bad, 0.5], np.float32)
    predictions = np.full((3, len(way.spec.labels)), 0.25, np.float32)
    predictions[2, -1] = bad

    text = orjson.dumps({"context": context, "candidates": [candidate] * 3})
    assert check_logged(way, text, scores, predictions) == (name == "feed")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"user": {"country": "DE"}}, "user.id"),
        ({"user": {"id": None}}, "user.id"),
        ({"device": "watch"}, "device"),
        ({"ts": NOW_MS + 61_000}, "ts"),
        ({"ts": -1}, "ts"),
        ({"experiment": {"a": 5}}, "experiment.a"),
    ],
)
def test_a_refused_request_names_the_field_that_the_log_needs(change: dict[str, Any], path: str) -> None:
    way = WAYS["feed"]
    good = {"user": {"id": 1, "last_items": []}, "device": "phone", "ts": NOW_MS}
    body = {"context": {**good, **change}, "candidates": [{"id": 1, "age_s": 1.0}]}

    with pytest.raises(BadInput, match=f"^{path}: expected"):
        way.read(orjson.dumps(body))
    assert way.plain.read(orjson.dumps(body), NOW_MS) is None  # type: ignore[attr-defined]
    way.read(orjson.dumps({**body, "dry_run": True})) if change != {"device": "watch"} else None
    way.read(orjson.dumps({**body, "context": good}))


def test_an_ordinary_request_is_still_read_as_text() -> None:
    context = {"user": {"id": 1, "last_items": []}, "device": "phone"}
    body = orjson.dumps(
        {"context": context, "candidates": [{"id": 1, "age_s": 1.0}, {"id": 2, "age_s": 2.0, "pos": 9}]}
    )

    assert WAYS["feed"].plain.read(body, NOW_MS) is not None  # type: ignore[attr-defined]


def body_of(context: int, candidates: int, **more: Any) -> bytes:
    return orjson.dumps(
        {"context": {"note": "c" * context}, "candidates": [{"i": i} for i in range(candidates)], **more}
    )


@given(st.integers(0, 3_000), st.integers(1, 60), st.integers(100, 5_000))
def test_a_context_copied_too_often_is_refused_first(context: int, candidates: int, most: int) -> None:
    body = body_of(context, candidates)
    asked = parse_rank(body, 100)
    copied = len(orjson.dumps(asked.context)) * candidates

    if copied > 4 * most:
        with pytest.raises(TooLarge, match="FRESHET_INFERENCE_MAX_BODY_BYTES"):
            refuse_expanded(None, asked, len(body), most)
    else:
        refuse_expanded(None, asked, len(body), most)
    refuse_expanded("items", asked, len(body), most)


LIMIT = 12_000
LONGEST = np.float32(-2.3456789e-05)
"""A float with the longest text."""


def sized(form: str, explode: bool) -> Way:
    """A model whose items have a position and a field with a default, in a log of small records."""
    row = {
        "sku": "long",
        "pos": ["null", "double"],
        "kind": {"type": "string", "default": 30 * "d"},
    }
    top = {"request": "string", "at": "long", "note": "string"}
    items, prefix = ({"type": "array", "items": record("Row", row)}, "items.") if explode else (None, "")
    exploded = 'explode = "items", ' if explode else ""
    spec = parse_spec(f"""
name = "sized"
[events]
served = {{ {exploded}format = "{form}", key = ["request", "{prefix}sku"], time = "at:ms" }}
action = {{ key = ["request", "sku"], time = "at:ms" }}
[labels]
click = {{ on = "action.sku > 0" }}
buy = {{ on = "action.sku > 1" }}
[tables]
item = {{ dim = 4 }}
[features]
item = {{ field = "{prefix}sku", table = "item" }}
pos = {{ field = "{prefix}pos", table = "item", serve_as = 0 }}
""")
    return Way(spec, parse_schema(record("S", top | ({"items": items} if explode else row))), LIMIT, 200)


SIZED = {(form, explode): sized(form, explode) for form in ("avro", "json") for explode in (True, False)}


def largest(fits: Callable[[int], bool]) -> int:
    """The largest length up to twice the limit that fits; -1 for none."""
    low, high = -1, 2 * LIMIT + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@pytest.mark.parametrize(("form", "explode"), SIZED)
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_what_passes_the_check_is_no_larger_in_the_log(form: str, explode: bool, data: st.DataObject) -> None:
    way = SIZED[form, explode]
    count = data.draw(st.integers(1, 100))
    item: dict[str, Any] = data.draw(st.sampled_from([{}, {"pos": 3}, {"unknown": 50 * "u"}, {"kind": ""}]))
    padded = data.draw(st.sampled_from(["request", "note", "unknown"]))
    given_id = data.draw(st.sampled_from([{"request": "r"}, {}]))

    def body(length: int) -> bytes:
        context = {"note": "c", **given_id, padded: length * "x"}
        return orjson.dumps({"context": context, "candidates": [{"sku": i, **item} for i in range(count)]})

    def logged_bytes(served: Served) -> int:
        made = way.log.column(BytesColumn.of(served.texts))  # type: ignore[attr-defined]
        assert not made.bad
        values = served.texts if form == "json" else list(made.records)
        return max(len(key) + len(value) for key, value in zip(served.keys, values, strict=True))

    def passes(length: int) -> bool:
        try:
            way.read(body(length))
        except (BadInput, TooLarge):
            return False
        return True

    def is_small(length: int) -> bool:
        text = body(length)
        fast = way.plain.read(text, NOW_MS)  # type: ignore[attr-defined]
        return fast is not None and way.loggable.is_small(len(text), fast.logged_bytes, fast.key, count)  # type: ignore[attr-defined]

    order = Order(np.arange(count)[::-1].copy(), np.full(count, LONGEST), explored=False)
    scores, predictions, version = np.full(count, LONGEST), np.full((count, 2), LONGEST), 2**63 - 1
    # An empty id is refused, so lengths begin with 1.
    if (length := largest(lambda n: passes(n + 1)) + 1) > 0:
        asked, context = way.read(body(length))
        events = served_events(way.spec, context, asked.candidates, order, scores, predictions, version)
        assert logged_bytes(Served.of(way.spec, events)) <= LIMIT
    if explode and (length := largest(lambda n: is_small(n + 1)) + 1) > 0:
        fast = way.plain.read(body(length), NOW_MS)  # type: ignore[attr-defined]
        _, served = fast.answer(order, Scored(predictions, scores, {}), version, None, log=True)
        assert logged_bytes(served) <= LIMIT


@given(st.integers(1, 20_000), st.integers(1, 30), st.integers(10_000, 60_000))
def test_a_request_too_large_to_log_is_refused(context: int, candidates: int, limit: int) -> None:
    spec, served = wide_spec()
    labels = len(spec.labels)
    limits = replace(limits_for(limit), expanded_bytes=200_000)
    check = Loggable(spec, served, limits)
    event = {
        "request": "r",
        "at": NOW_MS,
        "note": "c" * context,
        "items": [{"sku": i} for i in range(candidates)],
    }
    spare = 1_100 + candidates * (60 + 4 * labels)
    try:
        check.check([event], NOW_MS)
    except TooLarge:
        assert context + spare > limit or (context + spare) * candidates * labels > 200_000
    else:
        assert context <= limit
        assert context * candidates * labels <= 200_000


def wide_spec() -> tuple[Spec, Record]:
    spec = parse_spec("""
name = "wide"
[events]
served = { explode = "items", key = ["request", "items.sku"], time = "at:ms" }
action = { key = ["request", "sku"], time = "at:ms" }
[labels]
click = { on = "action.sku > 0" }
buy = { on = "action.sku > 1" }
[tables]
item = { dim = 4 }
[features]
item = { field = "items.sku", table = "item" }
""")
    item = {"type": "record", "name": "I", "fields": [{"name": "sku", "type": "long"}]}
    fields = [
        ("request", "string"),
        ("at", "long"),
        ("note", "string"),
        ("items", {"type": "array", "items": item}),
    ]
    made = {"type": "record", "name": "S", "fields": [{"name": n, "type": t} for n, t in fields]}
    return spec, parse_schema(made)
