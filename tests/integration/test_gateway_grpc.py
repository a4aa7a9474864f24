"""Events over gRPC: acknowledged as over HTTP, refused with the reason, and clients that mean ill."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import pytest
import trustme

from freshet.errors import Unavailable
from freshet.log.schema_ids import frame
from freshet.process.ports import lease_ports
from freshet.rpc.public_server import GATEWAY, messages
from freshet.testing.conditions import wait_for
from freshet.types import TopicPartition
from tests.fixtures.gateway import Running, action, avro, ranked, start
from tests.fixtures.serving import TOKEN, write_tokens
from tests.integration.hostile import MESSAGES, hostile
from tests.servers.certificates import issued

__all__ = ["start"]  # the fixture

M = messages(GATEWAY)
DEADLINE_S = 60.0
SERVED, ACTION = 1, 3
JSON, JSON_LINES, AVRO, AVRO_BATCH = 1, 2, 3, 4


class Talk:
    """A client that has only the .proto file."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def put(self, body: bytes, *, stream: int = SERVED, encoding: int = JSON, **call: Any) -> Any:
        asked = M.PutRequest(id=7, stream=stream, encoding=encoding, body=body)
        return self.send(asked.SerializeToString(), **call)

    def send(self, data: bytes, **call: Any) -> Any:
        called = self.channel.unary_unary("/freshet.wire.v1.Gateway/Put")
        return M.PutResponse.FromString(called(data, timeout=DEADLINE_S, **call))

    def stream(
        self, requests: Sequence[bytes] | Iterator[bytes], within_s: float = DEADLINE_S * 5
    ) -> list[Any]:
        called = self.channel.stream_stream("/freshet.wire.v1.Gateway/PutStream")
        return [M.PutResponse.FromString(a) for a in called(iter(requests), timeout=within_s)]


@pytest.fixture
def port() -> int:
    return lease_ports(1)[0]


@pytest.fixture
def gateway(start: Callable[..., Running], port: int) -> Running:
    return start(gateway_grpc_port=str(port))


@pytest.fixture
def talk(gateway: Running, port: int) -> Iterator[Talk]:
    talk = Talk(port)
    yield talk
    talk.channel.close()


def text(*events: Any) -> bytes:
    return orjson.dumps(list(events) if len(events) > 1 else events[0])


def places(answer: Any) -> list[tuple[int, int]]:
    return list(zip(answer.partitions, answer.offsets, strict=True))


def test_an_accepted_event_is_in_the_log_where_the_ack_says(gateway: Running, talk: Talk) -> None:
    answer = talk.put(text(ranked()))

    [(partition, offset, key, _)] = gateway.records("feed.ranked")
    assert (answer.id, answer.topic, places(answer)) == (7, "feed.ranked", [(partition, offset)])
    assert key == b"1"


def test_every_encoding_gives_the_records_of_http(gateway: Running, talk: Talk) -> None:
    events = [ranked(n) for n in range(1, 9)]
    gateway.send("impressions", events)
    expected = Counter((p, key, value) for p, _, key, value in gateway.records("feed.ranked"))
    schema_id = int.from_bytes(gateway.records("feed.ranked")[0][3][1:5], "big")
    records = [frame(schema_id, avro(event)) for event in events]

    answers = [
        talk.put(text(*events)),
        talk.put(b"\n".join(map(orjson.dumps, events)), encoding=JSON_LINES),
        talk.put(b"".join(struct.pack(">I", len(r)) + r for r in records), encoding=AVRO_BATCH),
        *(talk.put(record, encoding=AVRO) for record in records),
    ]

    assert [len(a.offsets) for a in answers] == [8, 8, 8] + [1] * 8
    found = {(p, o): (p, key, value) for p, o, key, value in gateway.records("feed.ranked")}
    for answer in answers[:3]:
        assert Counter(found[place] for place in places(answer)) == expected
        assert [found[place][1] for place in places(answer)] == [b"%d" % n for n in range(1, 9)]


def test_refusals_have_reasons_and_the_rest_is_durable(talk: Talk) -> None:
    answer = talk.put(text(ranked(1), {"request_id": 2}, ranked(3)))

    assert len(answer.offsets) == 2
    assert [(r.index, bool(r.path), bool(r.expected)) for r in answer.refused] == [(1, True, True)]


