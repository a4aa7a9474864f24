"""The gateway over real sockets and a real log: what is acknowledged can be joined."""

from __future__ import annotations

import base64
import io
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as quick
from hypothesis import strategies as st
from structlog.testing import capture_logs

from freshet.cli.wiring import gateway_door, gateway_guard
from freshet.client import Client, EventsRefused
from freshet.errors import ConfigError, Unavailable
from freshet.features import EventExtractor
from freshet.gateway.api import AVRO, AVRO_BATCH, AVRO_RAW
from freshet.gateway.service import codecs_of, run
from freshet.runtime.lifecycle import KILL_AFTER_S
from freshet.seams.eventlog import EventLog, Writer
from freshet.seams.eventlog.sqlite import open_url
from freshet.spec.avro import parse_schema, to_json
from freshet.spec.parse import load_spec
from freshet.testing.clock import SettableClock
from freshet.types import Append, BytesColumn, TopicPartition
from freshet.wire.schemas import LOOK_AGAIN_S, SchemaRegistry, frame, framed_id
from tests.integration.serving import FEED, running, schema, settings, wait_for

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
                    beside=gateway_door(made.gateway, made.common),
                    guard=gateway_guard(made.gateway, made.common, clock),
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


def test_an_accepted_event_is_in_the_log_where_the_ack_says_and_can_be_joined(gateway: Running) -> None:
    answer = gateway.send("impressions", ranked())

    assert answer.status_code == 202
    [ack] = answer.json()["acks"]
    [(partition, offset, key, value)] = gateway.records("feed.ranked")
    assert ack == {"topic": "feed.ranked", "partition": partition, "offset": offset}
    assert key == b"1"
    columns = EventExtractor(SPEC.events.served, RANKED).extract(BytesColumn.of([value]), framed=True)
    assert columns.times_ms.tolist() == [NOW, NOW]
    assert SchemaRegistry(gateway.log).get(framed_id(value)) == RANKED


def test_a_page_of_another_site_teaches_nothing(gateway: Running) -> None:
    headers = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
    answer = httpx.post(f"{gateway.url}/v1/actions", content=b"{}", headers=headers)

    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin"


@pytest.mark.parametrize("body", [orjson.dumps(action(2)), b"{"], ids=["good", "no JSON"])
def test_who_breaks_the_connection_off_keeps_nobody_from_an_answer(gateway: Running, body: bytes) -> None:
    """It asks, asks once more, and sends what is no HTTP, all in one packet, while an append is under way."""
    gateway.gate.open.clear()
    head = f"POST /v1/actions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    sent = head + body + b"GET /h HTTP/1.1\r\nhost: x\r\n\r\n" + b"\x00bad\r\n\r\n"
    port = int(gateway.url.rpartition(":")[2])
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(gateway.send, "actions", action(1))
        assert gateway.gate.begun.wait(10)
        others = []
        for request in (3, 4):  # before and behind it
            before = gateway.waiting()
            others.append(threads.submit(gateway.send, "actions", action(request)))
            gateway.wait_for_more_than(before)
            if request == 3:
                for _ in range(3):
                    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                        client.sendall(sent)
                        while client.recv(1_000):
                            pass
        gateway.gate.open.set()
        assert [asked.result().status_code for asked in (first, *others)] == [202] * 3
    assert gateway.send("actions", action(5)).status_code == 202
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 200


def test_json_is_encoded_as_fastavro_would(gateway: Running) -> None:
    gateway.send("impressions", ranked())

    [(_, _, _, value)] = gateway.records("feed.ranked")
    assert value[5:] == avro(ranked())


def test_a_topic_in_json_gets_the_events_as_json(gateway: Running) -> None:
    assert gateway.send("actions", action()).status_code == 202

    [(_, _, key, value)] = gateway.records("app.actions")
    assert (key, orjson.loads(value)) == (b"1", action())


