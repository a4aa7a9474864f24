"""The carry of a version reaches the first step of a trainer that starts from it, in native code too."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bench.workload import Workload, append, plain_spec
from freshet.apps.pipeline import Pipeline
from freshet.trainer.gradient_sums import CARRY, MEAN_CARRY
from tests.fixtures.trainers import trainer_of

ROWS = 2_000


@pytest.mark.parametrize("mean", [False, True])
def test_native_trainer_adds_the_carry_of_its_version(tmp_path: Path, mean: bool):
    carry_name, totals, frozen_steps = MEAN_CARRY if mean else CARRY, [], []
    for name, value in (("none", 0.0), ("carry", 50.0)):
        pipeline = Pipeline(plain_spec(""), tmp_path / name, 1)
        assert append(pipeline, Workload(rows=ROWS, cardinality=100).arrays(), 1) == ROWS
        first = trainer_of(pipeline, lanes=1)
        size = len(first.state.model.lane().reduce_buffers()[0])
        carry = np.full(size, value, np.float32)
        first.state.sums.carry, first.state.sums.carry_of_mean = carry if value else None, mean
        tensors = first.trainer.snapshot().tensors
        assert (carry_name in tensors) == bool(value)
        pipeline.versions.put(replace(pipeline.versions.manifest(0), number=1), tensors)
        first.stop()
        first.run()

        second = trainer_of(pipeline, lanes=1)
        loaded = second.state.sums.carry
        assert (loaded is not None and loaded.tolist() == carry.tolist()) == bool(value)
        second.run_to_the_end()

        assert second.state.sums.carry is None
        assert second.trainer.progress.samples == ROWS
        last = pipeline.versions.get(pipeline.versions.numbers()[-1])
        assert carry_name not in last.tensors
        assert set(last.manifest.applied.values()) != {0}
        state = second.state.model.state()
        totals.append(state["optimizer/second/mlp/0/weight"].max())
        frozen_steps.append(state["optimizer/step"][0] - cast(Any, second.state.model).variance_steps)
        pipeline.close()

    if mean:
        assert frozen_steps == [0, 1], "its step leaves the variance as it is"
        assert totals[1] < 2 * totals[0]
    else:
        assert frozen_steps == [0, 0]
        assert totals[1] > 2 * totals[0], "the squares of a gradient that is 50 larger"
