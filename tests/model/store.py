"""The row store: a small Redis Cluster, with replicas that lag and failovers that lose what they lag behind.

A bucket lives on one node; writes to it are atomic scripts. Rows are immutable, so copies are cheap and true.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from .rules import Rules
from .simulation import Simulation, Unavailable

Row = tuple[int, int]  # samples that touched the row; the sum of their hashes
Stamp = tuple[int, int]  # fence, sequence


@dataclass(frozen=True, slots=True)
class Meta:
    """What is stored beside the rows of a bucket, and changes with them."""

    fence: int
    seq: int
    count: int
    applied: tuple[int, ...]  # next offset of each partition of `samples`
    follow: int  # offset in `rows` from which a reader follows
    writer: int = -1  # fence of the last flush; `fence` is also raised by a claim

    @property
    def stamp(self) -> Stamp:
        """Identifies the content: no two contents of a bucket share one."""
        return self.fence, self.seq


@dataclass(frozen=True, slots=True)
class Cut:
    """A copy of what a flush writes, taken under one hold of the bucket's lock (rule 4)."""

    bucket: int
    acked: Stamp  # what the store acknowledged last
    meta: Meta
    rows: Mapping[int, Row]
    whole: bool  # replace the bucket instead of adding to it

    def altered(self, **changes: Any) -> Cut:
        """This cut with another `meta`: only broken rules need it."""
        return replace(self, meta=replace(self.meta, **changes))


class Outcome(Enum):
    """The answer to a flush."""

    WRITE = auto()
    DONE = auto()
    FENCED = auto()
    REPLACE = auto()


def judge_flush(stored: Stamp, cut: Cut, rules: Rules) -> Outcome:
    """Rule 11: what the compare-and-set on (fence, seq) decides."""
    if stored[0] > cut.meta.fence and rules.store_refuses_lower_fence:
        return Outcome.FENCED
    if stored == cut.meta.stamp:
        return Outcome.DONE
    if stored == cut.acked or cut.whole or not rules.flush_compares:
        return Outcome.WRITE
    return Outcome.REPLACE


class Copy:
    """The data of one node: the master's or the replica's."""

    def __init__(self, metas: dict[int, Meta], rows: dict[int, dict[int, Row]]) -> None:
        self.metas = metas
        self.rows = rows

    def duplicate(self) -> Copy:
        """What a new replica receives."""
        return Copy(dict(self.metas), {bucket: dict(rows) for bucket, rows in self.rows.items()})


class Node:
    """A master and a replica that follows it, in order but late."""

    def __init__(self, sim: Simulation, data: Copy) -> None:
        self.sim = sim
        self.master = data
        self.replica = data.duplicate()
        self.generation = 0  # counts failovers; a connection does not outlive one
        self.stalled_until = 0
        self.lag = sim.rng.choice([2, 8, 30])
        self._link: deque[tuple[int, Callable[[Copy], None]]] = deque()

    def write(self, change: Callable[[Copy], None]) -> None:
        """Change the master and answer before the replica knows."""
        change(self.master)
        due = max(self.sim.now, self.stalled_until) + self.sim.rng.randrange(self.lag + 1)
        self._link.append((due, change))

    def caught_up(self) -> Copy:
        """The replica, as far as it has followed by now."""
        while self._link and self._link[0][0] <= self.sim.now:
            self._link.popleft()[1](self.replica)
        return self.replica

    def stall(self, ticks: int) -> None:
        """Replication stops for a while: a failover loses what is acknowledged meanwhile."""
        self.stalled_until = self.sim.now + ticks
        late = [(max(due, self.stalled_until), change) for due, change in self._link]
        self._link = deque(late)

    def fail_over(self) -> int:
        """The replica becomes master; returns how many acknowledged writes are lost."""
        self.master = self.caught_up()
        lost = len(self._link)
        self._link.clear()
        self.replica = self.master.duplicate()
        self.generation += 1
        return lost


@dataclass(frozen=True, slots=True)
class Source:
    """Where a client reads: a node, as it was when the connection was made."""

    node: Node
    generation: int
    replica: bool
    bound: bool = True  # False: reads follow the address instead of the connection

    def data(self) -> Copy:
        """The copy that answers now.

        Raises:
            Unavailable: the node failed over since; a failed read is an error, no absence (rule 13).
        """
        if self.bound and self.generation != self.node.generation:
            raise Unavailable
        return self.node.caught_up() if self.replica else self.node.master

    def chunk(self, bucket: int, after: int, count: int = 4) -> list[tuple[int, Row]]:
        """The next rows of a scan, by key; empty at the end."""
        rows = self.data().rows[bucket]
        return [(key, rows[key]) for key in sorted(key for key in rows if key > after)[:count]]


class Store:
    """The cluster, and the scripts that run on it."""

    def __init__(self, sim: Simulation, rules: Rules, buckets: int, partitions: int, nodes: int) -> None:
        self.sim = sim
        self.rules = rules
        self.nodes: list[Node] = []
        self.on_flushed: Callable[[Cut], None] = lambda cut: None
        self.on_claimed: Callable[[int, int], None] = lambda bucket, fence: None
        for number in range(nodes):
            mine = range(number, buckets, nodes)
            # A model's creation writes starting offsets into every bucket (rule 5).
            metas = {bucket: Meta(-1, 0, 0, (0,) * partitions, 0) for bucket in mine}
            self.nodes.append(Node(sim, Copy(metas, {bucket: {} for bucket in mine})))

    def node(self, bucket: int) -> Node:
        """The node that a bucket lives on, for life."""
        return self.nodes[bucket % len(self.nodes)]

    def source(self, bucket: int, *, replica: bool, bound: bool = True) -> Source:
        """Connect to read a bucket."""
        node = self.node(bucket)
        return Source(node, node.generation, replica, bound)

    def write_fence(self, bucket: int, fence: int) -> bool:
        """Rule 10: the first step of a claim; False if a higher fence is stored."""
        node = self.node(bucket)
        meta = node.master.metas[bucket]
        if meta.fence > fence and self.rules.store_refuses_lower_fence:
            return False
        if meta.fence != fence:
            claimed = replace(meta, fence=fence)
            node.write(lambda copy: copy.metas.__setitem__(bucket, claimed))
            self.on_claimed(bucket, fence)
        return True

    def flush(self, cut: Cut) -> tuple[Outcome, Stamp]:
        """Rule 11: write an increment, or the bucket whole; returns the outcome and what was stored."""
        stored = self.node(cut.bucket).master.metas[cut.bucket].stamp
        outcome = judge_flush(stored, cut, self.rules)
        if outcome is Outcome.WRITE:
            self.node(cut.bucket).write(lambda copy: self._apply(copy, cut, rows=True, meta=True))
            self.on_flushed(cut)
            return Outcome.DONE, stored
        return outcome, stored

    def flush_rows_only(self, cut: Cut) -> Outcome:
        """Rule 11 broken: the rows of a flush, without its `meta`."""
        outcome = judge_flush(self.node(cut.bucket).master.metas[cut.bucket].stamp, cut, self.rules)
        if outcome is Outcome.WRITE:
            self.node(cut.bucket).write(lambda copy: self._apply(copy, cut, rows=True, meta=False))
        return outcome

    def _apply(self, copy: Copy, cut: Cut, *, rows: bool, meta: bool) -> None:
        held = copy.rows[cut.bucket]
        if rows:
            if cut.whole and self.rules.replace_deletes_first:
                held.clear()
            held.update(cut.rows)
        if meta:
            copy.metas[cut.bucket] = cut.meta
