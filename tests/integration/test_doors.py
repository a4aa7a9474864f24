"""Access that running services must refuse: refusals are counted, other clients are answered."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import pytest
import trustme
from prometheus_client import CollectorRegistry

from freshet.client import Client
from freshet.errors import BadInput
from freshet.http.admin import Admin
from freshet.observability.audit import read_audit
from freshet.process.ports import lease_ports
from freshet.rpc.public_server import GATEWAY, OIP, messages
from freshet.testing.conditions import wait_for
from tests.fixtures.gateway import Running as Gateway
from tests.fixtures.gateway import ranked, start
from tests.fixtures.inference import CANDIDATES, CONTEXT, SPEC, greedy, serving, trained
from tests.fixtures.inference import Running as Inference
from tests.fixtures.serving import TOKEN, bearer, write_tokens
from tests.integration.console_world import TOKEN as CONSOLE_TOKEN
from tests.integration.console_world import ConsoleWorld
from tests.servers.certificates import issued

__all__ = ["start"]  # the fixture

OTHER, OLD, UNKNOWN = "a-token-of-another-scope", "a-token-that-has-expired", "a-token-of-nobody"
TOKENS = (
    ("shop", "send", TOKEN),
    ("app", "rank", OTHER),
    ("gone", "send,rank,operate", OLD, "expires=2023-01-01T00:00:00Z"),
)
EVENT = orjson.dumps(ranked())
RANK = orjson.dumps({"context": CONTEXT, "candidates": CANDIDATES[:2]})

SHOWN = {
    "none": (None, 401, "token_missing", ""),
    "unknown": (UNKNOWN, 401, "token_unknown", ""),
    "expired": (OLD, 401, "token_expired", "gone"),
}
"""What is shown, and how that is answered and counted."""


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", *TOKENS)


@pytest.fixture
def gateway(start: Callable[..., Gateway], tokens: Path) -> Gateway:
    return start(common_tokens_file=str(tokens))


@pytest.fixture
def inference(tmp_path: Path, tokens: Path) -> Iterator[Inference]:
    world = trained(tmp_path / "world", greedy(SPEC))
    with serving(world, common_tokens_file=str(tokens)) as running:
        wait_for(lambda: running.get("/health/ready").status_code == 200)
        yield running
    world.close()


def post(url: str, content: bytes, token: str | None = None) -> httpx.Response:
    headers = {"content-type": "application/json", **({} if token is None else bearer(token))}
    return httpx.post(url, content=content, headers=headers, timeout=60)


def counted(url: str, metric: str, **labels: str) -> float:
    """A metric's value; 0 if it has none."""
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] == metric and all(f'{k}="{v}"' in name for k, v in labels.items()):
            return float(value)
    return 0.0


def test_the_gateway_takes_events_from_who_may_send(gateway: Gateway) -> None:
    url = f"{gateway.url}/v1/impressions"
    for token, status, code, name in SHOWN.values():
        refused = post(url, EVENT, token)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert refused.headers["www-authenticate"].startswith('Bearer realm="freshet"')
        assert counted(gateway.url, "freshet_door_refused_total", reason=code, token=name) == 1
    wrong = post(url, EVENT, OTHER)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (403, "token_scope")
    assert counted(gateway.url, "freshet_door_refused_total", reason="token_scope", token="app") == 1
    assert gateway.records("feed.ranked") == []

    assert post(url, EVENT, TOKEN).status_code == 202
    assert counted(gateway.url, "freshet_door_requests_total", token="shop") == 1


def test_a_request_that_comes_in_pieces_needs_the_token_as_well(gateway: Gateway) -> None:
    def pieces() -> Iterator[bytes]:
        yield EVENT[:50]
        yield EVENT[50:]

    url = f"{gateway.url}/v1/impressions"
    kind = {"content-type": "application/json"}

    assert httpx.post(url, content=pieces(), headers=kind).status_code == 401
    assert httpx.post(url, content=pieces(), headers={**kind, **bearer()}).status_code == 202


