"""What each slice of a shard is asked for, and what a shard whose memory is full no longer takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from freshet.errors import Unavailable
from freshet.paramserver.server import HeldRows
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.types import F32, F64, I64, U32, Bucket

__all__ = ["LoadMeter", "MeteredRows"]


class LoadMeter:
    """Counts rows by slice: one numpy call of a microsecond for each group of a lookup or push. Thread-safe,
    as numpy keeps Python's lock for arrays as short as these."""

    def __init__(self, buckets: int, slices: int) -> None:
        """Count nothing yet. `slices` divides `buckets`."""
        self._step = buckets // slices
        self._starts: I64 = np.zeros(slices + 1, np.int64)  # sums of where slices start, over all that came
        self._read = (0.0, self.rows)

    def count(self, bucket_starts: U32) -> None:
        """Rows of a lookup or push: (buckets + 1,) where each bucket's keys start."""
        self._starts += bucket_starts[:: self._step]

    @property
    def rows(self) -> I64:
        """(slices,) looked up and pushed so far."""
        return np.diff(self._starts)

    def rates(self, now_s: float) -> F64:
        """(slices,) rows a second since this was asked last, or since the beginning."""
        (before_s, before), rows = self._read, self.rows
        self._read = (now_s, rows)
        rates: F64 = (rows - before) / max(now_s - before_s, 1e-3)
        return rates


class MeteredRows:
    """A shard as its clients see it: counted, and refusing rows for training while its memory is full."""

    def __init__(self, rows: HeldRows, meter: LoadMeter, full: Callable[[], str | None]) -> None:
        """Serve `rows`; `full` says why no row may be added now, or None."""
        self._rows, self._meter, self._full = rows, meter, full
        self.refused = 0  # lookups

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        """As `RowService.lookup`. Lookups that may create rows are Unavailable while the memory is full:
        training stands still then, which loses nothing. What is looked up already may still be pushed."""
        if create:
            self._check_room()
        self._rows.lookup(groups, out, create=create, states=states)
        self._count(groups)

    def push(self, push: Push) -> bool:
        """As `RowService.push`."""
        applied = self._rows.push(push)
        self._count(push.groups)
        return applied

    def applied(self) -> Mapping[int, Sequence[int]]:
        """As `RowService.applied`."""
        return self._rows.applied()

    def held(self) -> Sequence[Bucket]:
        """The buckets held, rising."""
        return self._rows.held()

    def _check_room(self) -> None:
        if (why := self._full()) is not None:
            self.refused += 1
            raise Unavailable(why)

    def _count(self, groups: Sequence[KeyGroup]) -> None:
        for group in groups:
            self._meter.count(group.bucket_starts)
