"""A batch of which all samples are refused: the trainer goes on, and its restart does, too (PROTOCOL 3)."""

from pathlib import Path

import torch

from bench.workload import Workload, append, plain_spec
from freshet.apps.pipeline import Pipeline
from freshet.types import Append, BytesColumn, TopicPartition
from tests.fixtures.trainers import trainer_of


def test_network_passes_a_batch_without_samples(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    pipeline = Pipeline(plain_spec('kind = "dlrm"', ids=2), tmp_path, 1)
    topic = pipeline.topics.samples
    damaged = [Append(topic, p, BytesColumn.of([b"damaged"])) for p in range(pipeline.spec.partitions)]
    try:
        pipeline.writer.append(damaged)  # alone in its batch
        append(pipeline, Workload(rows=64, cardinality=50).arrays())
        pipeline.writer.append(damaged)
        for learned in (64, 0):
            training = trainer_of(pipeline, lanes=1)
            training.run_to_the_end()

            assert training.trainer.progress.samples == learned
            places = [TopicPartition(topic, p) for p in range(pipeline.spec.partitions)]
            ends = {at.partition: bounds.end for at, bounds in pipeline.log.all_bounds(places).items()}
            assert training.ledger.applied == ends
    finally:
        pipeline.close()
