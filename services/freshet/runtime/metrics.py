"""Metrics of services that keep plain counts: described once, read when somebody scrapes.

A service keeps its counts in a dataclass of its own and says with a list of `Metric` what they mean; docs
and dashboards come from the same list.

    METRICS = (Metric("freshet_shard_pushes", "counter", "pushes", "Pushes applied or skipped."),)
    register(registry, METRICS, lambda: {"freshet_shard_pushes": shard.counts.pushes})
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

__all__ = ["Metric", "Reading", "markdown_of", "register"]

_NAME = re.compile(r"freshet_[a-z0-9]+(_[a-z0-9]+)*")

Reading = float | Mapping[tuple[str, ...], float]
"""A number, or one for each combination of label values."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric is called and means."""

    name: str  # without `_total`, which Prometheus adds to counters
    kind: Literal["counter", "gauge"]
    unit: str  # "rows", "seconds", "bytes", …; for people
    doc: str  # a sentence
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.endswith("_total"):
            raise ValueError(f"a metric is named freshet_…, without _total; found {self.name!r}")


def register(
    registry: CollectorRegistry, metrics: Sequence[Metric], read: Callable[[], Mapping[str, Reading]]
) -> None:
    """Serve these metrics from a registry.

    Args:
        read: called at each scrape, on the scraper's thread; returns readings by name. A metric without
        reading is
            left out (it is not known yet); a reading without metric is an error of the service.

    Raises:
        ValueError: a name is taken already.
    """
    registry.register(_Readings(metrics, read))


def markdown_of(metrics: Iterable[Metric]) -> str:
    """A table for the docs."""
    lines = ["| metric | kind | unit | labels | what |", "|---|---|---|---|---|"]
    lines += [
        f"| `{_exposed(m)}` | {m.kind} | {m.unit} | {', '.join(m.labels) or '–'} | {m.doc} |"
        for m in sorted(metrics, key=lambda m: m.name)
    ]
    return "\n".join(lines) + "\n"


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
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return made(metric.name, metric.doc, labels=metric.labels)


def _exposed(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name