def test_inference_scores_for_who_may_rank(inference: Inference) -> None:
    model = f"{inference.url}/v2/models/{SPEC.name}"
    for token, status, code, name in SHOWN.values():
        refused = post(f"{inference.url}/v1/rank", RANK, token)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert counted(inference.url, "freshet_door_refused_total", reason=code, token=name) == 1
    assert post(f"{inference.url}/v1/rank", RANK, TOKEN).status_code == 403
    for path in ("", "/ready", "/config", "/versions/0", "/versions/0/ready"):
        assert httpx.get(model + path).status_code == 401, path
        assert httpx.get(model + path, headers=bearer(OTHER)).status_code == 200, path
    assert post(f"{model}/infer", b"{}").status_code == 401
    assert post(f"{model}/versions/0/infer", b"{}").status_code == 401
    assert inference.logged() == []

    assert post(f"{inference.url}/v1/rank", RANK, OTHER).status_code == 200


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/status", "/metrics"])
def test_health_and_figures_are_open_to_all(gateway: Gateway, path: str) -> None:
    assert httpx.get(gateway.url + path).status_code == 200


PAGES = {
    "another site": ({"origin": "https://evil.example"}, 403, "origin"),
    "a sandboxed frame": ({"origin": "null"}, 403, "origin"),
    "a picture": ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403, "origin"),
    "a name that points here": ({"host": "evil.example", "origin": "http://evil.example"}, 403, "host"),
    "that name, read": ({"host": "evil.example:7000"}, 403, "host"),
}
"""What browsers send for pages of other sites, and how that is answered on every port."""


@contextlib.contextmanager
def port_of(service: str, tmp_path: Path, start: Callable[..., Gateway], **settings: str) -> Iterator[str]:
    """The URL of a service that asks for no tokens."""
    match service:
        case "gateway":
            yield start(**settings).url
        case "inference":
            world = trained(tmp_path / "world", greedy(SPEC))
            with serving(world, **settings) as running:
                wait_for(lambda: running.get("/health/ready").status_code == 200)
                yield running.url
            world.close()
        case "console":
            with ConsoleWorld(tmp_path / "run").console(None, **settings) as console:
                yield console.url
        case _:
            hosts = settings.get("common_hosts", "")
            admin = Admin(
                "127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: None, status=dict, hosts=hosts
            )
            yield f"http://127.0.0.1:{admin.port}"
            admin.close()


@pytest.mark.parametrize("service", ["gateway", "inference", "console", "admin"])
def test_pages_of_other_sites_reach_no_port(
    service: str, tmp_path: Path, start: Callable[..., Gateway]
) -> None:
    with port_of(service, tmp_path, start) as url:
        for page, (headers, status, code) in PAGES.items():
            for path in ("/status", "/health/live", "/nowhere"):
                answer = httpx.get(url + path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (page, path)
                assert "FRESHET_COMMON_HOSTS" in answer.json()["error"]["hint"]
                assert "access-control-allow-origin" not in answer.headers
        assert httpx.get(f"{url}/status").status_code == 200
        assert httpx.get(f"{url}/status", headers={"host": "gateway-0:7000"}).status_code == 200


@pytest.mark.parametrize("service", ["gateway", "inference", "console", "admin"])
def test_names_and_sites_of_the_setting_may_ask(
    service: str, tmp_path: Path, start: Callable[..., Gateway]
) -> None:
    headers = {"host": "events.shop.example", "origin": "https://shop.example"}
    with port_of(service, tmp_path, start, common_hosts="shop.example,.shop.example") as url:
        assert httpx.get(f"{url}/status", headers=headers).status_code == 200


FORMS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]


