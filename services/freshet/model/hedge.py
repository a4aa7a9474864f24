"""Native dense models, without torch: the default, a hedge of experts, and `mlp` or `linear` alone.

C++ implements the step (`hedge.hpp`). This module derives its plan from the spec and names its arrays.
Letters: B samples, L labels, K experts, N words.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.errors import Mismatch
from freshet.model import (
    LABEL_MERGES,
    VARIANCE_STEP,
    Labels,
    Lane,
    ModelInputs,
    Precision,
    State,
    StepResult,
    variance_step,
)
from freshet.model.plan import LOSSES, expert_plan, groups_of, input_plan, padded
from freshet.tables import RowSteps
from freshet.types import F32, F64, I64, U32, U64


class HedgeDense:
    """`DenseModel` of kinds `hedge`, `mlp` and `linear`; implements `SplitStep`."""

    scores_requests = True
    merges = LABEL_MERGES

    def __init__(
        self, spec: Spec, *, training: bool, precision: Precision, kernels: str | None = None
    ) -> None:
        self.labels = len(spec.labels)
        self.plan = input_plan(spec, fm=spec.model.kind == "hedge")
        self.experts, experts = expert_plan(spec, self.plan.scalars)
        self.training = training
        self._hidden = tuple(spec.model.deep) if any(expert[2] for expert in experts) else ()
        self._has_mlp = any(expert[2] for expert in experts)
        self.native = _native.HedgeModel(
            input=self.plan.native,
            losses=[LOSSES[label.loss] for label in spec.labels],
            early=[spec.join.is_early(label) for label in spec.labels],
            experts=experts,
            hidden=[padded(width) for width in self._hidden],
            discount=spec.model.hedge_discount,
            dense_rate=spec.model.dense_lr,
            momentum=spec.model.dense_momentum,
            warmup_steps=spec.model.dense_warmup_steps,
            batch_rows=spec.train.batch_rows,
            bias_rate=spec.model.bias_lr,
            training=training,
            bf16=precision == "bf16",
            kernels=kernels,
        )
        self._spec = spec
        self._threads = threading.local()
        self._write(self._initial(spec.model.seed), weights_only=True)

    @cached_property
    def row_steps(self) -> list[RowSteps]:
        """Update rule of rows within a batch, for each group."""
        return [RowSteps(group) for group in layout_of(self._spec).groups]

    def dense_steps(self, rows: int) -> int:
        """Return the dense steps of the next batch, of `rows` samples: one per 64, or per 1, 2, 4, … samples
        in a new model's first steps."""
        return _native.dense_steps(rows, self.native.steps)

    def lane(self) -> HedgeLane:
        """Create a lane."""
        return HedgeLane(self)

    def step(self, lanes: Sequence[Lane]) -> None:
        """Update once by the lanes' sums and zero them."""
        self.native.step([lane.native for lane in lanes if isinstance(lane, HedgeLane)])

    def begin_step(self, lanes: Sequence[Lane]) -> None:
        """Step everything except the MLP's weights; see `SplitStep`."""
        self.native.begin_step([lane.native for lane in lanes if isinstance(lane, HedgeLane)])

    def step_part(self, lanes: Sequence[Lane], part: int, parts: int) -> None:
        """Step a part of the MLP's weights; see `SplitStep`."""
        self.native.step_part([lane.native for lane in lanes if isinstance(lane, HedgeLane)], part, parts)

    def scoring_lane(self) -> _native.HedgeLane:
        """Return the calling thread's lane for scores; create it at the first use."""
        lane: _native.HedgeLane | None = getattr(self._threads, "lane", None)
        if lane is None:
            lane = self._threads.lane = _native.HedgeLane(self.native, False)
        return lane

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L) predictions."""
        return _score(self, self.scoring_lane(), inputs)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the dense state."""
        state = self.named_weights("weights", self.native.array("weights"))
        if self.training:
            state |= self.named_weights("optimizer/first", self.native.array("first_moment"))
            state |= self.named_weights("optimizer/second", self.native.array("second_moment"))
            state["optimizer/bias_squares"] = self._heads("bias_squares").copy()
            state["optimizer/step"] = np.array([self.native.steps], np.int64)
            state |= variance_step(self.native.steps, self.variance_steps)
        state["weights/bias"] = self._heads("bias").copy()
        if len(self.native.array("heads")):
            state["weights/heads"] = self._heads("heads").copy()
            if self.training:
                state["optimizer/heads_squares"] = self._heads("heads_squares").copy()
        state["hedge/loss"] = self._heads("loss").copy()
        for name in ("started", "scale", "label_sums", "dense"):
            state[f"statistics/{name}"] = self.native.array(name).copy()
        return state

    def load_state(self, state: State, *, weights_only: bool = False) -> None:
        """Load a state. Raises Mismatch, before any change, if an array is missing or has another shape."""
        expected = self.state()
        wanted = [n for n in expected if not (weights_only and n.startswith("optimizer/"))]
        wanted = [n for n in wanted if n != VARIANCE_STEP]
        for name in wanted:
            if name not in state:
                raise Mismatch(
                    f"the version has no array {name!r}: it was written by another spec or model kind"
                )
            if state[name].shape != expected[name].shape:
                raise Mismatch(
                    f"array {name!r} of the version has shape {state[name].shape},"
                    f" this spec expects {expected[name].shape}: it was written by another spec"
                )
        self._write(state, weights_only=weights_only)

    def finite(self) -> bool:
        """Return whether the dense state is finite."""
        return bool(self.native.finite())

    def mixture(self) -> F32:
        """Return the (L, K) current weights of the experts."""
        return np.array(self.native.mixture(), np.float32).reshape(self.labels, -1)

    @property
    def variance_steps(self) -> int:
        """Steps that moved Adam's second moment; see `FreezesVariance`."""
        return int(self.native.variance_steps)

    @variance_steps.setter
    def variance_steps(self, steps: int) -> None:
        self.native.variance_steps = steps

    @property
    def not_finite(self) -> Mapping[str, int]:
        """What was left out because it was not finite; see `LeavesOut`."""
        samples, steps = self.native.not_finite
        return {"samples": samples, "steps": steps}

    def moments(self) -> tuple[F32, F32]:
        """Return views of the MLP's (d,) moments, with padding; see `FreezesVariance`."""
        return self.native.array("first_moment"), self.native.array("second_moment")

    def gradient_rows(self, lane: Lane) -> float:
        """Return by how many rows a step divides the lane's gradient.

        Raises TypeError for a lane of another kind of model.
        """
        return max(float(_own(lane).native.sums()[0]), float(self._spec.train.batch_rows))

    def freeze_variance(self) -> None:
        """Make the next step leave Adam's second moment as it is; see `FreezesVariance`."""
        self.native.freeze_variance()

    @property
    def adam_tensors(self) -> list[tuple[str, str, str]]:
        """Names of the MLP's weights and moments; see `NamesMoments`."""
        names = [name for name, _, _, _ in self._layers()]
        return [(f"weights/{n}", f"optimizer/first/{n}", f"optimizer/second/{n}") for n in names]

    def _heads(self, name: str) -> NDArray[Any]:
        return self.native.array(name).reshape(self.labels, -1)

    def _layers(self) -> list[tuple[str, slice, tuple[int, ...], tuple[I64, ...]]]:
        """Return (name, slice of the flat array, padded shape, indexes without padding) of matrices and
        biases."""
        if not self._has_mlp:
            return []
        layers: list[tuple[str, slice, tuple[int, ...], tuple[I64, ...]]] = []
        at, width, real = 0, self.plan.width, self.plan.columns
        for i, units in enumerate(self._hidden):
            wide = padded(units)
            kept = np.arange(units)
            layers.append(
                (f"mlp/{i}/weight", slice(at, at + width * wide), (width, wide), (real[:, None], kept))
            )
            at += width * wide
            layers.append((f"mlp/{i}/bias", slice(at, at + wide), (wide,), (kept,)))
            at += wide
            width, real = wide, kept
        rows = np.arange(self.labels)[:, None]
        layers.append(("mlp/head", slice(at, at + self.labels * width), (self.labels, width), (rows, real)))
        return layers

    def named_weights(self, prefix: str, flat: F32) -> dict[str, NDArray[Any]]:
        """Return matrices and biases by name, without padding, from `flat` (N,), the padded weights."""
        parts = {}
        for name, place, shape, real in self._layers():
            parts[f"{prefix}/{name}"] = flat[place].reshape(shape)[real]
        return parts

    def _initial(self, seed: int) -> dict[str, NDArray[Any]]:
        """Return He's initial weights and zero biases. The last layer is zero, so deep starts equal to FM."""
        state = self.state()
        for i in range(len(self._hidden)):
            name = f"weights/mlp/{i}/weight"
            shape = state[name].shape
            state[name] = he_uniform(seed, i, (shape[0], shape[1]))
        return state

    def _write(self, state: State, *, weights_only: bool) -> None:
        targets = {"weights": "weights"}
        if not weights_only:
            targets |= {"optimizer/first": "first_moment", "optimizer/second": "second_moment"}
            self._heads("bias_squares")[:] = state["optimizer/bias_squares"]
            if "weights/heads" in state:
                self._heads("heads_squares")[:] = state["optimizer/heads_squares"]
            self.native.steps = int(state["optimizer/step"][0])
            self.variance_steps = int(state.get(VARIANCE_STEP, state["optimizer/step"])[0])
        for prefix, array in targets.items():
            flat = self.native.array(array)
            for name, place, shape, real in self._layers():
                flat[place].reshape(shape)[real] = state[f"{prefix}/{name}"]
        self._heads("bias")[:] = state["weights/bias"]
        if "weights/heads" in state:
            self._heads("heads")[:] = state["weights/heads"]
        self._heads("loss")[:] = state["hedge/loss"]
        for name in ("started", "scale", "label_sums", "dense"):
            self.native.array(name)[:] = state[f"statistics/{name}"]
        self.native.refresh()


