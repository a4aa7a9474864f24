"""Settings of the services with external clients: gateway, inference, console; and of the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from freshet.config.options import Duration, Integer, Number, Text, option
from freshet.config.settings.network import (
    CLIENT_REQUESTS,
    GIB,
    HOSTS,
    HOUR,
    KIB,
    MIB,
    MINUTE,
    PATH,
    PEM,
    PORT,
    SECOND,
)

__all__ = ["Console", "Gateway", "GrpcListener", "Inference", "Simulator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcListener:
    """gRPC listener of a service with external clients; it needs the extra `grpc`."""

    grpc_port: int = option("deployment", "gRPC; 0: none", PORT, default=0)
    grpc_cert_file: str = option(
        "deployment", "certificate of the gRPC listener; without it no TLS", PEM, default=""
    )
    grpc_key_file: str = option("deployment", "the private key of the certificate", PEM, default="")
    grpc_ca_file: str = option(
        "deployment",
        "the authority that signs clients' certificates; without it clients need none",
        PEM,
        default="",
    )
    grpc_max_bodies_bytes: int = option(
        "deployment",
        "memory budget of gRPC messages that are received and processed at once. Each read reserves the size "
        "of the largest message, so this divided by that size is the number of calls and streams read at "
        "once; more wait, and an idle stream ends to release its reservation",
        Integer(MIB, 1 << 40),
        default=256 * MIB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway(GrpcListener):
    """The gateway: accepts events."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7000)
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=8 * MIB
    )
    max_bodies_bytes: int = option(
        "deployment",
        "memory budget of HTTP request bodies that are received and processed at once; more get 503, but one "
        "body of the largest size is always accepted",
        Integer(MIB, 1 << 40),
        default=128 * MIB,
    )
    max_events: int = option(
        "deployment", "a request with more events is refused with 413", Integer(1, 1_000_000), default=10_000
    )
    client_requests_per_s: float = option(
        "deployment",
        CLIENT_REQUESTS,
        Number(0, 1e9),
        default=0,
    )
    client_events_per_s: float = option(
        "deployment",
        "events of one client; a client that exceeds the rate gets 429 until its token bucket refills. 0: no "
        "limit",
        Number(0, 1e9),
        default=0,
    )
    queue_events: int = option(
        "deployment",
        "events that wait for the log; more get 429 with Retry-After",
        Integer(1, 10_000_000),
        default=50_000,
    )
    queue_bytes: int = option(
        "deployment",
        "bytes of events that wait for the log; more get 429 with Retry-After",
        Integer(KIB, 1 << 46),
        default=64 * MIB,
    )
    body_timeout_ms: int = option(
        "deployment",
        "how long a whole body may take to arrive; a slower client gets 408",
        Duration(10, HOUR),
        key="body_timeout",
        default=10 * SECOND,
    )
    append_events: int = option(
        "deployment", "events of one append; more wait for the next", Integer(1, 1_000_000), default=20_000
    )
    append_wait_ms: int = option(
        "deployment",
        "how long an append waits for events of other requests, which then share one write",
        Duration(0, SECOND),
        key="append_wait",
        default=2,
    )
    retry_after_ms: int = option(
        "deployment",
        "value of the header Retry-After",
        Duration(SECOND, HOUR),
        key="retry_after",
        default=SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference(GrpcListener):
    """The inference server."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7001)
    client_requests_per_s: float = option(
        "deployment",
        CLIENT_REQUESTS,
        Number(0, 1e9),
        default=0,
    )
    start_wait_ms: int = option(
        "deployment",
        "how long a rank request waits for rows and a version while the server starts; then it gets 503. Use "
        "0ms behind a proxy that retries at another server",
        Duration(0, MINUTE),
        key="start_wait",
        default=5 * SECOND,
    )
    max_candidates: int = option(
        "deployment", "a request with more is refused with 413", Integer(1, 1_000_000), default=10_000
    )
    batch_budget_ms: int = option(
        "deployment",
        "waiting rank requests are scored together up to this expected duration; 0: one by one",
        Duration(0, SECOND),
        key="batch_budget",
        default=5,
    )
    queue_wait_ms: int = option(
        "deployment",
        "longest expected wait of a request in the queue; above it 429 with Retry-After, over gRPC "
        "RESOURCE_EXHAUSTED with retry-after-ms. 0: no bound",
        Duration(0, HOUR),
        key="queue_wait",
        default=2 * SECOND,
    )
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=16 * MIB
    )
    max_bodies_bytes: int = option(
        "deployment",
        "memory budget of HTTP request bodies that are received and processed at once; more get 503, but one "
        "body of the largest size is always accepted",
        Integer(MIB, 1 << 40),
        default=256 * MIB,
    )
    body_timeout_ms: int = option(
        "deployment",
        "how long a whole body may take to arrive; a slower client gets 408",
        Duration(10, HOUR),
        key="body_timeout",
        default=10 * SECOND,
    )
    queue_served: int = option(
        "deployment",
        "served events that wait for the log; more are dropped and counted, and the response is sent anyway",
        Integer(1, 10_000_000),
        default=100_000,
    )
    queue_served_bytes: int = option(
        "deployment",
        "bytes of served events that wait for the log; more are dropped and counted",
        Integer(KIB, 1 << 46),
        default=64 * MIB,
    )
    follow_wait_ms: int = option(
        "deployment",
        "longest sleep between reads of changed rows",
        Duration(1, MINUTE),
        key="follow_wait",
        default=20,
    )
    version_poll_ms: int = option(
        "deployment",
        "interval of reads of the alias `stable` from the version store",
        Duration(10, MINUTE),
        key="version_poll",
        default=200,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The console: a web page with the state of the services, the quality of predictions and the versions."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7002)
    token: str = option(
        "deployment",
        "token for promote and rollback; without it, the one in state/console.token of the run folder",
        Text("16 to 200 letters, digits, - and _", r"[A-Za-z0-9_-]{16,200}"),
        default="",
    )
    token_file: str = option(
        "deployment",
        "a file with that token, such as a mounted secret; not together with FRESHET_CONSOLE_TOKEN",
        PATH,
        default="",
    )
    host: str = option(
        "deployment",
        "host names that only the console accepts, besides those of FRESHET_COMMON_HOSTS; separated by "
        "commas",
        HOSTS,
        default="",
    )
    services: str = option(
        "deployment",
        "HTTP addresses of the services, if not on this machine at their own ports: role=host:port, "
        "separated by commas; a role may occur several times, IPv6 addresses need brackets",
        Text("role=host:port with commas between", longest=50_000),
        default="",
    )
    poll_ms: int = option(
        "deployment",
        "interval of status requests to the services",
        Duration(50, MINUTE),
        key="poll",
        default=SECOND,
    )
    vitals_ms: int = option(
        "deployment",
        "interval of writes of rates, lags and memory to the topic of measures",
        Duration(100, HOUR),
        key="vitals",
        default=5 * SECOND,
    )
    trace_ms: int = option(
        "deployment",
        "pause between two actions that are traced to the served rows",
        Duration(100, HOUR),
        key="trace",
        default=3 * SECOND,
    )
    history_ms: int = option(
        "deployment",
        "length of the page's history; at start the topic of measures is read from so far back",
        Duration(MINUTE, 7 * 24 * HOUR),
        key="history",
        default=24 * HOUR,
    )
    max_streams: int = option(
        "deployment",
        "pages with live updates at once, one more gets 503; also requests for history at once, one more "
        "gets 429",
        Integer(1, 10_000),
        default=64,
    )
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=MIB
    )
    max_bodies_bytes: int = option(
        "deployment",
        "memory budget of HTTP request bodies that are received and processed at once; more get 503, but one "
        "body of the largest size is always accepted",
        Integer(MIB, 1 << 40),
        default=16 * MIB,
    )
    body_timeout_ms: int = option(
        "deployment",
        "how long a whole body may take to arrive; a slower client gets 408",
        Duration(10, HOUR),
        key="body_timeout",
        default=10 * SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """The simulator of `freshet simulate` and `freshet demo`."""

    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7012)
