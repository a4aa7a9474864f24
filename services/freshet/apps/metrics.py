"""What joiner and trainer tell Prometheus: descriptors, and readings of their figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freshet.embedder.partition_reader import refused_metrics, refused_readings
from freshet.observability.metrics import Metric, Reading
from freshet.paramserver.flusher import store_metrics, store_readings

__all__ = ["DAMAGED_STATE", "JOINER_METRICS", "TRAINER_METRICS", "joiner_readings", "trainer_readings"]

JOINER_METRICS = (
    Metric("freshet_joiner_events", "counter", "events", "Events read by this process."),
    Metric("freshet_joiner_samples", "counter", "samples", "Samples written by this process."),
    Metric("freshet_joiner_commits", "counter", "commits", "Atomic appends of samples with positions."),
    Metric(
        "freshet_joiner_newest_sample_ms",
        "gauge",
        "milliseconds since 1970",
        "Newest event time among samples written by this process; missing before the first.",
    ),
    Metric("freshet_joiner_lag_records", "gauge", "records", "Input records not read yet.", ("partition",)),
    Metric(
        "freshet_joiner_room_records",
        "gauge",
        "records",
        "Input records between the log's start and the oldest that a restart reads again; below 0 is a loss.",
        ("partition",),
    ),
    Metric(
        "freshet_joiner_lost_share",
        "gauge",
        "share",
        "Part of the events of the last five minutes, read by this process, that taught the model nothing, "
        "by figure (docs/operations.md, Losses); missing while there were none.",
        ("figure",),
    ),
    Metric(
        "freshet_joiner_keys_misplaced",
        "gauge",
        "topics",
        "1 while the keys of a topic on Kafka lie in other partitions than equal keys of the topics that it "
        "is joined with: another partitioner, none, or no keys; 0 once enough keys were seen. `partitioner` "
        "names the one that explains them (murmur2, crc32, fnv1a, fnv1a-positive, no key, other).",
        ("topic", "partitioner"),
    ),
    Metric(
        "freshet_joiner_topic_partitions",
        "gauge",
        "partitions",
        "Partitions of an input topic when last counted, on a log where topics of others grow.",
        ("topic",),
    ),
    Metric(
        "freshet_joiner_topic_partitions_unread",
        "gauge",
        "partitions",
        "Of these, partitions that no joiner reads: the model learns nothing of their events. 0 once all "
        "topics that are joined have one number of partitions.",
        ("topic",),
    ),
    Metric(
        "freshet_joiner_watermark_ms",
        "gauge",
        "milliseconds since 1970",
        "Event time up to which windows are closed.",
        ("partition",),
    ),
    Metric(
        "freshet_joiner_event_time_ahead_ms",
        "gauge",
        "milliseconds",
        "By how much the watermark is ahead of the time that the joiner knows to be right, below 0 as a "
        "rule. Events of now are late where it exceeds the longest window and twice the grace.",
        ("partition",),
    ),
    Metric(
        "freshet_joiner_clock_step_ms",
        "gauge",
        "milliseconds",
        "By how much this machine's wall clock was set, until that is believed or undone; 0 while it runs "
        "evenly.",
    ),
    Metric(
        "freshet_joiner_disputed_partitions",
        "gauge",
        "partitions",
        "Partitions whose next event is dated ahead while clocks disagree on that: they wait.",
    ),
    Metric(
        "freshet_joiner_impressions",
        "gauge",
        "impressions",
        "What became of impressions since the model began, for each label.",
        ("label", "outcome"),
    ),
    Metric(
        "freshet_joiner_out_of_bounds",
        "counter",
        "samples",
        "Samples that were not made as the value lies outside of the label's bounds: a part of no_value.",
        ("label",),
    ),
    Metric(
        "freshet_joiner_outcomes",
        "counter",
        "events",
        "Impressions (stream served), actions and shown events by what came of them, in commits of this "
        "process: new or matched; again (true already); repeated; late (what they belong to was decided); "
        "outside (every window); orphan (no impression came within the grace); no_label (true for none).",
        ("stream", "outcome"),
    ),
    Metric(
        "freshet_joiner_dead_letters",
        "counter",
        "events",
        "Events that the log holds and that went to dead letters, in commits of this process: unreadable; "
        "no_schema (not known, or lacking what the spec names); bad_time (before 1970, or too far ahead); "
        "too_large (its samples would exceed what the log takes).",
        ("stream", "reason"),
    ),
)

DAMAGED_STATE = Metric(
    "freshet_trainer_damaged",
    "gauge",
    "yes or no",
    "1 while a trainer that holds rows itself does not train, as rows or other state that it starts from are "
    "damaged: it looks again until an operator has mended them.",
)

TRAINER_METRICS = (
    DAMAGED_STATE,
    Metric("freshet_trainer_samples", "counter", "samples", "Samples trained on by this process."),
    Metric("freshet_trainer_steps", "gauge", "steps", "Dense steps since the model began."),
    Metric(
        "freshet_trainer_lag_blocks", "gauge", "blocks", "Blocks of samples that no batch has covered yet."
    ),
    Metric("freshet_trainer_event_time_ms", "gauge", "milliseconds since 1970", "Newest event learned from."),
    Metric(
        "freshet_trainer_stage_seconds",
        "counter",
        "seconds",
        "Time of the lanes in each stage of their work; what grows fastest is what training waits for.",
        ("stage",),
    ),
    Metric("freshet_trainer_version", "gauge", "number", "Newest version written by this process."),
    Metric(
        "freshet_trainer_versions_failed",
        "counter",
        "versions",
        "Versions that could not be written; training went on, and the next one was tried.",
    ),
    Metric(
        "freshet_trainer_outliers",
        "counter",
        "labels",
        "Numeric labels that measures and the gate left out: beyond 1,000 medians of the label's others.",
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
        "Measures of the last ten windows that have closed; missing before the first.",
        ("of", "label", "measure"),
    ),
    Metric("freshet_trainer_ranks", "gauge", "ranks", "Ranks that step together, this one among them."),
    Metric(
        "freshet_trainer_worlds",
        "counter",
        "worlds",
        "Groups of ranks that this one was in: one more whenever a rank joins, leaves or is lost.",
    ),
    Metric("freshet_trainer_lost", "counter", "worlds", "Of these, those that ended as a rank was lost."),
    Metric(
        "freshet_trainer_stepped_rows",
        "counter",
        "rows",
        "Copies of rows, looked up ahead, stepped by the rank's own pushes before they were trained on; one "
        "that several pushes have stepped counts for each.",
    ),
    Metric("freshet_trainer_sent_bytes", "counter", "bytes", "Sent to embedders or shards."),
    Metric("freshet_trainer_received_bytes", "counter", "bytes", "Received from embedders or shards."),
    Metric(
        "freshet_trainer_broken_streams",
        "counter",
        "streams",
        "Streams to embedders or shards that ended with an error; batches in flight are made again.",
    ),
    Metric(
        "freshet_trainer_fenced_batches",
        "counter",
        "batches",
        "Batches of an embedder that another had replaced; they were not trained on.",
    ),
    *refused_metrics("trainer"),
    Metric("freshet_shard_rows", "gauge", "rows", "Rows resident, by table.", ("table",)),
    Metric(
        "freshet_shard_max_rows",
        "gauge",
        "rows",
        "Rows that a table may have: its `max_rows`, or its share of the memory for rows; beyond it the "
        "least recently used are evicted.",
        ("table",),
    ),
    Metric("freshet_shard_evicted_rows", "counter", "rows", "Rows evicted, by table.", ("table",)),
    Metric(
        "freshet_shard_row_bytes",
        "gauge",
        "bytes",
        "Memory of rows with their state, by table; indexes and room to grow are not counted.",
        ("table",),
    ),
    Metric("freshet_shard_memory_bytes", "gauge", "bytes", "Memory of rows, indexes and room to grow."),
    *store_metrics("shard"),
    Metric("freshet_shard_fenced", "counter", "pushes", "Pushes of an embedder that another has replaced."),
    Metric("freshet_shard_skipped", "counter", "pushes", "Pushes that were applied before; in pushes, too."),
    Metric("freshet_shard_pushes", "counter", "pushes", "Pushes applied or skipped."),
    Metric("freshet_shard_refused", "counter", "pushes", "Pushes that did not continue what was applied."),
    Metric("freshet_shard_published_rows", "counter", "rows", "Changed rows published to serving."),
    Metric("freshet_shard_flushed_rows", "counter", "rows", "Changed rows written to the row store."),
    Metric("freshet_shard_flushes", "counter", "flushes", "Rounds of flushing all buckets."),
    Metric("freshet_shard_flushes_failed", "counter", "flushes", "Attempts at a flush that were in vain."),
    Metric(
        "freshet_shard_unwritten_seconds",
        "gauge",
        "seconds",
        "For how long there has been a flush that is not written, tried once or often; 0 between flushes.",
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
"""Of a trainer with its rows in its own process, which has no other ranks."""


def joiner_readings(status: Any) -> Mapping[str, Reading]:
    """Readings of a `JoinerStatus`."""
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
    """Of a counter of the joiner's ledger: `actions_late` -> action, late; `impressions` are the new ones."""
    events, _, outcome = counter.partition("_")
    return {"impressions": "served", "actions": "action"}.get(events, events), outcome or "new"


def trainer_readings(status: Mapping[str, Any]) -> Mapping[str, Reading]:
    """Readings of `Training.status()`, or of `RemoteTraining.status()`, which holds no rows."""
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
