"""`freshet init`: its spec passes the parser and the check, for any names in the user's schemas."""

import tomllib
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.explanation import explain
from freshet.config.spec.generate import generate_spec, words_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.schemas import Schemas
from freshet.errors import ConfigError

EXAMPLES = Path(__file__).parents[4] / "examples"


def example(name: str, *files: str) -> list[tuple[str, Record]]:
    return [(f, parse_schema((EXAMPLES / name / f).read_text())) for f in files]


def checked(schemas: list[tuple[str, Record]]) -> Spec:
    """Generate a spec, parse it, and check it against the schemas."""
    spec = parse_spec(generate_spec(schemas))
    by_path = dict(schemas)
    events = spec.events
    shown = by_path[events.shown.schema or ""] if events.shown else None
    explain(
        spec,
        Schemas(
            served=by_path[events.served.schema or ""],
            action=by_path[events.action.schema or ""],
            shown=shown,
        ),
    )
    return spec


def record(name: str, *fields: Any) -> Record:
    return parse_schema(
        {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}
    )


def test_the_retail_schemas_are_understood() -> None:
    spec = checked(example("online-retail", "impressions.avsc", "actions.avsc"))

    assert spec.name == "retail"
    assert spec.events.served.key == ("request_id", "items.stock_code")
    assert spec.events.action.id == "event_id"
    assert [label.name for label in spec.labels] == ["buy"]
    assert spec.feature("customer_id").table == "user"
    assert spec.feature("price").missing == "flag"
    assert spec.train.segments == ("country", "hour")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_feeds_schemas_are_understood_in_any_order(order: tuple[int, ...]) -> None:
    files = ["ranked.avsc", "viewport.avsc", "actions.avsc"]

    spec = checked(example("feed", *(files[i] for i in order)))

    assert spec.events.served.schema == "ranked.avsc"
    assert spec.events.shown is not None
    assert spec.events.shown.key == ("reqId", "item.id")
    assert spec.events.action.time.unit == "iso"
    assert spec.join.require == "shown"
    assert spec.feature("last_items").pool == "mean"
    assert spec.feature("pos").serve_as == 0


def test_events_of_one_impression_need_no_explode() -> None:
    spec = checked(
        [
            (
                "ads.avsc",
                record("AdImpression", ("impressionId", "string"), ("adId", "long"), ("eventTime", "long")),
            ),
            (
                "clicks.avsc",
                record("Click", ("impression_id", "string"), ("ad_id", "long"), ("clicked_at", "long")),
            ),
        ]
    )

    assert spec.events.served.explode is None
    assert spec.events.served.key == ("impressionId", "adId")
    assert spec.labels[0].on == "action.impression_id is not null"


def test_ids_have_their_own_table_and_crosses_name_features() -> None:
    slate = record(
        "Slate", ("request_id", "string"), ("track", "string"), ("session_id", "string"), ("ts", "long")
    )
    play = record("Play", ("request_id", "string"), ("track", "string"), ("ts", "long"))

    text = generate_spec([("slates.avsc", slate), ("plays.avsc", play)])

    spec = parse_spec(text)
    assert {f.name: f.table for f in spec.features if f.kind != "cross"} == {
        "track": "item",
        "session_id": "ids",
        "hour": "small",
        "weekday": "small",
    }
    crossed = parse_spec(text.replace("# crosses = ", "crosses = "))
    assert crossed.model.crosses == (("session_id", "track"),)


def test_every_commented_line_is_valid_toml_without_its_mark() -> None:
    text = generate_spec(example("feed", "ranked.avsc", "viewport.avsc", "actions.avsc"))

    for line in text.splitlines():
        if line.startswith("# ") and " = {" in line and not line.startswith("# a number"):
            tomllib.loads(line.removeprefix("# "))


def test_unrecognised_field_is_named() -> None:
    action = record("Action", ("request_id", "string"), ("type", "string"), ("ts", "long"))

    with pytest.raises(ConfigError) as caught:
        generate_spec(
            [("i.avsc", record("Impression", ("user", "string"), ("ts", "long"))), ("a.avsc", action)]
        )
    assert str(caught.value) == (
        "i.avsc: no field was recognised\n"
        "  expected a field that identifies the request, of the same name in the actions\n"
        "  it has user, ts: write freshet.toml by hand, see docs/reference/feature-spec.md"
    )
    with pytest.raises(ConfigError, match="a field with the time of the event"):
        generate_spec([("i.avsc", record("Impression", ("request_id", "string"))), ("a.avsc", action)])
    with pytest.raises(ConfigError, match="two or three schemas"):
        generate_spec([("a.avsc", action)])


