"""Lanes of a native model that go from batch to batch in native code: no Python, and no interpreter lock,
between two batches.

A run is consecutive batches of one lane, a batch one push and a dense step or several. Lanes meet at each
dense step; one that has fewer joins the others' without rows.

Letters: N samples of a run, K batches, L labels, D dense columns.
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
from freshet.tables import Store
from freshet.types import F32, I64, U8, OffsetRange

__all__ = ["MOMENTS", "STAGES", "Ended", "LoopBatches", "NativeLoop", "NativePass", "Ran"]

# --- A pass of a native model over decoded samples: rows, model and batches on one thread, in native
# code.
#
# A loop of one lane (`freshet.model.native_loop`) with a store of its own, that nobody else sees.
#
# Letters: N samples, L labels, D dense columns.


BUCKETS = 64
"""Of a pass's own table. Buckets are units of ownership, of locks and of flushes, which one thread needs none
of, and each costs every batch some nanoseconds; what is learned does not depend on their number."""


class NativePass:
    """Rows and dense state of a model that one thread trains from nothing, and that nobody else sees.

    For native kinds. Raises ConfigError as `layout_of` and the models do.
    """

    def __init__(self, spec: Spec, *, most_bytes: int = 0) -> None:
        """`most_bytes`: of rows, as of `Store.of`; who runs the pass evicts by `store.make_room`."""
        layout = layout_of(spec)
        self.labels = len(spec.labels)
        # The counts behind `admission` are kept by bucket: there the number stays, as they would differ.
        admits = any(table.admission > 1 for table in spec.tables)
        own = spec if admits else replace(spec, buckets=BUCKETS, partitions=1)
        own = replace(own, partitions=1)
        self.store = Store.of(own, layout, publish=False, flush=False, most_bytes=most_bytes)
        self.model = HedgeDense(spec, training=True, precision=spec.train.precision)
        self._loop = NativeLoop(spec, layout, self.model, self.store, 1)
        self._next = 0  # batches of all calls are offsets 0, 1, 2, ... of partition 0

    def run(self, groups: Sequence[GroupKeys], dense: F32, labels: Labels, times_ms: I64, ends: I64) -> F32:
        """Train on batches [ends[i - 1], ends[i]) in order; returns (N, L) predictions, each from before its
        own batch's step.

        Args:
            groups: keys of N samples, as decoded. dense: (N, D). labels: of N. times_ms: (N,) event times.
            ends: (batches,) rising, the last is N.

        Raises ValueError, before anything is learned, if these do not fit the model or each other.
        """
        if not len(ends) or ends[-1] != len(times_ms):
            raise ValueError(f"expected batches that end with the samples, found {ends.tolist()[-1:]}")
        first = self._next
        ranges = [(OffsetRange(0, i, i + 1),) for i in range(first, first + len(ends))]
        batches = LoopBatches(groups, dense, labels, times_ms, ends, ranges)
        ran = self._loop.run(0, batches, np.ones(len(ends), np.uint8))
        assert ran.ended is Ended.DONE, "nobody else pushes to a store of one's own"
        self._next += len(ends)
        return ran.predictions


STAGES = ("plan", "lookup", "forward_backward", "wait", "step", "push")
"""Of a lane in a run; `Ran.seconds` has the time of each."""

MOMENTS = ("begun", "planned", "looked_up", "computed", "stepped", "pushed")
"""Of a batch; `Ran.moments_ns` has the wall clock at each."""


class Ended(enum.IntEnum):
    """How a lane's run ended. Values are those of `LoopRan::Ended`."""

    DONE = 0
    REFUSED = 1  # the push of batch `Ran.pushed`: it does not continue what its rows have applied
    UNREAD = 2  # a bucket is being loaded
    NOT_HELD = 3  # a bucket is not held
    BROKEN = 4  # another lane has failed


