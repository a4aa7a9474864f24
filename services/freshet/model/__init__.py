"""The dense part of a model: one protocol for the trainer (lanes and steps) and for inference (score).

A lane returns row gradients to its caller. All else that the model learns is *dense state*: weights, biases,
hedge losses, running means. Only `step` changes it, by the sums of the lanes, so ranks with equal sums make
equal steps.

Letters: B samples, L labels, K experts, U unique rows of a group, S float slots of a row, T floats of a row's
optimiser state, G gradients of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from freshet.config.spec.model import Spec
from freshet.config.spec.transforms import load_object
from freshet.errors import ConfigError
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.model.lamb import TrustRatios
from freshet.types import F32, F64, U32

__all__ = [
    "DENSE_MODEL_HOOK",
    "LABEL_MERGES",
    "NATIVE_KINDS",
    "SERVING_PREFIXES",
    "STARTED",
    "TRUST_RATIOS",
    "VARIANCE_STEP",
    "DenseModel",
    "FreezesVariance",
    "GroupInputs",
    "Labels",
    "Lane",
    "LeavesOut",
    "MergeRule",
    "MergesState",
    "ModelInputs",
    "NamesMoments",
    "Precision",
    "SplitStep",
    "State",
    "StepResult",
    "StepsLamb",
    "StepsRows",
    "build_model",
    "class_of",
    "variance_step",
]

Precision = Literal["fp32", "bf16"]

NATIVE_KINDS = ("hedge", "mlp", "linear")
"""Kinds of `spec.model` with a step in native code; with rows in the process, lookup and push, too."""

DENSE_MODEL_HOOK = "dense_model"
"""Name of a classmethod `(spec, *, training, precision) -> DenseModel` of a user's class.

A class that has it is no `freshet.Model` (a torch network): it implements the whole dense part, with or
without torch, as a `DenseModel`.
"""

State = Mapping[str, NDArray[Any]]
"""Dense state by name: `weights/…`, `optimizer/…`, `hedge/…`, `statistics/…`."""

SERVING_PREFIXES = ("weights/", "hedge/", "statistics/")
"""Prefixes of the state that serving loads; only training needs `optimizer/`."""


MergeRule = Literal["mean", "sum", "moments", "max", "started"]
"""How an array of ranks that trained apart becomes one: `mean`, weighted by the samples of each rank; `sum`
of what each has added since all were equal; `moments`, (count, mean, Σ (x - mean)²) of the values that all
have seen; `max`, element by element; `started`, for each label the mean of the ranks that have its starting
values, if any has."""

STARTED = "statistics/started"
"""Name of the (L,) array that is 1 for each label that has its starting values."""

VARIANCE_STEP = "optimizer/variance_step"
"""Name of `FreezesVariance.variance_steps`; without the array they are those of `optimizer/step`."""

TRUST_RATIOS = "optimizer/trust_ratios"
"""Name of the (T,) means of LAMB's ratios; without the array, as after Adam, the next step begins them."""

LABEL_MERGES: Mapping[str, MergeRule] = {
    STARTED: "max",
    "statistics/label_sums": "sum",
    "statistics/dense": "moments",
    "statistics/scale": "started",
    "weights/bias": "started",
    "optimizer/bias_squares": "started",
}
"""Rules of the arrays that start with a label's first samples, and of those that count values."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Result of one batch. The lane reuses the gradients' memory for its next batch."""

    predictions: F32  # (B, L) of every head before the update: probability, or the number
    gradients: Sequence[F32]  # per group (G, S), G = U without counts: sums over occurrences, else zeros
    rows: F64  # (L,) weighted rows of each label
    expert_losses: F64  # (L, K) sums over the batch's weighted rows; K is 1 for a model without experts
    counts: Sequence[U32] | None = None
    """Per group (U,): number of each row's gradients, consecutive among the (G, S) gradients, in the order of
    its steps. None: one per row."""


