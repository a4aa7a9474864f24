"""Read-my-writes: apply a trainer's pending gradients to rows that were looked up ahead.

A lookup misses pushes of the same trainer that were in flight. Their gradients are available locally, and
the rows arrived with their optimiser state, so each missed gradient steps the copy as the shard steps its
row. Pushes of other trainers stay invisible until the next lookup. This extends bounded staleness (Ho et al.
2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", section 3): without
it, several gradients of a frequent row are computed at values without its last steps, and overshoot together.

The copies are estimates for training; the push alone steps the shard's row.

Letters: U rows of a group, S floats of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from freshet.config.spec.layout import Layout
from freshet.rows.service import KeyGroup, RowStates
from freshet.tables import RowSteps
from freshet.types import F32, I64, OffsetRange


@dataclass(slots=True, eq=False)
class LookupResult:
    """The keys and optimiser states of a batch's rows, from which pending gradients can be applied."""

    groups: Sequence[KeyGroup]
    states: RowStates  # stepped with the rows


@dataclass(slots=True, eq=False)
class Write:
    """The gradients of one batch, until no lookup can have missed them."""

    ranges: Sequence[OffsetRange]
    groups: Sequence[KeyGroup]
    gradients: Sequence[F32]  # per group (G, S): one for each key, repeated ones included
    free: Callable[[], None]  # called once the arrays are no longer needed
    ended: int = 0  # number of its acknowledgement, from 1; 0: pending
    void: bool = False  # dropped: its samples are issued again
    readers: int = 0  # threads that apply it at this moment


@dataclass(frozen=True, slots=True, eq=False)
class LookupStart:
    """The moment at which a lookup began. The lookup contains all writes acknowledged before."""

    ended: int  # acknowledgements until then


class ReadMyWrites:
    """The writes of all lanes of one stream, each kept while a lookup may have missed it. Thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._steps = [RowSteps(group) for group in layout.groups]
        self._lock = threading.Lock()
        self._writes: list[Write] = []  # in the order of `add`
        self._begun: list[LookupStart] = []
        self._ended = 0
        self.stepped_rows = 0
        """Steps applied to copies of rows since the start."""

    def begin_lookup(self) -> LookupStart:
        """Record the begin of a lookup. `apply_pending` or `end_lookup` must follow."""
        with self._lock:
            begun = LookupStart(self._ended)
            self._begun.append(begun)
            return begun

    def add(
        self,
        ranges: Sequence[OffsetRange],
        groups: Sequence[KeyGroup],
        gradients: Sequence[F32],
        free: Callable[[], None] = lambda: None,
    ) -> Write:
        """Add a batch's gradients, (G, S) float32 a group; pushes of a partition follow in this order.

        The arrays must not change until `free` is called: once, on any thread, after `acknowledge` or `drop`.
        """
        write = Write(ranges, groups, gradients, free)
        with self._lock:
            self._writes.append(write)
        return write

    def acknowledge(self, write: Write) -> None:
        """Mark a write as acknowledged by all shards: later lookups contain it."""
        with self._lock:
            self._ended += 1
            write.ended = self._ended
        self._sweep()

    def drop(self, write: Write) -> None:
        """Void a write: it is not applied any more."""
        with self._lock:
            write.void = True
        self._sweep()

    def keep_newest(self, newest: int) -> None:
        """Release all pending writes but the newest.

        For a caller that receives no acknowledgements but knows how many writes a lookup can miss.
        """
        for write in self.pending()[:-newest]:
            self.acknowledge(write)

    def drop_from(self, ranges: Sequence[OffsetRange]) -> None:
        """Drop pending writes at or past the start of a newly received batch: its embedder has rewound."""
        starts = {r.partition: r.start for r in ranges}
        for write in self.pending():
            if any(r.stop > starts.get(r.partition, r.stop) for r in write.ranges):
                self.drop(write)

    def pending(self) -> list[Write]:
        """Return the pending writes: neither acknowledged nor dropped."""
        with self._lock:
            return [w for w in self._writes if not w.void and not w.ended]

    def apply_pending(
        self, looked: LookupResult, rows: Sequence[F32], begun: LookupStart | None = None
    ) -> None:
        """Apply every write that a lookup missed to its rows, (U, S) float32 a group; forgets `begun`."""
        with self._lock:
            writes = [(w, _knowing(w, looked.states, begun)) for w in self._writes if not w.void]
            missed = [(write, knowing) for write, knowing in writes if not all(knowing)]
            for write, _ in missed:
                write.readers += 1
        stepped = 0
        try:
            for write, knowing in missed:
                written = {of.group: (of, g) for of, g in zip(write.groups, write.gradients, strict=True)}
                for mine, values, floats in zip(looked.groups, rows, looked.states.floats, strict=True):
                    if mine.group in written:
                        part = _unknown(*written[mine.group], knowing, looked.states)
                        stepped += self._steps[mine.group].step(mine, values, floats, *part)
        finally:
            with self._lock:
                self.stepped_rows += stepped
                for write, _ in missed:
                    write.readers -= 1
            self.end_lookup(begun)

    def end_lookup(self, begun: LookupStart | None) -> None:
        """End a lookup without applying writes to its rows."""
        if begun is not None:
            with self._lock:
                self._begun.remove(begun)
        self._sweep()

    def _sweep(self) -> None:
        """Free the writes that no lookup needs, outside the lock, since `free` acquires other locks."""
        with self._lock:
            first = min((begun.ended for begun in self._begun), default=self._ended)
            free = [w for w in self._writes if not w.readers and (w.void or 0 < w.ended <= first)]
            self._writes = [w for w in self._writes if w not in free]
        for write in free:
            write.free()


def _knowing(write: Write, states: RowStates, begun: LookupStart | None) -> list[bool]:
    """Return for each moment of a lookup whether its rows contain a write.

    All rows contain a write that was acknowledged before the lookup began.
    """
    if begun is not None and 0 < write.ended <= begun.ended:
        return [True]
    return [False] if states.known is None else states.known.knowing(write.ranges)


def _unknown(
    written: KeyGroup, gradients: F32, knowing: Sequence[bool], states: RowStates
) -> tuple[KeyGroup, F32]:
    """Select a write's rows of one group in buckets that did not contain it when they were read.

    A push and a lookup that overlap reach the buckets and shards in different orders.
    """
    if states.known is None or not any(knowing):
        return written, gradients
    counts: I64 = np.diff(written.bucket_starts.astype(np.int64)).astype(np.int64)
    known = np.array(knowing)[states.known.moment_of[written.group]]
    rows = np.repeat(~known, counts)
    starts = np.concatenate([[0], np.cumsum(np.where(known, 0, counts))]).astype(np.uint32)
    return KeyGroup(written.group, written.keys[rows], written.tables[rows], starts), gradients[rows]
