"""Metrics of the simulator."""

from __future__ import annotations

from freshet.observability.metrics import Metric

__all__ = ["METRICS"]

METRICS = (
    Metric("freshet_simulator_impressions", "counter", "items", "Items shown to readers."),
    Metric("freshet_simulator_clicks", "counter", "clicks", "Clicks that readers make, some still to come."),
    Metric("freshet_simulator_purchases", "counter", "purchases", "Purchases that readers make."),
    Metric("freshet_simulator_abandoned", "counter", "visits", "Visits that got no page in time."),
    Metric("freshet_simulator_errors", "counter", "requests", "Requests that failed, each attempt."),
    Metric(
        "freshet_simulator_events_per_second",
        "gauge",
        "events/s",
        "Events created in the last seconds.",
        at="measured_rate",
    ),
    Metric(
        "freshet_simulator_waiting",
        "gauge",
        "actions",
        "Actions that wait for the gateway.",
        at="actions.waiting",
    ),
)