class Lane(Protocol):
    """Scratch memory and sums of one thread. Not thread-safe; lanes of one model may run concurrently."""

    def forward_backward(self, inputs: ModelInputs, dense_weight: float = 1.0) -> StepResult:
        """Predict, compute the loss's gradients and add the dense ones to the lane's sums.

        `dense_weight` 0 skips the sums but still returns row gradients (PROTOCOL 14). A batch may have no
        sample (PROTOCOL 3): its row gradients are zero. Raises ValueError if the inputs do not fit the spec,
        RuntimeError if the model was built for serving.
        """

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L) predictions; ignore labels."""

    def reduce_buffers(self) -> list[F32 | F64]:
        """Return views of the lane's sums, flat arrays that a trainer may all-reduce before `step`."""

    def merge(self, other: Lane) -> None:
        """Add another lane's sums to this lane's and zero them, as before an all-reduce of the rank."""


@runtime_checkable
class StepsRows(Protocol):
    """A `Lane` that steps rows within a batch, so later samples see the updates of earlier ones.

    It steps copies of the rows every 16 samples. A row has a gradient for each step in which it occurs, and
    the store applies these one by one, by the same arithmetic. One batch at a time.
    """

    def begin_batch(
        self, inputs: ModelInputs, states: Sequence[F32], dense_weight: float = 1.0, *, dense_steps: bool
    ) -> None:
        """Predict a whole batch before all of its steps.

        Args:
            inputs: Batch with labels.
            states: Per group (U, T) float32: optimiser state of the rows. The lane writes to these arrays.
            dense_weight: As in `forward_backward`.
            dense_steps: The model steps after each call of `advance`; if false, one call trains on the whole
                batch.

        Raises ValueError if states or inputs do not fit the spec.
        """

    def advance(self) -> bool:
        """Train on the samples of the next dense step; return False after the last of the batch."""

    def result(self) -> StepResult:
        """Return the result of the samples that `advance` has trained on, with counts."""


class DenseModel(Protocol):
    """A model without its rows."""

    labels: int

    def lane(self) -> Lane:
        """Create a lane for one thread; it can only score if the model was built for serving."""

    def step(self, lanes: Sequence[Lane]) -> None:
        """Update once by the lanes' sums and zero them. Changes nothing if they hold no weighted row.

        One thread calls it while no lane runs.
        """

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L) predictions. Thread-safe, except during `step` or `load_state`."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the dense state, without padding."""

    def load_state(self, state: State, *, weights_only: bool = False) -> None:
        """Load a state; `weights_only` (serving) skips the optimiser's part.

        Raises Mismatch, before any change, if an array is missing or has another shape.
        """

    def finite(self) -> bool:
        """Return whether the dense state is finite; otherwise it is no restart point (PROTOCOL 23)."""


@runtime_checkable
class SplitStep(Protocol):
    """A `DenseModel` with a step that several threads can share.

    One thread calls `begin_step`, then threads call `step_part` once for each part, concurrently. The result
    equals that of `step` to the bit.
    """

    def begin_step(self, lanes: Sequence[Lane]) -> None:
        """Make the parts of the step that are too small to share."""

    def step_part(self, lanes: Sequence[Lane], part: int, parts: int) -> None:
        """Make part `part` of `parts`, counted from 0."""

    def dense_steps(self, rows: int) -> int:
        """Return the dense steps of the next batch, of `rows` samples, if it is stepped within (`StepsRows`).

        At least 1 if the batch has a sample.
        """


@runtime_checkable
class LeavesOut(Protocol):
    """A `DenseModel` that leaves out what would make its weights infinite, and counts it."""

    @property
    def not_finite(self) -> Mapping[str, int]:
        """What was left out since construction, where a loss, a gradient or its square was not finite.

        `samples`, which taught nothing; `steps`, in which such parts of the mean gradient counted as 0.
        """