@pytest.mark.parametrize("kind", FORMS)
def test_bodies_that_a_form_could_post_do_nothing(
    kind: str, start: Callable[..., Gateway], tmp_path: Path
) -> None:
    headers = {"content-type": kind} if kind else {}
    gateway = start()
    for path in ("impressions", "shown", "actions"):
        answer = httpx.post(f"{gateway.url}/v1/{path}", content=EVENT, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "content_type")
        assert "content-type: application/json" in answer.json()["error"]["hint"]
    assert gateway.records("feed.ranked") == []
    with port_of("inference", tmp_path, start) as url:
        answer = httpx.post(f"{url}/v1/rank", content=RANK, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "content_type")
        answer = httpx.post(f"{url}/v2/models/{SPEC.name}/infer", content=b"{}", headers=headers)
        assert answer.status_code == (415 if kind else 400)  # clients of the protocol name no type at times


def test_a_preflight_of_another_site_is_refused(gateway: Gateway) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    url = f"{gateway.url}/v1/actions"
    refused = httpx.options(url, headers={**asked, "origin": "https://evil.example"})
    answered = httpx.options(url, headers={**asked, "origin": gateway.url})

    assert refused.status_code == 403
    assert (answered.status_code, answered.headers["allow"]) == (200, "OPTIONS, POST")
    assert not [name for name in (*refused.headers, *answered.headers) if name.startswith("access-control")]


def test_a_token_that_is_dropped_is_refused_within_a_second(gateway: Gateway, tokens: Path) -> None:
    url = f"{gateway.url}/v1/impressions"
    assert post(url, EVENT, TOKEN).status_code == 202
    write_tokens(tokens, *TOKENS, ("shop", "send", UNKNOWN))
    gateway.clock.advance(1)
    assert [post(url, EVENT, t).status_code for t in (TOKEN, UNKNOWN)] == [202, 202]
    write_tokens(tokens, ("shop", "send", UNKNOWN))
    gateway.clock.advance(1)

    assert [post(url, EVENT, t).status_code for t in (TOKEN, UNKNOWN)] == [401, 202]


def test_a_damaged_tokens_file_shows_in_a_metric_only(gateway: Gateway, tokens: Path) -> None:
    tokens.write_text("shop send the-token-itself\n")
    gateway.clock.advance(1)

    assert counted(gateway.url, "freshet_door_tokens_file_wrong") == 1
    assert post(f"{gateway.url}/v1/impressions", EVENT, TOKEN).status_code == 202
    write_tokens(tokens, *TOKENS)
    gateway.clock.advance(1)
    assert counted(gateway.url, "freshet_door_tokens_file_wrong") == 0


def test_event_progress_needs_the_right_to_send_or_rank(inference: Inference) -> None:
    for query in ("", f"?topic={SPEC.events.action.topic}&partition=0&offset=0"):
        url = f"{inference.url}/v1/progress{query}"
        assert httpx.get(url).status_code == 401
        for token in (TOKEN, OTHER):
            told = httpx.get(url, headers={"authorization": f"Bearer {token}"})
            assert told.status_code == 200, told.text
            assert ("served" in told.json()) == bool(query)


def test_the_python_client_shows_its_token(gateway: Gateway, inference: Inference) -> None:
    with Client(gateway.url, inference.url, token=TOKEN) as sending:
        assert len(sending.impressions(ranked()).acks) == 1
        with pytest.raises(BadInput, match="a token with the scope rank"):
            sending.rank(CONTEXT, CANDIDATES[:2])
    with Client(gateway.url, inference.url, token=OTHER) as ranking:
        assert len(ranking.rank(CONTEXT, CANDIDATES[:2]).items) == 2


