"""Settings of the services that clients from outside talk to."""

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

__all__ = ["Console", "Gateway", "GrpcDoor", "Inference", "Simulator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcDoor:
    """gRPC beside HTTP, of a service that clients from outside talk to; the extra `grpc` brings it."""

    grpc_port: int = option("deployment", "gRPC; 0: none", PORT, default=0)
    grpc_cert_file: str = option(
        "deployment", "the certificate that gRPC shows; without it no TLS", PEM, default=""
    )
    grpc_key_file: str = option("deployment", "the certificate's key", PEM, default="")
    grpc_ca_file: str = option(
        "deployment",
        "who signs clients' certificates; without it no client is asked for one",
        PEM,
        default="",
    )
    grpc_max_bodies_bytes: int = option(
        "deployment",
        "bytes of messages that are held at once over gRPC, while they come and are worked on. One that is "
        "waited for counts as the largest, so that this divided by the largest is how many calls and streams "
        "are read at once; others wait, and then a stream that is quiet ends to make room",
        Integer(MIB, 1 << 40),
        default=256 * MIB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway(GrpcDoor):
    """The door for events."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7000)
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=8 * MIB
    )
    max_bodies_bytes: int = option(
        "deployment",
        "bytes of request bodies that are held at once over HTTP, while they come and are worked on; more "
        "gets 503, but one body of the largest size is always taken",
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
        "events of one client; whoever has sent more gets 429 until they are earned. 0: no limit",
        Number(0, 1e9),
        default=0,
    )
    queue_events: int = option(
        "deployment",
        "events waiting for the log; beyond it 429 with Retry-After",
        Integer(1, 10_000_000),
        default=50_000,
    )
    queue_bytes: int = option(
        "deployment",
        "bytes of events waiting for the log; beyond it 429 with Retry-After",
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
        "how long an append gathers events of other requests, so that they share one write",
        Duration(0, SECOND),
        key="append_wait",
        default=2,
    )
    retry_after_ms: int = option(
        "deployment",
        "what Retry-After tells a client",
        Duration(SECOND, HOUR),
        key="retry_after",
        default=SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference(GrpcDoor):
    """The server of predictions."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7001)
    client_requests_per_s: float = option(
        "deployment",
        CLIENT_REQUESTS,
        Number(0, 1e9),
        default=0,
    )
    start_wait_ms: int = option(
        "deployment",
        "how long a rank request waits for rows and a version while the server starts; then it gets 503. 0ms "
        "where a proxy then asks another server",
        Duration(0, MINUTE),
        key="start_wait",
        default=5 * SECOND,
    )
    max_candidates: int = option(
        "deployment", "a request with more is refused with 413", Integer(1, 1_000_000), default=10_000
    )
    batch_budget_ms: int = option(
        "deployment",
        "rank requests that wait are scored together while that should take no longer; 0: one by one",
        Duration(0, SECOND),
        key="batch_budget",
        default=5,
    )
    queue_wait_ms: int = option(
        "deployment",
        "longest that a request for scores may be expected to wait for those before it; beyond it 429 with "
        "Retry-After, over gRPC RESOURCE_EXHAUSTED with retry-after-ms. 0: no bound",
        Duration(0, HOUR),
        key="queue_wait",
        default=2 * SECOND,
    )
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=16 * MIB
    )
    max_bodies_bytes: int = option(
        "deployment",
        "bytes of request bodies that are held at once over HTTP, while they come and are worked on; more "
        "gets 503, but one body of the largest size is always taken",
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
        "served events waiting for the log; beyond it they are dropped and counted, never the answer",
        Integer(1, 10_000_000),
        default=100_000,
    )
    queue_served_bytes: int = option(
        "deployment",
        "bytes of served events waiting for the log; beyond it they are dropped and counted, too",
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
        "how often the version store is asked which version is stable",
        Duration(10, MINUTE),
        key="version_poll",
        default=200,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The page for people: what the other services do, how well the model predicts, and its versions."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7002)
    token: str = option(
        "deployment",
        "what promote and rollback ask for; without it, that of state/console.token in the run folder",
        Text("16 to 200 letters, digits, - and _", r"[A-Za-z0-9_-]{16,200}"),
        default="",
    )
    token_file: str = option(
        "deployment",
        "a file that holds that token, such as a secret that is mounted; not beside FRESHET_CONSOLE_TOKEN",
        PATH,
        default="",
    )
    host: str = option(
        "deployment",
        "names by which browsers may ask for the console alone, besides those of FRESHET_COMMON_HOSTS; "
        "commas between",
        HOSTS,
        default="",
    )
    services: str = option(
        "deployment",
        "where the services answer HTTP, if not on this machine by their own ports: role=host:port, commas "
        "between; a role may come again, and IPv6 stands in brackets",
        Text("role=host:port with commas between", longest=50_000),
        default="",
    )
    poll_ms: int = option(
        "deployment",
        "how often the services are asked how they are",
        Duration(50, MINUTE),
        key="poll",
        default=SECOND,
    )
    vitals_ms: int = option(
        "deployment",
        "how often rates, lags and memory are written to the topic of measures",
        Duration(100, HOUR),
        key="vitals",
        default=5 * SECOND,
    )
    trace_ms: int = option(
        "deployment",
        "pause between two actions that are followed to the served rows",
        Duration(100, HOUR),
        key="trace",
        default=3 * SECOND,
    )
    history_ms: int = option(
        "deployment",
        "how far back the page looks; the topic of measures is read back so far at the start",
        Duration(MINUTE, 7 * 24 * HOUR),
        key="history",
        default=24 * HOUR,
    )
    max_streams: int = option(
        "deployment",
        "pages that are kept up to date at once, one more gets 503; and questions about the past that are "
        "answered at once, one more gets 429",
        Integer(1, 10_000),
        default=64,
    )
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=MIB
    )
    max_bodies_bytes: int = option(
        "deployment",
        "bytes of request bodies that are held at once over HTTP, while they come and are worked on; more "
        "gets 503, but one body of the largest size is always taken",
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
    """Simulated readers: `freshet simulate` and `freshet demo`."""

    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7012)
