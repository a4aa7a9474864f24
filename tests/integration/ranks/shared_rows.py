"""Rows of several ranks in one SQLite file, and the batch stream on them: the rules of a shard, and no speed.

A sample of partition p at offset o has `seq` o * PARTITIONS + p; its row sums are kept as totals.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from freshet.batches.stream import BatchStream, TrainBatch
from freshet.embedder.core import rewind_offsets
from freshet.errors import Fenced, Refused
from freshet.model import GroupInputs, Labels, ModelInputs
from freshet.testing.ledger import hash_of
from freshet.types import F32, U32, Fence, OffsetRange

PARTITIONS = 4
ENDLESS = 2**22
BATCH = 3  # samples at most
LOOKUP_S = 0.002
"""What a lookup takes here, so that a run lasts as long as its test needs without much work."""


class SharedRows:
    """The file; made by the test, opened by each rank."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        # Open for good: the last connection that closes locks all others out for a moment.
        self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        self._lock = threading.Lock()
        if make:
            with self._lock, self._db as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("CREATE TABLE partitions (p INTEGER PRIMARY KEY, applied, fence, count, hash)")
                db.execute("CREATE TABLE log (stop)")
                db.execute("INSERT INTO log VALUES (?)", (ENDLESS,))
                db.executemany(
                    "INSERT INTO partitions VALUES (?, 0, 0, 0, 0)", [(p,) for p in range(PARTITIONS)]
                )

    def stop(self) -> int:
        """Offset at which every partition of the log ends."""
        with self._lock, self._db as db:
            return int(db.execute("SELECT stop FROM log").fetchone()[0])

    def end_the_log(self, further: int) -> int:
        """Let every partition end so many samples after the furthest one; returns where."""
        stop = max(self.applied().values()) + further
        with self._lock, self._db as db:
            db.execute("UPDATE log SET stop = ?", (stop,))
        return stop

    def applied(self) -> dict[int, int]:
        """{partition: next offset}."""
        with self._lock, self._db as db:
            return dict(db.execute("SELECT p, applied FROM partitions"))

    def totals(self) -> tuple[int, int]:
        """(samples, sum of their hashes) over all rows."""
        with self._lock, self._db as db:
            count, summed = db.execute("SELECT SUM(count), SUM(hash) FROM partitions").fetchone()
            return int(count), int(summed)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def push(self, ranges: Sequence[OffsetRange], fence: Fence, count: int, hashes: int) -> None:
        """Apply, skip or refuse, as PROTOCOL 4 says. One range only."""
        (r,) = ranges
        with self._lock, self._db as db:
            db.execute("BEGIN IMMEDIATE")
            applied, seen = db.execute(
                "SELECT applied, fence FROM partitions WHERE p = ?", (r.partition,)
            ).fetchone()
            if fence < seen:
                raise Fenced(f"partition {r.partition} has seen fence {seen}, this push has {fence}")
            if applied >= r.stop:
                return
            if applied != r.start:
                raise Refused(
                    f"applied up to {applied}, the push begins at {r.start}", {r.partition: applied}
                )
            db.execute(
                "UPDATE partitions SET applied=?, fence=?, count=count+?, hash=hash+? WHERE p=?",
                (r.stop, fence, count, hashes, r.partition),
            )


def expected(stop: int) -> tuple[int, int]:
    """What `totals` and the dense state must be when every partition ends at `stop`."""
    seq = np.arange(stop * PARTITIONS)
    return len(seq), int(hash_of(seq, np.zeros(len(seq), np.int64)).sum())


class SharedStream(BatchStream):
    """`BatchStream` of one rank over `SharedRows`: one partition a batch, one batch a lane."""

    def __init__(
        self,
        rows: SharedRows,
        dense_applied: Callable[[], Mapping[int, Sequence[int]]],
        fence: Fence,
        partitions: Sequence[Sequence[int]],  # of each lane
        before: Callable[[], None],
    ) -> None:
        """`before` is called before each look for a batch."""
        self._before = before
        self._rows, self._dense_applied, self._fence = rows, dense_applied, fence
        self._partitions = partitions
        self._next: list[dict[int, int] | None] = [None] * len(partitions)
        self._cuts: list[dict[int, list[int]]] = [{} for _ in partitions]
        self._pause = threading.Event()

    def next_batch(self, lane: int, wait_s: float) -> TrainBatch | None:
        """The next samples of one of the lane's partitions."""
        self._before()
        self._pause.wait(LOOKUP_S)
        at = self._next[lane]
        if at is None:
            applied = {p: (o,) for p, o in self._rows.applied().items()}
            starts, splits = rewind_offsets([applied, self._dense_applied()])
            at = self._next[lane] = {p: starts[p] for p in self._partitions[lane]}
            self._cuts[lane] = splits
        stop = self._rows.stop()
        waiting = [p for p in at if at[p] < stop]
        if not waiting:
            return None
        p = min(waiting, key=at.__getitem__)
        ahead = [cut for cut in self._cuts[lane][p] if cut > at[p]]
        last = min([at[p] + BATCH, stop, *ahead])
        batch = self._batch(OffsetRange(p, at[p], last), replayed=bool(ahead))
        at[p] = last
        return batch

    def push_gradients(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Push what the batch's one row is to count."""
        if gradients is None:
            self._next[lane] = None
            return
        count, hashes = (-gradients[0][0, 2:4]).tolist()
        try:
            self._rows.push(batch.ranges, self._fence, round(count), round(hashes))
        except Refused:
            self._next[lane] = None
            raise

    def flush(self, wait_s: float) -> bool:
        """Pushes are answered at once."""
        return True

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """Nothing is judged here."""
        return []

    def lag(self) -> Mapping[int, int]:
        """Not used here."""
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def _batch(self, span: OffsetRange, *, replayed: bool) -> TrainBatch:
        offsets = np.arange(span.start, span.stop)
        size = len(offsets)
        seq = (offsets * PARTITIONS + span.partition).astype(np.float32)[:, None]
        at = np.concatenate([np.zeros(size, np.int32), np.full(size, -1, np.int32)])  # user 0, no item
        group = GroupInputs(
            np.zeros((1, 4), np.float32), at, np.array([0, size, 2 * size], np.uint32), [None, None]
        )
        ones = np.ones(size, np.float32)
        inputs = ModelInputs(size, [group], seq, Labels(np.zeros(size, np.uint8), ones, ones))
        ids = offsets.astype(np.int64)
        return TrainBatch(
            (span,), self._fence, inputs, ids, ids.view(np.uint64), ids, {}, {}, replayed=replayed
        )
