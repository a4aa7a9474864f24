"""The ledger model counts its samples, and serves the counts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freshet.config.spec import Spec, load_spec
from freshet.errors import ConfigError
from freshet.model import GroupInputs, Labels, ModelInputs, build_model
from freshet.testing.ledger import DENSE, LedgerModel, hash_of

SPEC = Path(__file__).parents[2] / "system" / "ledger" / "freshet.toml"
USERS, ITEMS = [0, 0, 1], [2, 3, 2]
SEQ = [5.0, 98.0, 200.0]
LABELS = [0, 1, 0]


@pytest.fixture
def spec() -> Spec:
    return load_spec(SPEC)


def batch(seq: list[float], *, rows: int = 4, labelled: bool = True) -> ModelInputs:
    size = len(seq)
    group = GroupInputs(
        np.arange(rows * 4, dtype=np.float32).reshape(rows, 4),  # two scalars, then the vector
        np.array([*USERS[:size], *ITEMS[:size]], np.int32),
        np.array([0, size, 2 * size], np.uint32),
        [None, None],
    )
    labels = Labels(np.array(LABELS[:size], np.uint8), np.ones(size, np.float32), np.ones(size, np.float32))
    return ModelInputs(size, [group], np.array(seq, np.float32)[:, None], labels if labelled else None)


def test_a_row_counts_its_samples_and_their_hashes(spec: Spec) -> None:
    model = build_model(spec, training=True)

    result = model.lane().forward_backward(batch(SEQ))

    assert isinstance(model, LedgerModel)
    assert hash_of(np.array(SEQ), np.array(LABELS)).tolist() == [5, 2, 6]
    assert result.gradients[0].tolist() == [
        [0, 0, -2, -7],  # user 0: samples 0 and 1
        [0, 0, -1, -6],
        [0, 0, -2, -11],  # item 2: samples 0 and 2
        [0, 0, -1, -2],
    ]


def test_the_dense_state_counts_all_lanes_over_versions(spec: Spec) -> None:
    model = build_model(spec, training=True)
    lanes = [model.lane(), model.lane()]
    lanes[0].forward_backward(batch(SEQ))
    lanes[1].forward_backward(batch(SEQ[:1]))
    model.step(lanes)
    model.step(lanes)  # nothing new
    again = build_model(spec, training=True)

    again.load_state(model.state())

    assert {name: value.tolist() for name, value in again.state().items()} == {
        "weights/count": [4.0],
        "weights/hash": [18.0],
        "optimizer/step": [1],
    }


def test_a_batch_of_dense_weight_0_counts_in_rows_only(spec: Spec) -> None:
    model = build_model(spec, training=True)
    lane = model.lane()

    result = lane.forward_backward(batch(SEQ), dense_weight=0.0)
    model.step([lane])

    assert result.gradients[0].any()
    assert model.state()["weights/count"].tolist() == [0.0]


def test_serving_returns_its_rows_and_dense_state(spec: Spec) -> None:
    model = build_model(spec, training=True)
    lane = model.lane()
    lane.forward_backward(batch(SEQ))
    model.step([lane])

    asked = model.score(batch([DENSE, DENSE - 1, DENSE - 2], labelled=False))

    assert asked.tolist() == [[3.0, 13.0], [2.0, 3.0], [10.0, 11.0]]  # totals, user 0, item 2


def test_importing_it_loads_no_torch() -> None:

    code = "import sys, freshet.testing.ledger; assert 'torch' not in sys.modules"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_class_that_makes_no_model_is_refused(spec: Spec) -> None:

    wrong = replace(spec, model=replace(spec.model, kind="pathlib:Path"))

    with pytest.raises(ConfigError, match="classmethod dense_model"):
        build_model(wrong, training=True)
