"""Every count that the code keeps has a reader: a metric, or the service's status."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import freshet
from freshet.apps.metrics import TRAINER_METRICS
from freshet.apps.remote_sources import RankCounts
from freshet.observability.metrics import readings
from freshet.paramserver.flusher import ShardCounts
from freshet.process.telemetry import PROCESS_METRICS
from freshet.tables.store import Counts
from freshet.trainer.state_sync import Progress
from ops.reference.metrics_page import SERVICES
from tests.fixtures.tables import counting_group, store_of

METRICS = {m.name for metrics in (*SERVICES.values(), PROCESS_METRICS) for m in metrics}

PACKAGE = Path(freshet.__path__[0])

COUNTING = re.compile(r"(Counts|Totals)")
"""In the names of classes that count."""

READERS: Mapping[str, str] = {
    "apps.remote_sources.RankCounts.batches": "status batches",
    "apps.remote_sources.RankCounts.broken": "freshet_trainer_broken_streams",
    "apps.remote_sources.RankCounts.fenced": "freshet_trainer_fenced_batches",
    "apps.remote_sources.RankCounts.received_bytes": "freshet_trainer_received_bytes",
    "apps.remote_sources.RankCounts.refused": "freshet_trainer_refused",
    "apps.remote_sources.RankCounts.seconds": "freshet_trainer_stage_seconds",
    "apps.remote_sources.RankCounts.sent_bytes": "freshet_trainer_sent_bytes",
    "apps.remote_sources.RankCounts.stepped_rows": "freshet_trainer_stepped_rows",
    "embedder.lane.LaneCounts.batches": "status batches",
    "embedder.lane.LaneCounts.lookup_s": "freshet_trainer_stage_seconds",
    "embedder.lane.LaneCounts.push_s": "freshet_trainer_stage_seconds",
    "embedder.lane.LaneCounts.rewinds": "freshet_embedder_rewinds",
    "embedder.lane.LaneCounts.void_rows": "freshet_embedder_void_rows",
    "inference.scoring.Totals.candidates": "freshet_inference_candidates",
    "inference.scoring.Totals.explored": "freshet_inference_explored",
    "inference.scoring.Totals.requests": "status requests",
    "joiner.commit.EventCounts.out_of_bounds": "freshet_joiner_out_of_bounds",
    "joiner.commit.EventCounts.outcomes": "freshet_joiner_outcomes",
    "joiner.commit.EventCounts.refused": "freshet_joiner_dead_letters",
    "paramserver.flusher.ShardCounts.fenced": "freshet_shard_fenced",
    "paramserver.flusher.ShardCounts.flushed_rows": "freshet_shard_flushed_rows",
    "paramserver.flusher.ShardCounts.flushes": "freshet_shard_flushes",
    "paramserver.flusher.ShardCounts.flushes_failed": "freshet_shard_flushes_failed",
    "paramserver.flusher.ShardCounts.passed_rows": "freshet_shard_passed_rows",
    "paramserver.flusher.ShardCounts.published_bytes": "freshet_shard_published_bytes",
    "paramserver.flusher.ShardCounts.published_rows": "freshet_shard_published_rows",
    "paramserver.flusher.ShardCounts.pushes": "freshet_shard_pushes",
    "paramserver.flusher.ShardCounts.refused": "freshet_shard_refused",
    "paramserver.flusher.ShardCounts.replaced_buckets": "freshet_shard_replaced_buckets",
    "paramserver.flusher.ShardCounts.room_blocks": "freshet_shard_room_blocks",
    "paramserver.flusher.ShardCounts.skipped": "freshet_shard_skipped",
    "paramserver.shard_manager.SliceCounts.doubted": "freshet_paramserver_moved_slices",
    "paramserver.shard_manager.SliceCounts.given": "freshet_paramserver_moved_slices",
    "paramserver.shard_manager.SliceCounts.lost": "freshet_paramserver_moved_slices",
    "paramserver.shard_manager.SliceCounts.taken": "freshet_paramserver_moved_slices",
    "observability.grpc_metrics.ListenerCounts.answers": "freshet_grpc_answers",
    "observability.grpc_metrics.ListenerCounts.frames": "freshet_grpc_frames",
    "observability.grpc_metrics.ListenerCounts.handshakes": "freshet_grpc_handshakes",
    "observability.grpc_metrics.ListenerCounts.held_bytes": "freshet_grpc_held_bytes",
    "observability.grpc_metrics.ListenerCounts.received_bytes": "freshet_grpc_received_bytes",
    "observability.grpc_metrics.ListenerCounts.refused": "freshet_grpc_refused",
    "observability.grpc_metrics.ListenerCounts.seconds": "freshet_grpc_answer_seconds",
    "observability.grpc_metrics.ListenerCounts.sent_bytes": "freshet_grpc_sent_bytes",
    "observability.grpc_metrics.ListenerCounts.streams": "freshet_grpc_streams",
    "batches.grpc_client.StreamCounts.batches": "status batches",
    "batches.grpc_client.StreamCounts.broken": "freshet_trainer_broken_streams",
    "batches.grpc_client.StreamCounts.fenced": "freshet_trainer_fenced_batches",
    "batches.grpc_client.StreamCounts.received_bytes": "freshet_trainer_received_bytes",
    "batches.grpc_client.StreamCounts.samples": "freshet_trainer_samples",
    "batches.grpc_client.StreamCounts.sent_bytes": "freshet_trainer_sent_bytes",
    "rpc.link.LinkCounts.broken": "freshet_trainer_broken_streams",
    "rpc.link.LinkCounts.received_bytes": "freshet_trainer_received_bytes",
    "rpc.link.LinkCounts.sent_bytes": "freshet_trainer_sent_bytes",
    "rpc.link.LinkCounts.sent_frames": "freshet_grpc_frames",
    "tables.store.Counts.created": "freshet_shard_created_rows",
    "tables.store.Counts.evicted": "freshet_shard_dropped_rows",
    "tables.store.Counts.not_admitted": "freshet_shard_not_admitted_gradients",
    "tables.store.Counts.not_finite": "freshet_shard_not_finite_gradients",
    "wires.row_wire.RowCounts.bytes_raw": "freshet_wire_raw_bytes",
    "wires.row_wire.RowCounts.bytes_wire": "freshet_wire_bytes",
    "wires.row_wire.RowCounts.decode_s": "freshet_wire_decode_seconds",
    "wires.row_wire.RowCounts.encode_s": "freshet_wire_encode_seconds",
    "wires.row_wire.RowCounts.relative_error": "freshet_wire_relative_error",
    "wires.row_wire.RowCounts.rows": "freshet_wire_rows",
    "demo.readers.Counts.abandoned": "freshet_simulator_abandoned",
    "demo.readers.Counts.clicks": "freshet_simulator_clicks",
    "demo.readers.Counts.errors": "freshet_simulator_errors",
    "demo.readers.Counts.impressions": "freshet_simulator_impressions",
    "demo.readers.Counts.purchases": "freshet_simulator_purchases",
}
"""{field of a class that counts: the metric, or the key of the status, in which it can be read}."""


def counting_fields() -> set[str]:
    """Return the fields of all counting dataclasses, from source, since imports would take seconds."""
    fields = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        text = path.read_text()
        if not re.search(r"class \w*(Counts|Totals)", text):
            continue
        for kind in ast.walk(ast.parse(text)):
            if not isinstance(kind, ast.ClassDef) or not COUNTING.search(kind.name):
                continue
            if any("dataclass" in ast.unparse(decorator) for decorator in kind.decorator_list):
                annotated = [one.target for one in kind.body if isinstance(one, ast.AnnAssign)]
                names = [target.id for target in annotated if isinstance(target, ast.Name)]
                fields |= {f"{module}.{kind.name}.{name}" for name in names}
    return fields


def test_every_count_has_a_reader() -> None:
    """A new count needs a metric or a place in the status, which READERS names."""
    assert counting_fields() == set(READERS)


def test_every_reader_is_a_metric_or_stands_in_the_status() -> None:
    named = {reader for reader in READERS.values() if not reader.startswith("status ")}

    assert named <= METRICS


def test_the_native_table_has_the_counts_of_its_facade() -> None:
    native = store_of(counting_group(), buckets=4).native.counts()

    assert len(native) == len(dataclasses.fields(Counts))


@pytest.mark.parametrize("kind", [ShardCounts, Counts, RankCounts, Progress])
def test_all_counts_of_a_trainer_are_metrics(kind: Any) -> None:
    """Each field has a number of its own, and each number is read."""
    numbers = itertools.count(1_000_003)

    def numbered(counts: type) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for field in dataclasses.fields(counts):
            of_many = field.type.startswith("dict") if isinstance(field.type, str) else False
            made[field.name] = {"x": next(numbers)} if of_many else next(numbers)
        return made

    parts: dict[Any, dict[str, Any]] = {
        each: numbered(each) for each in (ShardCounts, Counts, RankCounts, Progress)
    }
    rank = parts[RankCounts]
    status = {
        **parts[Progress],
        **{name: value for name, value in rank.items() if name != "seconds"},
        "shard": parts[ShardCounts],
        "store": parts[Counts],
        "stage_seconds": rank["seconds"],
        "lag_blocks": 0,
        "measures": {},
        "lately": {},
        "rows": {},
        "evicted": {},
        "row_bytes": {},
        "bytes": 0,
        "unwritten_s": 0,
    }
    read: set[float] = set()
    for samples in readings(TRAINER_METRICS, status).values():
        read |= set(samples.values())

    shown_only = {"batches", "version_error", "begun"}  # in the status
    for name, value in parts[kind].items():
        if name not in shown_only:
            assert set(value.values() if isinstance(value, dict) else [value]) <= read, name
