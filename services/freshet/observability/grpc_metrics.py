"""What gRPC listeners count; without gRPC itself, which not every service needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram

from freshet.observability.metrics import ANSWER_BUCKETS, Metric, Reading, register

__all__ = [
    "GRPC_METRICS",
    "PUBLIC_GRPC_METRICS",
    "QUIET",
    "REFUSALS",
    "ListenerCounts",
    "grpc_readings",
    "public_counts",
    "public_readings",
]

GRPC_METRICS = (
    Metric("freshet_grpc_frames", "counter", "messages", "Messages taken.", ("method",)),
    Metric("freshet_grpc_received_bytes", "counter", "bytes", "Of messages taken.", ("method",)),
    Metric("freshet_grpc_sent_bytes", "counter", "bytes", "Of answers.", ("method",)),
    Metric("freshet_grpc_streams", "gauge", "streams", "Streams that are open.", ("method",)),
    Metric(
        "freshet_grpc_refused",
        "counter",
        "messages",
        "Calls without the token or of another model, streams beyond those that may be open, and messages "
        "that were refused: truncated, oversized, of another version, with a wrong checksum or shape, while "
        "too much was in work, or whose next piece did not come in time (late).",
        ("reason",),
    ),
    Metric(
        "freshet_grpc_handshakes",
        "counter",
        "connections",
        "TLS handshakes begun. A client whose certificate is refused, or that speaks no TLS, ends in one, "
        "which gRPC tells nobody: it shows as handshakes that go on without calls.",
    ),
)

_READ = (
    *GRPC_METRICS,
    Metric(
        "freshet_grpc_held_bytes",
        "gauge",
        "bytes",
        "Of messages that are read or worked on; one that is waited for counts as the largest.",
    ),
    Metric(
        "freshet_grpc_answers",
        "counter",
        "answers",
        "Answers to clients from outside, those of a stream one by one, and calls that ended without one "
        "(`CANCELLED`: given up by the client before it was answered); by gRPC status, and by `door`: "
        "`passed`, or `refused` before anybody was let in.",
        ("method", "status", "door"),
    ),
)
ANSWER_SECONDS = Metric(
    "freshet_grpc_answer_seconds",
    "histogram",
    "seconds",
    "Time from a call's beginning, or of a stream from a message's coming, to its answer, of those that "
    "passed the door; of one that was given up, until that was seen.",
    ("method",),
    buckets=ANSWER_BUCKETS,
)
PUBLIC_GRPC_METRICS = (*_READ, ANSWER_SECONDS)
"""Of a listener for clients from outside; `freshet_http_requests` and `…_request_seconds` are the same of
HTTP."""

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
"""Reasons of a listener between services. They are shown from 0 on: of a series that begins with its first
refusal, Prometheus sees no increase."""

QUIET = "quiet"
"""Reason of a door: a stream that made room for others."""


@dataclass(slots=True)
class ListenerCounts:
    """What a listener has done since it started, by method and by reason."""

    frames: Counter[str] = field(default_factory=Counter)
    received_bytes: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    answers: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # method, status, door
    handshakes: int = 0  # TLS, begun
    held_bytes: Callable[[], int] = lambda: 0  # of a door, now
    seconds: Histogram | None = None  # of a door's answers; None: nobody asks

    def show(self, method: str) -> None:
        """Tell of a door's method from the start on: of series that begin with an answer, Prometheus sees no
        increase."""
        self.answers[method, "OK", "passed"] += 0
        if self.seconds is not None:
            self.seconds.labels(method)

    def answered(self, method: str, status: str, door: str, seconds: float) -> None:
        """A door has answered. Those that were refused there change no times, as over HTTP."""
        self.answers[method, status, door] += 1
        if self.seconds is not None and door == "passed":
            self.seconds.labels(method).observe(seconds)


def public_counts(registry: CollectorRegistry) -> ListenerCounts:
    """Counts of a door for clients from outside, which the registry shows as PUBLIC_GRPC_METRICS."""
    counts = ListenerCounts(seconds=ANSWER_SECONDS.histogram(registry))
    register(registry, _READ, lambda: public_readings(counts))
    return counts


def grpc_readings(counts: ListenerCounts, reasons: Sequence[str] = ()) -> dict[str, Reading]:
    """GRPC_METRICS now. `reasons`: of refusals, shown also before there is one."""
    labelled: dict[str, Reading] = {
        f"freshet_grpc_{name}": {(label,): float(n) for label, n in list(getattr(counts, name).items())}
        for name in ("frames", "received_bytes", "sent_bytes", "streams")
    }
    labelled["freshet_grpc_refused"] = {
        (reason,): float(n) for reason, n in {**dict.fromkeys(reasons, 0), **counts.refused}.items()
    }
    return {**labelled, "freshet_grpc_handshakes": float(counts.handshakes)}


def public_readings(counts: ListenerCounts) -> dict[str, Reading]:
    """PUBLIC_GRPC_METRICS now, but for times."""
    answers: Reading = {labels: float(n) for labels, n in list(counts.answers.items())}
    held = float(counts.held_bytes())
    return {
        **grpc_readings(counts, (QUIET,)),
        "freshet_grpc_answers": answers,
        "freshet_grpc_held_bytes": held,
    }
