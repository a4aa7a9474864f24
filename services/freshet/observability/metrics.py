"""Metrics: described once, then counted where things happen or read when somebody scrapes.

A service's `METRICS` says what it exposes; docs/reference/metrics.md and the test that compares it with a
running `/metrics` come from the same list. Who counts where things happen makes a Prometheus metric of the
descriptor:

    APPENDED = Metric("freshet_gateway_events_appended", "counter", "events", "Events made durable.")
    appended = APPENDED.counter(registry)
    appended.inc(3)

Who keeps plain counts in a dataclass of its own has them read at each scrape:

    register(registry, METRICS, lambda: {"freshet_shard_pushes": shard.counts.pushes})
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

__all__ = ["ANSWER_BUCKETS", "Metric", "Reading", "register"]

_NAME = re.compile(r"freshet_[a-z0-9]+(_[a-z0-9]+)*")

ANSWER_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Seconds until a client is answered, by whatever protocol: the same, so that they can be added."""

Reading = float | Mapping[tuple[str, ...], float]
"""A number, or one for each combination of label values."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric is called and means."""

    name: str  # without `_total`, which Prometheus adds to counters
    kind: Literal["counter", "gauge", "histogram"]
    unit: str  # "rows", "seconds", "bytes", …; for people
    doc: str  # a sentence
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = Histogram.DEFAULT_BUCKETS  # of a histogram: rising upper bounds

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.endswith("_total"):
            raise ValueError(f"a metric is named freshet_…, without _total; found {self.name!r}")

    @property
    def exposed(self) -> str:
        """Its name in Prometheus."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def counter(self, registry: CollectorRegistry) -> Counter:
        """A counter of this description. Raises ValueError for another kind, or a name that is taken."""
        self._must_be("counter")
        return Counter(self.name, self.doc, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry, read: Callable[[], float] | None = None) -> Gauge:
        """A gauge of this description; `read` is asked for its value at each scrape. Raises as `counter`."""
        self._must_be("gauge")
        made = Gauge(self.name, self.doc, self.labels, registry=registry)
        if read is not None:
            made.set_function(read)
        return made

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """A histogram of this description. Raises as `counter`."""
        self._must_be("histogram")
        return Histogram(self.name, self.doc, self.labels, registry=registry, buckets=self.buckets)

    def _must_be(self, kind: str) -> None:
        if self.kind != kind:
            raise ValueError(f"{self.name} is described as a {self.kind}, not as a {kind}")


def register(
    registry: CollectorRegistry, metrics: Sequence[Metric], read: Callable[[], Mapping[str, Reading]]
) -> None:
    """Serve counters and gauges from a registry, read when somebody scrapes.

    Args:
        read: called at each scrape, on the scraper's thread; returns readings by name. A metric without
            reading is left out (it is not known yet); a reading without metric is an error of the service.

    Raises:
        ValueError: a name is taken already, or a metric is a histogram.
    """
    registry.register(_Readings(metrics, read))


class _Readings(Collector):
    def __init__(self, metrics: Sequence[Metric], read: Callable[[], Mapping[str, Reading]]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._read = read

    def describe(self) -> Iterable[Family]:
        """Names only, so that a registry can refuse duplicates without reading."""
        return [_family(metric) for metric in self._metrics.values()]

    def collect(self) -> Iterable[Family]:
        """One family for each metric that has a reading."""
        families = []
        for name, reading in self._read().items():
            family = _family(self._metrics[name])
            samples = reading if isinstance(reading, Mapping) else {(): reading}
            for labels, value in samples.items():
                family.add_metric(labels, value)
            families.append(family)
        return families


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    if metric.kind == "histogram":
        raise ValueError(f"{metric.name}: a histogram is counted where things happen, it cannot be read")
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return made(metric.name, metric.doc, labels=metric.labels)
