"""A batch stream between a log of blocks that contain only ids and a row service in memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from freshet.batches.frames import Names
from freshet.batches.grpc_client import RankAssignment, RemoteStream
from freshet.batches.read_my_writes import ReadMyWrites
from freshet.batches.stream import BatchStream
from freshet.clock import SYSTEM_CLOCK
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.embedder.block_decoder import BlockDecoder, DecodedBatch, Places
from freshet.embedder.core import partitions_of_lane
from freshet.embedder.local_stream import LocalStream
from freshet.embedder.pipelined_stream import PipelinedStream, ReadMyWritesBy, Share
from freshet.embedder.recent_samples import RecentSamples
from freshet.embedder.server import BatchServer, LaneShape
from freshet.embedder.service import names_of
from freshet.features import Decoded, GroupKeys, encode_block, read_blocks
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.rows.service import RowService
from freshet.rpc.channel import MIB, Transport
from freshet.rpc.frames import RowCodec
from freshet.rpc.server import WORK_BYTES, FrameServer
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
kind = "dcnv2"
[train]
batch = {{ rows = 1, behind = 1 }}
"""


class IdDecoder:
    """A decoder with the sample's id as the only feature; it ignores payloads."""

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


FENCE = Fence(10)


class LocalScene:
    """An empty topic, the reference row service, and the stream of one process over both."""

    def __init__(self, log: SqliteEventLog, text: str = SPEC, rows: RowService | None = None) -> None:
        self.text, self.spec, self.log = text, parse_spec(text), log
        self.names = names_of(self.spec, layout_of(self.spec))
        self.rows = rows or ReferenceRowService([WIDTH], dict.fromkeys(range(PARTITIONS), 0))
        self.dense_applied: dict[int, int] = {}
        self.decoder: Callable[[], BlockDecoder] = IdDecoder  # type: ignore[assignment]  # stands in for it
        self.told: Callable[[], Mapping[int, Sequence[int]]] | None = None  # overrides the fixed vector
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

    def stream(
        self, *, lanes: int = 1, batch_rows: int = 8, staleness_rows: int = 1000, mode: str = "hybrid"
    ) -> BatchStream:
        return LocalStream(
            **self.parts(mode), lanes=lanes, fence=FENCE, batch_rows=batch_rows, staleness_rows=staleness_rows
        )

    def parts(self, mode: str) -> dict[str, Any]:
        dense = {p: [self.dense_applied[p]] for p in self.dense_applied}
        told = self.told or (lambda: dense)
        return {
            "spec": parse_spec(self.text.replace("[train]", f'[train]\nmode = "{mode}"')),
            "layout": layout_of(self.spec),
            "topic": "samples",
            "log": self.log,
            "rows": self.rows,
            "decoder": self.decoder,
            "dense_applied": told,
            "clock": SYSTEM_CLOCK,
        }


class PipelinedScene(LocalScene):
    """A scene with the prefetching stream, with or without read-my-writes."""

    def __init__(
        self,
        log: SqliteEventLog,
        text: str = SPEC,
        rows: RowService | None = None,
        *,
        read_my_writes: bool = False,
    ) -> None:
        super().__init__(log, text, rows)
        self.read_my_writes: ReadMyWritesBy | None = "stream" if read_my_writes else None

    def stream(
        self, *, lanes: int = 1, batch_rows: int = 8, staleness_rows: int = 1000, mode: str = "hybrid"
    ) -> BatchStream:
        shares = [Share(partitions_of_lane(lane, lanes, range(PARTITIONS)), FENCE) for lane in range(lanes)]
        return PipelinedStream(
            **self.parts(mode),
            lanes=shares,
            batch_rows=batch_rows,
            staleness_rows=staleness_rows,
            read_my_writes=self.read_my_writes,
        )


