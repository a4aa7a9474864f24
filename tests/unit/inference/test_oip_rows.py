"""Rows of the Open Inference Protocol are read as events are: times, keys of maps, decimals. Versions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.errors import BadInput
from freshet.http.app import App
from freshet.http.authenticator import Principal
from freshet.http.messages import HttpError, Request
from freshet.inference.oip import InferRequest, Tensor, parse_infer
from freshet.inference.oip_grpc import add_oip
from freshet.inference.oip_http import INFER, OipRoutes
from freshet.inference.oip_model import OipModel
from freshet.inference.pipeline import Pipeline, Scored
from freshet.inference.requests import events_of
from freshet.inference.scoring import Scoring
from freshet.rpc.public_server import OIP, PublicServer, messages
from freshet.testing.clock import SettableClock
from tests.fixtures.effort import examples

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
LATEST_MS = 253_402_300_799_999  # the end of the year 9999
TICKS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "days": 86_400 * 10**9}
PLACES = [(path, explode) for path in ("ts", "meta.ts", "times.ts") for explode in (True, False)]
EVENTS = """
name = "shop"
[events]
served = { explode = "items", key = ["request_id", "items.id"], time = "TIME" }
action = { key = ["request_id", "item"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
[tables]
all = { dim = 4 }
[features]
item = { field = "items.id", table = "all" }
"""


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


def served(items: dict[str, Any], **fields: Any) -> Record:
    elements = {"type": "array", "items": record("Item", id="long", **items)}
    schema = parse_schema(record("Served", request_id="string", **fields, items=elements))
    assert isinstance(schema, Record)
    return schema


def model_of(spec: Spec, schema: Record, scoring: object = None) -> OipModel:
    return OipModel(spec, schema, cast(Scoring, scoring), clock=SettableClock(NOW_MS), max_rows=10)


def decode(model: OipModel, *tensors: Tensor) -> Any:
    return model._decoded(InferRequest(None, {one.name: one for one in tensors}, None, False, 0))


def decode_json(model: OipModel, *inputs: dict[str, Any]) -> Any:
    return model._decoded(parse_infer(orjson.dumps({"inputs": inputs}), None, model.limits))


def data(name: str, datatype: str, *values: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(values)], "data": values}


def keys(decoded: Any) -> list[list[int]]:
    return [group.keys.tolist() for group in decoded.groups]


class Timed:
    """One event, decoded by `/v1/rank` and by the protocol; a feature reads the time's own field.

    Without `explode` a candidate is the event, so the time is the candidate's.
    """

    def __init__(self, path: str, unit: str, type_: str = "long", *, explode: bool = True) -> None:
        text = EVENTS.replace("TIME", f"{path}:{unit}") + 'hour = { time = "hour_of_week", table = "all" }\n'
        text += f'at = {{ field = "{path}", table = "all" }}\n'
        if not explode:
            text = text.replace('explode = "items", ', "").replace("items.id", "id")
        self.outer, _, self.name = path.rpartition(".")
        types: dict[str, Any] = {
            "": {"ts": type_},
            "meta": {"meta": record("Meta", ts=type_)},
            "times": {"times": {"type": "map", "values": type_}},
        }
        schema = (
            served({}, **types[self.outer])
            if explode
            else parse_schema(record("Served", request_id="string", id="long", **types[self.outer]))
        )
        assert isinstance(schema, Record)
        self.path, self.id, self.spec = path, "items.id" if explode else "id", parse_spec(text)
        self.rank, self.model = Pipeline(self.spec, schema), model_of(self.spec, schema)
        self.datatype = {"long": "INT64", "double": "FP64", "string": "BYTES"}[type_]

    def by_rank(self, time: Any) -> list[list[int]]:
        timed = {self.outer: {self.name: time}} if self.outer else {self.name: time}
        whole, one = (timed, {}) if self.id == "items.id" else ({}, timed)
        events = events_of(self.spec, {"request_id": "r", **whole}, [{"id": 7, **one}])
        return keys(self.rank.request(self.rank.encoded(events, 1)))

    def by_protocol(self, time: Any, *more: dict[str, Any]) -> list[list[int]]:
        return self.without_time(data(self.path, self.datatype, time), *more)

    def without_time(self, *more: dict[str, Any]) -> list[list[int]]:
        return keys(decode_json(self.model, data(self.id, "INT64", 7), *more))


@pytest.mark.parametrize(("path", "explode"), PLACES)
def test_a_time_has_the_keys_of_a_rank_request(path: str, explode: bool) -> None:
    timed = Timed(path, "ms", explode=explode)
    times = [NOW_MS - 5 * HOUR_MS, NOW_MS, 0, -1, LATEST_MS]

    assert [timed.by_protocol(t) for t in times] == [timed.by_rank(t) for t in times]
    assert timed.by_protocol(times[0]) != timed.by_protocol(times[1])


@pytest.mark.parametrize(("path", "explode"), PLACES)
def test_a_row_without_a_time_has_that_of_now(path: str, explode: bool) -> None:
    timed = Timed(path, "ms", explode=explode)
    now = timed.by_rank(NOW_MS)

    assert timed.without_time() == now
    assert timed.by_protocol(None) == now
    assert timed.by_protocol(1, data(f"{path}.null", "BOOL", True)) == now


def test_a_time_that_no_feature_reads_is_no_input() -> None:
    spec = parse_spec(EVENTS.replace("TIME", "meta.ts:ms"))
    model = model_of(spec, served({}, meta=record("Meta", ts="long")))

    assert [one.name for one in model.inputs] == ["items.id"]
    assert decode_json(model, data("items.id", "INT64", 1, 2)).size == 2


near_the_limits = st.tuples(
    st.sampled_from([LATEST_MS, -LATEST_MS, 0, NOW_MS]), st.sampled_from(list(TICKS_NS.values()))
).flatmap(lambda at: st.integers(-2_000, 2_000).map(lambda n: at[0] * 10**6 // at[1] + n))
whole_times = st.one_of(
    st.integers(-(2**63), 2**63 - 1), near_the_limits.filter(lambda t: -(2**63) <= t < 2**63)
)
float_times = st.one_of(st.floats(allow_nan=False, allow_infinity=False), near_the_limits.map(float))
TIMED = {
    (unit, type_): Timed("meta.ts", unit, type_)
    for units, types in ((TICKS_NS, ("long", "double")), (("iso",), ("string",)))
    for unit in units
    for type_ in types
}


def outcome(read: Callable[[Any], list[list[int]]], time: Any) -> list[list[int]] | None:
    """Keys, or None if the time is refused."""
    try:
        return read(time)
    except BadInput:
        return None


@settings(max_examples=examples(500), deadline=None)
@given(st.data())
def test_any_time_is_bad_input_or_read_as_an_event_s(drawn: st.DataObject) -> None:
    unit, type_ = drawn.draw(st.sampled_from(list(TIMED)))
    texts = st.one_of(st.text(), st.datetimes().map(str))
    kinds = {"long": whole_times, "double": float_times, "string": texts}
    time: Any = drawn.draw(kinds[type_])

    timed = TIMED[unit, type_]
    found = outcome(timed.by_protocol, time)

    assert found == outcome(timed.by_rank, time)
    if type_ == "long":
        assert (found is None) == (abs(time * TICKS_NS[unit] // 10**6) > LATEST_MS)


@pytest.mark.parametrize("unit", list(TICKS_NS))
def test_a_time_beyond_the_year_9999_is_refused_by_name(unit: str) -> None:
    after = (LATEST_MS + 1) * 10**6 // TICKS_NS[unit] + 1
    after = min(after, 2**63 - 1) if unit != "ns" else 2**63 - 1
    timed = Timed("meta.ts", unit)
    if unit == "ns":
        assert timed.by_protocol(after)  # 64 bits end in 2262
        return

    with pytest.raises(BadInput, match=f"input 'meta.ts': expected a time .{unit}. .*9999, found {after}"):
        timed.by_protocol(after)


# --- maps


def mapped() -> OipModel:
    """A model that reads values of maps: a text, a list, a field of a record, and lists of records."""
    array = {"type": "array", "items": record("Element", x="long", m={"type": "map", "values": "long"})}
    schema = served(
        {},
        ts="long",
        experiment={"type": "map", "values": ["null", "string"]},
        lists={"type": "map", "values": {"type": "array", "items": "long"}},
        records={"type": "map", "values": record("Inner", y="string")},
        arrays={"type": "map", "values": array},
    )
    single, many = ["experiment.a", "experiment.b", "records.k.y"], ["lists.k", "arrays.k.x", "arrays.k.m.z"]
    more = "".join(f'f{i} = {{ field = "{path}", table = "all" }}\n' for i, path in enumerate(single))
    more += "".join(f'l{i} = {{ field = "{path}", table = "all", max = 2 }}\n' for i, path in enumerate(many))
    return model_of(parse_spec(EVENTS.replace("TIME", "ts:ms") + more), schema)


@pytest.mark.parametrize("path", ["experiment.a", "records.k.y"])
def test_a_null_of_a_map_is_a_key_that_is_missing(path: str) -> None:
    model, ids = mapped(), data("items.id", "INT64", 1, 2)
    full = decode_json(model, ids, data(path, "BYTES", "x", "x"))
    feature = next(i for i, f in enumerate(model.spec.features) if f.field == path)
    first = full.groups[0].feature_starts[feature]
    companion = data(f"{path}.null", "BOOL", False, True)

    for one_null in (
        decode_json(model, ids, data(path, "BYTES", "x", None)),
        decode_json(model, ids, data(path, "BYTES", "x", "y"), companion),
    ):
        found, expected = one_null.groups[0].keys, full.groups[0].keys.copy()
        expected[first + 1] = 0
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("path", ["lists.k", "arrays.k.x", "arrays.k.m.z"])
def test_a_null_list_of_a_map_is_a_key_that_is_missing(path: str) -> None:
    model = mapped()
    ids = data("items.id", "INT64", 1, 2)
    nested = {"name": path, "datatype": "INT64", "shape": [2, 2], "data": [[1, 2], None]}
    ends = next(i for i, f in enumerate(model.spec.features) if f.field == path)

    found = decode_json(model, ids, nested)

    assert found.groups[0].list_ends[ends].tolist() == [2, 2]


# --- decimals


def priced(scale: int) -> OipModel:
    price = {"type": "bytes", "logicalType": "decimal", "precision": 15, "scale": scale}
    more = 'price = { field = "items.price", table = "all" }\n'
    more += 'prices = { field = "items.prices", table = "all", max = 3 }\n'
    prices = {"type": "array", "items": price}
    spec = parse_spec(EVENTS.replace("TIME", "ts:ms") + more)
    return model_of(spec, served({"price": price, "prices": prices}, ts="long"))


def floats(name: str, datatype: str, values: Any) -> Tensor:
    """A float tensor as it arrives: BF16 are float32 whose lower half is zero."""
    array = np.array(values, {"FP16": np.float16, "FP64": np.float64}.get(datatype, np.float32))
    if datatype == "BF16":
        array = (array.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return Tensor(name, datatype, array)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32"])
@pytest.mark.parametrize("scale", [2, 9])
def test_a_narrow_float_is_the_decimal_that_was_meant(datatype: str, scale: int) -> None:
    model, values = priced(scale), [0.1, 0.25, 7.0, -1.5, 0.0, np.nan]
    lists = [values[:3], [*values[3:5], 2.5]]

    wide = decode(model, floats("items.price", "FP64", values))
    assert keys(decode(model, floats("items.price", datatype, values))) == keys(wide)
    wide = decode(model, floats("items.prices", "FP64", lists))
    assert keys(decode(model, floats("items.prices", datatype, lists))) == keys(wide)


def test_whole_numbers_of_narrow_floats_are_exact() -> None:
    whole = [4_112.0, 4_108.0, 65_216.0, 0.0]

    wide = keys(decode(PRICED, floats("items.price", "FP64", whole)))
    assert [keys(decode(PRICED, floats("items.price", kind, whole))) for kind in ("FP16", "FP32")] == [
        wide,
        wide,
    ]


@given(st.integers(-999_999, 999_999))
def test_six_digits_survive_fp32(cents: int) -> None:
    narrow, wide = (floats("items.price", kind, [cents / 100]) for kind in ("FP32", "FP64"))

    assert keys(decode(PRICED, narrow)) == keys(decode(PRICED, wide))


PRICED = priced(2)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_a_float_of_more_digits_than_the_decimal_is_refused(datatype: str) -> None:
    with pytest.raises(BadInput, match="2 of them behind the point"):
        decode(PRICED, floats("items.price", datatype, [0.123]))


# --- versions


@dataclass
class Swapped:
    """Serves version 7, and 8 once a request waits; takes the routes of HTTP and gRPC."""

    number: int = 7
    live: Any = None
    queue: Any = field(default_factory=lambda: SimpleNamespace(refuse_if_late=lambda: None))
    counts: Any = field(default_factory=lambda: SimpleNamespace(scored=lambda scored: None))
    calls: dict[str, Callable[..., Awaitable[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live = self

    def version(self) -> Any:
        return SimpleNamespace(manifest=SimpleNamespace(number=self.number))

    async def score_samples(self, count: int, *_: object) -> tuple[Scored, Any]:
        self.number = 8
        return Scored(np.zeros((count, 1), np.float32), np.zeros(count, np.float32), {}), self.version()

    def form_errors(self, *_: object) -> None: ...

    def route(self, endpoint: Any, handler: Any) -> None:
        self.calls[endpoint.path] = handler

    def add_call(self, _: str, method: str, handler: Any, *, scope: str) -> None:
        self.calls[method] = handler

    def add_open_call(self, *_: object) -> None: ...


async def over_http(model: OipModel, swapped: Swapped, version: str) -> str:
    OipRoutes(model, 1 << 20).add_to(cast(App, swapped))
    path = INFER.path.replace("{model}", "{model}/versions/{version}") if version else INFER.path
    body = orjson.dumps({"inputs": [data("items.id", "INT64", 1)]})
    arguments = (model.spec.name, version) if version else (model.spec.name,)
    response = await swapped.calls[path](Request("POST", path, "", {}, body, arguments))
    return str(orjson.loads(response.body)["model_version"])


async def over_grpc(model: OipModel, swapped: Swapped, version: str) -> str:
    m = messages(OIP)
    add_oip(cast(PublicServer, swapped), model)
    message = m.ModelInferRequest(model_name=model.spec.name, model_version=version)
    message.inputs.add(name="items.id", datatype="INT64", shape=[1]).contents.int64_contents.append(1)
    body = await swapped.calls["ModelInfer"](message.SerializeToString(), cast(Principal, None))
    return str(m.ModelInferResponse.FromString(body).model_version)


@pytest.mark.parametrize("send", [over_http, over_grpc])
def test_a_version_that_is_swapped_meanwhile_is_refused(send: Any) -> None:
    swapped = Swapped()
    model = model_of(parse_spec(EVENTS.replace("TIME", "ts:ms")), served({}, ts="long"), swapped)

    with pytest.raises(HttpError) as refused:
        asyncio.run(send(model, swapped, "7"))
    assert (refused.value.status, refused.value.content["code"]) == (404, "no_version")
    assert (refused.value.content["expected"], refused.value.content["found"]) == ("8", "7")

    assert asyncio.run(send(model, swapped, "8")) == "8"
    swapped.number = 7
    assert asyncio.run(send(model, swapped, "")) == "8"
