"""Own writes: rows that were looked up ahead are stepped by what this stream has pushed since, before they
are trained on.

A lookup that is sent while pushes of the same stream are still to be sent cannot hold what those teach. Their
gradients are here, though, and the rows came with their optimiser state: so each such gradient steps the copy
as it will step, or has stepped, the row in its shard. What others push meanwhile stays unseen until the next
lookup. This is what "read-my-writes" adds to a bounded staleness (Ho et al. 2013, "More Effective Distributed
ML via a Stale Synchronous Parallel Parameter Server", section 3): without it gradients of a row that comes
again and again are taken at values that miss its last steps, and together they overshoot.

It is a better guess at the row, nothing more: the shard's own row is stepped once, by the push. A push is
taken for one that a lookup has seen if it was sent before. The two go over streams of their own, so one that
was sent a moment earlier may be applied a moment later; then a copy lacks one step, or has it twice, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from freshet.seams.rowservice import KeyGroup
from freshet.spec.layout import Layout
from freshet.tables import RowSteps
from freshet.types import F32

__all__ = ["OwnWrites", "Seen", "Write"]


@dataclass(slots=True, eq=False)
class Write:
    """Gradients of one batch on their way to the shards."""

    groups: Sequence[KeyGroup]
    gradients: Sequence[F32]  # per group (U, S)
    free: Callable[[], None]  # nobody needs the arrays any more
    sent: int = 0  # counts from 1 in the order of sending; 0: not yet
    void: bool = False  # it was given up: its samples come again
    over: bool = False  # acknowledged or void
    readers: int = 0  # who step rows by it at this moment


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a lookup has seen: the writes sent before it."""

    sent: int


class OwnWrites:
    """Writes of all lanes of one stream, each kept until no lookup is left that has not seen it.
    Thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._steps = [RowSteps(group) for group in layout.groups]
        self._lock = threading.Lock()
        self._writes: list[Write] = []  # in the order in which they were given
        self._seen: list[Seen] = []
        self._sent = 0
        self.stepped_rows = 0
        """Copies of rows stepped so far; one that several writes have stepped counts for each."""

    def looking(self) -> Seen:
        """A lookup is about to be sent. Then comes `bring_up` or `forget`."""
        with self._lock:
            seen = Seen(self._sent)
            self._seen.append(seen)
            return seen

    def given(self, groups: Sequence[KeyGroup], gradients: Sequence[F32], free: Callable[[], None]) -> Write:
        """A batch's gradients are there; they will be pushed after all that were given before for its lane.

        The arrays must not change until `free` is called, which happens once, after `acknowledged` or `drop`,
        by whoever was the last to need them.
        """
        write = Write(groups, gradients, free)
        with self._lock:
            self._writes.append(write)
        return write

    def sent(self, write: Write) -> None:
        """It is on its way: lookups from now on see it. Again: nothing new."""
        with self._lock:
            if not write.sent:
                self._sent += 1
                write.sent = self._sent

    def acknowledged(self, write: Write) -> None:
        """All shards have it."""
        self._ended(write, void=False)

    def drop(self, write: Write) -> None:
        """It was given up: nothing may be stepped by it any more."""
        self._ended(write, void=True)

    def bring_up(
        self, seen: Seen, groups: Sequence[KeyGroup], rows: Sequence[F32], states: Sequence[F32]
    ) -> None:
        """Step looked-up rows by every write that their lookup has not seen; `seen` is done with."""
        with self._lock:
            missed = [w for w in self._writes if not w.void and (not w.sent or w.sent > seen.sent)]
            for write in missed:
                write.readers += 1
        stepped = 0
        try:
            for write in missed:
                theirs = {group.group: i for i, group in enumerate(write.groups)}
                for mine, values, state in zip(groups, rows, states, strict=True):
                    if (i := theirs.get(mine.group)) is not None:
                        step = self._steps[mine.group].step
                        stepped += step(mine, values, state, write.groups[i], write.gradients[i])
        finally:
            with self._lock:
                self.stepped_rows += stepped
                for write in missed:
                    write.readers -= 1
            self.forget(seen)

    def forget(self, seen: Seen) -> None:
        """The lookup's rows are not wanted any more."""
        with self._lock:
            self._seen.remove(seen)
        self._sweep()

    def _ended(self, write: Write, *, void: bool) -> None:
        with self._lock:
            write.over, write.void = True, void
        self._sweep()

    def _sweep(self) -> None:
        """Free the writes that nobody needs, outside the lock: who is told takes locks of their own."""
        with self._lock:
            first = min((seen.sent for seen in self._seen), default=self._sent)
            free = [w for w in self._writes if w.over and not w.readers and (w.void or w.sent <= first)]
            self._writes = [w for w in self._writes if w not in free]
        for write in free:
            write.free()