class HedgeLane:
    """`Lane` of the native model."""

    def __init__(self, model: HedgeDense) -> None:
        self.model = model
        self.native = _native.HedgeLane(model.native, model.training)
        self._gradients = [np.empty((0, g[0]), np.float32) for g in model.plan.native[5]]
        self._copies = [np.empty((0, g[0]), np.float32) for g in model.plan.native[5]]
        self._batch: _native.InSteps | None = None
        self._predictions, self._sizes = np.empty((0, model.labels), np.float32), list[int]()

    def forward_backward(self, inputs: ModelInputs, dense_weight: float = 1.0) -> StepResult:
        """Predict, compute the loss's gradients and add the dense ones to the lane's sums.

        Raises ValueError if the inputs do not fit the spec or have no labels, RuntimeError if the model was
        built for serving.
        """
        labels = self._labels_of(inputs)
        shape = self.model.labels, len(self.model.experts)
        result = StepResult(
            np.empty((inputs.size, shape[0]), np.float32),
            [_first_rows(self._gradients, g, len(group.rows)) for g, group in enumerate(inputs.groups)],
            np.empty(shape[0], np.float64),
            np.empty(shape, np.float64),
        )
        self.native.forward_backward(
            self.model.native,
            groups_of(inputs),
            inputs.dense,
            labels.index,
            labels.value,
            labels.weight,
            dense_weight != 0.0,
            list(result.gradients),
            result.predictions,
            result.expert_losses,
            result.rows,
        )
        return result

    def begin_batch(
        self, inputs: ModelInputs, states: Sequence[F32], dense_weight: float = 1.0, *, dense_steps: bool
    ) -> None:
        """Predict a batch before its rows are stepped within it; see `StepsRows`.

        `states` has per group (U, T) float32. Raises ValueError if states or inputs do not fit the spec.
        """
        labels = self._labels_of(inputs)
        self._predictions = np.empty((inputs.size, self.model.labels), np.float32)
        self._sizes = [len(group.rows) for group in inputs.groups]
        self._batch = self.native.begin_steps(
            self.model.native,
            groups_of(inputs),
            inputs.dense,
            labels.index,
            labels.value,
            labels.weight,
            dense_weight != 0.0,
            dense_steps,
            [steps.native for steps in self.model.row_steps],
            [_first_rows(self._copies, g, size) for g, size in enumerate(self._sizes)],
            list(states),
            self._predictions,
        )

    def advance(self) -> bool:
        """Train on the samples of the next dense step; return False after the last of the batch."""
        return self.native.advance_steps(self._current_batch())

    def result(self) -> StepResult:
        """Return the batch's result. Raises RuntimeError without a batch."""
        shape = self.model.labels, len(self.model.experts)
        rows, losses = np.empty(shape[0], np.float64), np.empty(shape, np.float64)
        gradient_counts = self.native.end_steps(self._current_batch(), losses, rows)
        gradients = [_first_rows(self._gradients, g, size) for g, size in enumerate(gradient_counts)]
        counts: list[U32] = [np.empty(size, np.uint32) for size in self._sizes]
        for g, (per_row, into) in enumerate(zip(counts, gradients, strict=True)):
            self.native.take_steps(g, per_row, into)
        self._batch = None
        return StepResult(self._predictions, gradients, rows, losses, counts)

    def _current_batch(self) -> _native.InSteps:
        if self._batch is None:
            raise RuntimeError("no batch was begun: call begin_batch first")
        return self._batch

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L) predictions."""
        return _score(self.model, self.native, inputs)

    def reduce_buffers(self) -> list[F32 | F64]:
        """Return flat views of the lane's sums."""
        return [self.native.gradients(), self.native.sums()]

    def merge(self, other: Lane) -> None:
        """Add another lane's sums and zero them. Raises TypeError for a lane of another kind of model."""
        self.native.add(_own(other).native)

    def _labels_of(self, inputs: ModelInputs) -> Labels:
        """Return the labels. Raises ValueError without, RuntimeError if the model was built for serving."""
        if inputs.labels is None:
            raise ValueError("training needs labels; to serve, use score")
        if not self.model.training:
            raise RuntimeError("this model was built for serving: build it with training=True to train")
        return inputs.labels


