"""Lanes of a native model that train on many batches in native code, without Python or its lock in between.

A run is consecutive batches of one lane. A batch has one push, and one or more dense steps. Lanes synchronise
at each dense step; a lane with fewer steps joins the others' without rows.

Letters: N samples of a run, K batches, M batches of them to train on, L labels, D dense columns.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from freshet import _native
from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.features import GroupKeys
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import GroupInputs, Labels
from freshet.tables import NO_BOUND, RowsBound, Store
from freshet.types import F32, I64, U8, OffsetRange

# --- A pass over decoded samples: one lane with a private store


BUCKETS = 64
"""Buckets of a pass's store. A single thread needs none of their locks and flushes, and each costs time in
every batch; their number does not change results."""


class NativePass:
    """Rows and dense state of a native model that one thread trains from its initial state."""

    def __init__(self, spec: Spec, *, bound: RowsBound = NO_BOUND) -> None:
        """Create store and model. Raises ConfigError as `layout_of` and the model do.

        `bound` limits the rows as in `Store.of`; the caller evicts by `store.make_room`.
        """
        layout = layout_of(spec)
        self.labels = len(spec.labels)
        # Admission counts keys by bucket, so another number of buckets would change results.
        admits = any(table.admission > 1 for table in spec.tables)
        own = replace(spec, buckets=spec.buckets if admits else BUCKETS, partitions=1)
        self.store = Store.of(own, layout, changes=False, bound=bound)
        self.model = HedgeDense(spec, training=True, precision=spec.train.precision)
        self._loop = NativeLoop(spec, layout, self.model, self.store, 1)
        self._next = 0  # batches of all calls are offsets 0, 1, 2, ... of partition 0

    def run(self, groups: Sequence[GroupKeys], dense: F32, labels: Labels, times_ms: I64, ends: I64) -> F32:
        """Train on batches [ends[i - 1], ends[i]) in order.

        Args:
            groups: Keys of N samples, as decoded.
            dense: (N, D) float32.
            labels: Labels of N samples.
            times_ms: (N,) event times.
            ends: (K,) ascending; the last is N.

        Returns:
            (N, L) predictions, each before the step of its batch.

        Raises:
            ValueError: The arrays do not fit the model or each other; nothing was trained.
        """
        if not len(ends) or ends[-1] != len(times_ms):
            raise ValueError(f"expected batches that end with the samples, found {ends.tolist()[-1:]}")
        batches = _PassBatches(groups, dense, labels, times_ms, ends, (), self._next)
        ran = self._loop.run(0, batches, np.ones(len(ends), np.uint8))
        assert ran.ended is Ended.DONE, "no other client pushes to a private store"
        self._next += len(ends)
        return ran.predictions


STAGES = ("plan", "lookup", "forward_backward", "wait", "step", "push")
"""Stages of a lane; `Ran.seconds` has the time of each."""

MOMENTS = ("begun", "planned", "looked_up", "computed", "stepped", "pushed")
"""Moments of a batch; `Ran.moments_ns` has the wall clock at each."""


class Ended(enum.IntEnum):
    """End of a lane's run. Values are those of `LoopRan::Ended`."""

    DONE = 0
    REFUSED = 1  # the offsets of batch `Ran.pushed` do not follow the applied offsets
    UNREAD = 2  # a bucket is being loaded
    NOT_HELD = 3  # a bucket is not owned
    BROKEN = 4  # another lane has failed


