"""Metrics of gRPC listeners; without gRPC itself, which not every service needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram

from freshet.observability.metrics import ANSWER_BUCKETS, Metric, register

GRPC_METRICS = (
    Metric("freshet_grpc_frames", "counter", "messages", "Messages received.", ("method",)),
    Metric("freshet_grpc_received_bytes", "counter", "bytes", "Bytes of messages received.", ("method",)),
    Metric("freshet_grpc_sent_bytes", "counter", "bytes", "Bytes of answers.", ("method",)),
    Metric("freshet_grpc_streams", "gauge", "streams", "Streams that are open.", ("method",)),
    Metric(
        "freshet_grpc_refused",
        "counter",
        "messages",
        "Refused calls and messages: calls without the token or of another model, streams beyond the limit, "
        "and messages that are truncated, oversized, of another version, with a wrong checksum or shape, "
        "that came while too many were in work, or of which the next piece came late.",
        ("reason",),
        at=lambda counts: counts.refusals(),
    ),
    Metric(
        "freshet_grpc_handshakes",
        "counter",
        "connections",
        "TLS handshakes begun. gRPC does not report a refused certificate or a client without TLS: both show "
        "as handshakes without calls.",
    ),
)

_READ = (
    *GRPC_METRICS,
    Metric(
        "freshet_grpc_held_bytes",
        "gauge",
        "bytes",
        "Bytes of messages that are read or in work; an awaited message counts as the largest.",
        at=lambda counts: counts.held_bytes(),
    ),
    Metric(
        "freshet_grpc_answers",
        "counter",
        "answers",
        "Answers to external clients, each one of a stream, and calls that ended without one (`CANCELLED`: "
        "cancelled by the client before the answer); by gRPC status, and by `door`: `passed`, or `refused` "
        "by authentication or a limit.",
        ("method", "status", "door"),
    ),
)
ANSWER_SECONDS = Metric(
    "freshet_grpc_answer_seconds",
    "histogram",
    "seconds",
    "Time from the start of an admitted call, or from a message of a stream, to its answer, or until a "
    "cancellation was noticed.",
    ("method",),
    buckets=ANSWER_BUCKETS,
)
PUBLIC_GRPC_METRICS = (*_READ, ANSWER_SECONDS)
"""Metrics of a listener for external clients, as `freshet_http_requests` and `…_request_seconds` of HTTP."""

REFUSALS = (
    "token",
    "identity",
    "streams",
    "truncated",
    "oversized",
    "magic",
    "version",
    "crc",
    "shape",
    "overloaded",
    "late",
)
"""Reasons of a listener between services."""

QUIET = "quiet"
"""Reason of a public listener: an idle stream was closed in favour of a new one."""


@dataclass(slots=True)
class ListenerCounts:
    """Counts of a listener since its start, by method and by reason."""

    frames: Counter[str] = field(default_factory=Counter)
    received_bytes: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    answers: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # method, status, `door`
    handshakes: int = 0  # TLS, begun
    held_bytes: Callable[[], int] = lambda: 0  # of a public listener, now
    seconds: Histogram | None = None  # of a public listener's answers; None: between services

    def refusals(self) -> dict[str, int]:
        """Return refusals by reason, from 0 on: Prometheus misses the first increase of a new series."""
        reasons = REFUSALS if self.seconds is None else (QUIET,)
        return {**dict.fromkeys(reasons, 0), **self.refused}

    def show(self, method: str) -> None:
        """Expose a method before its first answer: Prometheus misses the first increase of a new series."""
        self.answers[method, "OK", "passed"] += 0
        if self.seconds is not None:
            self.seconds.labels(method)

    def answered(self, method: str, status: str, door: str, seconds: float) -> None:
        """Count an answer of a public listener; refused calls do not count in times, as over HTTP."""
        self.answers[method, status, door] += 1
        if self.seconds is not None and door == "passed":
            self.seconds.labels(method).observe(seconds)


def public_counts(registry: CollectorRegistry) -> ListenerCounts:
    """Create the counts of a listener for external clients; the registry exposes PUBLIC_GRPC_METRICS."""
    counts = ListenerCounts(seconds=ANSWER_SECONDS.histogram(registry))
    register(registry, _READ, lambda: counts)
    return counts
