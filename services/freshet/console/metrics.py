"""What the console counts, described."""

from __future__ import annotations

from freshet.http.app import HTTP_METRICS
from freshet.http.authenticator import AUTH_METRICS
from freshet.observability.metrics import Metric

__all__ = ["LOOKS", "LOOK_SECONDS", "METRICS", "UNREADABLE"]

LOOKS = Metric(
    "freshet_console_looks",
    "counter",
    "looks",
    "Looks at the services, by whether all of it went well.",
    ("outcome",),
)
LOOK_SECONDS = Metric(
    "freshet_console_look_seconds",
    "histogram",
    "seconds",
    "Time that a look at services and log took.",
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
)
UNREADABLE = Metric(
    "freshet_console_unreadable",
    "counter",
    "events",
    "Served events at which the console looked and that it cannot show.",
)
METRICS = (*HTTP_METRICS, *AUTH_METRICS, LOOKS, LOOK_SECONDS, UNREADABLE)