def test_given_name_must_be_valid() -> None:
    schemas = example("online-retail", "impressions.avsc", "actions.avsc")

    assert parse_spec(generate_spec(schemas, "shop-2")).name == "shop-2"
    with pytest.raises(ConfigError, match="freshet init: name = 'My Shop'"):
        generate_spec(schemas, "My Shop")


def test_names_are_compared_as_words() -> None:
    assert words_of("user.lastItems") == ("user", "last", "item")
    assert words_of("reqId") == words_of("request_id") == ("request", "id")
    assert words_of("HTTPStatus2xx") == ("http", "status", "2", "xx")


STAMP = {"type": "long", "logicalType": "timestamp-millis"}
DATE = {"type": "int", "logicalType": "date"}
OF_DAY = {"type": "int", "logicalType": "time-millis"}
LOCAL = {"type": "long", "logicalType": "local-timestamp-micros"}


def time_of(*fields: tuple[str, Any]) -> str:
    """Return the time that `freshet init` chooses for events with these fields, which the check accepts."""
    ids = ("request_id", "string"), ("item_id", "string")
    time = checked(
        [(f"{name}.avsc", record(name, *fields, *ids)) for name in ("Slate", "Click")]
    ).events.served.time
    return f"{time.path}:{time.unit}"


@pytest.mark.parametrize(
    ("wanted", "unit"),
    [
        (("ts", "long"), "ms"),
        (("ts", STAMP), "ms"),
        (("served_at", "string"), "iso"),
        (("logged", LOCAL), "us"),
    ],
)
def test_a_moment_is_chosen_before_a_day(wanted: tuple[str, Any], unit: str) -> None:
    others = (("served_date", DATE), ("time", OF_DAY), ("event_date", "string"), ("day_date", "long"))

    for fields in (f for f in permutations((wanted, *others), 3) if wanted in f):
        assert time_of(*fields) == f"{wanted[0]}:{unit}"


@pytest.mark.parametrize(
    ("type_", "unit"), [(DATE, "days"), ("string", "iso"), ("long", "ms"), ("int", "s"), (STAMP, "ms")]
)
def test_a_date_alone_is_the_time_in_its_unit(type_: Any, unit: str) -> None:
    assert time_of(("opens_time", OF_DAY), ("date", type_)) == f"date:{unit}"


def test_a_time_of_day_alone_is_no_time_of_events() -> None:
    with pytest.raises(ConfigError, match="a field with the time of the event"):
        time_of(("time", OF_DAY), ("born", DATE))


names = st.sampled_from(
    [
        "price",
        "user",
        "userId",
        "device",
        "position",
        "title",
        "url",
        "_hidden",
        "x1",
        "country",
        "sum",
        "and",
        "clicks",
        "created_at",
        "value",
        "hour",
        "tags",
    ]
) | st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
NULLABLE = [["null", "long"], ["null", "string"], ["int", "string"]]
types: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["int", "long", "float", "double", "boolean", "string", "bytes", *NULLABLE, STAMP]),
    lambda inner: st.one_of(
        inner.map(lambda t: {"type": "array", "items": t}), inner.map(lambda t: {"type": "map", "values": t})
    ),
    max_leaves=2,
)
some_fields = st.lists(st.tuples(names, types), max_size=6, unique_by=lambda f: f[0])
symbols = st.lists(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True), min_size=1, max_size=4, unique=True
)


def fields_of(extra: list[tuple[str, Any]], *wanted: tuple[str, Any]) -> list[dict[str, Any]]:
    taken = {n for n, _ in wanted}
    return [{"name": n, "type": t} for n, t in [*wanted, *(f for f in extra if f[0] not in taken)]]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(some_fields, some_fields, some_fields, symbols, st.booleans())
def test_generated_spec_passes_the_check(
    context: list[tuple[str, Any]],
    item: list[tuple[str, Any]],
    action: list[tuple[str, Any]],
    kinds: list[str],
    exploded: bool,
) -> None:
    inner = {"type": "record", "name": "I", "fields": fields_of(item, ("item_id", "long"))}
    wanted: list[tuple[str, Any]] = [("request_id", "string"), ("ts", "long")]
    wanted.append(("items", {"type": "array", "items": inner}) if exploded else ("item_id", "long"))
    kind = {"type": "enum", "name": "E", "symbols": kinds}
    served = {"type": "record", "name": "Impression", "fields": fields_of(context, *wanted)}
    acted = fields_of(action, ("request_id", "string"), ("item_id", "long"), ("type", kind), ("ts", "long"))

    checked(
        [
            ("impressions.avsc", parse_schema(served)),
            ("actions.avsc", parse_schema({"type": "record", "name": "Action", "fields": acted})),
        ]
    )
