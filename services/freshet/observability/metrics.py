"""Metrics: described once, then counted where things happen or read from a status at each scrape.

docs/reference/metrics.md is written from the descriptors that `ops/reference/metrics_page.py` lists. A figure
is read from the status that is registered with it, at the place that its descriptor names:

    METRICS = (
        Metric("freshet_shard_pushes", "counter", "pushes", "Pushes applied."),  # status["pushes"]
        Metric("freshet_shard_bytes", "gauge", "bytes", "Memory of rows.", at="memory.bytes"),
    )
    register(registry, METRICS, shard.status)

Code that has no status makes a Prometheus metric of the descriptor:

    APPENDED = Metric("freshet_gateway_events_appended", "counter", "events", "Events made durable.")
    appended = APPENDED.counter(registry)
    appended.inc(3)
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from freshet.errors import Unavailable

_NAME = re.compile(r"freshet_[a-z0-9]+(_[a-z0-9]+)*")

ANSWER_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Seconds until a client is answered: the same for all protocols, so that they can be added."""

Readings = dict[str, dict[tuple[str, ...], float]]
"""{metric: {values of its labels: value}}; a metric without labels has the one key ()."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Name, meaning and source of one metric."""

    name: str  # without `_total`, which Prometheus adds to counters
    kind: Literal["counter", "gauge", "histogram"]
    unit: str  # "rows", "seconds", "bytes", …; for people
    doc: str  # a sentence
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = Histogram.DEFAULT_BUCKETS  # of a histogram: rising upper bounds
    at: str | Callable[[Any], Any] = ""
    """Place in the service's status: keys or attributes with dots between them, or a function of the status;
    "": the name without `freshet_<service>_`. A collection there counts as its length. With labels, the value
    is a mapping nested as deep as there are labels; its keys are the labels' values, and a tuple stands for
    several labels."""
    absent: float | None = None  # value if the status has none; None: the metric is left out

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.endswith("_total"):
            raise ValueError(f"a metric is named freshet_…, without _total; found {self.name!r}")

    @property
    def exposed(self) -> str:
        """Its name in Prometheus."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def counter(self, registry: CollectorRegistry) -> Counter:
        """Register a counter. Raises ValueError if the metric is of another kind, or the name is taken."""
        self._require("counter")
        return Counter(self.name, self.doc, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry, read: Callable[[], float] | None = None) -> Gauge:
        """Register a gauge; each scrape calls `read` for its value. Raises as `counter`."""
        self._require("gauge")
        gauge = Gauge(self.name, self.doc, self.labels, registry=registry)
        if read is not None:
            gauge.set_function(read)
        return gauge

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """Register a histogram. Raises as `counter`."""
        self._require("histogram")
        return Histogram(self.name, self.doc, self.labels, registry=registry, buckets=self.buckets)

    def _require(self, kind: str) -> None:
        if self.kind != kind:
            raise ValueError(f"{self.name} is described as a {self.kind}, not as a {kind}")

    def value_in(self, status: Any) -> Any:
        """Return the value at the metric's place in a status; None if it has none."""
        if callable(self.at):
            return self.at(status)
        found = status
        for key in (self.at or self.name.split("_", 2)[2]).split("."):
            found = found.get(key) if isinstance(found, Mapping) else getattr(found, key)
            if found is None:
                return self.absent
        return found


def readings(metrics: Iterable[Metric], status: Any) -> Readings:
    """Return the values of metrics in a status; metrics and labels without a value are left out."""
    values = ((metric, metric.value_in(status)) for metric in metrics)
    return {
        metric.name: dict(_samples(value, len(metric.labels)))
        for metric, value in values
        if value is not None
    }


def _samples(value: Any, labels: int) -> Iterator[tuple[tuple[str, ...], float]]:
    if not labels:
        if value is not None:
            yield (), float(len(value) if isinstance(value, Collection) else value)
        return
    for key, inner in list(value.items()):  # a copy: other threads count meanwhile
        own = key if isinstance(key, tuple) else (str(key),)
        for rest, number in _samples(inner, labels - len(own)):
            yield (*own, *rest), number


def register(registry: CollectorRegistry, metrics: Sequence[Metric], status: Callable[[], Any]) -> None:
    """Serve counters and gauges from a registry, read from a status at each scrape.

    Args:
        status: called on the scraper's thread; None while nothing is known yet.

    Raises:
        ValueError: a name is taken already, or a metric is a histogram.
    """
    registry.register(_StatusCollector(metrics, status))


class _StatusCollector(Collector):
    def __init__(self, metrics: Sequence[Metric], status: Callable[[], Any]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._status = status

    def describe(self) -> Iterable[Family]:
        """Return families without samples, by which a registry refuses duplicate names."""
        return [_family(metric) for metric in self._metrics.values()]

    def collect(self) -> Iterable[Family]:
        """Return a family for each metric that has a value."""
        status = self._status()
        families = []
        found = {} if status is None else readings(self._metrics.values(), status)
        for name, samples in found.items():
            family = _family(self._metrics[name])
            for labels, value in samples.items():
                family.add_metric(labels, value)
            families.append(family)
        return families


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    if metric.kind == "histogram":
        raise ValueError(f"{metric.name}: a histogram is counted where things happen, it cannot be read")
    family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return family(metric.name, metric.doc, labels=metric.labels)


T = TypeVar("T")

WAIT_S = 1.0
"""Prometheus waits 5 s for a page by our configuration, and a page may hold several cached gauges."""


class CachedGauge(Generic[T]):
    """A figure that another component must be queried for: its last known value if the answer takes too long.

    A page of metrics is so complete while the log is away. Thread-safe.
    """

    def __init__(self, query: Callable[[], T], initial: T, wait_s: float = WAIT_S) -> None:
        """Use `initial` until the first answer. A call waits up to `wait_s`."""
        self._query, self._known, self._wait_s = query, initial, wait_s
        self._lock = threading.Lock()
        self._running: threading.Event | None = None  # set at the end of the query that runs
        self._failed: BaseException | None = None

    def __call__(self) -> T:
        """Return the newest answer. Raises the exception of the query, except Unavailable."""
        with self._lock:
            if self._running is None:
                done = threading.Event()
                threading.Thread(target=self._run, args=(done,), daemon=True, name="cached-gauge").start()
                self._running = done  # only after the start, which may fail: later calls would wait for ever
            running = self._running
        running.wait(self._wait_s)
        with self._lock:
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed
            return self._known

    def _run(self, done: threading.Event) -> None:
        failed: BaseException | None = None
        try:
            known = self._query()
        except Unavailable:
            known = self._known
        except BaseException as error:  # the next reader raises it
            known, failed = self._known, error
        with self._lock:
            self._known, self._failed, self._running = known, failed, None
        done.set()
