"""A row service in a dict: slow and obvious, the reference of the others. In tests it replaces a shard."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from freshet.errors import Fenced, Refused
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.tables.changes import KnownPushes
from freshet.types import F32


class ReferenceRowService:
    """See `freshet.rows.service.RowService`. Rows are stepped by plain SGD; initial values come from
    (seed, row)."""

    def __init__(
        self,
        widths: Sequence[int],
        starting: Mapping[int, int],
        *,
        lr: float = 1.0,
        seed: int = 0,
        init: float = 0.01,
    ) -> None:
        """Create a service of `widths[g]` floats a row, with its partitions applied up to `starting`."""
        self._widths, self._lr, self._seed, self._init = widths, lr, seed, init
        self._applied = dict(starting)
        self._fences = dict.fromkeys(starting, -1)
        self._rows: dict[tuple[int, int, int], F32] = {}  # (group, table, key)
        self._lock = threading.Lock()
        self.non_finite = 0

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        """Write each key's slots into `out`. SGD keeps no state."""
        if states is not None and any(floats.shape[1] for floats in states.floats):
            raise ValueError("rows stepped by SGD have no optimiser state")
        with self._lock:
            for group, rows in zip(groups, out, strict=True):
                for i, row in enumerate(_rows_of(group)):
                    found = self._row(row) if create else self._rows.get(row)
                    rows[i] = 0.0 if found is None else found
            if states is not None:
                applied = [self._applied.get(p, 0) for p in range(max(self._applied) + 1)]
                states.known = KnownPushes(np.array([applied], np.int64))

    def push(self, push: Push) -> bool:
        """Apply a batch's gradients; False if they were applied before."""
        with self._lock:
            for r in push.ranges:
                if push.fence < self._fences[r.partition]:
                    raise Fenced(
                        f"partition {r.partition} has fence {self._fences[r.partition]}, above {push.fence}"
                    )
            if all(self._applied[r.partition] >= r.stop for r in push.ranges):
                return False
            if not all(self._applied[r.partition] == r.start for r in push.ranges):
                raise Refused(f"{push.ranges} do not continue {self._applied}", dict(self._applied))
            for group, gradients in zip(push.groups, push.gradients, strict=True):
                for row, gradient in zip(_rows_of(group), gradients, strict=True):
                    self._step(row, gradient)
            for r in push.ranges:
                self._applied[r.partition] = r.stop
                self._fences[r.partition] = push.fence
        return True

    def applied(self) -> Mapping[int, Sequence[int]]:
        """Return {partition: [offset]}: there is one set of rows, so one offset."""
        with self._lock:
            return {partition: [offset] for partition, offset in self._applied.items()}

    def rows(self) -> dict[tuple[int, int, int], list[float]]:
        """Return {(group, table, key): values} of all rows."""
        with self._lock:
            return {row: values.tolist() for row, values in self._rows.items()}

    def _step(self, row: tuple[int, int, int], gradient: F32) -> None:
        if not np.isfinite(gradient).all():
            self.non_finite += 1
            return
        values = self._row(row)
        values -= np.float32(self._lr) * gradient

    def _row(self, row: tuple[int, int, int]) -> F32:
        if row not in self._rows:
            rng = np.random.default_rng([self._seed, *row])
            self._rows[row] = rng.uniform(-self._init, self._init, self._widths[row[0]]).astype(np.float32)
        return self._rows[row]


def _rows_of(group: KeyGroup) -> list[tuple[int, int, int]]:
    return [
        (group.group, table, key)
        for table, key in zip(group.tables.tolist(), group.keys.tolist(), strict=True)
    ]
