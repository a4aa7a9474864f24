"""What tests of the gateway share: one on a thread with a log whose appends can be held up, and events."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import httpx
import orjson
import pytest

from freshet.apps.services import gateway_authenticator, gateway_grpc_listener
from freshet.config.avro.schema import to_json
from freshet.config.spec.parse import load_spec
from freshet.gateway.service import codecs_of, run
from freshet.log import EventLog, Writer
from freshet.log.sqlite.event_log import open_url
from freshet.testing.clock import SettableClock
from freshet.testing.waiting import wait_for
from freshet.types import Append, TopicPartition
from tests.integration.serving import FEED, running, schema, settings

SPEC = load_spec(FEED / "freshet.toml")
NOW = 1_700_000_000_000
RANKED, ACTIONS = schema("ranked"), schema("actions")
SCHEMAS = {"served": RANKED, "shown": schema("viewport"), "action": ACTIONS}


def ranked(request: int = 1, ts: Any = NOW, **changes: Any) -> dict[str, Any]:
    event = {
        "request_id": request,
        "ts": ts,
        "user": {"id": 5, "country": "DE", "last_items": [1, 2]},
        "device": "phone",
        "items": [
            {"id": 7, "age_s": 1.5, "ctr_1h": 0.25, "pos": 0},
            {"id": 8, "age_s": 2.5, "ctr_1h": None, "pos": 1},
        ],
        "experiment": {"arm": "a"},
    }
    return {**event, **changes}


def action(request: int = 1, **changes: Any) -> dict[str, Any]:
    event = {
        "eventId": "e1",
        "reqId": request,
        "item": {"id": 7},
        "type": "click",
        "seconds": None,
        "at": "2023-11-14T22:13:20Z",
    }
    return {**event, **changes}


def avro(event: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(to_json(RANKED)), event)
    return out.getvalue()


class Gate:
    """A log whose appends wait for the gate, or fail."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()
        self.error: Exception | None = None

    def writer(self, name: str | None = None) -> Writer:
        inner, gate = self.log.writer(name), self

        class Gated:
            def append(self, appends: Sequence[Append]) -> Sequence[int]:
                gate.begun.set()
                assert gate.open.wait(10)
                if gate.error is not None:
                    raise gate.error
                return inner.append(appends)

            def close(self) -> None:
                assert gate.open.wait(60)  # as a writer of Kafka, which waits for what it is sending
                inner.close()

        return Gated()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


@dataclass
class Running:
    url: str
    log: EventLog
    gate: Gate
    clock: SettableClock
    stop: threading.Event
    ended: threading.Event

    def post(
        self, what: str, content: bytes, kind: str = "application/json", **headers: str
    ) -> httpx.Response:
        headers["content-type"] = kind
        return httpx.post(f"{self.url}/v1/{what}", content=content, headers=headers, timeout=15)

    def send(self, what: str, events: Any) -> httpx.Response:
        return self.post(what, orjson.dumps(events))

    def waiting(self) -> float:
        """Events that wait for the log."""
        found = re.search(
            r"^freshet_gateway_queue_events (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M
        )
        assert found is not None
        return float(found[1])

    def wait_for_more_than(self, events: float) -> None:
        wait_for(lambda: self.waiting() > events)

    def records(self, topic: str) -> list[tuple[int, int, bytes, bytes]]:
        """(partition, offset, key, value) of all records."""
        found = []
        for p in range(self.log.topics()[topic].partitions):
            reader = self.log.reader()
            reader.assign({TopicPartition(topic, p): 0})
            for _, records in reader.poll(100_000, 0):
                for offset, key, value in zip(
                    records.offsets.tolist(), records.keys, records.values, strict=True
                ):
                    found.append((p, offset, key, value))
            reader.close()
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    log = open_url(f"sqlite:{tmp_path}/log")
    with_contexts = []

    def make(**variables: str) -> Running:
        gate, clock, made = Gate(log), SettableClock(NOW), settings(**variables)
        ended = threading.Event()

        def target(stop: threading.Event, ready: Callable[[str], None]) -> None:
            codecs = codecs_of(SPEC, SCHEMAS, log, clock)
            try:
                run(
                    SPEC,
                    gate,
                    codecs,
                    made.gateway,
                    made.common,
                    stop=stop,
                    clock=clock,
                    ready=ready,
                    beside=gateway_grpc_listener(made.gateway, made.common),
                    guard=gateway_authenticator(made.gateway, made.common, clock),
                )
            finally:
                ended.set()

        context = running(target)
        url, stop = context.__enter__()
        with_contexts.append(context)
        return Running(url, log, gate, clock, stop, ended)

    yield make
    for context in with_contexts:
        context.__exit__(None, None, None)
    log.close()


@pytest.fixture
def gateway(start: Callable[..., Running]) -> Running:
    return start()