@runtime_checkable
class FreezesVariance(Protocol):
    """A `DenseModel` whose lanes' float32 gradient is stepped by Adam.

    Its beta1 is `model.dense_momentum`, its beta2 0.999. 1-bit Adam and DCT read and write the moments, and
    need steps that leave the second as it is.
    """

    @property
    def variance_steps(self) -> int:
        """Steps that moved the second moment, of which its bias correction is made."""

    @variance_steps.setter
    def variance_steps(self, steps: int) -> None: ...

    def moments(self) -> tuple[F32, F32]:
        """Return views of the (d,) first and second moments, without bias correction.

        Raises ConfigError if they are not in host memory.
        """

    def gradient_rows(self, lane: Lane) -> float:
        """Return by how many rows a step with the lane's sums divides its gradient."""

    def freeze_variance(self) -> None:
        """Make the next step, and no other, leave the second moment as it is."""


@runtime_checkable
class StepsLamb(Protocol):
    """A `FreezesVariance` with tensors that LAMB steps if the spec says so (`model.dense_optimizer`)."""

    @property
    def trust(self) -> TrustRatios | None:
        """LAMB's ratios; 1-bit LAMB sets their factors; None: Adam steps all."""


@runtime_checkable
class NamesMoments(Protocol):
    """A `DenseModel` with tensors that Adam steps: averagings may round these, and no other array."""

    @property
    def adam_tensors(self) -> Sequence[tuple[str, str, str]]:
        """Names in `state` of each tensor's weights, first and second moment: float32 arrays of one shape."""


@runtime_checkable
class MergesState(Protocol):
    """A `DenseModel` with arrays whose states on several ranks do not become one by their means."""

    merges: Mapping[str, MergeRule]
    """Rule by name. Without one, floats become the mean, and integers the largest."""


def variance_step(steps: int, variance_steps: int) -> dict[str, NDArray[Any]]:
    """Return the state of Adam's second moment: empty unless some of the steps left it as it was."""
    return {} if variance_steps == steps else {VARIANCE_STEP: np.array([variance_steps], np.int64)}


def build_model(
    spec: Spec, *, training: bool, precision: Precision | None = None, device: str = "cpu"
) -> DenseModel:
    """Build the dense part that `spec.model.kind` names, in its initial state.

    Imports torch, except for native kinds (`hedge`, `mlp`, `linear`) and classes that build their own dense
    model.

    Args:
        spec: Model spec.
        training: Build a model that can train, not only score.
        precision: None takes that of the spec.
        device: `cpu`, or for a torch network `cuda` or `cuda:N`; rows and row gradients stay in host memory.

    Raises ConfigError for an unknown kind, or a device that the kind cannot run on.
    """
    precision = precision or spec.train.precision
    native = spec.model.kind in NATIVE_KINDS
    build = None if native else _own_hook(spec)
    if device != "cpu" and (native or build is not None):
        raise ConfigError(
            "the trainer's device",
            "",
            f"{device!r} for a model of kind {spec.model.kind!r}",
            "cpu: this kind is native code; on a GPU run dlrm, deepfm, dcnv2 and classes of your own",
        )
    if native:
        from freshet.model.hedge import HedgeDense  # noqa: PLC0415 - loads the native core

        return HedgeDense(spec, training=training, precision=precision)
    if build is not None:
        own: DenseModel = build(spec, training=training, precision=precision)
        return own
    from freshet.model.networks import build_alone  # noqa: PLC0415 - imports torch

    return build_alone(spec, training=training, precision=precision, device=device)


def class_of(kind: str, folder: str) -> type[Any]:
    """Import the class that `package.module:Class` names, also from the spec's folder.

    Raises ConfigError if there is none.
    """
    if ":" not in kind:
        expected = "hedge, linear, dlrm, deepfm, dcnv2, or package.module:Class"
        raise ConfigError("spec", "model.kind", kind, expected)
    found = load_object(kind, folder, where="spec", key="model.kind")
    if not isinstance(found, type):
        raise ConfigError("spec", "model.kind", kind, "a class", f"it is a {type(found).__name__}")
    return found


def _own_hook(spec: Spec) -> Callable[..., DenseModel] | None:
    """Return the hook of a user's class that builds its own dense model; None if it has none."""
    if ":" not in spec.model.kind:
        return None
    hook: Callable[..., DenseModel] | None = getattr(
        class_of(spec.model.kind, spec.folder), DENSE_MODEL_HOOK, None
    )
    return hook
