from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from freshet.clock import SYSTEM_CLOCK
from freshet.embedder.decoding import DecodedBatch, Places
from freshet.embedder.stream import LocalStream
from freshet.features import Decoded, GroupKeys, encode_block, read_blocks
from freshet.seams.batches import BatchStream
from freshet.seams.eventlog.sqlite import SqliteEventLog
from freshet.seams.rowservice import RowService
from freshet.spec.layout import layout_of
from freshet.spec.parse import parse_spec
from freshet.testing.contracts.batches import BatchStreamContract, Scene
from freshet.testing.contracts.rowservice import BUCKETS, PARTITIONS, WIDTH
from freshet.testing.reference import ReferenceRowService
from freshet.types import Append, BytesColumn, Fence

SPEC = f"""
name = "contract"
partitions = {PARTITIONS}
buckets = {BUCKETS}
[events]
served = {{ schema = "i.avsc", key = ["id"], time = "ts:ms" }}
action = {{ schema = "a.avsc", key = ["id"], time = "ts:ms" }}
[labels]
click = {{ on = "action.type == 'click'" }}
[tables]
user = {{ dim = {WIDTH}, optimizer = {{ name = "sgd", lr = 1.0 }} }}
[features]
user = {{ field = "user", table = "user" }}
[model]
kind = "dlrm"
[train]
batch = {{ rows = 1, behind = 1 }}
"""


class IdDecoder:
    """Stands in for the spec's decoder: a sample's one feature is its id; the payload is not looked at."""

    def decode(self, blocks: BytesColumn, places: Places = ()) -> DecodedBatch:
        read = read_blocks(blocks)
        n = len(read)
        keys = (read.sample_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        group = GroupKeys(keys, np.array([0, n], np.uint32), [None])
        columns = Decoded(
            size=n,
            groups=[group],
            dense=np.empty((n, 0), np.float32),
            segments={},
            served={},
            explored=np.zeros(n, np.bool_),
            bad=np.empty(0, np.int64),
        )
        return DecodedBatch(
            columns,
            read.sample_ids,
            read.request_ids,
            read.event_times_ms,
            read.labels,
            read.values,
            read.weights,
        )


class LocalScene:
    def __init__(self, log: SqliteEventLog) -> None:
        self.spec, self.log = parse_spec(SPEC), log
        self.rows: RowService = ReferenceRowService([WIDTH], dict.fromkeys(range(PARTITIONS), 0))
        self.dense_applied: dict[int, int] = {}
        log.create_topic("samples", partitions=PARTITIONS)
        self.writer = log.writer()

    def append(self, partition: int, sample_ids: Sequence[int]) -> None:
        n = len(sample_ids)
        block = encode_block(
            1,
            sample_ids=np.array(sample_ids, np.int64),
            event_times_ms=np.full(n, 1_700_000_000_000),
            request_ids=np.arange(n, dtype=np.uint64),
            values=np.ones(n, np.float32),
            weights=np.ones(n, np.float32),
            labels=np.zeros(n, np.uint8),
            payloads=BytesColumn.of([b"payload"] * n),
        )
        self.writer.append([Append("samples", partition, BytesColumn.of([block]))])

    def stream(self, *, lanes: int = 1, batch_rows: int = 8, staleness_rows: int = 1000) -> BatchStream:
        dense = {p: [self.dense_applied[p]] for p in self.dense_applied}
        return LocalStream(
            spec=self.spec,
            layout=layout_of(self.spec),
            topic="samples",
            log=self.log,
            rows=self.rows,
            decoder=IdDecoder,  # type: ignore[arg-type]
            dense_applied=lambda: dense,
            fence=Fence(10),
            lanes=lanes,
            clock=SYSTEM_CLOCK,
            batch_rows=batch_rows,
            staleness_rows=staleness_rows,
        )


class TestLocalStream(BatchStreamContract):
    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[Scene]:
        log = SqliteEventLog(tmp_path)
        yield LocalScene(log)
        log.close()