def test_grpc_requires_the_same_tokens(start: Callable[..., Gateway], tokens: Path) -> None:
    port, m = lease_ports(1)[0], messages(GATEWAY)
    gateway = start(gateway_grpc_port=str(port), common_tokens_file=str(tokens))
    asked = m.PutRequest(stream=1, encoding=1, body=EVENT).SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        put = channel.unary_unary("/freshet.wire.v1.Gateway/Put")
        stream = channel.stream_stream("/freshet.wire.v1.Gateway/PutStream")

        def with_token(token: str | None) -> dict[str, Any]:
            return {"timeout": 30, "metadata": [("authorization", f"Bearer {token}")] if token else None}

        for token, _, code, name in SHOWN.values():
            for call in (
                lambda token=token: put(asked, **with_token(token)),
                lambda token=token: list(stream(iter([asked]), **with_token(token))),
            ):
                with pytest.raises(grpc.RpcError) as told:
                    call()
                assert told.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert counted(gateway.url, "freshet_door_refused_total", reason=code, token=name) == 2
            assert counted(gateway.url, "freshet_grpc_refused_total", reason=code) == 2
        with pytest.raises(grpc.RpcError, match="with the scope send") as told:
            put(asked, **with_token(OTHER))
        assert told.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert gateway.records("feed.ranked") == []

        assert len(m.PutResponse.FromString(put(asked, **with_token(TOKEN))).offsets) == 1


def test_an_open_stream_ends_when_its_token_is_removed(start: Callable[..., Gateway], tokens: Path) -> None:
    port, m = lease_ports(1)[0], messages(GATEWAY)
    gateway = start(gateway_grpc_port=str(port), common_tokens_file=str(tokens))
    answers: list[Any] = []

    def asked() -> Iterator[bytes]:
        yield m.PutRequest(id=1, stream=1, encoding=1, body=EVENT).SerializeToString()
        wait_for(lambda: len(answers) == 1)
        write_tokens(tokens, ("shop", "send", UNKNOWN))
        gateway.clock.advance(1)
        yield m.PutRequest(id=2, stream=1, encoding=1, body=EVENT).SerializeToString()

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        called = channel.stream_stream("/freshet.wire.v1.Gateway/PutStream")
        for answer in called(asked(), timeout=30, metadata=[("authorization", f"Bearer {TOKEN}")]):
            answers.append(m.PutResponse.FromString(answer))

    assert [(a.id, a.error.code, len(a.offsets)) for a in answers] == [(1, "", 1), (2, "token_unknown", 0)]


def test_inference_over_grpc_limits_access_and_size(tmp_path: Path, tokens: Path) -> None:
    """Its settings of certificates, tokens and size reach the listener; health needs no token."""
    port, m = lease_ports(1)[0], messages(OIP)
    world = trained(tmp_path / "world", greedy(SPEC))
    files = issued(trustme.CA(), tmp_path)
    settings = {f"inference_grpc_{part}_file": str(getattr(files, part)) for part in ("ca", "cert", "key")}
    settings |= {"inference_max_body_bytes": "10000", "common_tokens_file": str(tokens)}
    shown = grpc.ssl_channel_credentials(*(path.read_bytes() for path in (files.ca, files.key, files.cert)))
    with (
        serving(world, inference_grpc_port=str(port), **settings),
        grpc.secure_channel(f"localhost:{port}", shown) as channel,
    ):

        def call(method: str, request: Any, token: str | None = None) -> bytes:
            metadata = [("authorization", f"Bearer {token}")] if token else None
            called = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            return bytes(called(request.SerializeToString(), timeout=30, metadata=metadata))

        for method in ("ServerLive", "ServerReady", "ServerMetadata"):
            call(method, getattr(m, f"{method}Request")())
        for method in ("ModelReady", "ModelMetadata", "ModelInfer"):
            with pytest.raises(grpc.RpcError) as told:
                call(method, getattr(m, f"{method}Request")())
            assert told.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
        with pytest.raises(grpc.RpcError, match="expected at most 10000"):
            call("ModelReady", m.ModelReadyRequest(name="x" * 10_000), OTHER)
        assert m.ModelReadyResponse.FromString(call("ModelReady", m.ModelReadyRequest(name=SPEC.name), OTHER))
    world.close()