def test_a_topic_in_json_keeps_fields_that_the_schema_does_not_have(gateway: Running) -> None:
    assert gateway.send("actions", {**action(), "app": {"build": 812}}).status_code == 202

    [(_, _, _, value)] = gateway.records("app.actions")
    assert orjson.loads(value)["app"] == {"build": 812}


def test_events_of_one_request_id_share_a_partition_over_all_streams(gateway: Running) -> None:
    for request in range(20):
        gateway.send("impressions", ranked(request))
        gateway.send("actions", action(request))
        gateway.send("shown", {"reqId": request, "item": {"id": 7}, "at": "2023-11-14T22:13:20Z"})

    def partitions(topic: str) -> dict[bytes, int]:
        return {key: p for p, _, key, _ in gateway.records(topic)}

    assert partitions("feed.ranked") == partitions("app.actions") == partitions("app.viewport")
    assert len(set(partitions("feed.ranked").values())) > 1


@pytest.mark.parametrize("as_lines", [True, False])
def test_a_batch_is_acknowledged_in_its_order(gateway: Running, as_lines: bool) -> None:
    events = [ranked(i) for i in range(30)]
    if as_lines:
        answer = gateway.post("impressions", b"\n".join(map(orjson.dumps, events)), "application/x-ndjson")
    else:
        answer = gateway.send("impressions", events)

    places = {(p, o): key for p, o, key, _ in gateway.records("feed.ranked")}
    assert answer.status_code == 202
    assert [places[a["partition"], a["offset"]] for a in answer.json()["acks"]] == [
        b"%d" % i for i in range(30)
    ]


def test_the_good_events_of_a_batch_are_taken_and_the_bad_ones_explained(gateway: Running) -> None:
    events = [ranked(1), ranked(2, ts="noon"), ranked(3), {"request_id": 4}, 7]

    answer = gateway.send("impressions", events)

    body = answer.json()
    assert answer.status_code == 422
    assert body["accepted"] == 2
    assert sorted(key for _, _, key, _ in gateway.records("feed.ranked")) == [b"1", b"3"]
    assert [r["index"] for r in body["refused"]] == [1, 3, 4]
    assert body["refused"][0]["path"] == "ts"


def test_refused_events_are_dead_letters_with_the_reason_before_the_answer(gateway: Running) -> None:
    gateway.send("impressions", [ranked(1, ts="noon")])

    [(_, _, _, value)] = gateway.records("feed.refused")
    letter = orjson.loads(value)
    assert orjson.loads(base64.b64decode(letter["value"]))["ts"] == "noon"
    assert (letter["kind"], letter["topic"], letter["path"]) == ("refused", "feed.ranked", "ts")


def test_an_event_dated_ahead_is_refused_and_one_within_the_limit_is_taken(gateway: Running) -> None:
    ahead = SPEC.join.max_ahead_ms
    assert gateway.send("impressions", ranked(1, ts=NOW + ahead)).status_code == 202

    answer = gateway.send("impressions", ranked(2, ts=NOW + ahead + 1_000))

    assert answer.status_code == 422
    [refused] = answer.json()["refused"]
    assert (refused["path"], refused["found"]) == ("ts", "61 s ahead")


def test_avro_is_passed_on_byte_for_byte(gateway: Running) -> None:
    schema_id = SchemaRegistry(gateway.log).register(RANKED)
    one, two = frame(schema_id, avro(ranked(1))), frame(schema_id, avro(ranked(2)))

    assert gateway.post("impressions", one, AVRO).status_code == 202
    batch = b"".join(len(r).to_bytes(4, "big") + r for r in (one, two))
    assert len(gateway.post("impressions", batch, AVRO_BATCH).json()["acks"]) == 2
    raw = gateway.post("impressions", avro(ranked(1)), AVRO_RAW, **{"freshet-schema-id": str(schema_id)})
    assert raw.status_code == 202

    assert sorted(v for _, _, _, v in gateway.records("feed.ranked")) == sorted([one, one, one, two])


