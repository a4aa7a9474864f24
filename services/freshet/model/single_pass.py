"""A pass of a native model over decoded samples: rows, model and batches on one thread, in native code.

A loop of one lane (`freshet.model.native_loop`) with a store of its own, that nobody else sees.

Letters: N samples, L labels, D dense columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.features import GroupKeys
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import Labels
from freshet.model.native_loop import Ended, LoopBatches, NativeLoop
from freshet.tables import Store
from freshet.types import F32, I64, OffsetRange

__all__ = ["NativePass"]

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
