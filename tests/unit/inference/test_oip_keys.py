"""Features have the keys of training by rank and by the Open Inference Protocol: lists in arrays of records,
fields of several types.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import orjson
import pytest

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.errors import BadInput
from freshet.features import Decoded, DecodedRequests, JsonTranscoder, RequestDecoder, SampleDecoder
from freshet.inference.oip import parse_infer
from freshet.inference.oip_model import OipModel
from freshet.inference.schemas import request_schema
from freshet.inference.scoring import Scoring
from freshet.testing.clock import SettableClock

NOW_MS = 1_700_000_000_000
SPEC = """
name = "keys"
[events]
served = { key = ["request"], time = "ts:ms" }
action = { key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.request == 'click'" }
[tables]
t = { dim = 4 }
[features]
"""


def record(name: str, **types: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in types.items()]}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


class Model:
    """A spec of features, a schema, and the ways in."""

    def __init__(self, features: str, **types: Any) -> None:
        self.spec: Spec = parse_spec(SPEC + features)
        self.served: Record = parse_schema(record("Event", request="string", ts="long", **types))
        self.request = request_schema(self.spec, self.served)
        scoring = cast(Scoring, None)
        self.oip = OipModel(self.spec, self.served, scoring, clock=SettableClock(NOW_MS), max_rows=10)

    def found(self, decoded: Decoded | DecodedRequests) -> list[Any]:
        """Numbers, and keys of each group and feature."""
        parts: list[Any] = [decoded.dense.tolist()]
        for group in decoded.groups:
            parts += [group.keys[a:b].tolist() for a, b in pairwise(group.feature_starts.tolist())]
        return parts

    def by_event(self, event: dict[str, Any]) -> list[Any]:
        """By training, and by rank, which must be equal."""
        layout, body = layout_of(self.spec), orjson.dumps([{"request": "r", "ts": NOW_MS, **event}])
        made = JsonTranscoder(self.served).body(body)
        assert not made.bad, made.bad
        one = SampleDecoder(self.spec, layout, lambda _: self.served).decode(
            made.records, 1, np.array([NOW_MS], np.int64)
        )
        made = JsonTranscoder(self.request, ignore_unknown=True).body(body)
        assert not made.bad, made.bad
        two = RequestDecoder(self.spec, layout, self.request).decode(made.records, np.array([1], np.uint32))
        assert self.found(one) == self.found(two)
        return self.found(one)

    def by_tensors(self, *tensors: dict[str, Any]) -> list[Any]:
        request = parse_infer(orjson.dumps({"inputs": tensors}), None, self.oip.limits)
        return self.found(self.oip._decoded(request))


def tensor(name: str, datatype: str, value: Any) -> dict[str, Any]:
    shape = [1, len(value)] if isinstance(value, list) else [1]
    return {"name": name, "datatype": datatype, "shape": shape, "data": value if shape[1:] else [value]}


HISTORY = """
cats = { field = "history.cat", table = "t", max = 2 }
items = { field = "history.item", table = "t", max = 5 }
"""
ELEMENT = record("Element", item="long", cat=["string", "null"])
ELEMENT["fields"][1]["default"] = "other"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("cats", [["a", "b"], ["a"], [], None])
def test_lists_in_one_array_may_differ_in_length(order: int, cats: list[str] | None) -> None:
    features = "\n".join(HISTORY.split("\n")[::order])
    model = Model(features, history=["null", array(ELEMENT)])
    texts = [*(cats or []), *[None] * 5][:5]
    event = {"history": [{"item": i, "cat": c} for i, c in enumerate(texts)]}
    listed = {"name": "history.cat", "datatype": "BYTES", "shape": [1, 1], "data": [None]}
    listed = tensor("history.cat", "BYTES", cats) if cats is not None else listed

    found = model.by_tensors(tensor("history.item", "INT64", list(range(5))), listed)

    assert found == model.by_event(event)
    lengths = sorted(len(keys) for keys in found[1:])
    assert lengths == [len(cats or []), 5]


def test_a_field_s_input_is_as_long_as_its_longest_feature() -> None:
    features = """
all = { field = "tags", table = "t", max = 20 }
recent = { field = "tags", table = "t", max = 3 }
"""
    model = Model(features, tags=array("string"))
    tags = list("abcdef")

    assert [one.max for one in model.oip.inputs] == [20]
    assert model.by_tensors(tensor("tags", "BYTES", tags)) == model.by_event({"tags": tags})


VISIT = record(
    "Visit",
    page="string",
    tags=["null", array("string")],
    hits=array(record("Hit", id="long", at=record("At", x="long", y=array("long")))),
)


@pytest.mark.parametrize("visits", [array(VISIT), array(["null", array(VISIT)])])
def test_lists_through_several_arrays_are_their_elements(visits: Any) -> None:
    fields = ["visits.page", "visits.tags", "visits.hits.id", "visits.hits.at.x", "visits.hits.at.y", "grid"]
    features = "\n".join(f'f{i} = {{ field = "{f}", table = "t", max = 9 }}' for i, f in enumerate(fields))
    model = Model(features, visits=visits, grid=array(array("long")))
    hits = [{"id": i, "at": {"x": 10 + i, "y": [20 + i, 30 + i]}} for i in range(3)]
    event: dict[str, Any] = {
        "visits": [
            {"page": "p", "tags": ["a", "b"], "hits": hits[:1]},
            {"page": "q", "tags": [], "hits": hits[1:]},
        ],
        "grid": [[1, 2], [], [3]],
    }
    if visits["items"] is not VISIT:
        event["visits"] = [event["visits"]]

    found = model.by_tensors(
        tensor("visits.page", "BYTES", ["p", "q"]),
        tensor("visits.tags", "BYTES", ["a", "b"]),
        tensor("visits.hits.id", "INT64", [0, 1, 2]),
        tensor("visits.hits.at.x", "INT64", [10, 11, 12]),
        tensor("visits.hits.at.y", "INT64", [20, 30, 21, 31, 22, 32]),
        tensor("grid", "INT64", [1, 2, 3]),
    )

    assert found == model.by_event(event)


UNIONS: list[tuple[list[Any], str, list[tuple[str, Any]]]] = [
    (["null", "long", "string"], "BYTES", [("INT64", 7), ("UINT8", 7), ("BYTES", "7"), ("BYTES", "é")]),
    (["string", "int"], "BYTES", [("INT32", -1), ("BYTES", "")]),
    (["null", "int", "long"], "INT64", [("INT64", 2**53 + 1), ("INT64", 7)]),
    (["null", "boolean", "long"], "INT64", [("BOOL", True), ("INT64", 1)]),
    (["boolean", "string"], "BYTES", [("BOOL", False), ("BYTES", "false")]),
    (["null", "bytes", "long"], "BYTES", [("INT64", 7), ("BYTES", "a")]),
]
NUMBERS: list[tuple[list[Any], str, list[tuple[str, Any]]]] = [
    (["null", "int", "double"], "FP64", [("FP64", 0.5), ("FP64", 3.0), ("FP32", 0.25), ("INT64", 3)]),
    (["float", "long"], "FP64", [("FP64", 0.5), ("INT64", 3)]),
    (["null", "float", "double"], "FP64", [("FP64", 0.1)]),
    (["boolean", "double"], "FP64", [("FP64", 0.1), ("BOOL", True)]),
]


@pytest.mark.parametrize("way", ['table = "t"', 'dense = "raw"'])
def test_a_field_of_several_types_takes_each_of_them(way: str) -> None:
    for types, datatype, sent in UNIONS if "table" in way else NUMBERS:
        model = Model(f'f = {{ field = "f", {way} }}', f=types)
        (described,) = (one for one in model.oip.inputs if one.name == "f")

        assert described.datatype == datatype, types
        for by, value in sent:
            assert model.by_tensors(tensor("f", by, value)) == model.by_event({"f": value}), (
                types,
                by,
                value,
            )


def test_a_list_of_several_types_takes_each_of_them() -> None:
    model = Model('f = { field = "f", table = "t", max = 9 }', f=array(["long", "string"]))

    for datatype, values in (("INT64", [7, 8]), ("BYTES", ["7", "a"])):
        assert model.by_tensors(tensor("f", datatype, values)) == model.by_event({"f": values})


def test_an_error_names_each_datatype_that_is_taken() -> None:
    model = Model('f = { field = "f", table = "t" }', f=["long", "string"])

    with pytest.raises(BadInput, match="input 'f': expected BYTES or INT64, found FP64"):
        model.by_tensors(tensor("f", "FP64", 7.0))
