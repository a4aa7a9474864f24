"""What every service counts that speaks HTTP: requests and their times, streams, connections."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Histogram

from freshet.http.bodies import BODIES
from freshet.http.responses import GONE
from freshet.observability.metrics import ANSWER_BUCKETS, Metric

__all__ = ["HTTP_METRICS", "REQUEST_SECONDS", "HttpCounts"]

REQUESTS = Metric(
    "freshet_http_requests",
    "counter",
    "requests",
    "Requests answered, or given up by clients that went away (status `gone`); by `door`: `passed`, or "
    "`refused` before anybody was let in, as without a token, too often for this client, from a page of "
    "another site, or with a path or method that there is not.",
    ("route", "status", "door"),
)
REQUEST_SECONDS = Metric(
    "freshet_http_request_seconds",
    "histogram",
    "seconds",
    "Time from a request's head to its answer, of those that passed the door; of one that waited to be "
    "scored and was given up, until that was seen.",
    ("route",),
    buckets=ANSWER_BUCKETS,
)
STREAMS = Metric(
    "freshet_http_streams", "gauge", "streams", "Answers that are being streamed now.", ("route",)
)
CONNECTIONS = Metric("freshet_http_connections", "gauge", "connections", "Connections that are open.")
CUT_OFF = Metric(
    "freshet_http_connections_cut_off",
    "counter",
    "connections",
    "Connections closed on their clients, by reason: there were too_many of them.",
    ("why",),
)
HTTP_METRICS = (REQUESTS, REQUEST_SECONDS, STREAMS, CONNECTIONS, CUT_OFF, BODIES)
"""Of every service that answers by an `App`."""


class HttpCounts:
    """Counts one service's requests and connections. Lives on one event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = REQUESTS.counter(registry)
        self._seconds = REQUEST_SECONDS.histogram(registry)
        self._streams = STREAMS.gauge(registry)
        self.connections: Callable[[], int] = lambda: 0  # that are open now; the server sets it
        CONNECTIONS.gauge(registry, lambda: self.connections())  # noqa: PLW0108  # the server sets another
        self._cut_off = CUT_OFF.counter(registry)
        self._passed: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # by route and status

    def answered(self, route: str, status: int, seconds: float, *, passed: bool = True) -> None:
        """Count an answer. Those to who was not let in apart: strangers, whom it costs nothing to ask, must
        change neither times nor shares of errors. A door that fails is a fault of ours."""
        if not passed and status < 500:
            self._requests.labels(route, str(status), "refused").inc()
            return
        counters = self._passed.get((route, status))
        if counters is None:
            said = "gone" if status == GONE.status else str(status)
            counters = (self._requests.labels(route, said, "passed"), self._seconds.labels(route))
            self._passed[route, status] = counters
        counters[0].inc()
        counters[1].observe(seconds)

    def gone(self, route: str) -> None:
        """Count a request whose client went away before its body was whole: it has no time."""
        self._requests.labels(route, "gone", "passed").inc()

    def streaming(self, route: str) -> AbstractContextManager[object]:
        """Count an answer that is streamed, and that it is under way until the context is left."""
        self._requests.labels(route, "200", "passed").inc()
        return self._streams.labels(route).track_inprogress()

    def cut_off(self, why: str) -> None:
        """Count a connection that is closed on its client; see CUT_OFF for the reasons."""
        self._cut_off.labels(why).inc()
