"""The default model, a hedge of experts, and `mlp` or `linear` alone: all native, no torch.

The step is written out in C++ (`hedge.hpp`); here a spec becomes its plan and its arrays become named state.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.errors import Mismatch
from freshet.model import Labels, Lane, ModelInputs, Precision, State, StepResult
from freshet.model.heads import he_uniform
from freshet.model.plan import LOSSES, expert_plan, groups_of, input_plan, padded
from freshet.tables import RowSteps
from freshet.types import F32, F64, I64, U32

__all__ = ["HedgeDense", "HedgeLane"]


class HedgeDense:
    """`DenseModel` of kinds `hedge`, `mlp` and `linear`; steps in parts (`SplitStep`)."""

    scores_requests = True

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
        """How rows of each group are stepped within a batch."""
        return [RowSteps(group) for group in layout_of(self._spec).groups]

    def dense_steps(self, rows: int) -> int:
        """How many dense steps a batch of so many rows makes that begins now: of 64 samples each, but a new
        model's first ones of 1, 2, 4 and so on."""
        return _native.dense_steps(rows, self.native.steps)

    def lane(self) -> HedgeLane:
        """A new lane."""
        return HedgeLane(self)

    def step(self, lanes: Sequence[Lane]) -> None:
        """One update from the lanes' sums."""
        self.native.step([lane.native for lane in lanes if isinstance(lane, HedgeLane)])

    def begin_step(self, lanes: Sequence[Lane]) -> None:
        """The small things of a step; see `SplitStep`."""
        self.native.begin_step([lane.native for lane in lanes if isinstance(lane, HedgeLane)])

    def step_part(self, lanes: Sequence[Lane], part: int, parts: int) -> None:
        """A share of the MLP's weights."""
        mine = [lane.native for lane in lanes if isinstance(lane, HedgeLane)]
        self.native.step_part(mine, part, parts)

    def scoring_lane(self) -> _native.HedgeLane:
        """What scores on the calling thread."""
        lane: _native.HedgeLane | None = getattr(self._threads, "lane", None)
        if lane is None:
            lane = self._threads.lane = _native.HedgeLane(self.native, False)
        return lane

    def score(self, inputs: ModelInputs) -> F32:
        """(B, L) predictions."""
        return _score(self, self.scoring_lane(), inputs)

    def state(self) -> dict[str, NDArray[Any]]:
        """A copy of the dense state."""
        state = self._weights("weights", self.native.array("weights"))
        if self.training:
            state |= self._weights("optimizer/first", self.native.array("first_moment"))
            state |= self._weights("optimizer/second", self.native.array("second_moment"))
            state["optimizer/bias_squares"] = self._heads("bias_squares").copy()
            state["optimizer/step"] = np.array([self.native.steps], np.int64)
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
        """Take a state in."""
        mine = self.state()
        wanted = [n for n in mine if not (weights_only and n.startswith("optimizer/"))]
        for name in wanted:
            if name not in state:
                raise Mismatch(
                    f"the version has no array {name!r}: it was written by another spec or model kind"
                )
            if state[name].shape != mine[name].shape:
                raise Mismatch(
                    f"array {name!r} of the version has shape {state[name].shape},"
                    f" this spec expects {mine[name].shape}: it was written by another spec"
                )
        self._write(state, weights_only=weights_only)

    def finite(self) -> bool:
        """Whether all of the dense state is finite."""
        return bool(self.native.finite())

    @property
    def step_count(self) -> int:
        """Steps taken."""
        return int(self.native.steps)

    def mixture(self) -> F32:
        """(L, K) present weights of the experts."""
        return np.array(self.native.mixture(), np.float32).reshape(self.labels, -1)

    def _heads(self, name: str) -> NDArray[Any]:
        return self.native.array(name).reshape(self.labels, -1)

    def _layers(self) -> list[tuple[str, slice, tuple[int, ...], tuple[I64, ...]]]:
        """(name, place in the flat array, padded shape, what of it is real) of each matrix and bias."""
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

    def _weights(self, prefix: str, flat: F32) -> dict[str, NDArray[Any]]:
        parts = {}
        for name, place, shape, real in self._layers():
            parts[f"{prefix}/{name}"] = flat[place].reshape(shape)[real]
        return parts

    def _initial(self, seed: int) -> dict[str, NDArray[Any]]:
        """He's initial weights, biases of zero; the last layer starts at zero, so deep starts as FM does."""
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
        self._held = [np.empty((0, g[0]), np.float32) for g in model.plan.native[5]]
        self._copies = [np.empty((0, g[0]), np.float32) for g in model.plan.native[5]]
        self._batch: _native.InSteps | None = None
        self._predictions, self._sizes = np.empty((0, model.labels), np.float32), list[int]()

    def forward_backward(self, inputs: ModelInputs, dense_weight: float = 1.0) -> StepResult:
        """Predict, then take the loss's gradients."""
        labels = self._labels_of(inputs)
        shape = self.model.labels, len(self.model.experts)
        result = StepResult(
            np.empty((inputs.size, shape[0]), np.float32),
            [_first_of(self._held, g, len(group.rows)) for g, group in enumerate(inputs.groups)],
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
        """Predict a batch whose rows are stepped within it; see `StepsRows`."""
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
            [_first_of(self._copies, g, size) for g, size in enumerate(self._sizes)],
            list(states),
            self._predictions,
        )

    def advance(self) -> bool:
        """Train on the samples of the next dense step."""
        return self.native.advance_steps(self._begun())

    def result(self) -> StepResult:
        """What the batch gave."""
        shape = self.model.labels, len(self.model.experts)
        rows, losses = np.empty(shape[0], np.float64), np.empty(shape, np.float64)
        made = self.native.end_steps(self._begun(), losses, rows)
        gradients = [_first_of(self._held, g, size) for g, size in enumerate(made)]
        counts: list[U32] = [np.empty(size, np.uint32) for size in self._sizes]
        for g, (of, into) in enumerate(zip(counts, gradients, strict=True)):
            self.native.take_steps(g, of, into)
        self._batch = None
        return StepResult(self._predictions, gradients, rows, losses, counts)

    def _begun(self) -> _native.InSteps:
        if self._batch is None:
            raise RuntimeError("no batch was begun: call begin_batch first")
        return self._batch

    def score(self, inputs: ModelInputs) -> F32:
        """(B, L) predictions."""
        return _score(self.model, self.native, inputs)

    def reduce_buffers(self) -> list[F32 | F64]:
        """The lane's sums as flat arrays (views)."""
        return [self.native.gradients(), self.native.sums()]

    def merge(self, other: Lane) -> None:
        """Take another lane's sums and zero them."""
        if not isinstance(other, HedgeLane):
            raise TypeError("lanes of different models cannot be merged")
        self.native.add(other.native)

    def _labels_of(self, inputs: ModelInputs) -> Labels:
        """Raises ValueError without labels, RuntimeError if the model was built for serving."""
        if inputs.labels is None:
            raise ValueError("training needs labels; to serve, use score")
        if not self.model.training:
            raise RuntimeError("this model was built for serving: build it with training=True to train")
        return inputs.labels


def _first_of(held: list[F32], group: int, rows: int) -> F32:
    """The first rows of an array that the lane keeps and lets grow."""
    if len(held[group]) < rows:
        held[group] = np.empty((rows + rows // 4, held[group].shape[1]), np.float32)
    return held[group][:rows]


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
