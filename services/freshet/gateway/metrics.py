"""Metrics of the gateway, with those of its HTTP and gRPC listeners."""

from __future__ import annotations

from freshet.observability.metrics import Metric

EVENTS = Metric(
    "freshet_gateway_events",
    "counter",
    "events",
    "Events by stream and outcome (accepted, refused).",
    ("stream", "outcome"),
)
QUEUED = Metric("freshet_gateway_queue_events", "gauge", "events", "Events that wait for the log.")
APPENDED = Metric(
    "freshet_gateway_events_appended",
    "counter",
    "events",
    "Events and dead letters that are durable in the log.",
)
APPEND_FAILURES = Metric(
    "freshet_gateway_append_failures",
    "counter",
    "appends",
    "Appends to a partition, or of a request, that failed; their clients received 503.",
)
APPEND_SECONDS = Metric(
    "freshet_gateway_append_seconds",
    "histogram",
    "seconds",
    "Duration of successful appends; those that were sent and answered together count once.",
)
