"""Metrics of joiner and trainer, read from their status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freshet.embedder.block_decoder import refused_metrics
from freshet.observability.metrics import Metric
from freshet.paramserver.shard import store_metrics

if TYPE_CHECKING:
    from freshet.joiner.service import JoinerStatus


def _lost_shares(status: JoinerStatus) -> dict[str, Any]:
    return {figure: counts["share"] for figure, counts in status.losses.get("recent", {}).items()}


def _misplaced_keys(status: JoinerStatus) -> dict[tuple[str, ...], float]:
    partitioners = status.placing.get("partitioners", {})
    return {(topic, name): topic in status.placing["trouble"] for topic, name in partitioners.items()}


def _outcomes(status: JoinerStatus) -> dict[tuple[str, ...], int]:
    """Split counters of the ledger: `actions_late` is ("action", "late"), `impressions` ("served", "new")."""
    outcomes: dict[tuple[str, ...], int] = {}
    for counter, n in status.counts.outcomes.items():
        events, _, outcome = counter.partition("_")
        stream = {"impressions": "served", "actions": "action"}.get(events, events)
        outcomes[stream, outcome or "new"] = n
    return outcomes


JOINER_METRICS = (
    Metric("freshet_joiner_events", "counter", "events", "Events read by this process."),
    Metric("freshet_joiner_samples", "counter", "samples", "Samples written by this process."),
    Metric("freshet_joiner_commits", "counter", "commits", "Commits written by this process."),
    Metric(
        "freshet_joiner_newest_sample_ms",
        "gauge",
        "milliseconds since 1970",
        "Newest event time of samples written by this process; missing before the first.",
        at="newest_ms",
    ),
    Metric(
        "freshet_joiner_lag_records",
        "gauge",
        "records",
        "Input records not yet read.",
        ("partition",),
        at="lag",
    ),
    Metric(
        "freshet_joiner_room_records",
        "gauge",
        "records",
        "Input records between the log's start and the first that a restart reads; below 0 is a loss.",
        ("partition",),
        at="room",
    ),
    Metric(
        "freshet_joiner_lost_share",
        "gauge",
        "share",
        "Share of the events read in the last five minutes from which the model learns nothing, by figure "
        "(docs/operations.md, Losses); missing without events.",
        ("figure",),
        at=_lost_shares,
    ),
    Metric(
        "freshet_joiner_keys_misplaced",
        "gauge",
        "topics",
        "1 while keys of a Kafka topic are in other partitions than equal keys of the topics joined with it; "
        "0 after enough keys were seen. `partitioner` names the partitioner that explains the keys "
        "(murmur2, crc32, fnv1a, fnv1a-positive, no key, other).",
        ("topic", "partitioner"),
        at=_misplaced_keys,
    ),
    Metric(
        "freshet_joiner_topic_partitions",
        "gauge",
        "partitions",
        "Partitions of an input topic when last counted, on a log whose topics can gain partitions.",
        ("topic",),
        at="growth.counts",
    ),
    Metric(
        "freshet_joiner_topic_partitions_unread",
        "gauge",
        "partitions",
        "Partitions of an input topic that no joiner reads, so that their events are not learned; 0 once all "
        "joined topics have the same number of partitions.",
        ("topic",),
        at=lambda status: dict.fromkeys(status.growth.counts, 0) | status.growth.unread,
    ),
    Metric(
        "freshet_joiner_watermark_ms",
        "gauge",
        "milliseconds since 1970",
        "Watermark: event time up to which windows are closed.",
        ("partition",),
    ),
    Metric(
        "freshet_joiner_event_time_ahead_ms",
        "gauge",
        "milliseconds",
        "Watermark minus the time that the joiner has verified; usually below 0. Current events are late "
        "where it exceeds the longest window plus twice the grace.",
        ("partition",),
        at=lambda status: {p: w - status.now_ms for p, w in status.watermark_ms.items() if w is not None},
    ),
    Metric(
        "freshet_joiner_clock_step_ms",
        "gauge",
        "milliseconds",
        "Step of this machine's wall clock, until it is confirmed or undone; 0 without a step.",
    ),
    Metric(
        "freshet_joiner_disputed_partitions",
        "gauge",
        "partitions",
        "Partitions that wait because their next event is dated ahead and clocks disagree on it.",
        at="disputed_ms",
    ),
    Metric(
        "freshet_joiner_impressions",
        "gauge",
        "impressions",
        "Impressions since the model began, by label and outcome: pending; trained_positive; "
        "trained_negative; not_shown; given_false; sampled_out; no_value; late (the impression itself: the "
        "same number for each label).",
        ("label", "outcome"),
        at="ledger.labels",
    ),
    Metric(
        "freshet_joiner_out_of_bounds",
        "counter",
        "samples",
        "Samples not written because the value is outside the label's bounds; included in no_value.",
        ("label",),
        at="counts.out_of_bounds",
    ),
    Metric(
        "freshet_joiner_outcomes",
        "counter",
        "events",
        "Impressions (stream served), actions and shown events by outcome, in commits of this process: "
        "new or matched; again (the label is already true); repeated; late (already decided, or older than "
        "all that is open); outside (dated before its impression by more than the grace); orphan (no "
        "impression within the grace, or dated after the windows of all its labels); no_label (true for no "
        "label).",
        ("stream", "outcome"),
        at=_outcomes,
    ),
    Metric(
        "freshet_joiner_dead_letters",
        "counter",
        "events",
        "Events written to dead letters, in commits of this process: unreadable; no_schema (unknown, or "
        "without a field that the spec names); bad_time (before 1970, or too far ahead); too_large (the "
        "samples would exceed the log's limit).",
        ("stream", "reason"),
        at="counts.refused",
    ),
)

DAMAGED_STATE = Metric(
    "freshet_trainer_damaged",
    "gauge",
    "yes or no",
    "1 while a trainer with its own rows does not start because rows or other state are damaged; it retries "
    "until an operator has repaired them.",
    absent=0,
)

TRAINER_METRICS = (
    Metric("freshet_trainer_samples", "counter", "samples", "Samples trained on by this process."),
    Metric("freshet_trainer_steps", "gauge", "steps", "Dense steps since the model began."),
    Metric("freshet_trainer_lag_blocks", "gauge", "blocks", "Blocks of samples that no batch contains yet."),
    Metric(
        "freshet_trainer_room_blocks",
        "gauge",
        "blocks",
        "Blocks between the start of samples and the vector of the newest version that training can start "
        "from, as the rank that writes versions knows it; below 0 is a loss.",
        ("partition",),
        at="room_blocks",
    ),
    Metric(
        "freshet_trainer_event_time_ms",
        "gauge",
        "milliseconds since 1970",
        "Event time of the newest sample learned.",
    ),
    Metric(
        "freshet_trainer_stage_seconds",
        "counter",
        "seconds",
        "Time of the lanes by stage; the fastest growing stage limits training.",
        ("stage",),
    ),
    Metric("freshet_trainer_version", "gauge", "number", "Newest version written by this process."),
    Metric(
        "freshet_trainer_versions_failed",
        "counter",
        "versions",
        "Versions that could not be written; training continues and tries the next one.",
    ),
    Metric(
        "freshet_trainer_outliers",
        "counter",
        "labels",
        "Numeric labels that measures and the gate leave out, beyond 1,000 times the label's median.",
        absent=0,
    ),
    Metric(
        "freshet_trainer_not_finite",
        "counter",
        "samples or steps",
        "What this process did not learn from, because a loss, a gradient or its square was not finite: "
        "samples; or steps (dense ones), in which such parts of the mean gradient counted as 0.",
        ("of",),
    ),
    Metric(
        "freshet_trainer_quality",
        "gauge",
        "figure",
        "Measures since the model began.",
        ("of", "label", "measure"),
        at="measures",
    ),
    Metric(
        "freshet_trainer_quality_lately",
        "gauge",
        "figure",
        "Measures over the last ten closed windows; missing before the first.",
        ("of", "label", "measure"),
        at="lately",
    ),
    Metric(
        "freshet_trainer_ranks",
        "gauge",
        "ranks",
        "Ranks of the quorum, including this one.",
        at="ranks.ranks",
        absent=1,
    ),
    Metric(
        "freshet_trainer_worlds",
        "counter",
        "quorums",
        "Quorums of this rank; a new one begins when a rank joins, leaves or is lost.",
        at="ranks.worlds",
        absent=1,
    ),
    Metric(
        "freshet_trainer_lost",
        "counter",
        "quorums",
        "Quorums that ended because a rank was lost.",
        at="ranks.lost",
        absent=0,
    ),
    Metric(
        "freshet_trainer_stepped_rows",
        "counter",
        "rows",
        "Row copies looked up ahead and stepped by the rank's own pushes before training, once per push.",
        absent=0,
    ),
    Metric("freshet_trainer_sent_bytes", "counter", "bytes", "Sent to embedders or shards.", absent=0),
    Metric(
        "freshet_trainer_received_bytes", "counter", "bytes", "Received from embedders or shards.", absent=0
    ),
    Metric(
        "freshet_trainer_broken_streams",
        "counter",
        "streams",
        "Streams to embedders or shards that ended with an error; batches in flight are built again.",
        at="broken",
        absent=0,
    ),
    Metric(
        "freshet_trainer_fenced_batches",
        "counter",
        "batches",
        "Batches not trained on because another embedder has claimed the partition.",
        at="fenced",
        absent=0,
    ),
    *refused_metrics("trainer"),
    Metric(
        "freshet_shard_max_rows",
        "gauge",
        "rows",
        "Maximum rows of a table: its `max_rows`, or its share of the memory for rows; beyond it the least "
        "recently used are evicted.",
        ("table",),
    ),
    Metric(
        "freshet_shard_evicted_rows", "counter", "rows", "Rows evicted, by table.", ("table",), at="evicted"
    ),
    Metric(
        "freshet_shard_row_bytes",
        "gauge",
        "bytes",
        "Memory of rows with their state, by table, without indexes and spare capacity.",
        ("table",),
    ),
    Metric(
        "freshet_shard_memory_bytes",
        "gauge",
        "bytes",
        "Memory of rows, indexes and spare capacity.",
        at="bytes",
    ),
    *store_metrics("shard"),
    Metric(
        "freshet_shard_fenced",
        "counter",
        "pushes",
        "Pushes refused because of an old fence.",
        at="shard.fenced",
    ),
    Metric(
        "freshet_shard_skipped",
        "counter",
        "pushes",
        "Pushes already applied; included in pushes.",
        at="shard.skipped",
    ),
    Metric("freshet_shard_pushes", "counter", "pushes", "Pushes applied or skipped.", at="shard.pushes"),
    Metric(
        "freshet_shard_refused",
        "counter",
        "pushes",
        "Pushes that do not follow the applied offsets.",
        at="shard.refused",
    ),
)
