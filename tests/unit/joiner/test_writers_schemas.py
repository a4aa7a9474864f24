"""Events of any writer's schema are joined and learned as the spec's schema reads them, or refused."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Sequence
from typing import Any

import fastavro
import numpy as np
import pytest

from freshet.config.avro.schema import Record, Written, canonical, parse_schema, parse_written
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.schemas import Schemas, readers_of, sample_reader
from freshet.features import Decoded, SampleDecoder, hash_text
from freshet.joiner.core import Joiner
from freshet.joiner.decoder import Refused, SpecDecoder
from freshet.joiner.plan import join_plan
from freshet.types import BytesColumn, Records
from tests.fixtures import feature_oracle as oracle

SPEC = parse_spec("""
name = "shop"
[events]
served = { schema = "s.avsc", explode = "items", key = ["request_id", "items.sku"], time = "ts:ms" }
action = { schema = "a.avsc", key = ["request_id", "sku"], time = "ts:ms", id = "event_id" }
[join]
emit = "window"
grace = "1s"
[labels]
click = { on = "action.what == 'click'", window = "2s" }
[tables]
t = { dim = 4 }
[features]
user = { field = "user.id", table = "t" }
country = { field = "user.country", table = "t" }
seen = { field = "user.seen", table = "t", max = 3 }
sku = { field = "items.sku", table = "t" }
price = { field = "items.price", dense = "raw" }
""")
ITEM: dict[str, Any] = {
    "type": "record",
    "name": "Item",
    "fields": [
        {"name": "sku", "type": "string", "aliases": ["article"]},
        {"name": "price", "type": ["null", "double"], "default": None},
    ],
}
SERVED: dict[str, Any] = {
    "type": "record",
    "name": "Slate",
    "namespace": "shop",
    "aliases": ["OldSlate"],
    "fields": [
        {"name": "request_id", "type": "string"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {
            "name": "user",
            "type": {
                "type": "record",
                "name": "User",
                "fields": [
                    {"name": "id", "type": "long"},
                    {"name": "country", "type": ["null", "string"], "default": None},
                    {"name": "seen", "type": {"type": "array", "items": "long"}, "default": [7]},
                ],
            },
        },
        {"name": "items", "type": {"type": "array", "items": ITEM}, "aliases": ["articles"]},
    ],
}
ACTION: dict[str, Any] = {
    "type": "record",
    "name": "Act",
    "namespace": "shop",
    "fields": [
        {"name": "event_id", "type": "string"},
        {"name": "request_id", "type": "string"},
        {"name": "sku", "type": "string"},
        {
            "name": "what",
            "type": {
                "type": "enum",
                "name": "What",
                "symbols": ["click", "buy", "other"],
                "default": "other",
            },
        },
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
SCHEMAS = Schemas(parse_schema(SERVED), parse_schema(ACTION))


class Registry:
    """Schemas by id."""

    def __init__(self, *known: Any) -> None:
        self.known: dict[int, Written] = {i + 1: parse_written(json.dumps(s)) for i, s in enumerate(known)}

    def get(self, schema_id: int, came_s: float | None = None) -> Written:
        return self.known[schema_id]

    def register(self, schema: Written) -> int:
        found = next(
            (i for i, s in self.known.items() if canonical(s) == canonical(schema)), len(self.known) + 1
        )
        self.known[found] = schema
        return found


class World:
    """A joiner's decoder, and a trainer's decoder of the samples; writers have ids from 1 on."""

    def __init__(self, *writers: Any) -> None:
        self.writers, self.registry = writers, Registry(*writers)
        plan = join_plan(SPEC, hash_text)
        readers = readers_of(SPEC, SCHEMAS)
        self.decoder = SpecDecoder(SPEC, plan, self.registry, readers=readers)
        self.joiner = Joiner(plan)

    def records(self, writer: int, *events: Any) -> Records:
        parsed = fastavro.parse_schema(copy.deepcopy(self.writers[writer - 1]))
        out = []
        for event in events:
            stream = io.BytesIO()
            fastavro.schemaless_writer(stream, parsed, event)
            out.append(b"\0" + writer.to_bytes(4, "big") + stream.getvalue())
        n = len(out)
        keys = BytesColumn.of([b""] * n)
        return Records(np.arange(n), np.zeros(n, np.int64), keys, BytesColumn.of(out), n)

    def served(self, writer: int, *events: Any) -> Refused:
        columns, refused = self.decoder.served(self.records(writer, *events))
        self.joiner.on_served(columns)
        return refused

    def samples(self) -> Decoded:
        self.joiner.advance(10**12)
        made = self.joiner.take_samples()
        decoder = SampleDecoder(SPEC, layout_of(SPEC), self.registry.get, sample_reader(SPEC, SCHEMAS))
        got = decoder.decode(made.payloads, made.schemas, made.times_ms)
        assert list(got.why) == []
        return got


def slate(request: str = "r", **more: Any) -> dict[str, Any]:
    user = {"id": 1, "country": "DE", "seen": [1]}
    items = [{"sku": "a", "price": 1.5}, {"sku": "b", "price": None}]
    return {"request_id": request, "ts": 1_000, "user": user, "items": items, **more}


def keys(got: Decoded) -> Any:
    return oracle.decoded_keys(got), got.dense.tobytes()


def changed(schema: Any, path: Sequence[Any], value: Any) -> Any:
    """Return the schema with another value at a path of keys and indexes; None removes the value."""
    made = copy.deepcopy(schema)
    at = made
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


OLD_FIELDS = [{"name": "article", "type": "bytes"}, {"name": "price", "type": "int"}]
OLD_ITEM = {"type": "record", "name": "Item", "fields": OLD_FIELDS}
ARTICLES = {"name": "articles", "type": {"type": "array", "items": OLD_ITEM}}
TREE = {
    "type": "record",
    "name": "Tree",
    "fields": [{"name": "up", "type": ["null", "Tree"]}, {"name": "id", "type": "long"}],
}
USER = ("fields", 2, "type", "fields")


@pytest.mark.parametrize(
    ("writer", "event", "same"),
    [
        pytest.param(
            changed(SERVED, (*USER, 1), None),
            slate(user={"id": 1, "seen": [1]}),
            slate(user={"id": 1, "country": None, "seen": [1]}),
            id="a field that is not written has its default, null",
        ),
        pytest.param(
            changed(SERVED, (*USER, 2), None),
            slate(user={"id": 1, "country": "DE"}),
            slate(user={"id": 1, "country": "DE", "seen": [7]}),
            id="a list that is not written has its default",
        ),
        pytest.param(
            changed(SERVED, (*USER, 0, "type"), "int"), slate(), slate(), id="an int is read as a long"
        ),
        pytest.param(
            changed({**SERVED, "name": "x.OldSlate"}, ("fields", 3), ARTICLES),
            {**slate(), "articles": [{"article": b"a", "price": 3}, {"article": b"b", "price": 4}]},
            slate(items=[{"sku": "a", "price": 3.0}, {"sku": "b", "price": 4.0}]),
            id="aliases of record, array and field, bytes as string, an int as double in a union",
        ),
        pytest.param(
            [{"type": "record", "name": "Other", "fields": [{"name": "x", "type": "int"}]}, SERVED],
            ("shop.Slate", slate()),
            slate(),
            id="a union at the top",
        ),
        pytest.param(
            {**SERVED, "fields": [*reversed(SERVED["fields"]), {"name": "prev", "type": ["null", TREE]}]},
            slate(prev={"up": {"up": None, "id": 1}, "id": 2}),
            slate(),
            id="another order, and a record inside itself that nobody reads",
        ),
        pytest.param(
            changed(SERVED, ("fields", 1, "type", "logicalType"), "timestamp-micros"),
            slate(ts=1_000_999),
            slate(),
            id="a time in another unit",
        ),
    ],
)  # fmt: skip
def test_an_event_of_another_schema_is_learned_as_the_specs(writer: Any, event: Any, same: Any) -> None:
    theirs, ours = World(writer), World(SERVED)

    assert theirs.served(1, event).reasons == []
    assert ours.served(1, same).reasons == []

    assert keys(theirs.samples()) == keys(ours.samples())


PLACES = {
    "text": ("fields", 0, "type"),
    "time": ("fields", 1, "type"),
    "record": ("fields", 2, "type"),
    "list": (*USER, 2, "type"),
    "exploded array": ("fields", 3, "type"),
    "field of an element": ("fields", 3, "type", "items", "fields", 0, "type"),
    "element": ("fields", 3, "type", "items"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", ["null first", "null second", "alone"])
def test_a_writers_union_is_read_wherever_it_stands(place: str, shape: str) -> None:
    """The spec's schema has none there. An exploded array's stands before the elements that are spliced."""
    within: Any = SERVED
    for step in PLACES[place]:
        within = within[step]
    branches = {"null first": ["null", within], "null second": [within, "null"], "alone": [within]}
    theirs, ours = World(changed(SERVED, PLACES[place], branches[shape])), World(SERVED)

    refused = theirs.served(1, slate("r"), slate("s", user={"id": 2, "country": None, "seen": [3, 4]}))
    ours.served(1, slate("r"), slate("s", user={"id": 2, "country": None, "seen": [3, 4]}))

    assert refused.reasons == []
    assert keys(theirs.samples()) == keys(ours.samples())


@pytest.mark.parametrize("place", ["exploded array", "element", "record"])
def test_a_writers_null_that_the_spec_lacks_is_refused(place: str) -> None:
    within: Any = SERVED
    for step in PLACES[place]:
        within = within[step]
    world = World(changed(SERVED, PLACES[place], ["null", within]))
    null: dict[str, dict[str, Any]] = {
        "exploded array": {"items": None},
        "element": {"items": [None]},
        "record": {"user": None},
    }

    refused = world.served(1, slate(**null[place]), slate())

    assert refused.rows == [0]
    assert world.samples().size == 2


@pytest.mark.parametrize(
    ("writer", "event", "says"),
    [
        pytest.param(
            changed(SERVED, (*USER, 0, "type"), "string"),
            slate(user={"id": "1", "country": "DE", "seen": []}),
            "user.id = 'string'",
            id="text for a long",
        ),
        pytest.param(
            changed(SERVED, (*USER, 0), None),
            slate(user={"country": "DE", "seen": []}),
            "user.id",
            id="no default",
        ),
        pytest.param(
            changed(SERVED, (*USER, 0, "type"), "double"),
            slate(user={"id": 1.0, "country": "DE", "seen": []}),
            "user.id",
            id="a double for a long",
        ),
        pytest.param({**SERVED, "name": "Click"}, slate(), "Click", id="another record"),
        pytest.param(
            changed(SERVED, ("fields", 1, "type"), {"type": "int", "logicalType": "time-millis"}),
            slate(),
            "ts",
            id="a time of the day for a timestamp",
        ),
    ],
)
def test_schema_that_does_not_resolve_is_refused_with_its_field(writer: Any, event: Any, says: str) -> None:
    world = World(writer, SERVED)

    refused = world.served(1, event, event)

    assert (len(refused), refused.no_schema) == (2, 2)
    assert says in refused.reasons[0]
    assert world.served(2, slate()).reasons == []  # the next event is read
    assert world.samples().size == 2


def test_a_value_that_does_not_resolve_is_refused_alone() -> None:
    world = World(changed(SERVED, (*USER, 0, "type"), ["null", "long", "string"]))
    bad = (
        slate(user={"id": None, "country": "DE", "seen": []}),
        slate(user={"id": "x", "country": "DE", "seen": []}),
    )

    refused = world.served(1, *bad, slate())

    assert (refused.rows, refused.no_schema) == ([0, 1], 0)
    assert "user.id" in refused.reasons[0]
    assert "the spec's schema does not take" in refused.reasons[0]
    assert world.samples().size == 2


def test_a_symbol_of_a_later_schema_is_the_enums_default() -> None:
    later = changed(ACTION, ("fields", 3, "type", "symbols"), ["wishlist", "click", "buy", "other"])
    world = World(later)
    act = {"request_id": "r", "sku": "a", "ts": 1_100}

    columns, refused = world.decoder.actions(
        world.records(1, *({**act, "event_id": w, "what": w} for w in ("wishlist", "click", "buy")))
    )

    assert refused.reasons == []
    assert columns.masks.tolist() == [0, 1, 0]


def test_a_path_through_a_record_inside_itself_is_refused() -> None:
    schema = parse_schema({"type": "record", "name": "R", "fields": [{"name": "tree", "type": TREE}]})
    spec = parse_spec("""
name = "x"
[events]
served = { schema = "s", key = ["tree.id"], time = "tree.id:ms" }
action = { schema = "s", key = ["tree.id"], time = "tree.id:ms" }
[labels]
c = { on = "action.tree.id == 1", window = "2s" }
[tables]
t = { dim = 4 }
[features]
a = { field = "tree.up.up.id", table = "t" }
""")  # fmt: skip
    assert isinstance(schema, Record)
    with pytest.raises(Exception, match="does not lead through a recursive record"):
        SampleDecoder(spec, layout_of(spec), lambda _: schema).program(1)