def test_the_console_lets_who_may_operate_promote(tmp_path: Path) -> None:
    world = ConsoleWorld(tmp_path / "run")
    tokens = write_tokens(tmp_path / "tokens", *TOKENS, ("ada", "operate", UNKNOWN))
    world.put_version(0)
    with world.console(common_tokens_file=str(tokens)) as console:
        for token, status in ((OTHER, 403), (OLD, 401), ("x", 401)):
            assert console.change("promote", token=token, number=0).status_code == status
        assert world.versions.aliases() == {}

        assert console.change("promote", token=UNKNOWN, number=0).status_code == 200
        assert console.change("promote", token=CONSOLE_TOKEN, number=0).status_code == 200
    world.close()


def test_the_console_lends_its_token_only_to_who_may_operate(tmp_path: Path) -> None:
    world = ConsoleWorld(tmp_path / "run")
    (tmp_path / "mine").write_text(f"{OTHER}\n")
    with world.console(common_client_token_file=str(tmp_path / "mine")) as console:
        asked: Any = {"context": {}, "candidates": [{}]}
        assert console.client.post("/api/try", json=asked).status_code == 401
        console.client.post("/api/try", json=asked, headers=bearer(CONSOLE_TOKEN))
    world.close()

    assert world.fakes["inference"].shown == [f"Bearer {OTHER}"]


def test_a_try_by_the_console_s_token_is_refused_unread(tmp_path: Path) -> None:
    world = ConsoleWorld(tmp_path / "run")
    (tmp_path / "mine").write_text(f"{OTHER}\n")
    head = b"POST /api/try HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with (
        world.console(common_client_token_file=str(tmp_path / "mine"), console_body_timeout="1m") as console,
        raw(console.url) as connection,
    ):
        connection.sendall(head + b"content-length: 100000\r\n\r\n{")  # and the rest never comes
        answer = connection.recv(65_536)
    world.close()

    assert answer.startswith(b"HTTP/1.1 401 ")


# --- what is too large, too slow or too much, and what is not a name


def raw(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65_536):
            pieces.append(piece)
    return b"".join(pieces)


HEAD = b"POST /v1/impressions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def send_until(taken: object, send: Callable[[], object], *, late: object) -> None:
    """On a busy machine whole messages, too, may take longer than the 2 s that they have."""
    while (found := send()) != taken:
        assert found == late


def test_a_body_that_trickles_in_is_given_up(start: Callable[..., Gateway]) -> None:
    gateway = start(gateway_body_timeout="2s")
    with raw(gateway.url) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        assert b"408" in answer_of(connection)

    assert counted(gateway.url, "freshet_http_requests_total", status="408") == 1
    send_until(202, lambda: gateway.send("impressions", ranked()).status_code, late=408)


def test_a_request_on_one_connection_too_many_is_refused(start: Callable[..., Gateway]) -> None:
    gateway = start(common_max_connections="16")
    with contextlib.ExitStack() as held, httpx.Client(base_url=gateway.url, timeout=60) as client:
        assert client.get("/health/live").status_code == 200
        for _ in range(15):
            held.enter_context(raw(gateway.url))
        wait_for(lambda: "freshet_http_connections 16.0" in client.get("/metrics").text)
        with raw(gateway.url) as more:
            more.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = answer_of(more)  # until it is closed
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"connections"' in answer
        assert b"FRESHET_COMMON_MAX_CONNECTIONS" in answer
        assert client.get("/health/live").status_code == 200
    wait_for(lambda: counted(gateway.url, "freshet_http_connections") == 1)
    assert counted(gateway.url, "freshet_http_connections_cut_off_total", why="too_many") == 1
    assert gateway.send("impressions", ranked()).status_code == 202


