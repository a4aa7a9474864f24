"""A trainer without rows, embedders of their own, and a shard, over real connections and the real model."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.workload import Workload, append, plain_spec
from freshet.apps.pipeline import Pipeline
from freshet.apps.rank_batches import FromShards, Wire
from freshet.apps.remote_training import RemoteTraining
from freshet.apps.training import Training
from freshet.clock import SYSTEM_CLOCK
from freshet.config.spec.layout import layout_of
from freshet.config.spec.learning import Train
from freshet.config.spec.model import Spec
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
from freshet.testing.waiting import wait_until
from freshet.types import Bucket, Fence

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
    for lease in rows._leases[1:]:
        lease.release()
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


@pytest.mark.parametrize("mode", ["hybrid", "sync"])
def test_a_rank_without_rows_learns_what_a_single_process_learns(tmp_path: Path, mode: str):
    with scene(tmp_path, plain_spec("", f'mode = "{mode}"')) as made:
        made.serving.start()
        rank = made.rank(2)
        training = threading.Thread(target=rank.run)
        training.start()
        try:
            made.trained([rank])
        finally:
            rank.stop()
            training.join()

        assert rank.trainer.progress.samples == ROWS
        assert rank.ledger.applied == {p: offset[0] for p, offset in made.rows.shard.applied().items()}
        auc = rank.quality.summary()["training"]["click"]["auc"]
        assert auc > 0.55, "half of the samples teach the other half"
        assert made.embedder.status()["samples"] >= ROWS, "more if one is sent again"


def test_two_ranks_learn_together_what_an_embedder_serves_them(tmp_path: Path):
    with scene(tmp_path, plain_spec("")) as made:
        ranks = [made.rank(1) for _ in range(2)]
        threads = [threading.Thread(target=rank.run) for rank in ranks]
        for thread in threads:
            thread.start()
        try:
            wait_until(
                "the ranks have met",
                lambda: all(rank.status()["ranks"]["ranks"] == 2 for rank in ranks),
                within_s=DEADLINE_S,
            )
            made.serving.start()
            made.trained(ranks)
        finally:
            for rank in ranks:
                rank.stop()
            for thread in threads:
                thread.join()

        assert sum(rank.trainer.progress.samples for rank in ranks) == ROWS
        assert all(rank.trainer.progress.samples for rank in ranks)
        for rank in ranks:
            assert rank.ledger.applied == {p: offset[0] for p, offset in made.rows.shard.applied().items()}
            assert rank.quality.summary()["training"]["click"]["n"] == ROWS


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


@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
def test_a_rank_looks_rows_up_in_shards_itself(tmp_path: Path, mode: str):
    pipeline = Pipeline(plain_spec("", f'mode = "{mode}"'), tmp_path / "run", 2)
    assert append(pipeline, Workload(rows=ROWS, cardinality=500).arrays(), 1) == ROWS
    rank = RemoteTraining(
        pipeline.spec,
        pipeline.log,
        pipeline.stores.versions,
        Wire(),
        spec_hash=pipeline.spec_hash,
        batches=FromShards,
        lanes=2,
    )
    training = threading.Thread(target=rank.run)
    with shards(pipeline, 2):
        training.start()
        wait_until("all is trained on", lambda: rank.trainer.progress.samples == ROWS, within_s=DEADLINE_S)
        rank.stop()
        training.join()

    status = rank.status()
    assert sum(status["applied"].values()) == BLOCKS
    assert ROWS // 256 <= status["batches"] <= BLOCKS, "larger batches while much waits"
    assert status["sent_bytes"] > 0
    assert status["received_bytes"] > 0
    assert rank.quality.summary()["training"]["click"]["auc"] > 0.55
    metas = pipeline.stores.rows.claim([Bucket(b) for b in range(pipeline.spec.buckets)], Fence(1 << 40))
    for meta in metas.values():
        assert sum(meta.applied.values()) == BLOCKS, "all was pushed, and flushed by the shards"
    pipeline.close()
