"""The dense part of a model: one protocol, used by the trainer (lanes and steps) and by inference (score).

Letters: B samples, L labels, K experts, U unique rows of a group, S float slots of a row.

The row gradients go back to whoever looked the rows up; everything else the model learns is *dense state*:
weights, biases, hedge losses, running means. It changes in `step` only, by the sums that the lanes have
gathered, so that every rank that adds up the same sums makes the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from freshet.config.spec.model import Spec
from freshet.errors import ConfigError
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.types import F32, F64, U32

__all__ = [
    "NATIVE_KINDS",
    "SERVING_PREFIXES",
    "DenseModel",
    "GroupInputs",
    "Labels",
    "Lane",
    "ModelInputs",
    "Precision",
    "SplitStep",
    "State",
    "StepResult",
    "StepsRows",
    "build_model",
]

Precision = Literal["fp32", "bf16"]

NATIVE_KINDS = ("hedge", "mlp", "linear")
"""Kinds of `spec.model` whose lookup, step and push are native code from end to end."""

State = Mapping[str, NDArray[Any]]
"""Dense state by name: `weights/…`, `optimizer/…`, `hedge/…`, `statistics/…`."""

SERVING_PREFIXES = ("weights/", "hedge/", "statistics/")
"""What a version's reader needs to serve it; `optimizer/` is for training on."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one batch gave. Gradients belong to the lane and are valid until its next batch."""

    predictions: F32  # (B, L) of every head before the update: probability, or the number
    gradients: Sequence[F32]  # per group (U, S): summed over occurrences, zeros where a slot got none
    rows: F64  # (L,) weighted rows of each label
    expert_losses: F64  # (L, K) summed over the batch's weighted rows; K is 1 for a model without experts
    counts: Sequence[U32] | None = None
    """Per group (U,): how many of the gradients (G, S) are each row's, one behind the other in the order of
    its steps. None: each row has one."""


class Lane(Protocol):
    """One thread's scratch and sums. Not thread-safe; lanes of one model may run at the same time."""

    def forward_backward(self, inputs: ModelInputs, dense_weight: float = 1.0) -> StepResult:
        """Predict, then take the loss's gradients; the dense ones add up in the lane until the next step.

        `dense_weight` 0 leaves the dense state's sums alone and still returns row gradients (PROTOCOL 14).
        Raises ValueError if the inputs do not fit the spec, RuntimeError if the model was built for serving.
        """

    def score(self, inputs: ModelInputs) -> F32:
        """(B, L) predictions; labels are not looked at."""

    def reduce_buffers(self) -> list[F32 | F64]:
        """The lane's sums as flat arrays (views), which a trainer may all-reduce before `step`."""

    def merge(self, other: Lane) -> None:
        """Take another lane's sums and zero them: lanes of a rank are merged before an all-reduce."""


@runtime_checkable
class StepsRows(Protocol):
    """A `Lane` that can step rows within a batch: later samples see what earlier ones taught.

    It steps copies of the rows, every 16 samples, as the store will step the rows themselves by the
    gradients: a row has one for each step that it occurs in. One batch at a time.
    """

    def begin_batch(
        self, inputs: ModelInputs, states: Sequence[F32], dense_weight: float = 1.0, *, dense_steps: bool
    ) -> None:
        """Predict a batch as a whole, from before all of its steps.

        Args:
            states: per group (U, T): optimiser state of the rows. The lane writes to these arrays.
            dense_weight: as of `forward_backward`.
            dense_steps: the model steps between two calls of `advance`; else one call does the whole batch.

        Raises ValueError if states or inputs do not fit the spec.
        """

    def advance(self) -> bool:
        """Train on the samples of the next dense step; False once that was the last of the batch."""

    def result(self) -> StepResult:
        """What the batch gave, as far as `advance` came, with counts."""


