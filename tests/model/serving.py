"""A serving reader: bootstraps buckets from the row store, then follows `rows` (rule 17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .shard import Delta
from .simulation import Process, Steps, Unavailable
from .store import Meta, Row, Source

if TYPE_CHECKING:
    from .world import World

FOLLOW = 8  # ticks


class Served:
    """A bucket as one reader has it."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.fence = -1
        self.position: int | None = None  # in `rows`; None until the scan is done

    def scanned(self, meta: Meta, rows: dict[int, Row], *, of_writer: bool) -> None:
        """Start to follow from where the `meta` says that was read before the rows.

        The fence to start with is that of the last flush (found by this model): a claim that a failover loses
        would make the reader drop what the owner before goes on to write.
        """
        self.rows.update(rows)
        self.fence = meta.writer if of_writer else meta.fence
        self.position = meta.follow

    def take(self, delta: Delta, *, drop_lower: bool) -> None:
        """The last in the log wins, unless its fence is lower than one seen."""
        if delta.fence < self.fence and drop_lower:
            return
        self.fence = max(self.fence, delta.fence)
        self.rows.update(delta.rows)

    def read_through(self, key: int, row: Row, *, if_absent: bool) -> None:
        """Take the answer of a read that was sent when the row was absent, which may be long ago."""
        if key not in self.rows or not if_absent:
            self.rows[key] = row


class Reader(Process):
    """One inference server's table of rows."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.sim, name)
        self.world = world
        self.rules = world.rules
        self.served = [Served() for _ in range(world.buckets)]
        for bucket in range(world.buckets):
            self.spawn(self._serve(bucket), delay=self.sim.rng.randrange(20))
        self.spawn(self._look_up())

    def _source(self, bucket: int) -> Source:
        replica = self.sim.rng.random() < 0.5
        return self.world.store.source(bucket, replica=replica, bound=self.rules.reader_one_node)

    def _serve(self, bucket: int) -> Steps[None]:
        served = self.served[bucket]
        while served.position is None:
            try:
                meta, rows = yield from self._bootstrap(bucket)
                served.scanned(meta, rows, of_writer=self.rules.reader_starts_at_writer)
            except Unavailable:
                yield 1
        topic = self.world.rows[self.world.rows_partition(bucket)]
        while True:
            for delta in topic.records[served.position :]:
                served.position += 1
                if delta is not None and delta.bucket == bucket:
                    served.take(delta, drop_lower=self.rules.reader_drops_lower_fence)
            yield FOLLOW

    def _bootstrap(self, bucket: int) -> Steps[tuple[Meta, dict[int, Row]]]:
        """Read `meta`, then the rows, at one node; a connection that breaks starts over."""
        source = self._source(bucket)
        meta = yield from self.call(lambda: source.data().metas[bucket])
        rows: dict[int, Row] = {}
        after = -1
        while True:
            cursor = after
            if not self.rules.reader_one_node:
                source = self._source(bucket)
            chunk = yield from self.call(lambda: source.chunk(bucket, cursor))  # noqa: B023 (called before it moves)
            if not chunk:
                break
            rows.update(chunk)
            after = chunk[-1][0]
        if not self.rules.reader_meta_first:
            meta = yield from self.call(lambda: source.data().metas[bucket])
        return meta, rows

    def _look_up(self) -> Steps[None]:
        """Ask for rows; one that is absent is read through from the store."""
        while True:
            yield 5
            key = self.sim.rng.randrange(self.world.keys)
            bucket = self.world.bucket_of(key)
            if key not in self.served[bucket].rows:
                self.spawn(self._read_through(bucket, key))

    def _read_through(self, bucket: int, key: int) -> Steps[None]:
        try:
            row = self._source(bucket).data().rows[bucket].get(key)
        except Unavailable:
            return
        yield self.sim.rng.choice([2, 6, 40])
        if row is not None:
            self.served[bucket].read_through(key, row, if_absent=self.rules.read_through_if_absent)
