"""Metrics of joiner and trainer: descriptors, and readings of their figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freshet.embedder.block_decoder import refused_metrics, refused_readings
from freshet.observability.metrics import Metric, Reading
from freshet.paramserver.flusher import store_metrics, store_readings

__all__ = ["DAMAGED_STATE", "JOINER_METRICS", "TRAINER_METRICS", "joiner_readings", "trainer_readings"]

JOINER_METRICS = (
    Metric("freshet_joiner_events", "counter", "events", "Events read by this process."),
    Metric("freshet_joiner_samples", "counter", "samples", "Samples written by this process."),
    Metric("freshet_joiner_commits", "counter", "commits", "Commits written by this process."),
    Metric(
        "freshet_joiner_newest_sample_ms",
        "gauge",
        "milliseconds since 1970",
        "Newest event time of samples written by this process; missing before the first.",
    ),
    Metric("freshet_joiner_lag_records", "gauge", "records", "Input records not yet read.", ("partition",)),
    Metric(
        "freshet_joiner_room_records",
        "gauge",
        "records",
        "Input records between the log's start and the first that a restart reads; below 0 is a loss.",
        ("partition",),
    ),
    Metric(
        "freshet_joiner_lost_share",
        "gauge",
        "share",
        "Share of the events read in the last five minutes from which the model learns nothing, by figure "
        "(docs/operations.md, Losses); missing without events.",
        ("figure",),
    ),
    Metric(
        "freshet_joiner_keys_misplaced",
        "gauge",
        "topics",
        "1 while keys of a Kafka topic are in other partitions than equal keys of the topics joined with it; "
        "0 after enough keys were seen. `partitioner` names the partitioner that explains the keys "
        "(murmur2, crc32, fnv1a, fnv1a-positive, no key, other).",
        ("topic", "partitioner"),
    ),
    Metric(
        "freshet_joiner_topic_partitions",
        "gauge",
        "partitions",
        "Partitions of an input topic when last counted, on a log whose topics can gain partitions.",
        ("topic",),
    ),
    Metric(
        "freshet_joiner_topic_partitions_unread",
        "gauge",
        "partitions",
        "Partitions of an input topic that no joiner reads, so that their events are not learned; 0 once all "
        "joined topics have the same number of partitions.",
        ("topic",),
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
    ),
    Metric(
        "freshet_joiner_impressions",
        "gauge",
        "impressions",
        "Impressions since the model began, by label and outcome.",
        ("label", "outcome"),
    ),
    Metric(
        "freshet_joiner_out_of_bounds",
        "counter",
        "samples",
        "Samples not written because the value is outside the label's bounds; included in no_value.",
        ("label",),
    ),
    Metric(
        "freshet_joiner_outcomes",
        "counter",
        "events",
        "Impressions (stream served), actions and shown events by outcome, in commits of this process: "
        "new or matched; again (the label is already true); repeated; late (already decided); outside "
        "(after every window); orphan (no impression within the grace); no_label (true for no label).",
        ("stream", "outcome"),
    ),
    Metric(
        "freshet_joiner_dead_letters",
        "counter",
        "events",
        "Events written to dead letters, in commits of this process: unreadable; no_schema (unknown, or "
        "without a field that the spec names); bad_time (before 1970, or too far ahead); too_large (the "
        "samples would exceed the log's limit).",
        ("stream", "reason"),
    ),
)

DAMAGED_STATE = Metric(
    "freshet_trainer_damaged",
    "gauge",
    "yes or no",
    "1 while a trainer with its own rows does not start because rows or other state are damaged; it retries "
    "until an operator has repaired them.",
)

TRAINER_METRICS = (
    DAMAGED_STATE,
    Metric("freshet_trainer_samples", "counter", "samples", "Samples trained on by this process."),
    Metric("freshet_trainer_steps", "gauge", "steps", "Dense steps since the model began."),
    Metric("freshet_trainer_lag_blocks", "gauge", "blocks", "Blocks of samples that no batch contains yet."),
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
    ),
    Metric(
        "freshet_trainer_quality",
        "gauge",
        "figure",
        "Measures since the model began.",
        ("of", "label", "measure"),
    ),
    Metric(
        "freshet_trainer_quality_lately",
        "gauge",
        "figure",
        "Measures over the last ten closed windows; missing before the first.",
        ("of", "label", "measure"),
    ),
    Metric("freshet_trainer_ranks", "gauge", "ranks", "Ranks of the quorum, including this one."),
    Metric(
        "freshet_trainer_worlds",
        "counter",
        "worlds",
        "Quorums of this rank; a new one begins when a rank joins, leaves or is lost.",
    ),
    Metric("freshet_trainer_lost", "counter", "worlds", "Quorums that ended because a rank was lost."),
    Metric(
        "freshet_trainer_stepped_rows",
        "counter",
        "rows",
        "Row copies looked up ahead and stepped by the rank's own pushes before training, once per push.",
    ),
    Metric("freshet_trainer_sent_bytes", "counter", "bytes", "Sent to embedders or shards."),
    Metric("freshet_trainer_received_bytes", "counter", "bytes", "Received from embedders or shards."),
    Metric(
        "freshet_trainer_broken_streams",
        "counter",
        "streams",
        "Streams to embedders or shards that ended with an error; batches in flight are built again.",
    ),
    Metric(
        "freshet_trainer_fenced_batches",
        "counter",
        "batches",
        "Batches not trained on because another embedder has claimed the partition.",
    ),
    *refused_metrics("trainer"),
    Metric("freshet_shard_rows", "gauge", "rows", "Rows resident, by table.", ("table",)),
    Metric(
        "freshet_shard_max_rows",
        "gauge",
        "rows",
        "Maximum rows of a table: its `max_rows`, or its share of the memory for rows; beyond it the least "
        "recently used are evicted.",
        ("table",),
    ),
    Metric("freshet_shard_evicted_rows", "counter", "rows", "Rows evicted, by table.", ("table",)),
    Metric(
        "freshet_shard_row_bytes",
        "gauge",
        "bytes",
        "Memory of rows with their state, by table, without indexes and spare capacity.",
        ("table",),
    ),
    Metric("freshet_shard_memory_bytes", "gauge", "bytes", "Memory of rows, indexes and spare capacity."),
    *store_metrics("shard"),
    Metric("freshet_shard_fenced", "counter", "pushes", "Pushes refused because of an old fence."),
    Metric("freshet_shard_skipped", "counter", "pushes", "Pushes already applied; included in pushes."),
    Metric("freshet_shard_pushes", "counter", "pushes", "Pushes applied or skipped."),
    Metric("freshet_shard_refused", "counter", "pushes", "Pushes that do not follow the applied offsets."),
    Metric("freshet_shard_published_rows", "counter", "rows", "Changed rows published to serving."),
    Metric("freshet_shard_flushed_rows", "counter", "rows", "Changed rows written to the row store."),
    Metric("freshet_shard_flushes", "counter", "flushes", "Rounds of flushing all buckets."),
    Metric("freshet_shard_flushes_failed", "counter", "flushes", "Failed attempts at a flush."),
    Metric(
        "freshet_shard_unwritten_seconds",
        "gauge",
        "seconds",
        "Age of the flush that is not yet written, over all attempts; 0 between flushes.",
    ),
    Metric(
        "freshet_shard_room_blocks",
        "gauge",
        "blocks",
        "Blocks between the start of samples and the smallest offset in the row store; below 0 is a loss.",
        ("partition",),
    ),
)


SINGLE_RANK = {"ranks": 1, "worlds": 1, "lost": 0}
"""Figures of a trainer with its own rows, which has no other ranks."""


def joiner_readings(status: Any) -> Mapping[str, Reading]:
    """Return the readings of a `JoinerStatus`."""
    return {
        "freshet_joiner_events": status.events,
        "freshet_joiner_samples": status.samples,
        "freshet_joiner_commits": status.commits,
        **({} if status.newest_ms is None else {"freshet_joiner_newest_sample_ms": status.newest_ms}),
        "freshet_joiner_lag_records": {(str(p),): float(n) for p, n in status.lag.items()},
        "freshet_joiner_room_records": {(str(p),): float(n) for p, n in status.room.items()},
        "freshet_joiner_lost_share": {
            (figure,): one["share"]
            for figure, one in status.losses.get("recent", {}).items()
            if one["share"] is not None
        },
        "freshet_joiner_keys_misplaced": {
            (topic, name): float(topic in status.placing["trouble"])
            for topic, name in status.placing.get("partitioners", {}).items()
        },
        "freshet_joiner_topic_partitions": {(topic,): float(n) for topic, n in status.growth.counts.items()},
        "freshet_joiner_topic_partitions_unread": {
            (topic,): float(status.growth.unread.get(topic, 0)) for topic in status.growth.counts
        },
        "freshet_joiner_out_of_bounds": {
            (label,): float(n) for label, n in status.counts.out_of_bounds.items()
        },
        "freshet_joiner_watermark_ms": {
            (str(p),): float(w) for p, w in status.watermark_ms.items() if w is not None
        },
        "freshet_joiner_event_time_ahead_ms": {
            (str(p),): float(w - status.now_ms) for p, w in status.watermark_ms.items() if w is not None
        },
        "freshet_joiner_clock_step_ms": status.clock_step_ms,
        "freshet_joiner_disputed_partitions": len(status.disputed_ms),
        "freshet_joiner_impressions": {
            (label, outcome): float(n)
            for label, counts in status.ledger.labels.items()
            for outcome, n in counts.items()
        },
        "freshet_joiner_outcomes": {
            _stream_and_outcome(name): float(n) for name, n in status.counts.outcomes.items()
        },
        "freshet_joiner_dead_letters": {
            (stream, reason): float(n)
            for stream, counts in status.counts.refused.items()
            for reason, n in counts.items()
        },
    }


def _stream_and_outcome(counter: str) -> tuple[str, str]:
    """Split a counter of the joiner's ledger: `actions_late` -> action, late; `impressions` -> served,
    new."""
    events, _, outcome = counter.partition("_")
    return {"impressions": "served", "actions": "action"}.get(events, events), outcome or "new"


def trainer_readings(status: Mapping[str, Any]) -> Mapping[str, Reading]:
    """Return the readings of `Training.status()`, or of `RemoteTraining.status()`, which has no shard."""
    return _training_readings(status) | (_shard_readings(status) if "shard" in status else {})


def _training_readings(status: Mapping[str, Any]) -> dict[str, Reading]:
    return {
        DAMAGED_STATE.name: 0,
        "freshet_trainer_samples": status["samples"],
        "freshet_trainer_steps": status["steps"],
        "freshet_trainer_lag_blocks": status["lag_blocks"],
        "freshet_trainer_stage_seconds": {(s,): seconds for s, seconds in status["stage_seconds"].items()},
        "freshet_trainer_event_time_ms": status["event_time_ms"],
        "freshet_trainer_version": status["version"],
        "freshet_trainer_versions_failed": status["versions_failed"],
        "freshet_trainer_outliers": status.get("outliers", 0),
        "freshet_trainer_ranks": status.get("ranks", SINGLE_RANK)["ranks"],
        "freshet_trainer_worlds": status.get("ranks", SINGLE_RANK)["worlds"],
        "freshet_trainer_lost": status.get("ranks", SINGLE_RANK)["lost"],
        "freshet_trainer_stepped_rows": status.get("stepped_rows", 0),
        "freshet_trainer_sent_bytes": status.get("sent_bytes", 0),
        "freshet_trainer_received_bytes": status.get("received_bytes", 0),
        "freshet_trainer_broken_streams": status.get("broken", 0),
        "freshet_trainer_fenced_batches": status.get("fenced", 0),
        **refused_readings("trainer", status),
        "freshet_trainer_quality": _quality_readings(status["measures"]),
        "freshet_trainer_quality_lately": _quality_readings(status["lately"]),
    }


def _quality_readings(measures: Mapping[str, Any]) -> Mapping[tuple[str, ...], float]:
    return {
        (of, label, measure): float(value)
        for of, labels in measures.items()
        for label, values in labels.items()
        for measure, value in values.items()
        if value is not None
    }


def _shard_readings(status: Mapping[str, Any]) -> dict[str, Reading]:
    shard = status["shard"]
    return {
        "freshet_shard_rows": {(str(table),): float(n) for table, n in status["rows"].items()},
        "freshet_shard_max_rows": {(str(t),): float(n) for t, n in status.get("max_rows", {}).items()},
        "freshet_shard_evicted_rows": {(str(table),): float(n) for table, n in status["evicted"].items()},
        "freshet_shard_row_bytes": {(str(table),): float(n) for table, n in status["row_bytes"].items()},
        "freshet_shard_memory_bytes": status["bytes"],
        "freshet_shard_pushes": shard["pushes"],
        "freshet_shard_skipped": shard["skipped"],
        "freshet_shard_fenced": shard["fenced"],
        **store_readings("shard", status["store"], shard["replaced_buckets"]),
        "freshet_shard_refused": shard["refused"],
        "freshet_shard_published_rows": shard["published_rows"],
        "freshet_shard_flushed_rows": shard["flushed_rows"],
        "freshet_shard_flushes": shard["flushes"],
        "freshet_shard_flushes_failed": shard["flushes_failed"],
        "freshet_shard_unwritten_seconds": status["unwritten_s"],
        "freshet_shard_room_blocks": {(p,): float(n) for p, n in shard["room_blocks"].items()},
    }
