"""The reducers by the names that `train.reduce` gives them."""

from __future__ import annotations

import numpy as np

from freshet.config.spec.model import Spec
from freshet.model import DenseModel
from freshet.trainer.reducers import Reducer
from freshet.trainer.reducers.group_codecs import IntegerCodec
from freshet.trainer.reducers.plain import PlainReducer
from freshet.trainer.reducers.two_phase import TwoPhase

__all__ = ["build_reducer"]


def build_reducer(spec: Spec, model: DenseModel) -> Reducer:
    """Build the reducer of `train.reduce` for the gradient of a model."""
    match spec.train.reduce:
        case "fp32":
            return PlainReducer()
        case "int8":
            return TwoPhase(IntegerCodec(8), _gradient_size(model))
        case "int4":
            return TwoPhase(IntegerCodec(4), _gradient_size(model))


def _gradient_size(model: DenseModel) -> int:
    """Return d: the float32 numbers of a lane's sums."""
    return sum(len(buffer) for buffer in model.lane().reduce_buffers() if buffer.dtype == np.float32)
