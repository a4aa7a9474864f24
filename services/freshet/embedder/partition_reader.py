"""One lane's partitions as they are read: from what every store has applied on, put together into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freshet.clock import Clock
from freshet.embedder.core import Assembler, BatchPlan, cut_points
from freshet.features.blocks import block_samples
from freshet.log import EventLog
from freshet.types import TopicPartition

__all__ = ["Sizes", "Source", "lag_of"]

READ_AHEAD_ROWS = 16_384
"""Rows read from the log at once, if blocks are full: tens of milliseconds of work."""
MOST_BLOCKS = 256
"""Blocks read from the log at once at most: where batches are of few rows, blocks are short."""


class Sizes:
    """How many rows make a batch, and how long one may wait for them."""

    __slots__ = ("behind_rows", "ramps", "rows", "wait_s")

    def __init__(self, rows: int, behind_rows: int, wait_ms: int, *, ramps: bool = False) -> None:
        """`behind_rows` is the size of batches while at least twice as much waits; at least `rows`. `ramps`:
        a new model's first batches are short."""
        self.rows, self.behind_rows, self.wait_s = rows, max(rows, behind_rows), wait_ms / 1000
        self.ramps = ramps


class Source:
    """Reads and assembles for one lane. Used by one thread; `positions` may be asked by any."""

    def __init__(
        self, log: EventLog, topic: str, partitions: Sequence[int], sizes: Sizes, clock: Clock
    ) -> None:
        """Nothing is read before the first `rewind`."""
        self.partitions = tuple(partitions)
        self.topic, self._sizes, self._clock = topic, sizes, clock
        self._reader = log.reader()
        self._assembler: Assembler | None = None
        self._replayed_until: dict[int, int] = {}
        self._waiting_since = 0.0
        self._blocks = min(MOST_BLOCKS, READ_AHEAD_ROWS // block_samples(sizes.rows))
        self._more = False  # the log had something when it was read last
        self._issued: int | None = None  # rows in batches so far, while the first ones of a new model

    @property
    def started(self) -> bool:
        """Whether there is a place to read from; False until `rewind`, and after `stop`."""
        return self._assembler is not None

    def stop(self) -> None:
        """Forget what was read; the next batch comes after a `rewind`."""
        self._assembler = None

    def rewind(self, told: Sequence[Mapping[int, Sequence[int]]]) -> None:
        """Start from the smallest offset that any store has told, with the others as cut points (PROTOCOL 7).

        Raises DataLost, Unavailable: as `Reader.assign` does.
        """
        starts, cuts = cut_points(told)
        mine = {p: starts[p] for p in self.partitions}
        self._reader.assign({TopicPartition(self.topic, p): offset for p, offset in mine.items()})
        self._replayed_until = {p: max([starts[p], *cuts[p]]) for p in self.partitions}
        self._assembler, self._more = Assembler(mine, cuts), False
        from_the_start = self._sizes.ramps and not any(mine.values())  # nothing is learned yet
        self._issued = 0 if from_the_start else None

    def assemble(self, deadline: float) -> BatchPlan | None:
        """Wait for a full batch, but no longer than a batch's own wait once a block is there; None at the
        deadline."""
        plans = self.assemble_run(deadline, 0, 1)
        return plans[0] if plans else None

    def assemble_run(self, deadline: float, rows: int, batches: int) -> list[BatchPlan]:
        """As `assemble`, and after that batch as many full ones as are there already, until they have `rows`
        rows together or are `batches`; at the log's end what is left as well, for which no round of its own
        is worth waiting."""
        assembler, sizes = self._assembler, self._sizes
        assert assembler is not None
        wanted = max(2 * sizes.behind_rows, rows)
        while (waiting := assembler.waiting()) < (wanted if self._more else sizes.rows):
            now = self._clock.monotonic()
            if not waiting:
                self._waiting_since = now
            enough = waiting >= sizes.rows  # for a batch: it is only looked whether the lane is far behind
            until = min(deadline, self._waiting_since + sizes.wait_s) if waiting else deadline
            until = now if enough else until
            polled = self._reader.poll(self._blocks, max(0.0, until - now))
            self._more = bool(polled)
            for partition, records in polled:
                assembler.offer(partition.partition, records)
            if polled:
                continue
            if enough:
                break
            if not assembler.waiting() or self._clock.monotonic() < self._waiting_since + sizes.wait_s:
                return []
            break
        size = sizes.behind_rows if assembler.waiting() >= 2 * sizes.behind_rows else sizes.rows
        plans, taken = list[BatchPlan](), 0
        least = size if self._more else 1
        while not plans or (taken < rows and len(plans) < batches and assembler.waiting() >= least):
            plan = assembler.next(self._ramped(size))
            if plan is None:
                break
            plans.append(plan)
            taken += plan.rows
            if self._issued is not None:
                self._issued += plan.rows
        return plans

    def _ramped(self, size: int) -> int:
        """Rows of the next batch at most: a new model's first batches have 1, 2, 4 rows and so on, if blocks
        are as short."""
        if self._issued is None or self._issued >= size:
            self._issued = None
            return size
        return self._issued + 1

    def replayed(self, plan: BatchPlan) -> bool:
        """Whether some store had applied a part of it before."""
        return any(r.start < self._replayed_until[r.partition] for r in plan.ranges)

    def positions(self) -> dict[int, int]:
        """{partition: where its next range starts}; empty while there is no place to read from."""
        assembler = self._assembler
        return assembler.positions() if assembler is not None else {}

    def covered(self) -> dict[int, int]:
        """{partition: up to where no block waits for a batch}; empty while there is no place to read from."""
        assembler = self._assembler
        return assembler.covered() if assembler is not None else {}

    def close(self) -> None:
        """Close the reader. Idempotent."""
        self._reader.close()


def lag_of(
    log: EventLog, topic: str, partitions: Sequence[int], covered: Mapping[int, int]
) -> dict[int, int]:
    """{partition: blocks in the log at or past where it is covered to, or all of them}."""
    found = log.all_bounds([TopicPartition(topic, p) for p in partitions])
    return {
        at.partition: max(0, bounds.end - covered.get(at.partition, bounds.start))
        for at, bounds in found.items()
    }
