"""Avro schemas: parser, errors, fields by path, derived schemas, canonical text."""

import json
from typing import Any

import fastavro
import pytest

from freshet.config.avro.schema import (
    Record,
    canonical,
    field_at,
    parse_schema,
    paths,
    sample_schema,
    served_schema,
    spell,
)
from freshet.errors import ConfigError

FEED: dict[str, Any] = {
    "type": "record",
    "name": "Ranked",
    "namespace": "feed",
    "fields": [
        {"name": "request_id", "type": "string"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {
            "name": "user",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "User",
                    "fields": [
                        {"name": "id", "type": "long"},
                        {"name": "country", "type": ["null", "string"], "default": None},
                        {"name": "last_items", "type": {"type": "array", "items": "long"}},
                        {"name": "stats", "type": {"type": "map", "values": "double"}},
                    ],
                },
            ],
        },
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Item",
                    "fields": [
                        {"name": "id", "type": "string"},
                        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
                        {"name": "price", "type": {"type": "fixed", "name": "Price", "size": 8}},
                    ],
                },
            },
        },
        {"name": "kind", "type": "Kind"},
    ],
}


@pytest.fixture
def feed() -> Record:
    return parse_schema(FEED)


def test_a_schema_written_back_and_parsed_again_is_the_same(feed: Record) -> None:
    assert parse_schema(canonical(feed)) == feed


def test_canonical_form_ignores_docs_aliases_and_spacing(feed: Record) -> None:
    noisy = json.loads(json.dumps(FEED))
    noisy["doc"] = "what was ranked"
    noisy["aliases"] = ["Old"]
    assert canonical(parse_schema(json.dumps(noisy, indent=4))) == canonical(feed)


def test_the_canonical_form_is_read_by_another_avro_library(feed: Record) -> None:
    assert fastavro.parse_schema(json.loads(canonical(feed))) is not None


@pytest.mark.parametrize(
    ("path", "type_", "nullable", "repeated"),
    [
        ("request_id", "string", False, False),
        ("ts", "long (timestamp-millis)", False, False),
        ("user.id", "long", True, False),
        ("user.country", "string", True, False),
        ("user.last_items", "array of long", True, False),
        ("user.stats.clicks", "double", True, False),
        ("items.id", "string", False, True),
        ("items.kind", "enum feed.Kind", False, True),
        ("kind", "enum feed.Kind", False, False),
    ],
)
def test_a_field_is_found_by_its_path(
    feed: Record, path: str, type_: str, nullable: bool, repeated: bool
) -> None:
    found = field_at(feed, path)
    assert (spell(found.type), found.nullable, found.repeated) == (type_, nullable, repeated)


def test_every_path_that_is_listed_is_found(feed: Record) -> None:
    assert "items.price" in paths(feed)
    assert all(field_at(feed, p).path == p for p in paths(feed))


def test_unknown_path_is_refused_with_existing_fields(feed: Record) -> None:
    with pytest.raises(ConfigError, match=r"a field of user: id, country, last_items, stats"):
        field_at(feed, "user.age")
    with pytest.raises(ConfigError, match=r"a record at 'request_id', which is string"):
        field_at(feed, "request_id.x")


def test_the_sample_schema_holds_one_element_in_the_arrays_place(feed: Record) -> None:
    sample = sample_schema(feed, "items")
    assert [f.name for f in sample.fields] == [f.name for f in feed.fields]
    assert not field_at(sample, "items.id").repeated
    assert sample_schema(feed, None) is feed
    assert parse_schema(canonical(sample)) == sample


def test_served_schema_ends_each_impression_with_freshet_served(feed: Record) -> None:
    served = served_schema(feed, "items")
    assert spell(field_at(served, "items.freshet_served.predictions").type) == "array of float"
    assert field_at(served, "items.freshet_served").nullable
    assert served_schema(served, "items") == served
    flat = served_schema(sample_schema(feed, "items"), None)
    assert flat.fields[-1].name == "freshet_served"


def test_element_that_is_used_twice_gets_another_name() -> None:
    tree = json.loads(json.dumps(FEED))
    tree["fields"].append({"name": "best", "type": ["null", "Item"]})
    served = served_schema(parse_schema(tree), "items")
    assert parse_schema(canonical(served)) == served


def test_explode_of_another_type_is_refused(feed: Record) -> None:
    with pytest.raises(ConfigError, match="expected an array"):
        sample_schema(feed, "user")
    with pytest.raises(ConfigError, match="nosuch"):
        sample_schema(feed, "nosuch")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "not JSON"),
        ('"string"', "record"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "strnig"}]}, "strnig"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": ["int", "int"]}]}, "union"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": [["int"]]}]}, "union"),
        ({"type": "record", "name": "R", "fields": [{"name": "a b", "type": "int"}]}, "letters"),
        ({"type": "record", "name": "R", "fields": [{"name": "a"}]}, "a type"),
        ({"type": "record", "fields": []}, "name"),
        ({"type": "record", "name": "R"}, "fields"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "array"}}]}, "items"),
        (
            {
                "type": "record",
                "name": "R",
                "fields": [{"name": "a", "type": {"type": "enum", "name": "E", "symbols": ["A", "A"]}}],
            },
            "each symbol once",
        ),
    ],
)
def test_invalid_schema_is_refused_with_place_and_expectation(schema: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_schema(schema)


def test_schema_nested_too_deeply_is_refused() -> None:
    tree: Any = "int"
    for _ in range(100):
        tree = {"type": "array", "items": tree}
    with pytest.raises(ConfigError, match="levels"):
        parse_schema({"type": "record", "name": "R", "fields": [{"name": "a", "type": tree}]})