@dataclass(frozen=True, slots=True, eq=False)
class LoopBatches:
    """Batches of a run and what they teach. Samples are in the order of their batches."""

    groups: Sequence[GroupKeys]  # keys of N samples, as decoded
    dense: F32  # (N, D)
    labels: Labels  # of N
    times_ms: I64  # (N,) event times
    ends: I64  # (K,) samples up to and with each batch; may stand still, as a batch may have no sample
    ranges: Sequence[tuple[OffsetRange, ...]]  # (K,)

    def __len__(self) -> int:
        return len(self.ends)


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """What became of a lane's batches; those after `trained` were not begun."""

    ended: Ended
    trained: int  # batches that were computed, and whose dense gradients were stepped
    pushed: int  # batches whose push was acknowledged
    skipped: int  # of these, how many all buckets had applied before
    bucket: int  # that is not held, or not read
    seconds: dict[str, float]  # of each of STAGES
    predictions: F32  # (N, L) each from before its own batch's step; written as far as `trained`
    moments_ns: I64 | None = None  # (K, len(MOMENTS))
    kept: Sequence[tuple[int, list[GroupInputs]]] = ()
    """(batch, its rows as they were before it was trained on) of those that were to be kept: copies."""


class NativeLoop:
    """Lanes of one model on one store. All lanes call `run` or `join` at once, each from its thread."""

    def __init__(
        self, spec: Spec, layout: Layout, model: HedgeDense, store: Store, lanes: int, *, sync: bool = False
    ) -> None:
        """`sync`: rows of a batch are looked up when all batches of the last step are applied."""
        tables = [[spec.table(spec.features[f].table or "").id for f in g.features] for g in layout.groups]
        self.lanes, self._labels = lanes, model.labels
        self._native = _native.HedgeLoop(store.native, model.native, tables, lanes, sync)

    @property
    def dense_steps(self) -> int:
        """Dense steps made so far. Between two runs."""
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
        """Train on the first batches, and step with the other lanes until none has anything left to do.

        Args:
            learn_dense: (k,) of the first k batches, which are trained on: 0 where only row gradients count.
            keep: (k,) 1 where `Ran.kept` is to have the batch.
            moments: whether to tell when each batch came how far.

        Raises ValueError if the arrays do not fit the model or each other; whatever is raised, the runs of
        all lanes end as BROKEN, and so does every later one.
        """
        count, native = len(learn_dense), self._native
        predictions = np.empty((len(batches.times_ms), self._labels), np.float32)
        ranges = batches.ranges[:count]
        at = np.zeros((count, len(MOMENTS)), np.int64) if moments else None
        told = native.run(
            lane,
            [(g.keys, g.feature_starts, list(g.list_ends)) for g in batches.groups],
            batches.dense,
            batches.labels.index,
            batches.labels.value,
            batches.labels.weight,
            batches.times_ms,
            batches.ends[:count],
            np.array([(r.partition, r.start, r.stop) for of in ranges for r in of], np.int64).reshape(-1, 3),
            np.cumsum([len(of) for of in ranges], dtype=np.int64),
            learn_dense,
            np.zeros(count, np.uint8) if keep is None else keep,
            predictions,
            at,
        )
        return _ran(told, predictions, at, self._kept(lane) if keep is not None and keep.any() else ())

    def join(self, lane: int) -> Ran:
        """Make the others' steps without batches."""
        return _ran(self._native.join(lane), np.empty((0, self._labels), np.float32), None)

    def _kept(self, lane: int) -> list[tuple[int, list[GroupInputs]]]:
        return [
            (batch, [GroupInputs(rows, positions, starts, ends) for rows, positions, starts, ends in groups])
            for batch, groups in self._native.kept(lane)
        ]

    def abort(self) -> None:
        """End the lanes that wait for one that will not come."""
        self._native.abort()


def _ran(
    told: _native.RanTuple,
    predictions: F32,
    moments_ns: I64 | None,
    kept: Sequence[tuple[int, list[GroupInputs]]] = (),
) -> Ran:
    ended, trained, pushed, skipped, bucket, seconds = told
    by_stage = dict(zip(STAGES, seconds, strict=True))
    return Ran(Ended(ended), trained, pushed, skipped, bucket, by_stage, predictions, moments_ns, kept)
