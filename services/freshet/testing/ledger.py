"""A model that counts: after any run its rows and weights show exactly which samples they have learned.

For `model.kind = "freshet.testing.ledger:LedgerModel"`. Every sample has the same gradient in any
state of the model: -1 in the first column of each row that it touches, and minus a small hash of itself in
the second. With tables of `dim = 2`, `init = 0` and `optimizer = { name = "sgd", lr = 1.0 }` a row is then
(samples that touched it, sum of their hashes), and one sample lost and another doubled cannot cancel. The
dense state counts the same over all samples.

Letters: B samples, L labels, U unique rows, S float slots of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, Mismatch
from freshet.model import Lane, MergeRule, ModelInputs, Precision, State, StepResult
from freshet.model.inputs import GroupInputs
from freshet.types import F32, F64, I64

SEQ = "seq"
"""The dense feature that identifies a sample: an integer from 0 to 2**24, exact in float32."""

DENSE = -1
"""A request to serving with this `seq` is answered with (count, hash) of the dense state; with -2 of the row
of the spec's first id feature, with -3 of the second, and so on."""

MODULUS = 97
"""Hashes are hardly above it, so that float32 sums of 100,000 of them are exact."""

PREDICTION = 0.5
"""Prediction for every sample with a label: gate and measures see a model that never changes."""


def hash_of(seq: NDArray[Any], label: NDArray[Any]) -> I64:
    """Return (B,) small hashes of the samples' identities and labels."""
    hashed: I64 = seq.astype(np.int64) % MODULUS + label.astype(np.int64)
    return hashed


class LedgerModel:
    """A `DenseModel` that counts; see the module."""

    merges: ClassVar[Mapping[str, MergeRule]] = {"weights/count": "sum", "weights/hash": "sum"}

    @classmethod
    def dense_model(cls, spec: Spec, *, training: bool, precision: Precision) -> Self:
        """Build the model: the hook of `freshet.model.DENSE_MODEL_HOOK`."""
        return cls(spec, training=training)

    def __init__(self, spec: Spec, *, training: bool) -> None:
        layout = layout_of(spec)
        dense = [spec.features[i].name for i in layout.dense]
        vectors = [group.slot("vector") for group in layout.groups]
        if SEQ not in dense or any(v is None or v.width != 2 for v in vectors) or len(spec.labels) > 2:
            raise ConfigError(
                "spec",
                "model.kind",
                spec.model.kind,
                f"tables of dim 2, one or two labels, and a dense feature {SEQ!r}",
                "this model only counts samples; see freshet.testing.ledger",
            )
        self.labels = len(spec.labels)
        self.training = training
        self.seq = dense.index(SEQ)
        self.columns = [0 if v is None else v.start for v in vectors]
        self.features = [(g, i) for g, group in enumerate(layout.groups) for i in range(len(group.features))]
        self.totals = np.zeros(2)  # count, hash
        self._steps = 0

    def lane(self) -> LedgerLane:
        """Return a new lane."""
        return LedgerLane(self)

    def step(self, lanes: Sequence[Lane]) -> None:
        """Add the lanes' sums."""
        total = sum((lane.sums for lane in lanes if isinstance(lane, LedgerLane)), np.zeros(2))
        if total.any():
            self.totals = self.totals + total
            self._steps += 1
        for lane in lanes:
            if isinstance(lane, LedgerLane):
                lane.sums[:] = 0.0

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L): values that the request's `seq` selects (see `DENSE`), PREDICTION for a sample."""
        seq = inputs.dense[:, self.seq]
        out = np.full((inputs.size, self.labels), PREDICTION, np.float32)
        out[seq == DENSE] = self.totals[: self.labels]
        for place, (g, feature) in enumerate(self.features):
            asked = np.flatnonzero(seq == DENSE - 1 - place)
            out[asked] = self._vectors(inputs.groups[g], g, feature)[asked, : self.labels]
        return out

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the dense state."""
        state = {"weights/count": self.totals[:1].copy(), "weights/hash": self.totals[1:].copy()}
        return state | ({"optimizer/step": np.array([self._steps], np.int64)} if self.training else {})

    def load_state(self, state: State, *, weights_only: bool = False) -> None:
        """Replace the dense state."""
        for name in ("weights/count", "weights/hash", *(() if weights_only else ("optimizer/step",))):
            if name not in state or state[name].shape != (1,):
                raise Mismatch(f"array {name!r} of the version: expected one number; it is not a ledger's")
        self.totals = np.concatenate([state["weights/count"], state["weights/hash"]]).astype(np.float64)
        if not weights_only:
            self._steps = int(state["optimizer/step"][0])

    def finite(self) -> bool:
        """Check that the dense state is finite."""
        return bool(np.isfinite(self.totals).all())

    def _vectors(self, group: GroupInputs, g: int, feature: int) -> F32:
        """Return (B, 2) rows of a feature's values; zeros for null."""
        start, stop = group.feature_starts[feature : feature + 2]
        positions = group.positions[start:stop]
        column = self.columns[g]
        found: F32 = np.zeros((len(positions), 2), np.float32)
        found[positions >= 0] = group.rows[positions[positions >= 0], column : column + 2]
        return found


class LedgerLane:
    """A `Lane` that counts."""

    def __init__(self, model: LedgerModel) -> None:
        self.model = model
        self.sums: F32 = np.zeros(2, np.float32)  # as a gradient: reducers compress float32 buffers

    def forward_backward(self, inputs: ModelInputs, dense_weight: float = 1.0) -> StepResult:
        """Count the samples; return the counts for their rows."""
        labels = inputs.labels
        if labels is None:
            raise ValueError("forward_backward needs labels; to serve, use score")
        hashes = hash_of(inputs.dense[:, self.model.seq], labels.index)
        if dense_weight:
            self.sums += (inputs.size, hashes.sum())
        heads = self.model.labels
        rows = np.bincount(labels.index, labels.weight, heads).astype(np.float64)
        return StepResult(
            np.full((inputs.size, heads), PREDICTION, np.float32),
            [self._gradient(group, g, hashes) for g, group in enumerate(inputs.groups)],
            rows,
            rows[:, None] * np.log(2),
        )

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L) as the model scores."""
        return self.model.score(inputs)

    def reduce_buffers(self) -> list[F32 | F64]:
        """Return the lane's sums."""
        return [self.sums]

    def merge(self, other: Lane) -> None:
        """Add another lane's sums and zero them."""
        if not isinstance(other, LedgerLane):
            raise TypeError("lanes of different models cannot be merged")
        self.sums += other.sums
        other.sums[:] = 0.0

    def _gradient(self, group: GroupInputs, g: int, hashes: I64) -> F32:
        """Return (U, S): minus (1, hash) summed over the occurrences of each row; zeros in the scalars."""
        gradient = np.zeros_like(group.rows)
        column = self.model.columns[g]
        for start, stop in zip(group.feature_starts[:-1], group.feature_starts[1:], strict=True):
            positions = group.positions[start:stop]
            real = positions >= 0
            np.subtract.at(gradient[:, column], positions[real], np.float32(1))
            np.subtract.at(gradient[:, column + 1], positions[real], hashes[real].astype(np.float32))
        return gradient
