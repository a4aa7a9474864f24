"""The reader of a lane's partitions: it starts at the smallest offset that any store has applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freshet.clock import Clock
from freshet.embedder.core import Assembler, BatchPlan, rewind_offsets
from freshet.features.blocks import block_samples
from freshet.log import EventLog
from freshet.types import BytesColumn, TopicPartition

READ_AHEAD_ROWS = 16_384
"""Rows of one read from the log, if blocks are full: tens of milliseconds of work."""
MOST_BLOCKS = 256
"""The most blocks of one read: with small batches, blocks are short."""


class BatchSizes:
    """The rows of batches, and the longest wait for a full one."""

    __slots__ = ("behind_rows", "rows", "wait_s", "warms_up")

    def __init__(self, rows: int, behind_rows: int, wait_ms: int, *, warms_up: bool = False) -> None:
        """Set the sizes.

        Args:
            rows: rows of a batch.
            behind_rows: rows of a batch while at least twice as many wait; at least `rows`.
            wait_ms: longest wait for a full batch.
            warms_up: a new model begins with shorter batches (label-delay warm-up).
        """
        self.rows, self.behind_rows, self.wait_s = rows, max(rows, behind_rows), wait_ms / 1000
        self.warms_up = warms_up


class PartitionReader:
    """Reads a lane's partitions and assembles batches. One thread uses it; any may call `positions`."""

    def __init__(
        self, log: EventLog, topic: str, partitions: Sequence[int], sizes: BatchSizes, clock: Clock
    ) -> None:
        """Open a reader; the first `rewind` starts it."""
        self.partitions = tuple(partitions)
        self.topic, self._sizes, self._clock = topic, sizes, clock
        self._reader = log.reader()
        self._assembler: Assembler | None = None
        self._replayed_until: dict[int, int] = {}
        self._waiting_since = 0.0
        self._blocks = min(MOST_BLOCKS, READ_AHEAD_ROWS // block_samples(sizes.rows))
        self._more = False  # the last read returned blocks
        self._issued: int | None = None  # rows of a new model's batches; None: no warm-up

    @property
    def started(self) -> bool:
        """Whether offsets are assigned; False before `rewind` and after `stop`."""
        return self._assembler is not None

    def stop(self) -> None:
        """Discard all read blocks; `rewind` must follow."""
        self._assembler = None

    def rewind(self, applied: Sequence[Mapping[int, Sequence[int]]]) -> None:
        """Restart at the smallest offset that any store has applied; the others become splits (PROTOCOL 7).

        Raises DataLost, Unavailable: as `Reader.assign` does.
        """
        starts, splits = rewind_offsets(applied)
        mine = {p: starts[p] for p in self.partitions}
        self._reader.assign({TopicPartition(self.topic, p): offset for p, offset in mine.items()})
        self._replayed_until = {p: max([starts[p], *splits[p]]) for p in self.partitions}
        self._assembler, self._more = Assembler(mine, splits), False
        from_the_start = self._sizes.warms_up and not any(mine.values())  # nothing is learned yet
        self._issued = 0 if from_the_start else None

    def assemble(self, deadline: float) -> BatchPlan | None:
        """Wait for a full batch, or for `wait_s` after its first block; None at the deadline."""
        plans = self.assemble_run(deadline, 0, 1)
        return plans[0] if plans else None

    def assemble_run(self, deadline: float, rows: int, batches: int) -> list[BatchPlan]:
        """Return as `assemble`, and then the full batches that are already read, up to the limits.

        At the end of the log the last batch may be short, since a round of its own would cost more.

        Args:
            deadline: monotonic time in seconds.
            rows: no further batch once they have so many rows together.
            batches: the most batches.
        """
        assembler, sizes = self._assembler, self._sizes
        assert assembler is not None
        wanted = max(2 * sizes.behind_rows, rows)
        while (waiting := assembler.waiting()) < (wanted if self._more else sizes.rows):
            now = self._clock.monotonic()
            if not waiting:
                self._waiting_since = now
            enough = waiting >= sizes.rows  # for a batch: the read only finds out whether the lane is behind
            until = min(deadline, self._waiting_since + sizes.wait_s) if waiting else deadline
            until = now if enough else until
            polled = self._reader.poll(self._blocks, max(0.0, until - now))
            self._more = bool(polled)
            for partition, records in polled:
                assembler.add(partition.partition, records)
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
            plan = assembler.next(self._batch_limit(size))
            if plan is None:
                break
            plans.append(plan)
            taken += plan.rows
            if self._issued is not None:
                self._issued += plan.rows
        return plans

    def _batch_limit(self, size: int) -> int:
        """Return the row limit of the next batch: 1, 2, 4 … for a new model, if blocks are as short."""
        if self._issued is None or self._issued >= size:
            self._issued = None
            return size
        return self._issued + 1

    def next_blocks(self, rows: int) -> BytesColumn:
        """Return blocks that are read and in no batch yet, of at most `rows` rows; they stay."""
        assembler = self._assembler
        return assembler.next_blocks(rows) if assembler is not None else BytesColumn.of([])

    def replayed(self, plan: BatchPlan) -> bool:
        """Return whether a store had applied a part of the batch before the rewind."""
        return any(r.start < self._replayed_until[r.partition] for r in plan.ranges)

    def positions(self) -> dict[int, int]:
        """Return {partition: start of its next range}; empty unless `started`."""
        assembler = self._assembler
        return assembler.positions() if assembler is not None else {}

    def covered(self) -> dict[int, int]:
        """Return {partition: offset before which every block is in a batch}; empty unless `started`."""
        assembler = self._assembler
        return assembler.covered() if assembler is not None else {}

    def close(self) -> None:
        """Close the reader. Idempotent."""
        self._reader.close()


def lag_of(
    log: EventLog, topic: str, partitions: Sequence[int], covered: Mapping[int, int]
) -> dict[int, int]:
    """Return {partition: blocks in the log from its covered offset on, or all of them}."""
    found = log.all_bounds([TopicPartition(topic, p) for p in partitions])
    return {
        at.partition: max(0, bounds.end - covered.get(at.partition, bounds.start))
        for at, bounds in found.items()
    }