@dataclass(frozen=True, slots=True, eq=False)
class LoopBatches:
    """Labelled batches of a run. Samples are in the order of their batches."""

    groups: Sequence[GroupKeys]  # keys of N samples, as decoded
    dense: F32  # (N, D)
    labels: Labels  # labels of N samples
    times_ms: I64  # (N,) event times
    ends: I64  # (K,) end of each batch's samples; a batch may be empty
    ranges: Sequence[tuple[OffsetRange, ...]]  # K tuples

    def __len__(self) -> int:
        return len(self.ends)

    def flat_ranges(self, count: int) -> tuple[I64, I64]:
        """Return partition, start and stop (R, 3) of the first batches' ranges, and their ends (count,)."""
        ranges = self.ranges[:count]
        flat = [(r.partition, r.start, r.stop) for of in ranges for r in of]
        return np.array(flat, np.int64).reshape(-1, 3), np.cumsum([len(of) for of in ranges], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _PassBatches(LoopBatches):
    """Batches that have the offsets from `first` on as ranges, one each: as objects they cost a pass 5 %."""

    first: int

    def flat_ranges(self, count: int) -> tuple[I64, I64]:
        at = np.arange(self.first, self.first + count)
        return np.stack([np.zeros_like(at), at, at + 1], axis=1), np.arange(1, count + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """Result of a lane's run; batches after `trained` were not started."""

    ended: Ended
    trained: int  # batches that were computed, with their dense gradients stepped
    pushed: int  # batches with an acknowledged push
    skipped: int  # pushed batches that all buckets had applied before
    bucket: int  # the bucket that is not owned, or not loaded
    seconds: dict[str, float]  # time of each of STAGES
    predictions: F32  # (N, L) each before its batch's step; valid up to `trained`
    moments_ns: I64 | None = None  # (K, len(MOMENTS))
    kept: Sequence[tuple[int, list[GroupInputs]]] = ()
    """(batch, copies of its rows before it was trained on) of the batches to keep."""


class NativeLoop:
    """Lanes of one model on one store. All lanes call `run` or `join` concurrently, each in its thread."""

    def __init__(
        self, spec: Spec, layout: Layout, model: HedgeDense, store: Store, lanes: int, *, sync: bool = False
    ) -> None:
        """Create a loop; with `sync`, lookups wait until all pushes of the previous step are applied."""
        tables = [[spec.table(spec.features[f].table or "").id for f in g.features] for g in layout.groups]
        self.lanes, self._labels = lanes, model.labels
        in_steps = spec.train.batch_steps
        self._native = _native.HedgeLoop(store.native, model.native, tables, lanes, sync, in_steps)

    @property
    def dense_steps(self) -> int:
        """Number of dense steps made; valid between runs."""
        return self._native.dense_steps

    def run(
        self,
        lane: int,
        batches: LoopBatches,
        learn_dense: U8,
        *,
        keep: U8 | None = None,
        moments: bool = False,
    ) -> Ran:
        """Train on the first M batches, then join the other lanes' steps until all are done.

        Args:
            lane: Number of the lane.
            batches: K batches.
            learn_dense: (M,) uint8: 0 for batches of which only row gradients count.
            keep: (M,) uint8: 1 for batches that `Ran.kept` shall have.
            moments: Record `Ran.moments_ns`.

        Raises ValueError if the arrays do not fit the model or each other. After any error, the runs of all
        lanes, and all later runs, end as BROKEN.
        """
        count, native = len(learn_dense), self._native
        predictions = np.empty((len(batches.times_ms), self._labels), np.float32)
        ranges, range_ends = batches.flat_ranges(count)
        at = np.zeros((count, len(MOMENTS)), np.int64) if moments else None
        result = native.run(
            lane,
            [(g.keys, g.feature_starts, list(g.list_ends)) for g in batches.groups],
            batches.dense,
            batches.labels.index,
            batches.labels.value,
            batches.labels.weight,
            batches.times_ms,
            batches.ends[:count],
            ranges,
            range_ends,
            learn_dense,
            np.zeros(count, np.uint8) if keep is None else keep,
            predictions,
            at,
        )
        return _ran(result, predictions, at, self._kept(lane) if keep is not None and keep.any() else ())

    def join(self, lane: int) -> Ran:
        """Join the other lanes' steps without batches."""
        return _ran(self._native.join(lane), np.empty((0, self._labels), np.float32), None)

    def _kept(self, lane: int) -> list[tuple[int, list[GroupInputs]]]:
        return [
            (batch, [GroupInputs(rows, positions, starts, ends) for rows, positions, starts, ends in groups])
            for batch, groups in self._native.kept(lane)
        ]

    def abort(self) -> None:
        """End the runs of lanes that wait for a lane that has failed."""
        self._native.abort()


def _ran(
    result: _native.RanTuple,
    predictions: F32,
    moments_ns: I64 | None,
    kept: Sequence[tuple[int, list[GroupInputs]]] = (),
) -> Ran:
    ended, trained, pushed, skipped, bucket, seconds = result
    by_stage = dict(zip(STAGES, seconds, strict=True))
    return Ran(Ended(ended), trained, pushed, skipped, bucket, by_stage, predictions, moments_ns, kept)