def _own(lane: Lane) -> HedgeLane:
    if not isinstance(lane, HedgeLane):
        raise TypeError(f"expected a lane of a native model, found a {type(lane).__name__}")
    return lane


def _first_rows(buffers: list[F32], group: int, rows: int) -> F32:
    """Return the first rows of a group's buffer; it grows to 1.25 times the rows."""
    if len(buffers[group]) < rows:
        buffers[group] = np.empty((rows + rows // 4, buffers[group].shape[1]), np.float32)
    return buffers[group][:rows]


def _score(model: HedgeDense, lane: _native.HedgeLane, inputs: ModelInputs) -> F32:
    predictions = np.empty((inputs.size, model.labels), np.float32)
    requests = None
    if inputs.request_ends is not None:
        shared = [
            np.zeros(len(g.list_ends), np.uint8) if g.shared is None else g.shared for g in inputs.groups
        ]
        requests = inputs.request_ends, shared
    lane.score(model.native, groups_of(inputs), inputs.dense, predictions, requests)
    return predictions


_SPLITMIX_STEP = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, stream: int, n: int) -> U64:
    """Return (N,) 64-bit words of splitmix64 (Steele et al. 2014), started at mix(seed) + mix(stream + 1).

    Initial weights do not depend on a library's generator, so they are equal on all platforms.
    """
    start = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    start = start + _mix(np.array([stream + 1], np.uint64))
    with np.errstate(over="ignore"):
        return _mix(start + _SPLITMIX_STEP * np.arange(1, n + 1, dtype=np.uint64))


def he_uniform(seed: int, stream: int, shape: tuple[int, int]) -> F32:
    """Return weights of `shape`, uniform in ±√(6 / shape[0]): the variance of He et al. 2015, eq. 10."""
    words = uniform(seed, stream, shape[0] * shape[1])
    unit = (words >> np.uint64(40)).astype(np.float64) / float(1 << 23) - 1.0  # 24 bits: exact in fp32
    weights: F32 = (unit * np.sqrt(6.0 / shape[0])).astype(np.float32).reshape(shape)
    return weights


def _mix(x: U64) -> U64:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
