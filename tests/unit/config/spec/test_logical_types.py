"""An edit of a logical type that changes keys or numbers needs a new model."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.identity import diff, identity_hash
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.schemas import Schemas, check_fit
from freshet.errors import ConfigError
from freshet.features import SampleDecoder
from freshet.types import BytesColumn

NUMBER, ID = 'dense = "raw"', 'table = "t"'
TEXT = """
name = "logical"
[events]
served = { schema = "s.avsc", key = ["request"], time = "ts:ms" }
action = { schema = "a.avsc", key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
[tables]
t = { dim = 8 }
[features]
other = { field = "request", table = "t" }
"""
UNITS = ("millis", "micros", "nanos")
DECIMALS = [{"logicalType": "decimal", "precision": 12, "scale": scale} for scale in (0, 2, 3)]
LONGS = [f"{family}-{unit}" for family in ("time", "timestamp", "local-timestamp") for unit in UNITS]
BASES: list[tuple[dict[str, Any], list[dict[str, Any]], bytes]] = [
    ({"type": "long"}, [{}, *({"logicalType": name} for name in LONGS)], b"\xd0\x8c\x01"),
    ({"type": "int"}, [{}, {"logicalType": "date"}, {"logicalType": "time-millis"}], b"\xd0\x8c\x01"),
    ({"type": "bytes"}, [{}, *DECIMALS], b"\x04\x05\xdc"),
    (
        {"type": "fixed", "name": "F", "size": 16},
        [{}, {"logicalType": "uuid"}, *DECIMALS],
        bytes(14) + b"\x05\xdc",
    ),
]


def record(**fields: Any) -> Record:
    made = [{"name": n, "type": t} for n, t in {"request": "string", "ts": "long", **fields}.items()]
    return parse_schema({"type": "record", "name": "R", "fields": made})


def schemas(type_: Any) -> Schemas:
    return Schemas(record(value=type_), record(type="string"))


def read(spec: Any, written: Record, reader: Record, value: bytes) -> tuple[Any, ...]:
    decoder = SampleDecoder(spec, layout_of(spec), lambda _: written, reader)
    try:
        found = decoder.decode(BytesColumn.of([b"\x02r\x00" + value]), 1, np.zeros(1, np.int64))
    except ConfigError as error:
        return (str(error),)
    return found.dense.tolist(), [g.keys.tolist() for g in found.groups], list(found.why)


@pytest.mark.parametrize(("base", "logical", "value"), BASES)
@pytest.mark.parametrize("use", [NUMBER, ID])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: ["null", t]], ids=["plain", "nullable"])
def test_what_reads_otherwise_is_another_model(
    base: dict[str, Any], logical: list[dict[str, Any]], value: bytes, use: str, wrap: Any
) -> None:
    spec = parse_spec(f'{TEXT}value = {{ field = "value", {use} }}\n')
    value = value if wrap(1) == 1 else b"\x02" + value
    differing = 0
    for old, new in combinations(logical, 2):
        before, after = (schemas(wrap({**base, **more})) for more in (old, new))
        try:
            check_fit(spec, before)
            check_fit(spec, after)
        except ConfigError:
            continue
        writers = [record(value=wrap({**base, **more})) for more in logical]
        if any(read(spec, w, before.served, value) != read(spec, w, after.served, value) for w in writers):
            differing += 1
            refused = diff(spec, spec, before, after)
            assert refused or identity_hash(spec, before) != identity_hash(spec, after), (old, new)
    assert differing or base["type"] == "int", "a date and a time of day are never converted"


def test_equal_units_and_the_events_time_are_no_edit() -> None:
    spec = parse_spec(f'{TEXT}value = {{ field = "value", dense = "raw" }}\n')
    utc, local = (schemas({"type": "long", "logicalType": f"{f}timestamp-millis"}) for f in ("", "local-"))
    named = Schemas(record(value="long", ts={"type": "long", "logicalType": "timestamp-millis"}), utc.action)
    assert not diff(spec, spec, utc, local)
    assert not diff(spec, spec, schemas("long"), named)
