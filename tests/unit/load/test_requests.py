"""Random requests fit their specs: the gateway accepts every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import parse_schema
from freshet.config.spec import load_spec
from freshet.config.spec.schemas import load_schemas, streams_of
from freshet.errors import BadInput, ConfigError
from freshet.gateway.codec import StreamCodec
from freshet.load.random_events import Draws, keys_of, record_generator
from freshet.load.requests import Events, Ranks, Shown, compared_by, read_requests
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.sqlite.event_log import open_url
from freshet.log.topics import ensure_topics
from freshet.testing.clock import SettableClock

ROOT = Path(__file__).parents[3]
SPECS = sorted(
    path
    for folder in ("examples", "services/freshet", "tests/system")
    for path in (ROOT / folder).rglob("freshet.toml")
)
NOW = 1_700_000_000_000


def events_of(spec_file: Path, **how: Any) -> Events:
    spec = load_spec(spec_file)
    draws = Draws(3, keys_of(spec, {}, 1.0))
    given_ = {"items": 4, "actions": 0.4, "batch": 2, **how}
    return Events(spec, load_schemas(spec), draws, SettableClock(NOW), **given_)


@pytest.mark.parametrize("spec_file", SPECS, ids=lambda path: path.parent.name)
def test_the_gateway_takes_every_event(spec_file: Path, tmp_path: Path) -> None:
    spec = load_spec(spec_file)
    schemas, source = load_schemas(spec), events_of(spec_file)
    log = open_url(f"sqlite:{tmp_path}/log")
    ensure_topics(log, spec)
    registry = SchemaRegistry(log)
    codecs = {
        stream.role: StreamCodec(spec, stream, schemas.of(stream.role), registry)
        for stream in streams_of(spec)
        if not stream.external
    }
    roles = {"/v1/impressions": "served", "/v1/shown": "shown", "/v1/actions": "action"}
    asked: Counter[str] = Counter()
    ids: set[bytes] = set()

    for _ in range(300):
        request = source()
        role = roles[request.path]
        if role in codecs:
            checked = codecs[role].from_json(request.body, max_events=1_000)
            assert list(checked.bad) == []
            assert len(checked.good) == request.events
            if role == "served":
                ids.update(one.key for one in checked.good)
        asked[role] += request.events
        request.answered(b"")

    log.close()
    assert set(asked) == {stream.role for stream in streams_of(spec)}
    assert asked["action"] / asked.total() == pytest.approx(0.4, abs=0.15)
    if "served" in codecs:
        assert len(ids) == asked["served"], "each impression has a request id of its own"


def test_actions_follow_acknowledged_impressions_and_fit_labels() -> None:
    spec_file = ROOT / "tests" / "system" / "ledger" / "freshet.toml"
    source = events_of(spec_file, batch=1)
    shown: set[tuple[str, str]] = set()
    kinds: Counter[str] = Counter()

    for number in range(2_000):
        request = source()
        event = orjson.loads(request.body)
        if request.path == "/v1/actions":
            assert (event["request_id"], event["item"]) in shown
            kinds[event["type"]] += 1
        elif number % 2:  # the others are not acknowledged
            shown |= {(event["request_id"], item["item"]) for item in event["items"]}
            request.answered(b"")

    assert compared_by(load_spec(spec_file)) == {"type": ("click", "buy")}
    assert set(kinds) == {"click", "buy"}


def test_actions_come_while_the_shortest_window_is_open() -> None:
    spec_file = ROOT / "tests" / "system" / "ledger" / "freshet.toml"
    spec, clock = load_spec(spec_file), SettableClock(NOW)
    source = Events(spec, load_schemas(spec), Draws(3), clock, items=2, actions=0.5, batch=1)
    served = {}
    ages = []

    for _ in range(2_000):
        request = source()
        event = orjson.loads(request.body)
        if request.path == "/v1/impressions":
            served[event["request_id"]] = event["ts"]
        else:
            ages.append(event["ts"] - served[event["request_id"]])
        request.answered(b"")
        clock.advance(0.01)

    assert 1_000 < max(ages) <= 2_000 * 0.8, "the window of a click is 2 s"


def test_ids_are_distributed_by_zipfs_law_over_the_stated_number() -> None:
    spec_file = ROOT / "tests" / "system" / "ledger" / "freshet.toml"
    spec = load_spec(spec_file)
    draws = Draws(1, keys_of(spec, {"user": 10}, 1.0))
    make = record_generator(load_schemas(spec).served, draws)

    users = Counter(make()["user"] for _ in range(20_000))

    assert set(users) == {f"user-{i}" for i in range(10)}
    harmonic = sum(1 / i for i in range(1, 11))
    for i in (1, 2, 5):
        assert users[f"user-{i - 1}"] / 20_000 == pytest.approx(1 / i / harmonic, rel=0.1)


def test_key_space_of_unknown_field_is_refused() -> None:
    spec = load_spec(ROOT / "tests" / "system" / "ledger" / "freshet.toml")

    with pytest.raises(ConfigError, match=r"fields with rows: user, items\.item"):
        keys_of(spec, {"usr": 10}, 1.0)


def test_rank_request_has_distinct_candidates_and_is_remembered() -> None:
    spec = load_spec(ROOT / "services/freshet/demo/site/freshet.toml")
    shown: list[Shown] = []
    draws, clock = Draws(1, keys_of(spec, {}, 0.0)), SettableClock(NOW)
    ranks = Ranks(
        spec, load_schemas(spec), draws, clock, candidates=20, k=5, dry_run=False, shown=shown.append
    )

    request = ranks()
    body = orjson.loads(request.body)
    request.answered(orjson.dumps({"request_id": "r1", "items": [{"index": 3}, {"index": 0}]}))

    assert set(body) == {"context", "candidates", "k"}
    assert "ts" not in body["context"], "the server knows the time, and makes the request's id"
    items = [candidate["item"] for candidate in body["candidates"]]
    assert len(set(items)) == 20
    assert shown == [Shown("r1", [(items[3],), (items[0],)], NOW)]


def test_rankings_outside_served_log_get_no_actions() -> None:
    spec = load_spec(ROOT / "services/freshet/demo/site/freshet.toml")
    shown: list[Shown] = []
    draws, clock = Draws(1, keys_of(spec, {}, 0.0)), SettableClock(NOW)
    ranks = Ranks(
        spec, load_schemas(spec), draws, clock, candidates=2, k=None, dry_run=True, shown=shown.append
    )

    request = ranks()
    request.answered(orjson.dumps({"request_id": "r1", "items": [{"index": 0}]}))

    assert orjson.loads(request.body)["dry_run"] is True
    assert shown == []


EVERY_TYPE = {
    "type": "record",
    "name": "all",
    "fields": [
        {"name": "n", "type": "null"},
        {"name": "b", "type": "boolean"},
        {"name": "i", "type": "int"},
        {"name": "l", "type": "long"},
        {"name": "f", "type": "float"},
        {"name": "d", "type": "double"},
        {"name": "y", "type": "bytes"},
        {"name": "s", "type": "string"},
        {"name": "x", "type": {"type": "fixed", "name": "six", "size": 6}},
        {"name": "e", "type": {"type": "enum", "name": "colour", "symbols": ["red", "blue"]}},
        {"name": "a", "type": {"type": "array", "items": ["null", "string"]}},
        {"name": "m", "type": {"type": "map", "values": "double"}},
        {"name": "u", "type": ["null", "long"]},
        {"name": "r", "type": {"type": "record", "name": "in", "fields": [{"name": "z", "type": "int"}]}},
    ],
}


@given(st.integers(0, 1 << 30))
def test_every_type_of_avro_gets_a_value_that_is_one(seed: int) -> None:
    made: Mapping[str, Any] = record_generator(parse_schema(EVERY_TYPE), Draws(seed))()

    assert orjson.loads(orjson.dumps(made)) == made
    assert made["n"] is None
    assert isinstance(made["b"], bool)
    assert 0 <= made["i"] < 1 << 31
    assert isinstance(made["l"], int)
    assert isinstance(made["f"], float)
    assert isinstance(made["d"], float)
    assert len(made["y"].encode("latin-1")) == 8
    assert isinstance(made["s"], str)
    assert len(made["x"].encode("latin-1")) == 6
    assert made["e"] in ("red", "blue")
    assert all(a is None or isinstance(a, str) for a in made["a"])
    assert all(isinstance(v, float) for v in made["m"].values())
    assert made["u"] is None or isinstance(made["u"], int)
    assert set(made["r"]) == {"z"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found none"),
        ("{", "line 1: expected a JSON object"),
        ('{"candidates": []}\n[1]', "line 2: expected"),
        ('{"context": {}}', "line 1: expected"),
    ],
)
def test_file_of_rank_requests_is_checked_first(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ranks.jsonl"
    file.write_text(text)

    with pytest.raises(BadInput, match=message):
        read_requests(file)


def test_rank_requests_of_file_repeat_in_order(tmp_path: Path) -> None:
    file = tmp_path / "ranks.jsonl"
    file.write_text('{"candidates": [1]}\n\n{"candidates": [2]}\n')

    source = read_requests(file)

    assert [orjson.loads(source().body)["candidates"] for _ in range(3)] == [[1], [2], [1]]
