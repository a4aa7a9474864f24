"""A trainer without rows, embedders of their own, and a shard, over real connections and the real model."""

import threading
from pathlib import Path

import numpy as np
import pytest

from bench.workload import Workload, append, plain_spec
from freshet.apps.pipeline import Pipeline
from freshet.apps.remote_sources import FromShards
from freshet.testing.conditions import wait_until
from freshet.types import Bucket, Fence
from tests.fixtures.trainers import rank_of
from tests.integration.embedder_run import BLOCKS, DEADLINE_S, ROWS, scene, shards


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
        assert rank.ledger.applied == {p: offset[0] for p, offset in made.shard.applied().items()}
        auc = rank.quality.summary()["training"]["click"]["auc"]
        assert auc > 0.55, "half of the samples teach the other half"
        assert made.embedder.status()["samples"] >= ROWS, "more if one is sent again"


@pytest.mark.parametrize("options", ['mode = "hybrid"', 'reduce = "int8"', 'mode = "async"'])
def test_two_ranks_learn_together_what_an_embedder_serves_them(tmp_path: Path, options: str):
    options += '\nversion_interval = "100ms"'
    with scene(tmp_path, plain_spec("", options)) as made:
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
            assert rank.ledger.applied == {p: offset[0] for p, offset in made.shard.applied().items()}
            assert rank.quality.summary()["training"]["click"]["n"] == ROWS
            assert rank.training_loop.lost == 0
        first, second = (rank.state.model.state() for rank in ranks)
        for name, array in first.items():
            np.testing.assert_array_equal(array, second[name], err_msg=name)
        written = [rank.trainer.progress.version for rank in ranks]
        assert max(written) >= 1


@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
def test_a_rank_looks_rows_up_in_shards_itself(tmp_path: Path, mode: str):
    pipeline = Pipeline(plain_spec("", f'mode = "{mode}"'), tmp_path / "run", 2)
    assert append(pipeline, Workload(rows=ROWS, cardinality=500).arrays(), 1) == ROWS
    rank = rank_of(pipeline, FromShards, lanes=2)
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
    metas = pipeline.rows.claim([Bucket(b) for b in range(pipeline.spec.buckets)], Fence(1 << 40))
    for meta in metas.values():
        assert sum(meta.applied.values()) == BLOCKS, "all was pushed, and flushed by the shards"
    pipeline.close()