def test_a_stream_answers_each_request_by_its_id(gateway: Running, talk: Talk) -> None:
    requests = [
        M.PutRequest(
            id=n, stream=(SERVED, ACTION)[n % 2], encoding=JSON, body=text((ranked, action)[n % 2](n))
        )
        for n in range(300)
    ]

    acks = talk.stream([r.SerializeToString() for r in requests])

    assert sorted(a.id for a in acks) == list(range(300))
    assert answers(gateway) == {"OK PutStream passed": 300}
    assert all(len(a.offsets) == 1 and not a.HasField("error") for a in acks)
    for topic in {a.topic for a in acks}:
        told = {place for a in acks if a.topic == topic for place in places(a)}
        assert told == {(p, o) for p, o, _, _ in gateway.records(topic)}


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (M.PutRequest(encoding=JSON), "stream: expected one of 1 \\(served\\)"),
        (M.PutRequest(stream=SERVED), "encoding: expected JSON, JSON_LINES"),
        (M.PutRequest(stream=SERVED, encoding=JSON, body=b" "), "from 1 to .* events in a request, found 0"),
        (b"\xff\xff\xff", "expected a protobuf message freshet.wire.v1.PutRequest"),
    ],
)
def test_an_invalid_request_gets_the_reason(talk: Talk, request_: Any, told: str) -> None:
    data = request_ if isinstance(request_, bytes) else request_.SerializeToString()
    with pytest.raises(grpc.RpcError, match=told) as refused:
        talk.send(data)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    good = M.PutRequest(id=9, stream=SERVED, encoding=JSON, body=text(ranked())).SerializeToString()
    [answer, fine] = sorted(talk.stream([data, good]), key=lambda a: a.id)
    assert (answer.error.code, answer.error.retry_after_ms) == ("bad_input", 0)
    assert (fine.id, len(fine.offsets)) == (9, 1)


def test_a_full_queue_is_reported_with_a_time_to_retry(start: Callable[..., Running], port: int) -> None:
    gateway = start(gateway_grpc_port=str(port), gateway_queue_events="1", gateway_retry_after="2s")
    talk = Talk(port)
    gateway.gate.open.clear()
    called = talk.channel.unary_unary("/freshet.wire.v1.Gateway/Put")
    asked = M.PutRequest(stream=SERVED, encoding=JSON, body=text(ranked())).SerializeToString()
    first = called.future(asked, timeout=DEADLINE_S)
    assert gateway.gate.begun.wait(60)
    with pytest.raises(grpc.RpcError, match="wait for the log") as refused:
        talk.send(asked)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after-ms", "2000") in [tuple(x) for x in refused.value.trailing_metadata()]
    [answer] = talk.stream([asked])
    assert (answer.error.code, answer.error.retry_after_ms) == ("overloaded", 2000)
    assert answers(gateway) == {"Put RESOURCE_EXHAUSTED passed": 1, "PutStream RESOURCE_EXHAUSTED passed": 1}
    gateway.gate.open.set()
    assert len(M.PutResponse.FromString(first.result()).offsets) == 1
    talk.channel.close()


def test_an_append_that_fails_is_unavailable(gateway: Running, talk: Talk) -> None:
    gateway.gate.error = Unavailable("the disk is full")
    with pytest.raises(grpc.RpcError, match="the disk is full") as refused:
        talk.put(text(ranked()))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert answers(gateway) == {"Put UNAVAILABLE passed": 1}


def test_a_stop_ends_streams_and_what_was_answered_is_durable(gateway: Running, talk: Talk) -> None:
    called = talk.channel.stream_stream("/freshet.wire.v1.Gateway/PutStream")
    answered: list[Any] = []

    def requests() -> Iterator[bytes]:
        for n in range(10**6):
            yield M.PutRequest(id=n, stream=SERVED, encoding=JSON, body=text(ranked(n))).SerializeToString()

    def read() -> None:
        for data in called(requests(), timeout=DEADLINE_S):
            answered.append(M.PutResponse.FromString(data))
            if len(answered) == 100:
                gateway.stop.set()

    with pytest.raises(grpc.RpcError) as ended:
        read()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    told = [place for a in answered if not a.HasField("error") for place in places(a)]
    assert len(told) >= 100
    bounds = {p: gateway.log.bounds(TopicPartition("feed.ranked", p)).end for p, _ in told}
    assert all(o < bounds[p] for p, o in told)


def refused(gateway: Running, reason: str) -> float:
    """How many this gateway says that it has refused for it."""
    return metric(gateway, f'refused_total{{reason="{reason}"}}')


def metric(gateway: Running, begin: str) -> float:
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"freshet_grpc_{begin}"))


