"""`freshet replay files --gateway`: what it says of event times and of refused events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from freshet.errors import ConfigError
from freshet.http.app import App
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, Request, Response, json_response
from tests.fixtures.serving import answering
from tests.unit.cli.verbs import run

SPEC = """
name = "shop"
[events]
served = { schema = "served.avsc", key = ["request_id", "sku"], time = "ts:ms" }
action = { schema = "served.avsc", key = ["request_id", "sku"], time = "ts:ms" }
[labels]
click = { on = "action.sku != ''" }
[tables]
t = { dim = 4 }
[features]
sku = { field = "sku", table = "t" }
[model]
experts = ["wide"]
"""
SCHEMA = {
    "type": "record",
    "name": "Served",
    "fields": [
        {"name": "request_id", "type": "string"},
        {"name": "sku", "type": "string"},
        {"name": "ts", "type": "long"},
    ],
}
T0 = 1_700_000_000_000


@dataclass
class Gateway:
    """Accepts events, except those with the sku `bad`; answers 400 after `most` requests."""

    url: str = ""
    most: int = 1_000
    requests: int = 0

    async def __call__(self, request: Request) -> Response:
        self.requests += 1
        if self.requests > self.most:
            return json_response(400, {"error": {"code": "bad_input", "message": "no more"}})
        events = orjson.loads(request.body)
        refused = [
            {"index": i, "path": "sku", "expected": "long", "found": '"bad"'}
            for i, event in enumerate(events)
            if event["sku"] == "bad"
        ]
        acks = [{"topic": "t", "partition": 0, "offset": i} for i in range(len(events) - len(refused))]
        body = {"accepted": len(acks), "acks": acks, "refused": refused}
        return json_response(422 if refused else 202, body)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    stub = Gateway()
    app = App(CollectorRegistry(), BodyLimits(1_000_000, 20))
    for path in ("/v1/impressions", "/v1/actions"):
        app.route(Endpoint("POST", path, "Stub.", ()), stub)
    with answering(app) as at:
        stub.url = at.url
        yield stub


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "served.avsc").write_text(json.dumps(SCHEMA))
    (tmp_path / "freshet.toml").write_text(SPEC)
    return tmp_path


def event(number: int, sku: str = "s", ts: int | None = None) -> str:
    return json.dumps({"request_id": f"r{number}", "sku": sku, "ts": T0 + number if ts is None else ts})


def replay(place: Path, gateway: Gateway, served: list[str], *more: str) -> Any:
    (place / "served.jsonl").write_text("\n".join([*served, ""]))
    (place / "clicks.jsonl").write_text(event(0, ts=T0 + 10_000) + "\n")
    files = ["--impressions", place / "served.jsonl", "--actions", place / "clicks.jsonl"]
    return run("replay", "files", place / "freshet.toml", *files, "--gateway", gateway.url, *more, catch=True)


def test_odd_event_times_are_reported_after_sending(place: Path, gateway: Gateway) -> None:
    served = [event(0), event(1, ts=T0 + 60_000), event(2)]

    said = replay(place, gateway, served).output
    as_json = json.loads(replay(place, gateway, served, "--json").output)

    assert "sent 4 events" in said
    assert "times: 1 of 3 rows are older than a row before them" in said
    assert as_json["events"] == 4
    assert as_json["times"]["served"]["falling"]["first"].endswith("served.jsonl, line 3")
    assert list(as_json["times"]) == ["served"]


def test_a_refused_event_is_named_by_its_line(place: Path, gateway: Gateway) -> None:
    served = [event(i) for i in range(700)]
    served[610] = event(610, sku="bad")
    served.insert(3, "")  # the line before it counts, too

    error = str(replay(place, gateway, served).exception)

    assert 'served.jsonl, line 612: sku: expected long, found "bad" (1 of 200 refused' in error
    assert "until then the gateway acknowledged 699 events" in error


def test_an_error_says_how_many_events_were_sent_before(place: Path, gateway: Gateway) -> None:
    gateway.most = 1

    error = str(replay(place, gateway, [event(i) for i in range(700)]).exception)

    assert "no more" in error
    assert "until then the gateway acknowledged 500 events" in error


@pytest.mark.parametrize("option", [("--keep", "kept"), ("--lanes", "1")])
def test_an_option_without_effect_is_refused(place: Path, gateway: Gateway, option: tuple[str, str]) -> None:
    error = replay(place, gateway, [event(0)], *option).exception

    assert isinstance(error, ConfigError)
    assert f"expected no {option[0]} beside --gateway" in str(error)
    assert gateway.requests == 0
