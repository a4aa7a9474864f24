"""The carry of a version reaches the first step of a trainer that starts from it, in native code too."""

from pathlib import Path

import numpy as np

from bench.workload import Workload, append, plain_spec
from freshet.apps.pipeline import Pipeline
from freshet.trainer.gradient_sums import CARRY
from tests.fixtures.trainers import trainer_of

ROWS = 2_000


def test_native_trainer_adds_the_carry_of_its_version(tmp_path: Path):
    totals = []
    for name, value in (("none", 0.0), ("carry", 50.0)):
        pipeline = Pipeline(plain_spec(""), tmp_path / name, 1)
        assert append(pipeline, Workload(rows=ROWS, cardinality=100).arrays(), 1) == ROWS
        first = trainer_of(pipeline, lanes=1)
        size = len(first.state.model.lane().reduce_buffers()[0])
        carry = np.full(size, value, np.float32)
        first.state.sums.carry = carry if value else None
        first.trainer._version_writer.next(first.trainer.snapshot())
        first._cleanup.run(None)
        numbers = pipeline.versions.numbers()
        assert (CARRY in pipeline.versions.get(numbers[-1]).tensors) == bool(value)

        second = trainer_of(pipeline, lanes=1)
        loaded = second.state.sums.carry
        assert (loaded is not None and loaded.tolist() == carry.tolist()) == bool(value)
        second.run_to_the_end()

        assert second.state.sums.carry is None
        assert second.trainer.progress.samples == ROWS
        last = pipeline.versions.get(pipeline.versions.numbers()[-1])
        assert CARRY not in last.tensors
        assert set(last.manifest.applied.values()) != {0}
        totals.append(second.state.model.state()["optimizer/second/mlp/0/weight"].max())
        pipeline.close()

    assert totals[1] > 2 * totals[0], "the squares of a gradient that is 50 larger"