PATHS = (
    *("/v2/models/..%2f..%2fetc%2fpasswd", "/v2/models/%2e%2e/ready", "/v2/models/feed/versions/..%2f0"),
    *("/v2/models/feed/versions/0%00/ready", "/v2/models/../../health/live", "/%2e%2e/%2e%2e/etc/passwd"),
    *("/v2/models/feed%2fversions%2f0/infer", "//v2/models/feed", "/v2/models/" + "a" * 10_000),
)


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_out_of_the_models_there_are(inference: Inference, path: str) -> None:
    with raw(inference.url) as connection:  # httpx would tidy the path up
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {OTHER}\r\n\r\n"
        connection.sendall(head.encode())
        answer = answer_of(connection)

    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405"))
    assert b"root:" not in answer
    assert post(f"{inference.url}/v1/rank", RANK, OTHER).status_code == 200


def test_a_grpc_call_without_its_message_is_given_up(start: Callable[..., Gateway]) -> None:
    port, m = lease_ports(1)[0], messages(GATEWAY)
    gateway = start(gateway_grpc_port=str(port), gateway_body_timeout="2s")
    hold = threading.Event()

    def nothing() -> Iterator[bytes]:
        hold.wait(60)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.RpcError) as told:
            channel.stream_unary("/freshet.wire.v1.Gateway/Put")(nothing(), timeout=60)
        hold.set()
        assert told.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive" in str(told.value.details())
        assert counted(gateway.url, "freshet_grpc_refused_total", reason="body_timeout") == 1
        asked = m.PutRequest(stream=1, encoding=1, body=EVENT).SerializeToString()
        put, good = channel.unary_unary("/freshet.wire.v1.Gateway/Put"), grpc.StatusCode.OK
        send_until(good, lambda: put.future(asked, timeout=60).code(), late=grpc.StatusCode.DEADLINE_EXCEEDED)


def test_promotions_and_refused_ones_are_in_the_audit_log(tmp_path: Path) -> None:
    world = ConsoleWorld(tmp_path / "run")
    tokens = write_tokens(tmp_path / "tokens", ("ada", "operate", UNKNOWN), ("shop", "send", TOKEN))
    world.put_version(0)
    with world.console(common_tokens_file=str(tokens)) as console:
        console.change("promote", token=TOKEN, number=0)
        console.change("promote", token=UNKNOWN, number=7)
        console.change("promote", token=UNKNOWN, number=0)
        console.change("rollback", token=CONSOLE_TOKEN, number=0)
    world.close()

    read = read_audit(tmp_path / "run" / "audit.jsonl", 10)
    assert read.damaged == 0
    told = [(o.action, o.who, o.at, o.what, o.outcome) for o in read.lines]
    told.remove(("operate", "token:shop", "127.0.0.1", {}, "refused"))  # by a thread: earlier or later
    assert told == [
        ("promote", "token:ada", "127.0.0.1", {"version": 7}, "failed"),
        ("promote", "token:ada", "127.0.0.1", {"version": 0}, "done"),
        ("rollback", "token:console", "127.0.0.1", {"version": 0}, "done"),
    ]


def test_behind_a_proxy_the_audit_log_names_the_client(tmp_path: Path) -> None:
    world, file = ConsoleWorld(tmp_path / "run"), tmp_path / "client.token"
    file.write_text("a token\n")
    headers = {"authorization": f"Bearer {UNKNOWN}", "x-forwarded-for": "6.6.6.6, 203.0.113.9"}
    with world.console(common_client_token_file=str(file), common_trusted_proxies="1") as console:
        assert console.client.post("/api/try", json={"candidates": [{}]}, headers=headers).status_code == 401
    world.close()

    lines = read_audit(tmp_path / "run" / "audit.jsonl", 10).lines
    assert [(line.outcome, line.at) for line in lines] == [("refused", "203.0.113.9")]


# --- who comes too often