def test_avro_of_a_later_schema_is_taken_once_it_is_registered(gateway: Running) -> None:
    tree = to_json(RANKED)
    tree["fields"].append({"name": "page", "type": "string", "default": ""})
    later = parse_schema(tree)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(tree), {**ranked(1), "page": "home"})

    assert gateway.post("impressions", frame(99, out.getvalue()), AVRO).status_code == 422
    many_digits = gateway.post("impressions", avro(ranked()), AVRO_RAW, **{"freshet-schema-id": "1" * 5_000})
    assert (many_digits.status_code, many_digits.json()["error"]["code"]) == (400, "bad_input")
    schema_id = SchemaRegistry(gateway.log).register(later)
    gateway.clock.advance(0.1)
    early = gateway.post("impressions", frame(schema_id, out.getvalue()), AVRO)
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    gateway.clock.advance(LOOK_AGAIN_S)  # since the made-up 99
    assert gateway.post("impressions", frame(schema_id, out.getvalue()), AVRO).status_code == 202


def test_of_a_batch_all_schema_ids_are_known_when_it_comes_again(tmp_path: Path) -> None:
    log, clock = open_url(f"sqlite:{tmp_path}/log"), SettableClock()
    codec = codecs_of(SPEC, SCHEMAS, log, clock)["served"]

    def others_look(made_up: int) -> None:
        clock.advance(LOOK_AGAIN_S)
        assert len(codec.from_avro([frame(made_up, b"\0")]).bad) == 1
        clock.advance(0.1)

    others_look(500)
    batch = [frame(501, b"\0"), frame(502, b"\0")]
    with pytest.raises(Unavailable):
        codec.from_avro(batch)
    others_look(503)
    assert [refused.found for refused in codec.from_avro(batch).bad] == ["501", "502"]
    log.close()


def test_thousands_of_made_up_schema_ids_are_refused_after_one_look_at_the_schemas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_url(f"sqlite:{tmp_path}/log")
    codec = codecs_of(SPEC, SCHEMAS, log, SettableClock())["served"]
    looks, bounds = [], log.bounds

    def counted(partition: TopicPartition) -> Any:
        looks.append(partition)
        return bounds(partition)

    monkeypatch.setattr(log, "bounds", counted)

    checked = codec.from_avro([frame(made_up, b"\0") for made_up in range(500, 10_500)])
    codec.take_avro([frame(499, b"\0")], lengths=False, latest_ms=NOW, max_events=1)

    assert [r.index for r in checked.bad] == list(range(10_000))
    assert looks == [TopicPartition("schemas", 0)]
    log.close()


def test_avro_of_a_schema_that_the_spec_does_not_fit_is_refused(gateway: Running) -> None:
    schema_id = SchemaRegistry(gateway.log).register(schema("viewport"))

    answer = gateway.post("impressions", frame(schema_id, b"\x02\x02\x02a"), AVRO)

    assert answer.status_code == 422
    assert "a schema that the spec fits" in answer.json()["refused"][0]["expected"]


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 20])
def test_truncated_avro_is_refused_in_words(gateway: Running, cut: int) -> None:
    schema_id = SchemaRegistry(gateway.log).register(RANKED)

    answer = gateway.post("impressions", frame(schema_id, avro(ranked()))[:cut] or b"x", AVRO)

    assert answer.status_code == 422
    assert answer.json()["refused"][0]["found"]


@pytest.mark.parametrize(
    ("kind", "content", "status", "code"),
    [
        ("application/json", b"{", 400, "bad_input"),
        ("application/json", b"[]", 400, "bad_input"),
        ("text/html", b"{}", 415, "content_type"),
        (AVRO_BATCH, b"\xff\xff\xff\xff", 400, "bad_input"),
        (AVRO_RAW, b"x", 400, "bad_input"),
    ],
)
def test_a_request_that_cannot_be_told_apart_is_refused_whole(
    gateway: Running, kind: str, content: bytes, status: int, code: str
) -> None:
    answer = gateway.post("impressions", content, kind)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert gateway.records("feed.ranked") == []


