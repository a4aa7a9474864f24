"""An event is accepted exactly if a trainer can decode its sample, by whichever way it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.schemas import Schemas, check_fit, fields_read
from freshet.errors import ConfigError
from freshet.features import EventExtractor, SampleDecoder, add_frames, hash_text
from freshet.features.writer import write_long
from freshet.joiner.decoder import SpecDecoder
from freshet.joiner.plan import join_plan
from freshet.types import BytesColumn, Records

SPEC = parse_spec("""
name = "checked"
[events]
served = { schema = "s.avsc", key = ["request"], time = "ts:ms", format = "json" }
action = { schema = "a.avsc", key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
[tables]
t = { dim = 8 }
[features]
order = { field = "order", table = "t" }
amount = { field = "amount", dense = "raw" }
kinds = { field = "kinds", table = "t", max = 9 }
flags = { field = "flags", table = "t", max = 9 }
share = { field = "shares.a", dense = "raw" }
""")


def served(symbols: tuple[str, ...] = ("A",), scale: int = 0) -> Record:
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 38}
    fields = {
        "request": "string",
        "ts": "long",
        "order": {**decimal, "scale": scale},
        "amount": decimal,
        "kinds": {"type": "array", "items": {"type": "enum", "name": "Kind", "symbols": list(symbols)}},
        "flags": {"type": "array", "items": "boolean"},
        "shares": {"type": "map", "values": decimal},
        "note": {"type": "array", "items": "boolean"},  # no feature reads it
    }
    return parse_schema(
        {"type": "record", "name": "S", "fields": [{"name": n, "type": t} for n, t in fields.items()]}
    )


WRITTEN, READER = served(("A", "B")), served()
ACTION = parse_schema(
    {"type": "record", "name": "A", "fields": [{"name": n, "type": "string"} for n in ("request", "type")]
     + [{"name": "ts", "type": "long"}]}
)  # fmt: skip


def sized(content: bytes) -> bytes:
    return write_long(len(content)) + content


def blocks(items: list[bytes], written_size: bool) -> bytes:
    if not items:
        return b"\0"
    body = b"".join(items)
    head = write_long(-len(items)) + write_long(len(body)) if written_size else write_long(len(items))
    return head + body + b"\0"


DECIMALS = st.sampled_from([1, 8, 9, 16, 60, 100, 160]).map(lambda n: sized(b"\x11" * n))
FLAGS = st.lists(st.sampled_from([b"\0", b"\1", b"\2"]), max_size=2)


@st.composite
def record(draw: st.DrawFn) -> bytes:
    big = st.booleans()
    shares = [
        sized(key) + draw(DECIMALS) for key in draw(st.lists(st.sampled_from([b"a", b"b"]), max_size=2))
    ]
    return (
        sized(b"r") + write_long(5) + draw(DECIMALS) + draw(DECIMALS)
        + blocks([write_long(draw(st.integers(0, 2))) for _ in range(draw(st.integers(0, 2)))], draw(big))
        + blocks(draw(FLAGS), draw(big)) + blocks(shares, draw(big)) + blocks(draw(FLAGS), draw(big))
    )  # fmt: skip


def test_the_spec_fits() -> None:
    check_fit(SPEC, Schemas(READER, ACTION))


@given(st.lists(record(), max_size=6), st.booleans())
def test_what_the_way_in_takes_a_trainer_can_decode(records: list[bytes], framed: bool) -> None:
    values = BytesColumn.of(records)
    extractor = EventExtractor(
        SPEC.events.served, WRITTEN, reader=READER, checked=fields_read(SPEC, "served")[1]
    )
    events = extractor.extract(add_frames(values, 7) if framed else values, framed=framed)
    decoder = SampleDecoder(SPEC, layout_of(SPEC), lambda _: WRITTEN, READER)
    decoded = decoder.decode(values, 1, np.zeros(len(records), np.int64))
    assert events.bad.tolist() == decoded.bad.tolist()


def test_an_id_of_another_scale_is_refused_at_the_way_in() -> None:
    with pytest.raises(ConfigError, match="an id has one scale"):
        EventExtractor(
            SPEC.events.served, served(scale=2), reader=READER, checked=fields_read(SPEC, "served")[1]
        )


class Fixed:
    def register(self, schema: Any) -> int:
        return 1

    def get(self, schema_id: int, came_s: float | None = None) -> Any:
        return READER


@pytest.mark.parametrize("given_reader", [False, True])
def test_the_joiner_checks_json_events_like_avro(given_reader: bool) -> None:
    readers = {"served": READER} if given_reader else {}
    decoder = SpecDecoder(
        SPEC, join_plan(SPEC, hash_text), Fixed(), {"served": READER}, readers=readers
    )  # fmt: skip
    rest = b'"request": "r", "ts": 5, "amount": 1, "kinds": [], "flags": [], "shares": {}, "note": []'
    text = b'{"order": %d, ' + rest + b"}"
    values = BytesColumn.of([text % (2**63 - 1), text % 2**63])
    at = np.arange(2, dtype=np.int64)
    impressions, refused = decoder.served(Records(at, at, BytesColumn.of([b"", b""]), values, 2))
    assert (len(impressions), refused.rows) == (1, [1]), refused.reasons
    assert "order" in refused.reasons[0]
    assert "64 bits of an id" in refused.reasons[0]