class DenseModel(Protocol):
    """A model without its rows."""

    labels: int
    experts: tuple[str, ...]  # names of the K members; one name for a model that is no hedge

    def lane(self) -> Lane:
        """A new lane, for one thread. A model built for serving gives lanes that only score."""

    def step(self, lanes: Sequence[Lane]) -> None:
        """One update from the lanes' sums, which are zeroed. Nothing changes if they hold no weighted row.

        Called by one thread while no lane runs.
        """

    def score(self, inputs: ModelInputs) -> F32:
        """(B, L) predictions. Thread-safe against other scores, not against `step` or `load_state`."""

    def state(self) -> dict[str, NDArray[Any]]:
        """A copy of the dense state. Padding is not part of it."""

    def load_state(self, state: State, *, weights_only: bool = False) -> None:
        """Take a state in; `weights_only` leaves the optimiser's part alone (serving).

        Raises Mismatch, naming the array, if one is missing or of another shape; nothing has changed then.
        """

    def finite(self) -> bool:
        """Whether all of the dense state is finite; else it is never a restart point (PROTOCOL 23)."""

    @property
    def step_count(self) -> int:
        """Steps taken."""

    def mixture(self) -> F32:
        """(L, K) present weights of the experts; ones for a model that is no hedge."""


@runtime_checkable
class SplitStep(Protocol):
    """A `DenseModel` whose step several threads can share: first `begin_step` by one of them, then every
    part once, all at the same time. Together they do what `step` does, to the bit."""

    def begin_step(self, lanes: Sequence[Lane]) -> None:
        """What is too small to share."""

    def step_part(self, lanes: Sequence[Lane], part: int, parts: int) -> None:
        """Part `part` of `parts`, counted from 0."""

    def dense_steps(self, rows: int) -> int:
        """How many dense steps a batch of so many samples makes that is trained on from now on in steps
        (`StepsRows`); at least 1 of a sample or more."""


def build_model(
    spec: Spec, *, training: bool, precision: Precision | None = None, device: str = "cpu"
) -> DenseModel:
    """The dense part that `spec.model.kind` names, in its initial state.

    Native kinds (`hedge`, `mlp`, `linear`) and classes that make their own dense model import no torch; the
    others do, here.

    Args:
        precision: that of the spec, if not given.
        device: `cpu`, or for a torch network `cuda` or `cuda:N`; rows and their gradients are arrays here
            whatever it is.

    Raises ConfigError for a kind that does not exist, or a device that it cannot compute on.
    """
    precision = precision or spec.train.precision
    if device != "cpu" and not _is_torch(spec):
        raise ConfigError(
            "the trainer's device",
            "",
            f"{device!r} for a model of kind {spec.model.kind!r}",
            "cpu: this kind is native code; on a GPU run dlrm, deepfm, dcnv2 and classes of your own",
        )
    if spec.model.kind in NATIVE_KINDS:
        from freshet.model.hedge import HedgeDense  # noqa: PLC0415 - loads the native core

        return HedgeDense(spec, training=training, precision=precision)
    build = _own_hook(spec)
    if build is not None:
        own: DenseModel = build(spec, training=training, precision=precision)
        return own
    from freshet.model.networks import build_alone  # noqa: PLC0415 - imports torch

    return build_alone(spec, training=training, precision=precision, device=device)


def _is_torch(spec: Spec) -> bool:
    return spec.model.kind not in NATIVE_KINDS and _own_hook(spec) is None


def _own_hook(spec: Spec) -> Callable[..., DenseModel] | None:
    """What makes the dense model of a class of the user's, if it makes its own."""
    if ":" not in spec.model.kind:
        return None
    from freshet.model.user_classes import DENSE_MODEL_HOOK, class_of  # noqa: PLC0415 - a module of the user's

    hook: Callable[..., DenseModel] | None = getattr(
        class_of(spec.model.kind, spec.folder), DENSE_MODEL_HOOK, None
    )
    return hook


def ones_mixture(labels: int) -> F32:
    """(L, 1) of ones."""
    return np.ones((labels, 1), np.float32)