class ServedEmbedder:
    """Start a batch server on a free port."""

    def __init__(
        self,
        parts: dict[str, Any],
        names: Names,
        owned: Sequence[int],
        fence: Fence,
        codec: RowCodec,
        transport: Transport,
        work_bytes: int,
    ) -> None:
        self._parts, self._owned, self._fence = parts, owned, fence
        self.batches = BatchServer(names, codec, self._make)
        self.server = FrameServer("127.0.0.1:0", transport, work_bytes=work_bytes)
        self.batches.add_to(self.server)
        self.server.start()
        self.address = f"127.0.0.1:{self.server.port}"

    def own(self, owned: Sequence[int]) -> None:
        self._owned = owned
        self.batches.renew()

    def stop(self) -> None:
        self.batches.close()
        self.server.stop(0.0)

    def _make(self, shape: LaneShape, told: Callable[[int], Any]) -> tuple[PipelinedStream, list[int]]:
        shares, places = [], []
        for place in range(shape.places):
            mine = [p for p in self._owned if p % shape.places == place]
            if mine:
                shares.append(Share(mine, self._fence, partial(told, place)))
                places.append(place)
        return PipelinedStream(**self._parts, dense_applied=dict, lanes=shares), places


class RemoteScene(LocalScene):
    """A scene over gRPC: an embedder that owns every partition, and a trainer rank."""

    def __init__(
        self,
        log: SqliteEventLog,
        text: str = SPEC,
        rows: RowService | None = None,
        *,
        codec: RowCodec = RowCodec.FP32,
        read_my_writes: bool = False,
        max_message_bytes: int = MIB,
    ) -> None:
        super().__init__(log, text, rows)
        self.codec, self.read_my_writes = codec, read_my_writes
        self.transport = Transport(max_message_bytes=max_message_bytes)
        self.ends: list[Callable[[], None]] = []

    def stream(
        self, *, lanes: int = 1, batch_rows: int = 8, staleness_rows: int = 1000, mode: str = "hybrid"
    ) -> RemoteStream:
        embedder = self.embedder(range(PARTITIONS), batch_rows, staleness_rows, mode=mode)
        owners = dict.fromkeys(range(PARTITIONS), embedder.address)
        return self.rank(lambda: owners, lanes=lanes, mode=mode)

    def embedder(
        self,
        owned: Sequence[int],
        batch_rows: int = 8,
        staleness_rows: int = 1000,
        *,
        mode: str = "hybrid",
        fence: Fence = FENCE,
        work_bytes: int = WORK_BYTES,
    ) -> ServedEmbedder:
        """Start an embedder that owns these partitions."""
        parts = self.parts(mode)
        del parts["dense_applied"]
        parts |= {"batch_rows": batch_rows, "staleness_rows": staleness_rows}
        parts["read_my_writes"] = "trainer" if self.read_my_writes else None
        embedder = ServedEmbedder(parts, self.names, owned, fence, self.codec, self.transport, work_bytes)
        self.ends.append(embedder.stop)
        return embedder

    def rank(
        self,
        owners: Callable[[], Mapping[int, str]],
        *,
        lanes: int = 1,
        mode: str = "hybrid",
        seat: Fence = FENCE,
    ) -> RemoteStream:
        """Return the stream of a single rank."""
        parts = self.parts(mode)
        recent = RecentSamples(self.spec.serve.gate.samples, SYSTEM_CLOCK)
        stream = RemoteStream(
            assignment=RankAssignment(0, 1, lanes, seat),
            names=self.names,
            partitions=PARTITIONS,
            owners=owners,
            transport=self.transport,
            metadata=(),
            dense_applied=parts["dense_applied"],
            remember=recent.add,
            newest=recent.newest,
            log=self.log,
            topic="samples",
            clock=SYSTEM_CLOCK,
            ahead=0 if mode == "sync" else 3,
            own=ReadMyWrites(layout_of(self.spec)) if self.read_my_writes and mode != "sync" else None,
            codec=self.codec,
        )
        self.ends.append(stream.close)
        return stream

    def close(self) -> None:
        for end in reversed(self.ends):
            end()
