"""The table of rows for serving: values without optimiser state.

Letters: U unique keys of a lookup, N keys, S floats of a row.
"""

from __future__ import annotations

import numpy as np

from freshet import _native
from freshet.config.spec.layout import Layout
from freshet.errors import Corrupt
from freshet.tables import Store, UniqueKeys
from freshet.tables.runs import runs_of
from freshet.types import F32, U8, U32, U64, RowRuns, Run

__all__ = ["ServingTable"]


NEVER_LATER_S = 0xFFFFFFFF
"""Latest second that a row can hold, in 2106."""


class ServingTable:
    """Rows for lookups, which may run during writes. One thread writes."""

    def __init__(self, layout: Layout, *, buckets: int, partitions: int, seed: int) -> None:
        def store(*, serving: bool) -> Store:
            return Store(
                layout, buckets=buckets, partitions=partitions, seed=seed, serving=serving, changes=False
            )

        self._layout = layout
        self._rows = store(serving=True)
        self._unpacker = store(serving=False)  # empty: it only unpacks rows
        self._group_of = {table: group.index for group in layout.groups for table in group.tables}

    @property
    def native(self) -> _native.Store:
        """The native store, for native code that scores with it."""
        return self._rows.native

    def lookup(
        self,
        group: int,
        keys: UniqueKeys,
        out: F32,
        *,
        create: bool = False,
        found: U8 | None = None,
        touched: U32 | None = None,
    ) -> None:
        """Write the rows of U keys into `out` (U, S) float32, zeros if missing; see `Store.lookup`."""
        self._rows.lookup(group, keys, out, create=create, found=found, touched=touched)

    def import_runs(self, runs: RowRuns) -> None:
        """Import rows in the row store's format. Raises Corrupt if they do not fit the spec."""
        for part in self._unpacker.unpack_runs(runs):
            self._rows.import_values(part.table, part.keys, part.values, touched=part.touched)

    def import_sound(self, runs: RowRuns) -> int:
        """Import the valid rows of runs that `import_runs` refuses; return the number of the others."""
        left_out = 0
        for run in runs:
            width = int(runs.widths[run.table])
            waiting = [np.arange(len(run.keys))]
            while waiting:
                some = waiting.pop()
                if not len(some):
                    continue
                part = Run(run.bucket, run.table, run.keys[some], run.keys[:0], run.records[some])
                try:
                    self.import_runs(runs_of([part], runs.widths))
                except (Corrupt, ValueError):
                    if len(some) == 1 or not width:
                        left_out += len(some)
                    else:
                        waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
        return left_out

    def import_values(self, table: int, keys: U64, values: F32, *, event_time_ms: int = 0) -> None:
        """Set rows: (N,) uint64 keys, (N, S) float32 values that learned from events up to this time.

        Raises Corrupt if the table is unknown or has another width.
        """
        group = self._group_of.get(table)
        if group is None or values.shape[1] != self._layout.groups[group].width:
            raise Corrupt(
                f"a delta of table {table} with {values.shape[1]} floats a row does not fit the spec"
            )
        touched = np.full(len(keys), min(max(event_time_ms, 0) // 1000, NEVER_LATER_S), np.uint32)
        self._rows.import_values(table, keys, values, touched=touched)

    def remove(self, table: int, keys: U64) -> None:
        """Remove the rows of (N,) uint64 keys, if any. Raises Corrupt if the table is unknown."""
        if table not in self._group_of:
            raise Corrupt(f"removals of table {table}, which the spec does not have")
        self._rows.remove(table, keys)

    def rows(self) -> dict[int, int]:
        """Return {table id: number of rows}."""
        return dict(self._rows.memory().rows)
