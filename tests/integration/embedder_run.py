"""An embedder, shards and ranks of a small model, in this process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.workload import Workload, append
from freshet.apps.pipeline import Pipeline
from freshet.apps.trainer import TrainerProcess
from freshet.config.spec.model import Spec, Train
from freshet.coordination.assignment import slices_of
from freshet.coordination.claims import Claims
from freshet.embedder.block_decoder import BlockDecoders
from freshet.embedder.service import Embedder, EmbedderAddress
from freshet.paramserver.service import ParamServer, ShardAddress
from freshet.paramserver.shard import Shard
from freshet.rpc.channel import Transport
from freshet.rpc.server import FrameServer
from freshet.testing.conditions import wait_until
from freshet.types import Fence
from tests.fixtures.trainers import rank_of

DEADLINE_S = 60.0
ROWS = 4_096
BLOCKS = ROWS // Train().batch_rows


@dataclass
class Scene:
    """A shard with rows, an embedder that serves its samples once started, and the stores of both."""

    pipeline: Pipeline
    shard: Shard
    embedder: Embedder
    serving: threading.Thread

    def rank(self, lanes: int) -> TrainerProcess:
        """A trainer rank."""
        return rank_of(self.pipeline, lanes=lanes, answer_s=DEADLINE_S)

    def trained(self, ranks: Sequence[TrainerProcess]) -> None:
        """Wait until the rows have learned from all samples."""
        offsets = self.shard.applied
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
    shard = Shard(pipeline.context, pipeline.rows, fence=Fence(1))
    shard.load()
    claims = Claims(pipeline.log, pipeline.topics.control)
    embedder = Embedder(
        pipeline.context,
        claims,
        shard,
        BlockDecoders(pipeline.context, pipeline.writer),
        FrameServer("127.0.0.1:0", Transport()),
        EmbedderAddress("a", "127.0.0.1"),
    )
    stop = threading.Event()
    serving = threading.Thread(target=embedder.run, args=(stop,))
    try:
        yield Scene(pipeline, shard, embedder, serving)
    finally:
        stop.set()
        if serving.ident is None:
            serving.start()  # which ends at once, and frees what the embedder holds
        serving.join()
        claims.close()
        pipeline.close()


@contextmanager
def shards(pipeline: Pipeline, count: int) -> Iterator[None]:
    """So many shards of the model, in this process, until the block ends.

    The block begins once each has its share of the buckets. Pushes between the flush and the release of a
    bucket that moves are sent again by their rank (PROTOCOL 7), but not by one that has ended.
    """
    stop = threading.Event()
    made = [
        ParamServer(
            pipeline.context,
            pipeline.rows,
            ShardAddress(f"shard-{i}", "127.0.0.1", 0),
            Transport(),
        )
        for i in range(count)
    ]
    threads = [threading.Thread(target=shard.run, args=(stop,), kwargs={"drain_s": 60.0}) for shard in made]
    for thread in threads:
        thread.start()
    try:
        share = len(slices_of(pipeline.spec.buckets)) // count
        wait_until(
            "each shard has its share",
            lambda: all(shard.status()["slices"] == share for shard in made),
            within_s=DEADLINE_S,
        )
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
