"""An embedder, shards and ranks of a small model, in this process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.workload import Workload, append
from freshet.apps.pipeline import Pipeline
from freshet.apps.rank_batches import Wire
from freshet.apps.remote_training import RemoteTraining
from freshet.apps.training import Training
from freshet.clock import SYSTEM_CLOCK
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec, Train
from freshet.coordination.claims import Claims
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.partition_reader import RefusedSamples
from freshet.embedder.service import Embedder
from freshet.features import SampleDecoder
from freshet.paramserver.service import ParamServer, ShardAddress
from freshet.paramserver.shard import ShardContext
from freshet.rpc.channel import Transport
from freshet.rpc.server import GrpcServer
from freshet.rpc.value_formats import RowCodec
from freshet.testing.conditions import wait_until

DEADLINE_S = 60.0
ROWS = 4_096
BLOCKS = ROWS // Train().batch_rows


@dataclass
class Scene:
    """A shard with rows, an embedder that serves its samples once started, and the stores of both."""

    pipeline: Pipeline
    rows: Training  # for its shard
    embedder: Embedder
    serving: threading.Thread

    def rank(self, lanes: int) -> RemoteTraining:
        """A trainer rank."""
        return RemoteTraining(
            self.pipeline.spec,
            self.pipeline.log,
            self.pipeline.stores.versions,
            Wire(),
            spec_hash=self.pipeline.spec_hash,
            lanes=lanes,
        )

    def trained(self, ranks: Sequence[RemoteTraining]) -> None:
        """Wait until the rows have learned from all samples."""
        offsets = self.rows.shard.applied
        try:
            wait_until(
                "the rows have learned from all samples",
                lambda: sum(offset[0] for offset in offsets().values()) >= BLOCKS,
                within_s=DEADLINE_S,
            )
        except AssertionError as error:
            raise AssertionError(f"{[rank.status() for rank in ranks]}\n{self.embedder.status()}") from error


@contextmanager
def scene(folder: Path, spec: Spec) -> Iterator[Scene]:
    pipeline = Pipeline(spec, folder / "run", 2)
    assert append(pipeline, Workload(rows=ROWS, cardinality=500).arrays(), 1) == ROWS
    rows = Training(spec, pipeline.stores, spec_hash=pipeline.spec_hash, lanes=1)
    for held in rows._held[1:]:
        held.release()
    decoder = SampleDecoder(spec, layout_of(spec), pipeline.registry.get)
    claims = Claims(pipeline.log, pipeline.topics.control)
    refused = RefusedSamples(lambda letters: None, SYSTEM_CLOCK.monotonic)
    embedder = Embedder(
        spec=spec,
        topic=pipeline.topics.samples,
        log=pipeline.log,
        rows=rows.shard,
        decoder=lambda: BlockDecoder(decoder, 1, refused),
        refused=refused,
        claims=claims,
        server=GrpcServer("127.0.0.1:0", Transport()),
        name="a",
        host="127.0.0.1",
        clock=SYSTEM_CLOCK,
        codec=RowCodec.FP32,
    )
    stop = threading.Event()
    serving = threading.Thread(target=embedder.run, args=(stop,))
    try:
        yield Scene(pipeline, rows, embedder, serving)
    finally:
        stop.set()
        if serving.ident is None:
            serving.start()  # which ends at once, and frees what the embedder holds
        serving.join()
        claims.close()
        rows._cleanup.run()
        pipeline.close()


@contextmanager
def shards(pipeline: Pipeline, count: int) -> Iterator[None]:
    """So many shards of the model, in this process, until the block ends."""
    stop = threading.Event()
    made = [
        ParamServer(
            ShardContext(pipeline.spec, pipeline.spec_hash, pipeline.log, pipeline.stores.rows),
            ShardAddress(f"shard-{i}", "127.0.0.1", 0),
            Transport(),
        )
        for i in range(count)
    ]
    threads = [threading.Thread(target=shard.run, args=(stop,), kwargs={"drain_s": 60.0}) for shard in made]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
