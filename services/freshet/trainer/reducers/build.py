"""The reducers by the names that `train.reduce` gives them."""

from __future__ import annotations

import numpy as np

from freshet.config.spec.model import Reduce, Spec
from freshet.errors import ConfigError
from freshet.model import DenseModel, FreezesVariance, StepsLamb
from freshet.trainer.reducers import PlainReducer, Reducer
from freshet.trainer.reducers.dct import Dct
from freshet.trainer.reducers.group_codecs import IntegerCodec
from freshet.trainer.reducers.ladder import LadderReducer
from freshet.trainer.reducers.levels import AdaptiveLevels
from freshet.trainer.reducers.one_bit_adam import Betas, MomentsReducer, MomentumReducer, OneBitAdam
from freshet.trainer.reducers.one_bit_lamb import LambReducer, OneBitLamb
from freshet.trainer.reducers.two_phase import TwoPhase

__all__ = ["build_reducer", "reducer_name"]


def reducer_name(spec: Spec) -> Reduce:
    """Return the reducer of gradients; in mode `async` sites sum them whole, and `train.reduce` is that of
    averagings."""
    return "fp32" if spec.train.mode == "async" else spec.train.reduce


def build_reducer(spec: Spec, model: DenseModel) -> Reducer:
    """Build the reducer of `train.reduce` for the gradient of a model, by its `reducer_name`.

    Raises ConfigError if the model's optimiser is not the one that it needs.
    """
    match reducer_name(spec):
        case "fp32":
            return PlainReducer()
        case "auto":
            return LadderReducer(_gradient_size(model))
        case "int8" | "int4" as name:
            return TwoPhase(IntegerCodec(int(name.removeprefix("int"))), _gradient_size(model))
        case "adaquantfl":
            return AdaptiveLevels(_gradient_size(model))
        case "dct" | "1bit-adam" | "1bit-lamb":
            return _moments_reducer(spec, model)


def _moments_reducer(spec: Spec, model: DenseModel) -> MomentsReducer:
    reduce, warmup_steps = spec.train.reduce, spec.model.dense_warmup_steps
    size = len(model.moments()[0]) if isinstance(model, FreezesVariance) else 0
    trust = model.trust if isinstance(model, StepsLamb) else None
    optimizer = "LAMB" if reduce == "1bit-lamb" else "Adam"
    fits = (trust is not None) == (reduce == "1bit-lamb")
    if not isinstance(model, FreezesVariance) or not size or not fits:
        raise ConfigError(
            "spec",
            "train.reduce",
            reduce,
            "fp32, auto, int8, int4 or adaquantfl",
            f"it needs the moments of {optimizer}, and model.kind {spec.model.kind!r} has none",
        )
    betas = Betas(first=spec.model.dense_momentum)
    if reduce == "dct":
        return MomentsReducer(Dct(size, betas), model)
    if trust is None:
        return MomentumReducer(OneBitAdam(size, betas, warmup_steps=warmup_steps), model)
    return LambReducer(OneBitLamb(trust.ends, betas, warmup_steps=warmup_steps), model, trust)


def _gradient_size(model: DenseModel) -> int:
    """Return d: the float32 numbers of a lane's sums."""
    return sum(len(buffer) for buffer in model.lane().reduce_buffers() if buffer.dtype == np.float32)
