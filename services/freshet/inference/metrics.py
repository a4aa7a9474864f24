"""Metrics of the inference server, with those of its HTTP and gRPC listeners."""

from __future__ import annotations

from freshet.observability.metrics import Metric

CANDIDATES = Metric("freshet_inference_candidates", "counter", "candidates", "Candidates scored.")
BATCH_REQUESTS = Metric(
    "freshet_inference_batch_requests",
    "histogram",
    "requests",
    "Rank requests scored together.",
    buckets=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
)
NOT_FINITE_SCORES = Metric(
    "freshet_inference_not_finite_scores",
    "counter",
    "candidates",
    "Candidates with a score or a prediction that was NaN or infinite, as of log(0). It is null in the "
    "answer, and the impression is logged and trained on without `freshet_served`.",
)
SHED = Metric(
    "freshet_inference_shed",
    "counter",
    "requests",
    "Requests of any route that were not scored: refused because the wait would be too long (`wait`), or "
    "abandoned by clients that disconnected (`gone`).",
    ("why",),
)
UNKNOWN_ROWS = Metric(
    "freshet_inference_unknown_rows", "counter", "values", "Values without a row, by feature.", ("feature",)
)
UNREAD_ROWS = Metric(
    "freshet_inference_unread_rows",
    "counter",
    "rows",
    "Rows, each once a request, that had to be looked for on the local disk before a request was scored.",
)
DEFAULTED_ROWS = Metric(
    "freshet_inference_defaulted_rows",
    "counter",
    "rows",
    "Rows that requests were scored without, as if they had never learned, though the local disk may have "
    "them: they were not read within FRESHET_INFERENCE_ROWS_WAIT (`late`), the disk cannot be read or is not "
    "as it was written (`unreadable`), or too many rows waited to be read (`busy`).",
    ("why",),
)
ROW_BYTES = Metric(
    "freshet_inference_row_bytes",
    "gauge",
    "bytes",
    "Memory of rows with their indexes.",
)
SSD_ROWS = Metric(
    "freshet_inference_ssd_rows", "gauge", "rows", "Rows on the local disk alone (SSD_FOLDER), about."
)
SSD_BYTES = Metric(
    "freshet_inference_ssd_bytes",
    "gauge",
    "bytes",
    "Bytes of the files of rows on the local disk that are in use.",
)
SSD_FULL = Metric(
    "freshet_inference_ssd_full",
    "gauge",
    "1",
    "1 while the disk, or SSD_BYTES, is full: rows stay in memory beyond its bound.",
)
ROW_READ_SECONDS = Metric(
    "freshet_inference_row_read_seconds",
    "histogram",
    "seconds",
    "Time of a read of rows from the local disk, for all requests that waited.",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0),
)
EXPLORED = Metric("freshet_inference_explored", "counter", "requests", "Requests ordered at random.")
FRESHNESS = Metric(
    "freshet_inference_freshness_seconds",
    "gauge",
    "seconds",
    "Now minus the newest event learned from; 0 before any.",
)
ROWS_FRESHNESS = Metric(
    "freshet_inference_rows_freshness_seconds",
    "gauge",
    "seconds",
    "Freshness of rows without dense versions: it grows if changed rows are not followed, even if new "
    "versions keep freshness short. Equal to freshness until rows have learned from an event.",
)
ROWS_UNREAD = Metric(
    "freshet_inference_rows_unread_seconds",
    "gauge",
    "seconds",
    "Longest time for which a partition of changed rows has not been read to its end; freshness does not "
    "show one stalled partition. About a second while all are read, or nothing is published; it grows while "
    "the log does not report the partitions' ends; 0 until rows are served.",
)
LABEL_DELAY = Metric(
    "freshet_inference_label_delay_seconds",
    "gauge",
    "seconds",
    "Shortest window of a label, grace included: freshness reaches it while no action arrives, and is at "
    'least as long with emit = "window".',
)
PUBLISH_INTERVAL = Metric(
    "freshet_inference_publish_interval_seconds",
    "gauge",
    "seconds",
    "Interval at which changed rows are published (`train.publish_interval`); a lower bound of freshness.",
)
CORRUPT_DELTAS = Metric(
    "freshet_inference_corrupt_deltas",
    "gauge",
    "records",
    "Damaged row deltas that were skipped since the start.",
)
NOT_FINITE_ROWS = Metric(
    "freshet_inference_not_finite_rows",
    "gauge",
    "rows",
    "Rows skipped since the start because a value was NaN or infinite; each keeps its former value.",
)
DAMAGED_BUCKETS = Metric(
    "freshet_inference_damaged_buckets",
    "gauge",
    "buckets",
    "Buckets with unreadable pages at the last read of the row store; retried every minute.",
)
MISSING_ROWS = Metric(
    "freshet_inference_missing_rows",
    "gauge",
    "rows",
    "Rows of those buckets that were not read: until they change they serve as if never learned.",
)
VERSION = Metric(
    "freshet_inference_version",
    "gauge",
    "number",
    "Number of the version served; -1: none, or rows are not served yet.",
)
SWAPS = Metric("freshet_inference_version_swaps", "counter", "versions", "Versions that began to serve.")
KEPT_OUT = Metric(
    "freshet_inference_versions_refused", "counter", "versions", "Versions that could not be served."
)
SERVED_LOGGED = Metric("freshet_inference_served_logged", "counter", "events", "Served events appended.")
SERVED_DROPPED = Metric(
    "freshet_inference_served_dropped", "counter", "events", "Served events not logged, by reason.", ("why",)
)
SERVED_QUEUE = Metric(
    "freshet_inference_served_queue", "gauge", "events", "Served events that wait to be logged."
)
SERVED_QUEUE_BYTES = Metric(
    "freshet_inference_served_queue_bytes", "gauge", "bytes", "Bytes of served events that wait to be logged."
)
