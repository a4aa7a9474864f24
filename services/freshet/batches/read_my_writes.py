"""Own writes: rows that were looked up ahead are stepped by what their trainer has pushed since, before they
are trained on.

A lookup that was sent while pushes of the same trainer were under way does not hold what those teach. Their
gradients are here, though, and the rows came with their optimiser state: so each such gradient steps the copy
as it will step, or has stepped, the row in its shard. What others push meanwhile stays unseen until the next
lookup. This is what "read-my-writes" adds to a bounded staleness (Ho et al. 2013, "More Effective Distributed
ML via a Stale Synchronous Parallel Parameter Server", section 3): without it gradients of a row that comes
again and again are taken at values that miss its last steps, and together they overshoot.

It is a better guess at the row, nothing more: the shard's own row is stepped once, by the push.
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

__all__ = ["Begun", "Looked", "OwnWrites", "Write"]


@dataclass(slots=True, eq=False)
class Looked:
    """What came with the rows of a batch, so that they can be brought up to later pushes."""

    groups: Sequence[KeyGroup]
    states: RowStates  # stepped with the rows


@dataclass(slots=True, eq=False)
class Write:
    """Gradients of one batch on their way to the shards."""

    ranges: Sequence[OffsetRange]
    groups: Sequence[KeyGroup]
    gradients: Sequence[F32]  # per group (U, S)
    free: Callable[[], None]  # nobody needs the arrays any more
    ended: int = 0  # counts from 1 in the order of acknowledgements; 0: not yet
    void: bool = False  # it was given up: its samples come again
    readers: int = 0  # who step rows by it at this moment


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A lookup: how many writes were acknowledged when it began. It knows those."""

    ended: int


class OwnWrites:
    """Writes of all lanes of one stream, each kept until no lookup is left that can have missed it.
    Thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._steps = [RowSteps(group) for group in layout.groups]
        self._lock = threading.Lock()
        self._writes: list[Write] = []  # in the order in which they were given
        self._begun: list[Begun] = []
        self._ended = 0
        self.stepped_rows = 0
        """Copies of rows stepped so far; one that several writes have stepped counts for each."""

    def looking(self) -> Begun:
        """A lookup is about to be sent. Then comes `bring_up` or `forget`."""
        with self._lock:
            begun = Begun(self._ended)
            self._begun.append(begun)
            return begun

    def given(
        self,
        ranges: Sequence[OffsetRange],
        groups: Sequence[KeyGroup],
        gradients: Sequence[F32],
        free: Callable[[], None] = lambda: None,
    ) -> Write:
        """A batch's gradients are there, to be pushed after those given before of the same partitions.

        The arrays must not change until `free` is called, which happens once, after `acknowledged` or `drop`,
        by whoever was the last to need them.
        """
        write = Write(ranges, groups, gradients, free)
        with self._lock:
            self._writes.append(write)
        return write

    def acknowledged(self, write: Write) -> None:
        """All shards have it: lookups from now on know it."""
        with self._lock:
            self._ended += 1
            write.ended = self._ended
        self._sweep()

    def drop(self, write: Write) -> None:
        """It was given up: nothing may be stepped by it any more."""
        with self._lock:
            write.void = True
        self._sweep()

    def keep(self, newest: int) -> None:
        """Let go of all but the newest: for who is told of no acknowledgement, but knows how many a lookup
        can miss."""
        for write in self.waiting()[:-newest]:
            self.acknowledged(write)

    def restarted(self, ranges: Sequence[OffsetRange]) -> None:
        """A batch of these ranges has come: what was given from there on was given up."""
        starts = {r.partition: r.start for r in ranges}
        for write in self.waiting():
            if any(r.stop > starts.get(r.partition, r.stop) for r in write.ranges):
                self.drop(write)

    def waiting(self) -> list[Write]:
        """Those that are neither acknowledged nor given up."""
        with self._lock:
            return [w for w in self._writes if not w.void and not w.ended]

    def bring_up(self, looked: Looked, rows: Sequence[F32], begun: Begun | None = None) -> None:
        """Step looked-up rows (U, S), of each group, by every write that they do not know; `begun` is done
        with."""
        with self._lock:
            told = [(w, _knowing(w, looked.states, begun)) for w in self._writes if not w.void]
            missed = [(write, knowing) for write, knowing in told if not all(knowing)]
            for write, _ in missed:
                write.readers += 1
        stepped = 0
        try:
            for write, knowing in missed:
                theirs = {of.group: (of, g) for of, g in zip(write.groups, write.gradients, strict=True)}
                for mine, values, floats in zip(looked.groups, rows, looked.states.floats, strict=True):
                    if mine.group in theirs:
                        part = _unknown(*theirs[mine.group], knowing, looked.states)
                        stepped += self._steps[mine.group].step(mine, values, floats, *part)
        finally:
            with self._lock:
                self.stepped_rows += stepped
                for write, _ in missed:
                    write.readers -= 1
            self.forget(begun)

    def forget(self, begun: Begun | None) -> None:
        """The lookup's rows are not wanted any more."""
        if begun is not None:
            with self._lock:
                self._begun.remove(begun)
        self._sweep()

    def _sweep(self) -> None:
        """Free the writes that nobody needs, outside the lock: who is told takes locks of their own."""
        with self._lock:
            first = min((begun.ended for begun in self._begun), default=self._ended)
            free = [w for w in self._writes if not w.readers and (w.void or 0 < w.ended <= first)]
            self._writes = [w for w in self._writes if w not in free]
        for write in free:
            write.free()


def _knowing(write: Write, states: RowStates, begun: Begun | None) -> list[bool]:
    """Whether rows of each moment of a lookup know it. What was acknowledged before the lookup all rows
    know."""
    if begun is not None and 0 < write.ended <= begun.ended:
        return [True]
    return [False] if states.known is None else states.known.knowing(write.ranges)


def _unknown(
    theirs: KeyGroup, gradients: F32, knowing: Sequence[bool], states: RowStates
) -> tuple[KeyGroup, F32]:
    """A write's rows of one group, without those of buckets that had it when they were read: it was on its
    way from bucket to bucket, or from shard to shard, while the lookup was."""
    if states.known is None or not any(knowing):
        return theirs, gradients
    counts: I64 = np.diff(theirs.bucket_starts.astype(np.int64)).astype(np.int64)
    known = np.array(knowing)[states.known.moment_of[theirs.group]]
    rows = np.repeat(~known, counts)
    starts = np.concatenate([[0], np.cumsum(np.where(known, 0, counts))]).astype(np.uint32)
    return KeyGroup(theirs.group, theirs.keys[rows], theirs.tables[rows], starts), gradients[rows]