def test_compressed_bodies_are_refused(gateway: Running) -> None:
    answer = gateway.post("impressions", b"x", **{"content-encoding": "gzip"})

    assert answer.status_code == 415


def test_too_many_events_and_too_many_bytes_are_413(start: Callable[..., Running]) -> None:
    gateway = start(gateway_max_events="2", gateway_max_body_bytes="2000")

    assert gateway.send("impressions", [ranked(i) for i in range(3)]).status_code == 413
    assert gateway.send("impressions", ranked(1, experiment={"a": "x" * 3_000})).status_code == 413


def test_requests_that_come_together_are_each_told_of_their_own_events(gateway: Running) -> None:
    gateway.gate.open.clear()
    bodies = [ranked(1), ranked(2, ts="noon"), [ranked(3), ranked(4)], {"request_id": 5}, ranked(6)]
    with ThreadPoolExecutor(len(bodies) + 1) as threads:
        first = threads.submit(gateway.send, "impressions", ranked(0))
        assert gateway.gate.begun.wait(10)
        answers = [threads.submit(gateway.send, "impressions", body) for body in bodies]
        gateway.gate.open.set()

    assert first.result().status_code == 202
    assert [a.result().status_code for a in answers] == [202, 422, 202, 422, 202]
    places = {(p, o): key for p, o, key, _ in gateway.records("feed.ranked")}
    told = [[places[k["partition"], k["offset"]] for k in a.result().json()["acks"]] for a in answers]
    assert told == [[b"1"], [], [b"3", b"4"], [], [b"6"]]


def test_of_requests_that_together_are_too_many_those_that_fit_are_taken(
    start: Callable[..., Running],
) -> None:
    gateway = start(gateway_queue_events="3")
    gateway.gate.open.clear()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(gateway.send, "actions", action(0))
        assert gateway.gate.begun.wait(10)
        two = [threads.submit(gateway.send, "actions", [action(i), action(i + 10)]) for i in (1, 2)]
        wait_for(lambda: httpx.get(f"{gateway.url}/status").json()["events_waiting"] == 3)
        gateway.gate.open.set()

    assert first.result().status_code == 202
    assert [t.result().status_code for t in two] in ([202, 202], [202, 429], [429, 202])
    taken = 1 + 2 * [t.result().status_code for t in two].count(202)
    assert len(gateway.records("app.actions")) == taken


def test_a_batch_for_a_topic_in_json_keeps_each_event_as_it_came(gateway: Running) -> None:
    texts = [orjson.dumps({**action(i), "app": {"build": i}}) for i in range(3)]

    assert gateway.post("actions", b"[" + b" ,\n".join(texts) + b"]").status_code == 202

    assert sorted(v for _, _, _, v in gateway.records("app.actions")) == sorted(texts)


def test_a_full_queue_is_429_with_retry_after(start: Callable[..., Running]) -> None:
    gateway = start(gateway_queue_events="1")
    gateway.gate.open.clear()
    first: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: first.append(gateway.send("actions", action(1))))
    thread.start()
    assert gateway.gate.begun.wait(10)

    refused = gateway.send("actions", action(2))
    gateway.gate.open.set()
    thread.join(10)

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert first[0].status_code == 202


def test_while_the_log_fails_the_answer_is_503_and_the_gateway_not_ready(gateway: Running) -> None:
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
    gateway.gate.error = Unavailable("disk full")

    answer = gateway.send("actions", action())

    assert answer.status_code == 503
    assert "disk full" in answer.json()["error"]["message"]
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 503
    assert httpx.get(f"{gateway.url}/health/live").status_code == 200

    gateway.gate.error = None
    assert gateway.send("actions", action()).status_code == 202
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 200


def test_a_stop_finishes_what_was_begun(gateway: Running) -> None:
    gateway.gate.open.clear()
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(gateway.send("actions", action())))
    thread.start()
    assert gateway.gate.begun.wait(10)
    gateway.stop.set()
    gateway.gate.open.set()
    thread.join(10)

    assert answers[0].status_code == 202
    assert len(gateway.records("app.actions")) == 1


