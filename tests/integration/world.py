"""A small trained model on disk: log, row store and versions, and another way to its scores."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
from numpy.typing import NDArray

from freshet.config.avro.schema import Record, sample_schema, to_json
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import ROWS_PARTITIONS, topics_of
from freshet.features import EventExtractor, SampleDecoder
from freshet.inference.service import Parts
from freshet.log import EventLog
from freshet.log.sqlite.event_log import open_url as open_log
from freshet.model import build_model
from freshet.model.inputs import GroupInputs, ModelInputs
from freshet.paramserver.flusher import FlushBook
from freshet.rows.deltas import RowDelta, encode_rows
from freshet.rows.sqlite.row_store import open_url as open_store
from freshet.rows.store import RowStore, StoreIdentity
from freshet.tables import Plan, Store
from freshet.types import (
    F32,
    Append,
    Bucket,
    BucketMeta,
    BytesColumn,
    Fence,
    OffsetRange,
    TimeMs,
    TopicPartition,
    bucket_of,
)
from freshet.versions import Manifest, VersionStore
from freshet.versions.folder import open_url as open_versions

HASH = "spec-hash"


def avro(schema: Record, event: Mapping[str, Any]) -> bytes:
    """An event as fastavro writes it."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(to_json(schema)), event)
    return out.getvalue()


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """A `KeyGroup`, copied from a plan."""

    group: int
    keys: NDArray[np.uint64]
    tables: NDArray[np.uint8]
    bucket_starts: NDArray[np.uint32]


class World:
    """What trainer and shard would leave behind, made step by step."""

    def __init__(self, folder: Path, spec: Spec, served: Record) -> None:
        self.folder = folder
        tables = tuple(replace(t, admission=1) for t in spec.tables)  # a push makes its row
        self.spec, self.served = replace(spec, buckets=16, tables=tables), served
        self.layout = layout_of(self.spec)
        self.log: EventLog = open_log(f"sqlite:{folder}/log")
        self.store: RowStore = open_store(f"sqlite:{folder}/rows")
        self.versions: VersionStore = open_versions(f"file:{folder}/versions")
        self.topics = topics_of(self.spec)
        self.rows = Store.of(self.spec, self.layout)
        self.model = build_model(self.spec, training=True)
        self.decoder = SampleDecoder(
            self.spec, self.layout, lambda _: sample_schema(served, self.spec.events.served.explode)
        )
        self.book = FlushBook(buckets=self.spec.buckets, partitions=self.spec.partitions)
        self.offset = 0
        self.writer = self.log.writer()

    @property
    def parts(self) -> Parts:
        """What an inference server stands on."""
        return Parts(self.spec, HASH, self.served, self.log, self.store, self.versions)

    def close(self) -> None:
        for part in (self.writer, self.log, self.store, self.versions):
            part.close()

    # --- the row store

    def create(self) -> None:
        """The model comes into being, with no rows."""
        for plan in self.topics.plans:
            self.log.create_topic(
                plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
            )
        ids = {t.name: t.id for t in self.spec.tables}
        sizes = {t.id: self.rows.record_bytes(t.id) for t in self.spec.tables}
        partitions = dict.fromkeys(range(self.spec.partitions), 0)
        meta = BucketMeta(Fence(-1), 0, 0, partitions, 0, TimeMs(0))
        buckets = [Bucket(b) for b in range(self.spec.buckets)]
        claims = [b"{}", b"{}"]  # a fence is the offset of a claim
        self.writer.append([Append(self.topics.control, 0, BytesColumn.of(claims))])
        self.store.create(
            StoreIdentity(self.spec.name, HASH, self.spec.buckets, ids, sizes, "log"),
            dict.fromkeys(buckets, meta),
        )
        self.book.claimed(self.store.claim(buckets, Fence(1)))

    def flush(self) -> None:
        """Write what changed to the row store, as a shard does."""
        ends = [self.log.bounds(TopicPartition(self.topics.rows, p)).end for p in range(ROWS_PARTITIONS)]
        flush = self.book.next_flush(self.rows.collect_flush(), np.array(ends))
        self.book.done(flush, self.store.flush(flush))

    def publish(self) -> None:
        """Append what changed to the topic of rows."""
        published = self.rows.collect_publish(1_000_000)
        for part in published.tables:
            places = bucket_of(part.keys, self.spec.buckets) * ROWS_PARTITIONS // self.spec.buckets
            for p in np.unique(places).tolist():
                chosen = places == p
                delta = RowDelta(
                    part.table, Fence(1), published.clock_ms, part.keys[chosen], part.values[chosen],
                    np.empty(0, np.uint64),
                )  # fmt: skip
                self.writer.append([Append(self.topics.rows, p, BytesColumn.of([encode_rows(delta)]))])

    # --- training

    def inputs(self, event: Mapping[str, Any], *, serving: bool) -> tuple[ModelInputs, list[Keys]]:
        """A served event as the trainer would see its samples, by way of fastavro and the whole schema."""
        extractor = EventExtractor(self.spec.events.served, self.served)
        encoded = BytesColumn.of([avro(self.served, event)])
        columns = extractor.extract(encoded, framed=False)
        assert len(columns.bad) == 0, columns.why
        decoded = self.decoder.decode(columns.samples(encoded), 0, columns.times_ms, serving=serving)
        groups: list[GroupInputs] = []
        keys: list[Keys] = []
        for group, found in zip(self.layout.groups, decoded.groups, strict=True):
            features = [self.spec.features[f] for f in group.features]
            tables = np.array([self.spec.table(f.table or "").id for f in features], np.uint8)
            plan = Plan(tables=tables, buckets=self.spec.buckets)
            rows = np.empty((plan.build(found.keys, found.feature_starts), group.width), np.float32)
            self.rows.lookup(group.index, plan.keys, plan.tables, plan.bucket_starts, rows, create=False)
            groups.append(GroupInputs(rows, plan.positions.copy(), found.feature_starts, found.list_ends))
            keys.append(Keys(group.index, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy()))
        return ModelInputs(decoded.size, groups, decoded.dense, None), keys

    def learn(self, event: Mapping[str, Any], seed: int, *, clock_ms: int = 1) -> None:
        """Give the rows of an event random values, as a few steps of training would."""
        _, keys = self.inputs(event, serving=False)
        rng = np.random.default_rng(seed)
        gradients = [
            rng.normal(0, 1, (len(k.keys), self.layout.groups[k.group].width)).astype(np.float32)
            for k in keys
        ]
        self.rows.push([OffsetRange(0, self.offset, self.offset + 1)], clock_ms, keys, gradients)
        self.offset += 1

    def put_version(self, number: int, *, noise: float = 0.1, event_time_ms: int = 0) -> None:
        """Store a version with weights of its own."""
        rng = np.random.default_rng(number)
        state = {
            n: t + rng.normal(0, noise, t.shape).astype(t.dtype) if n.startswith("weights/") else t
            for n, t in build_model(self.spec, training=True).state().items()
        }
        self.versions.put(
            Manifest(number, self.spec.name, HASH, 0, 0, {0: number}, "log", event_time_ms, {}, 0, ""),
            state,
        )

    def promote(self, number: int) -> None:
        """Let `stable` name a version."""
        self.versions.point("stable", number)

    def scores(self, event: Mapping[str, Any], number: int) -> F32:
        """(C, L) predictions of the trainer's own scorer, in serving mode."""
        model = build_model(self.spec, training=False)
        model.load_state(self.versions.get(number).tensors, weights_only=True)
        return model.score(self.inputs(event, serving=True)[0])
