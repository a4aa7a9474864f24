"""A pass of a native model over decoded samples: rows, model and batches on one thread, in native code.

What a lane does with each of its batches (plan, look up, forward and backward, step, push), for as many
batches as a call is given: of a linear model's batch of 256 rows a lane's Python costs many times the batch.

Letters: N samples, L labels, D dense columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from freshet import _native
from freshet.features import GroupKeys
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import Labels
from freshet.spec.layout import layout_of
from freshet.spec.model import Spec
from freshet.tables import Store
from freshet.types import F32, I64

__all__ = ["NativePass"]

BUCKETS = 64
"""Of a pass's own table. Buckets are units of ownership, of locks and of flushes, which one thread needs none
of, and each costs every batch some nanoseconds; what is learned does not depend on their number."""


class NativePass:
    """Rows and dense state of a model that one thread trains from nothing, and that nobody else sees.

    For kinds `hedge` and `linear`. Raises ConfigError as `layout_of` and the models do.
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
        tables = [[spec.table(spec.features[f].table or "").id for f in g.features] for g in layout.groups]
        self._native = _native.Pass(self.store.native, self.model.native, tables)

    def run(self, groups: Sequence[GroupKeys], dense: F32, labels: Labels, times_ms: I64, ends: I64) -> F32:
        """Train on batches [ends[i - 1], ends[i]) in order; returns (N, L) predictions, each from before its
        own batch's step.

        Args:
            groups: keys of N samples, as decoded. dense: (N, D). labels: of N. times_ms: (N,) event times.
            ends: (batches,) rising, the last is N.

        Raises ValueError, before anything is learned, if these do not fit the model or each other.
        """
        predictions = np.empty((len(times_ms), self.labels), np.float32)
        self._native.run(
            [(g.keys, g.feature_starts, list(g.list_ends)) for g in groups],
            dense,
            labels.index,
            labels.value,
            labels.weight,
            times_ms,
            ends,
            predictions,
        )
        return predictions
