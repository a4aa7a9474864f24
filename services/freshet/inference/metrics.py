"""What the inference server tells Prometheus, beside what every HTTP service does."""

from __future__ import annotations

from freshet.http.authenticator import DOOR_METRICS
from freshet.http.metrics import HTTP_METRICS
from freshet.observability.grpc_metrics import GRPC_DOOR_METRICS
from freshet.observability.metrics import Metric

__all__ = [
    "BATCH_REQUESTS",
    "CANDIDATES",
    "CORRUPT_DELTAS",
    "DAMAGED_BUCKETS",
    "EXPLORED",
    "FRESHNESS",
    "KEPT_OUT",
    "LABEL_DELAY",
    "METRICS",
    "MISSING_ROWS",
    "NOT_FINITE_ROWS",
    "PUBLISH_INTERVAL",
    "ROWS_FRESHNESS",
    "ROWS_UNREAD",
    "SERVED_DROPPED",
    "SERVED_LOGGED",
    "SERVED_QUEUE",
    "SERVED_QUEUE_BYTES",
    "SHED",
    "SWAPS",
    "UNKNOWN_ROWS",
    "VERSION",
]

CANDIDATES = Metric("freshet_inference_candidates", "counter", "candidates", "Candidates scored.")
BATCH_REQUESTS = Metric(
    "freshet_inference_batch_requests",
    "histogram",
    "requests",
    "Rank requests scored together.",
    buckets=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
)
SHED = Metric(
    "freshet_inference_shed",
    "counter",
    "requests",
    "Requests that were not scored, by whatever door they came: refused, as the wait would be too long "
    "(`wait`), or given up by clients that went away (`gone`).",
    ("why",),
)
UNKNOWN_ROWS = Metric(
    "freshet_inference_unknown_rows", "counter", "values", "Values without a row, by feature.", ("feature",)
)
EXPLORED = Metric("freshet_inference_explored", "counter", "requests", "Requests ordered at random.")
FRESHNESS = Metric(
    "freshet_inference_freshness_seconds",
    "gauge",
    "seconds",
    "Now minus the newest event learned from; 0 before anything was learned.",
)
ROWS_FRESHNESS = Metric(
    "freshet_inference_rows_freshness_seconds",
    "gauge",
    "seconds",
    "The same of rows alone: it grows where changed rows are not followed, while dense versions keep "
    "freshness short. As freshness until rows have learned anything.",
)
ROWS_UNREAD = Metric(
    "freshet_inference_rows_unread_seconds",
    "gauge",
    "seconds",
    "For how long the partition of changed rows that is worst off is not known to be read to its end: "
    "freshness hides one that stands still behind the others. About a second while all are read, or nothing "
    "is published; it grows while the log does not say where they end; 0 until rows are served.",
)
LABEL_DELAY = Metric(
    "freshet_inference_label_delay_seconds",
    "gauge",
    "seconds",
    "Shortest window of a label, grace included: freshness comes to it while nobody acts, and is at least "
    'it with emit = "window".',
)
PUBLISH_INTERVAL = Metric(
    "freshet_inference_publish_interval_seconds",
    "gauge",
    "seconds",
    "How often the spec has changed rows published (`train.publish_interval`): rows are no fresher.",
)
CORRUPT_DELTAS = Metric(
    "freshet_inference_corrupt_deltas",
    "gauge",
    "records",
    "Row deltas left out since the start: damaged bytes.",
)
NOT_FINITE_ROWS = Metric(
    "freshet_inference_not_finite_rows",
    "gauge",
    "rows",
    "Rows left out since the start because a value was NaN or infinite; each serves as it was before.",
)
DAMAGED_BUCKETS = Metric(
    "freshet_inference_damaged_buckets",
    "gauge",
    "buckets",
    "Buckets of the row store with pages that cannot be read, as it was read last. They are looked at "
    "again every "
    "minute.",
)
MISSING_ROWS = Metric(
    "freshet_inference_missing_rows",
    "gauge",
    "rows",
    "Rows of those buckets that were not read: they serve as rows that were never learned until they change.",
)
VERSION = Metric(
    "freshet_inference_version",
    "gauge",
    "number",
    "Number of the dense version served; -1: none, or rows are not served yet.",
)
SWAPS = Metric("freshet_inference_version_swaps", "counter", "versions", "Versions taken into service.")
KEPT_OUT = Metric(
    "freshet_inference_versions_refused", "counter", "versions", "Versions that could not be served."
)
SERVED_LOGGED = Metric("freshet_inference_served_logged", "counter", "events", "Served events appended.")
SERVED_DROPPED = Metric(
    "freshet_inference_served_dropped", "counter", "events", "Served events not logged, by why.", ("why",)
)
SERVED_QUEUE = Metric(
    "freshet_inference_served_queue", "gauge", "events", "Served events that wait to be logged."
)
SERVED_QUEUE_BYTES = Metric(
    "freshet_inference_served_queue_bytes", "gauge", "bytes", "Bytes of served events that wait to be logged."
)

METRICS = (
    *GRPC_DOOR_METRICS,
    *HTTP_METRICS,
    *DOOR_METRICS,
    BATCH_REQUESTS,
    SHED,
    CANDIDATES,
    UNKNOWN_ROWS,
    EXPLORED,
    FRESHNESS,
    ROWS_FRESHNESS,
    ROWS_UNREAD,
    LABEL_DELAY,
    PUBLISH_INTERVAL,
    CORRUPT_DELTAS,
    NOT_FINITE_ROWS,
    DAMAGED_BUCKETS,
    MISSING_ROWS,
    VERSION,
    SWAPS,
    KEPT_OUT,
    SERVED_LOGGED,
    SERVED_DROPPED,
    SERVED_QUEUE,
    SERVED_QUEUE_BYTES,
)