def test_what_a_stop_cuts_off_is_told_503(start: Callable[..., Running]) -> None:
    gateway = start(common_drain="1s")
    gateway.gate.open.clear()
    answers: list[httpx.Response | httpx.TransportError] = []

    def send() -> None:
        try:
            answers.append(gateway.send("actions", action()))
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=send)
    with capture_logs() as said:
        thread.start()
        assert gateway.gate.begun.wait(10)
        gateway.stop.set()
        thread.join(10)
        ended = gateway.ended.wait(1 + KILL_AFTER_S)  # while the append still hangs
    gateway.gate.open.set()

    [answer] = answers
    assert isinstance(answer, httpx.Response)
    assert answer.status_code == 503
    assert ended
    [stopped] = [line for line in said if line["event"] == "gateway stopped"]
    assert (stopped["events_cut_off"], stopped["append_left"]) == (1, True)


class Refused:
    """A listener whose address cannot be had."""

    async def start(self) -> None:
        raise ConfigError("listen", "grpc_port", 1, "a free port of this machine")

    async def serve(self, stop: threading.Event, drain_s: float) -> None:
        raise AssertionError("it was not started")


def test_a_gateway_that_cannot_listen_leaves_no_thread(tmp_path: Path) -> None:
    log, made, before = open_url(f"sqlite:{tmp_path}/log"), settings(), set(threading.enumerate())
    codecs = codecs_of(SPEC, SCHEMAS, log)
    with pytest.raises(ConfigError):
        run(
            SPEC,
            log,
            codecs,
            made.gateway,
            made.common,
            stop=threading.Event(),
            beside=lambda _: Refused(),
        )

    wait_for(lambda: not set(threading.enumerate()) - before)
    log.close()


def test_metrics_count_events_by_what_became_of_them(gateway: Running) -> None:
    gateway.send("impressions", [ranked(1), 7])
    text = httpx.get(f"{gateway.url}/metrics").text

    assert 'freshet_gateway_events_total{outcome="accepted",stream="served"} 1.0' in text
    assert 'freshet_gateway_events_total{outcome="refused",stream="served"} 1.0' in text
    assert 'freshet_http_requests_total{door="passed",route="/v1/impressions",status="422"} 1.0' in text


def test_the_status_counts_events_of_each_stream(gateway: Running) -> None:
    def counts() -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = httpx.get(f"{gateway.url}/status").json()["events"]
        return found

    before = counts()
    gateway.send("impressions", [ranked(1), 7])

    assert before.keys() == {"served", "shown", "action"}
    assert counts()["served"] == {outcome: n + 1 for outcome, n in before["served"].items()}
    assert counts()["action"] == before["action"]


def test_the_client_sends_and_reads_refusals(gateway: Running) -> None:
    with Client(gateway.url) as client:
        receipt = client.impressions(ranked())
        assert receipt.acks[0].topic == "feed.ranked"
        with pytest.raises(EventsRefused, match="event 1"):
            client.actions([action(), action(reqId="x")])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.binary(max_size=300),
    st.sampled_from(["application/json", "application/x-ndjson", AVRO, AVRO_BATCH, AVRO_RAW, "x"]),
    st.sampled_from(["impressions", "shown", "actions"]),
)
@quick(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
def test_random_bytes_are_never_a_server_error(gateway: Running, body: bytes, kind: str, what: str) -> None:
    assert gateway.post(what, body, kind, **{"freshet-schema-id": "1"}).status_code < 500


@given(st.sampled_from(list(ranked())), json_values)
@quick(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
def test_any_value_of_any_field_is_taken_or_refused(gateway: Running, field: str, value: Any) -> None:
    try:
        body = orjson.dumps({**ranked(), field: value})
    except TypeError:  # integers beyond 64 bits
        return
    assert gateway.post("impressions", body).status_code in (202, 422)
