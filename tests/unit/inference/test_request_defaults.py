"""What a client leaves out is filled in, what it sent stays, and its own objects are left as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.parse import parse_spec
from freshet.errors import BadInput
from freshet.inference.requests import Filling

NOW_MS = 1_700_000_000_123


def filling(id_type: str = "string") -> Filling:
    spec = parse_spec("""
name = "shop"
[events]
served = { explode = "items", key = ["meta.request", "items.id"], time = "meta.at:ms" }
action = { key = ["request", "item"], time = "at:ms" }
[labels]
buy = { on = "action.kind == 'buy'" }
[tables]
all = { dim = 4 }
[features]
item = { field = "items.id", table = "all" }
""")
    meta = record("Meta", request=id_type, at=["null", "long"])
    items = {"type": "array", "items": record("Item", id="long")}
    return Filling.of(spec.events.served, parse_schema(record("Served", meta=meta, items=items)))


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


def test_id_and_time_are_filled_in_where_they_lack() -> None:
    context = filling().filled({"meta": {"country": "AT"}}, None, NOW_MS)

    assert context["meta"]["country"] == "AT"
    assert context["meta"]["at"] == NOW_MS
    assert len(context["meta"]["request"]) == 32


def test_generated_ids_differ_and_fit_the_schema() -> None:
    made = [filling("long").filled({}, None, NOW_MS)["meta"]["request"] for _ in range(100)]

    assert len(set(made)) == 100
    assert all(type(n) is int and 0 <= n < 1 << 53 for n in made)


def test_what_the_client_sent_stays() -> None:
    context = {"meta": {"request": "mine", "at": 5}}

    assert filling().filled(context, "mine", NOW_MS) == context
    assert filling().filled({}, "mine", NOW_MS)["meta"]["request"] == "mine"


def test_two_different_ids_are_refused_with_both() -> None:
    with pytest.raises(BadInput, match="'mine'; found 'other'"):
        filling().filled({"meta": {"request": "mine"}}, "other", NOW_MS)


def test_the_clients_objects_are_left_as_they_are() -> None:
    context: dict[str, Any] = {"meta": {"country": "AT"}}
    before = copy.deepcopy(context)

    assert filling().filled(context, None, NOW_MS) != before
    assert context == before


def test_a_whole_id_with_a_fraction_of_zero_is_logged_without_it() -> None:
    """The log's key of an action has none either."""
    found = filling("long").filled({"meta": {"request": 5.0}}, None, NOW_MS)["meta"]["request"]
    assert (found, type(found)) == (5, int)


@pytest.mark.parametrize(
    ("context", "request_id"), [({}, ""), ({"meta": {"request": ""}}, None), ({"meta": {"request": ""}}, "")]
)
def test_an_empty_id_is_refused(context: dict[str, Any], request_id: str | None) -> None:
    with pytest.raises(BadInput, match=r'expected an id that no other request has.*found ""'):
        filling().filled(context, request_id, NOW_MS)