def test_requests_beyond_the_limit_get_a_time_to_retry(start: Callable[..., Gateway]) -> None:
    gateway = start(gateway_client_requests_per_s="2")
    statuses = [gateway.send("impressions", ranked(i)).status_code for i in range(3)]
    refused = gateway.send("impressions", ranked(9))

    assert statuses == [202, 202, 429]
    assert refused.json()["error"]["code"] == "too_often"
    assert refused.headers["retry-after"] == "1"
    assert counted(gateway.url, "freshet_door_refused_total", reason="too_often") == 2
    assert httpx.get(f"{gateway.url}/health/live").status_code == 200
    gateway.clock.advance(1)
    assert gateway.send("impressions", ranked(10)).status_code == 202


def test_events_are_limited_by_what_was_taken(start: Callable[..., Gateway]) -> None:
    gateway = start(gateway_client_events_per_s="10")

    assert gateway.send("impressions", [ranked(i) for i in range(30)]).status_code == 202
    refused = gateway.send("impressions", ranked(31))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    gateway.clock.advance(2)
    assert gateway.send("impressions", ranked(31)).status_code == 202


def test_clients_behind_a_known_proxy_are_distinct(start: Callable[..., Gateway]) -> None:
    gateway = start(gateway_client_requests_per_s="1", common_trusted_proxies="1")

    def sent(forwarded: str) -> int:
        return gateway.post("impressions", EVENT, **{"x-forwarded-for": forwarded}).status_code

    assert [sent("192.0.2.1"), sent("192.0.2.2"), sent("192.0.2.3, 192.0.2.1")] == [202, 202, 429]


def test_rankings_are_limited_over_http_and_grpc_together(tmp_path: Path) -> None:
    port, m = lease_ports(1)[0], messages(OIP)
    world = trained(tmp_path / "world", greedy(SPEC))
    asked = m.ModelReadyRequest(name=SPEC.name).SerializeToString()
    with (
        serving(world, inference_grpc_port=str(port), inference_client_requests_per_s="2") as running,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        wait_for(lambda: running.get("/health/ready").status_code == 200)
        called = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
        assert post(f"{running.url}/v1/rank", RANK).status_code == 200
        called(asked, timeout=30)
        assert post(f"{running.url}/v1/rank", RANK).status_code == 429
        with pytest.raises(grpc.RpcError) as told:
            called(asked, timeout=30)
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(told.value.trailing_metadata())["retry-after-ms"] == "500"
        running.clock.advance(1)
        assert post(f"{running.url}/v1/rank", RANK).status_code == 200
    world.close()


def test_deeper_nesting_than_is_written_is_the_client_s_error(gateway: Gateway, inference: Inference) -> None:
    deep = b"[" * 300 + b"]" * 300
    for lines in (b'{"a":%b}' % deep, b'{"a":%b}\n{"a":1}' % deep):
        assert post(f"{gateway.url}/v1/impressions", lines, TOKEN).status_code in (400, 422)
    candidates = b'"candidates":[{"id":1}]'
    for body in (b'{"context":{"x":%b},%b}' % (deep, candidates), b'{"k":%b,%b}' % (deep, candidates)):
        refused = post(f"{inference.url}/v1/rank", body, OTHER)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_input")
    asked = b'{"inputs":[{"name":"user.id","datatype":"INT64","shape":[1],"data":[1,%b]}]}' % deep
    assert post(f"{inference.url}/v2/models/{SPEC.name}/infer", asked, OTHER).status_code == 400


def test_on_a_stream_each_message_counts(start: Callable[..., Gateway]) -> None:
    port, m = lease_ports(1)[0], messages(GATEWAY)
    start(gateway_grpc_port=str(port), gateway_client_requests_per_s="2")
    asked = [
        m.PutRequest(id=i, stream=1, encoding=1, body=orjson.dumps(ranked(i))).SerializeToString()
        for i in range(1, 4)
    ]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        called = channel.stream_stream("/freshet.wire.v1.Gateway/PutStream")
        answers = [m.PutResponse.FromString(a) for a in called(iter(asked), timeout=30)]

    refused = [a.error for a in answers if a.error.code]
    assert [(e.code, e.retry_after_ms) for e in refused] == [("too_often", 500)]
