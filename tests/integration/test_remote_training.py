"""A trainer without rows, embedders of their own, and a shard, over real connections and the real model."""

import threading
import time
from pathlib import Path

import pytest

from freshet.cli.pipeline import Pipeline
from freshet.cli.remote_training import RemoteTraining
from freshet.cli.training import Training
from freshet.clock import SYSTEM_CLOCK
from freshet.embedder.decoding import BlockDecoder
from freshet.embedder.service import Embedder
from freshet.features import SampleDecoder
from freshet.runtime.grpc_server import GrpcServer
from freshet.seams.eventlog.claims import Claims
from freshet.seams.transport import Transport
from freshet.spec.layout import layout_of
from freshet.wire.values import RowCodec
from tests.perf.workload import Workload, append, plain_spec

DEADLINE_S = 60.0
ROWS = 4_096


@pytest.mark.parametrize("mode", ["hybrid", "sync"])
def test_a_rank_without_rows_learns_what_a_single_process_learns(tmp_path: Path, mode: str):
    spec = plain_spec("", f'mode = "{mode}"')
    pipeline = Pipeline(spec, tmp_path / "run", 2)
    assert append(pipeline, Workload(rows=ROWS, cardinality=500).arrays(), 1) == ROWS
    rows = Training(spec, pipeline.stores, spec_hash=pipeline.spec_hash, lanes=1)  # for its shard
    for held in rows._held[1:]:
        held.release()
    decoder = SampleDecoder(spec, layout_of(spec), pipeline.registry.get)
    claims = Claims(pipeline.log, pipeline.topics.control)
    embedder = Embedder(
        spec=spec,
        topic=pipeline.topics.samples,
        log=pipeline.log,
        rows=rows.shard,
        decoder=lambda: BlockDecoder(decoder, 1, lambda letters: None),
        claims=claims,
        server=GrpcServer("127.0.0.1:0", Transport()),
        name="a",
        host="127.0.0.1",
        clock=SYSTEM_CLOCK,
        codec=RowCodec.FP32,
    )
    stop = threading.Event()
    serving = threading.Thread(target=embedder.run, args=(stop,))
    serving.start()
    rank = RemoteTraining(
        spec, pipeline.stores, Transport(), spec_hash=pipeline.spec_hash, codec=RowCodec.FP32, lanes=2
    )
    training = threading.Thread(target=rank.run)
    training.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while sum(offset[0] for offset in rows.shard.applied().values()) < ROWS // 256:
            assert time.monotonic() < deadline, f"{rank.status()}\n{embedder.status()}"
            time.sleep(0.02)
    finally:
        rank.stop()
        training.join()
        stop.set()
        serving.join()
        claims.close()

    assert rank.trainer.progress.samples == ROWS
    assert rank.ledger.applied == {p: offset[0] for p, offset in rows.shard.applied().items()}
    auc = rank.quality.summary()["training"]["click"]["auc"]
    assert auc > 0.55, "half of the samples teach the other half"
    assert embedder.status()["samples"] == ROWS
    rows._cleanup.run()
    pipeline.close()