def answers(gateway: Running) -> dict[str, float]:
    """{method, status and listener: number of answers}."""
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    found = [re.match(r"freshet_grpc_answers_total{(.*)} (.*)", line) for line in lines]
    told = {" ".join(re.findall('"(.*?)"', m[1])): float(m[2]) for m in found if m is not None}
    return {" ".join(sorted(labels.split())): n for labels, n in told.items() if n}


def test_certificates_and_token_are_required(
    start: Callable[..., Running], port: int, tmp_path: Path
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = issued(authority, tmp_path)
    write_tokens(tmp_path / "tokens", ("shop", "send", TOKEN))
    gateway = start(
        gateway_grpc_port=str(port),
        gateway_grpc_ca_file=str(files.ca),
        gateway_grpc_cert_file=str(files.cert),
        gateway_grpc_key_file=str(files.key),
        common_tokens_file=str(tmp_path / "tokens"),
    )
    token = (("authorization", f"Bearer {TOKEN}"),)
    asked = M.PutRequest(stream=SERVED, encoding=JSON, body=text(ranked())).SerializeToString()

    def put(by: trustme.CA | None, metadata: Any = token, *, tls: bool = True) -> int:
        """How many events are acknowledged to who shows a certificate of `by`."""
        mine = issued(by, tmp_path, "client") if by is not None else None
        pair = (mine.key.read_bytes(), mine.cert.read_bytes()) if mine else (None, None)
        shown = grpc.ssl_channel_credentials(files.ca.read_bytes(), *pair)
        at = f"localhost:{port}"
        with grpc.secure_channel(at, shown) if tls else grpc.insecure_channel(at) as channel:
            called = channel.unary_unary("/freshet.wire.v1.Gateway/Put")
            return len(M.PutResponse.FromString(called(asked, timeout=DEADLINE_S, metadata=metadata)).offsets)

    assert put(authority) == 1
    for metadata, why in (((), "asked for"), ((("authorization", "Bearer other"),), "not known")):
        with pytest.raises(grpc.RpcError, match=why) as told:
            put(authority, metadata)
        assert told.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused(gateway, "token_missing") == refused(gateway, "token_unknown") == 1
    for by, tls in ((stranger, True), (None, True), (None, False)):
        before = metric(gateway, "handshakes_total")
        with pytest.raises(grpc.RpcError) as told:
            put(by, tls=tls)
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        assert metric(gateway, "handshakes_total") > before
    assert put(authority) == 1
    assert answers(gateway) == {"OK Put passed": 2, "Put UNAUTHENTICATED refused": 2}
    assert len(gateway.records("feed.ranked")) == 2


def test_a_message_beyond_the_limit_is_refused_and_counted(start: Callable[..., Running], port: int) -> None:
    gateway = start(gateway_grpc_port=str(port), gateway_max_body_bytes=str(1 << 20))
    talk = Talk(port)
    with pytest.raises(grpc.RpcError, match="send it in smaller pieces"):
        talk.send(b"\0" * ((1 << 20) + 1))
    with pytest.raises(grpc.RpcError, match="larger than max"):
        talk.send(b"\0" * (3 << 20))
    assert refused(gateway, "too_large") == 1
    wait_for(lambda: refused(gateway, "no_message") == 1)
    assert answers(gateway) == {"INVALID_ARGUMENT Put passed": 2}
    assert len(talk.put(text(ranked())).offsets) == 1
    talk.channel.close()


@pytest.mark.long
def test_hostile_messages_are_refused_and_counted_and_it_lives(gateway: Running, talk: Talk) -> None:
    good = [
        M.PutRequest(id=5, stream=SERVED, encoding=JSON, body=text(ranked())).SerializeToString(),
        M.PutRequest(id=5, stream=ACTION, encoding=AVRO, body=b"\0\0\0\0\1" + bytes(40)).SerializeToString(),
    ]

    answers = talk.stream(hostile(good, MESSAGES, seed=1), DEADLINE_S + MESSAGES / 50)

    assert len(answers) == MESSAGES
    codes = Counter(a.error.code for a in answers if a.HasField("error"))
    assert "internal" not in codes
    assert codes["bad_input"] > MESSAGES / 10
    assert refused(gateway, "bad_input") == codes["bad_input"]
    assert len(talk.put(text(ranked(99))).offsets) == 1
    wait_for(lambda: httpx.get(f"{gateway.url}/health/ready").status_code == 200)
