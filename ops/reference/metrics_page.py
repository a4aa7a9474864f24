"""The metrics of every service, from their descriptors."""

from __future__ import annotations

from types import ModuleType

import freshet.console.collector
import freshet.demo.service
import freshet.gateway.metrics
import freshet.inference.metrics
from freshet.apps.metrics import DAMAGED_STATE, JOINER_METRICS, TRAINER_METRICS
from freshet.embedder.service import EMBEDDER_METRICS
from freshet.http.app import HTTP_METRICS
from freshet.http.authenticator import AUTH_METRICS
from freshet.observability.grpc_metrics import GRPC_METRICS, PUBLIC_GRPC_METRICS
from freshet.observability.metrics import Metric
from freshet.paramserver.service import PARAMSERVER_METRICS, STORE_METRICS
from freshet.process.telemetry import PROCESS_METRICS
from freshet.wires.row_wire import WIRE_METRICS
from ops.reference.markdown import escaped, grid, header

PUBLIC = (*HTTP_METRICS, *AUTH_METRICS, *PUBLIC_GRPC_METRICS)  # of listeners for external clients


def _metrics_of(module: ModuleType) -> tuple[Metric, ...]:
    return tuple(metric for metric in vars(module).values() if isinstance(metric, Metric))


SERVICES: dict[str, tuple[Metric, ...]] = {
    "gateway": (*PUBLIC, *_metrics_of(freshet.gateway.metrics)),
    "joiner": JOINER_METRICS,
    "embedder": (*EMBEDDER_METRICS, *GRPC_METRICS, *WIRE_METRICS),
    "trainer": (DAMAGED_STATE, *TRAINER_METRICS, *WIRE_METRICS),
    "paramserver": (*PARAMSERVER_METRICS, *STORE_METRICS, *GRPC_METRICS, *WIRE_METRICS),
    "inference": (*PUBLIC, *_metrics_of(freshet.inference.metrics)),
    "simulator": freshet.demo.service.METRICS,
    "console": freshet.console.collector.METRICS,
}
"""What `/metrics` of each service exposes beside PROCESS_METRICS."""

HEAD = ("metric", "kind", "unit", "labels", "what")

INTRO = """\
Every service answers `GET /metrics` on its port in Prometheus' text format; the ports are in
[settings.md](settings.md). A metric that is not known yet is left out. Counters count from the start of the
process, so ask for rates: `rate(freshet_gateway_events_total[1m])`. Beside each counter and histogram stands
when it began (`…_created`), and a histogram has its `…_bucket`, `…_sum` and `…_count`. Every service also has
the figures of any process on Linux by Prometheus' client: `process_resident_memory_bytes`,
`process_start_time_seconds`, `process_cpu_seconds_total`, `process_open_fds` and their like.
"""


def page() -> str:
    """The whole page."""
    lines = [header("Metrics", "what `SERVICES` of ops/reference/metrics_page.py lists"), INTRO]
    for service, metrics in {"every service": PROCESS_METRICS, **SERVICES}.items():
        lines += [
            f"## {service}\n",
            *grid(map(_row, metrics), HEAD),
            "",
        ]
    return "\n".join(lines)


def _row(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return (f"`{metric.exposed}`", metric.kind, metric.unit, labels, escaped(metric.doc))
