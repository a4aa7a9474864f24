"""A new owner of buckets answers from the row store while it loads them, with correct rows."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.errors import Corrupt, Refused, Unavailable
from freshet.log import EventLog
from freshet.paramserver import buckets
from freshet.paramserver.buckets import damaged_buckets
from freshet.paramserver.shard import Shard
from freshet.rows.service import RowStates
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rows.store import LostMetas
from freshet.testing.contracts.rowservice import Row, keys_of, look_up, push_of, push_of_steps
from freshet.testing.faults import Faulty
from freshet.types import I64, U8, U64, Bucket, Fence, RowRuns, TopicPartition
from tests.fixtures.shards import PARSED, TOPICS, shard_of, write_by_old_owner, write_refused_row

STORED: list[Row] = [
    (table, (key * 0x9E3779B97F4A7C15) % (1 << 64)) for table in (0, 1) for key in range(1, 60)
]
"""Rows stored before the takeover, in every bucket."""
NEW: list[Row] = [
    (table, (key * 0x9E3779B97F4A7C15) % (1 << 64)) for table in (0, 1) for key in range(60, 90)
]
DEADLINE_S = 60.0
EVERY_BUCKET = [Bucket(b) for b in range(PARSED.buckets)]


class Watched(SqliteRowStore):
    """A row store that records reads by key, and calls back before each read and before its result."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.keys_read: list[int] = []  # keys of each reading
        self.before_piece: Callable[[], None] = lambda: None
        self.before_read: Callable[[], None] = lambda: None
        self.before_rows: Callable[[], None] = lambda: None

    def scan(self, buckets: Sequence[Bucket]) -> Iterator[RowRuns]:
        for runs in super().scan(buckets):
            for i in range(len(runs.directory)):
                self.before_piece()
                yield runs.slice(i, i + 1)

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Iterator[RowRuns]:
        self.before_read()
        self.keys_read.append(len(keys))
        for runs in super().read_many(buckets, tables, keys):
            self.before_rows()
            yield runs


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "rows.sqlite")
    yield made
    made.close()


@pytest.fixture
def initial(log: EventLog, rows: Watched) -> dict[Row, list[float]]:
    """Initial values of all rows; the row store holds STORED after one push."""
    former = shard_of(log, rows, "former")
    former.buckets.create()
    former.buckets.claim(EVERY_BUCKET, Fence(10), whole=True)
    values = look_up(former, STORED + NEW, create=True)
    former.push(push_of({0: (0, 1)}, ones(STORED)))
    former.flush()
    return values


@pytest.fixture
def shard(log: EventLog, rows: Watched, initial: dict[Row, list[float]]) -> Shard:
    """A shard that has claimed every bucket, and loaded none."""
    made = shard_of(log, rows, "heir")
    made.buckets.claim(EVERY_BUCKET, Fence(11))
    return made


def ones(wanted: list[Row]) -> dict[Row, list[float]]:
    """Return gradients of a push that subtracts one from each float of these rows."""
    return {row: [1.0, 1.0] for row in wanted}


def load(shard: Shard) -> None:
    while shard.buckets.has_work:
        shard.buckets.load_next_part()


def pushes(
    shard: Shard, initial: dict[Row, list[float]], wanted: list[Row], *, create: bool = False
) -> dict[Row, int]:
    """Return {row: number of pushes it contains}."""
    found = look_up(shard, wanted, create=create)
    counts = {row: round(initial[row][0] - values[0]) for row, values in found.items()}
    for row, values in found.items():
        np.testing.assert_allclose(values, [value - counts[row] for value in initial[row]], atol=1e-5)
    return counts


def next_owner(log: EventLog, rows: SqliteRowStore) -> Shard:
    """Return a shard that has read every row."""
    fence = int(rows.metas([Bucket(0)])[Bucket(0)].fence)
    next_one = shard_of(log, rows, "next")
    next_one.buckets.claim(EVERY_BUCKET, Fence(fence + 1), whole=True)
    return next_one


def test_a_lookup_is_answered_before_buckets_are_loaded(
    shard: Shard, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    assert shard.owned() == EVERY_BUCKET
    assert shard.applied() == {0: [1], 1: [0]}
    assert pushes(shard, initial, STORED[:10], create=True) == dict.fromkeys(STORED[:10], 1)
    assert rows.keys_read == [10], "only what was keys_read for is read"
    assert pushes(shard, initial, STORED[:10], create=True) == dict.fromkeys(STORED[:10], 1)
    assert rows.keys_read == [10], "and it is read once"


def test_a_row_with_several_gradients_is_read_once(
    shard: Shard, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    several = {row: [[1.0, 1.0]] * 3 for row in [*STORED[:10], *NEW[:5]]}
    assert shard.push(push_of_steps({0: (1, 2)}, several))
    assert rows.keys_read == [15]
    assert pushes(shard, initial, STORED[:10]) == dict.fromkeys(STORED[:10], 4)
    assert pushes(shard, initial, NEW[:5]) == dict.fromkeys(NEW[:5], 3)


def test_a_row_that_is_not_stored_is_read_once_only(
    shard: Shard, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    zeros = {row: [0.0, 0.0] for row in NEW}
    assert look_up(shard, NEW, create=False) == zeros
    assert look_up(shard, NEW, create=False) == zeros
    assert look_up(shard, NEW, create=True) == {row: initial[row] for row in NEW}
    assert rows.keys_read == [len(NEW)]


def test_a_push_without_a_lookup_reads_its_rows_first(
    shard: Shard, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    assert shard.push(push_of({0: (1, 2)}, ones(STORED + NEW)))
    assert not shard.push(push_of({0: (1, 2)}, ones(STORED + NEW)))
    expected = dict.fromkeys(STORED, 2) | dict.fromkeys(NEW, 1)
    assert pushes(shard, initial, STORED + NEW) == expected
    load(shard)
    assert pushes(shard, initial, STORED + NEW) == expected
    assert rows.keys_read == [len(STORED + NEW)]


def test_a_push_that_was_applied_before_reads_nothing(shard: Shard, rows: Watched) -> None:
    assert not shard.push(push_of({0: (0, 1)}, ones(STORED)))
    assert rows.keys_read == []


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_row_changed_before_its_scan_keeps_the_change(
    shard: Shard, log: EventLog, rows: Watched, initial: dict[Row, list[float]], when: str
) -> None:
    left = [True]

    def learn() -> None:
        if left:
            left.pop()
            shard.push(push_of({0: (1, 2)}, ones(STORED[::2] + NEW)))

    if when == "before":
        learn()
    rows.before_piece = learn if when == "during" else lambda: None
    load(shard)
    if when == "after":
        learn()
    assert not left
    expected = dict.fromkeys(STORED, 1) | dict.fromkeys(STORED[::2], 2) | dict.fromkeys(NEW, 1)
    assert pushes(shard, initial, STORED + NEW, create=False) == expected
    shard.flush()
    metas = rows.metas(EVERY_BUCKET)
    assert sum(meta.rows for meta in metas.values()) == len(STORED + NEW)
    assert {meta.applied[0] for meta in metas.values()} == {2}
    assert pushes(next_owner(log, rows), initial, STORED + NEW) == expected


def test_a_row_removed_during_loading_stays_removed(
    shard: Shard, log: EventLog, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    gone = STORED[:5]
    look_up(shard, gone, create=True)
    keys = np.array([key for _, key in gone], np.uint64)
    assert shard.store.remove(0, keys) == len(gone)
    load(shard)
    shard.flush()
    assert look_up(shard, gone, create=False) == {row: [0.0, 0.0] for row in gone}
    assert look_up(next_owner(log, rows), gone, create=False) == {row: [0.0, 0.0] for row in gone}


def test_a_failed_read_is_not_taken_as_absence(
    shard: Shard, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    def fail() -> None:
        raise Unavailable("the row store is away")

    look_up(shard, STORED[:5], create=True)
    rows.before_read = fail
    with pytest.raises(Unavailable, match="away"):
        look_up(shard, STORED, create=True)
    with pytest.raises(Unavailable, match="away"):
        shard.push(push_of({0: (1, 2)}, ones(STORED)))
    assert shard.applied() == {0: [1], 1: [0]}
    shard.push(push_of({0: (1, 2)}, ones(STORED[:5])))  # rows already read are still trained
    rows.before_read = lambda: None
    expected = dict.fromkeys(STORED, 1) | dict.fromkeys(STORED[:5], 2)
    assert pushes(shard, initial, STORED, create=True) == expected


def test_a_failed_scan_is_repeated(shard: Shard, rows: Watched, initial: dict[Row, list[float]]) -> None:
    def fail() -> None:
        rows.before_piece = lambda: None
        raise Unavailable("the row store is away")

    rows.before_piece = fail
    with pytest.raises(Unavailable, match="away"):
        shard.buckets.load_next_part()
    load(shard)
    assert pushes(shard, initial, STORED, create=False) == dict.fromkeys(STORED, 1)
    assert shard.buckets.progress.buckets == 0


def test_a_bucket_is_flushed_only_after_loading(shard: Shard, rows: Watched) -> None:
    shard.push(push_of({0: (1, 2)}, ones(STORED)))
    shard.flush()
    assert {meta.applied[0] for meta in rows.metas(EVERY_BUCKET).values()} == {1}
    shard.buckets.load_next_part()
    shard.flush()
    still = shard.buckets.loading()
    assert 0 < len(still) < len(EVERY_BUCKET)
    for bucket, meta in rows.metas(EVERY_BUCKET).items():
        assert meta.applied[0] == (1 if bucket in still else 2)


def test_progress_of_loading_is_reported(shard: Shard) -> None:
    before = shard.buckets.progress
    assert (before.buckets, before.rows) == (len(EVERY_BUCKET), len(STORED))
    shard.buckets.load_next_part()
    assert 0 < shard.buckets.progress.buckets < before.buckets
    assert shard.buckets.progress.rows < before.rows
    load(shard)
    assert (shard.buckets.progress.buckets, shard.buckets.progress.rows) == (0, 0)


def test_a_bucket_written_during_loading_is_dropped(
    shard: Shard, log: EventLog, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    shard.push(push_of({0: (1, 2)}, ones(STORED)))
    write_by_old_owner(rows, 3)
    load(shard)
    assert shard.buckets.pop_conflicted() == {3}
    assert shard.buckets.pop_conflicted() == set()
    assert shard.owned() == [b for b in EVERY_BUCKET if b != 3]
    shard.flush()
    assert rows.metas([Bucket(3)])[Bucket(3)].applied[0] == 1, "nothing that it learned was written"

    shard.buckets.claim([Bucket(3)], Fence(12), whole=True)
    assert shard.applied()[0] == [1, 2], "what it learned is to be replayed"
    assert shard.push(push_of({0: (1, 2)}, {})), "by the bucket that had lost it"


@pytest.mark.parametrize("reading", ["the scan", "a lookup", "a lookup of rows that were absent"])
def test_rows_read_for_an_earlier_claim_are_ignored(
    shard: Shard, log: EventLog, rows: Watched, initial: dict[Row, list[float]], reading: str
) -> None:
    """The buckets move to another shard and back during a read."""
    other = shard_of(log, rows, "other")
    moved: list[bool] = []

    def come_back() -> None:
        rows.before_rows = rows.before_piece = lambda: None
        moved.append(True)
        shard.buckets.drop(EVERY_BUCKET)
        other.buckets.claim(EVERY_BUCKET, Fence(12), whole=True)
        other.push(push_of({0: (1, 2)}, ones(STORED + NEW)))
        other.flush()
        shard.buckets.claim(EVERY_BUCKET, Fence(13))

    if reading == "the scan":
        rows.before_piece = come_back
        load(shard)
    else:
        rows.before_rows = come_back
        wanted = STORED if reading == "a lookup" else NEW
        assert pushes(shard, initial, wanted, create=True) == dict.fromkeys(wanted, 1 + (wanted is STORED))
    assert moved
    assert shard.buckets.pop_conflicted() == set(), (
        "buckets of the later claim are none of an earlier scan's affair"
    )
    expected = dict.fromkeys(STORED, 2) | dict.fromkeys(NEW, 1)
    assert pushes(shard, initial, STORED + NEW, create=True) == expected
    load(shard)
    assert pushes(shard, initial, STORED + NEW) == expected


def test_a_bucket_claimed_again_is_read_again(
    shard: Shard, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    shard.push(push_of({0: (1, 2)}, ones(STORED + NEW)))
    shard.buckets.claim(EVERY_BUCKET, Fence(12))
    assert shard.applied() == {0: [1], 1: [0]}
    assert pushes(shard, initial, STORED) == dict.fromkeys(STORED, 1)
    assert look_up(shard, NEW, create=False) == {row: [0.0, 0.0] for row in NEW}


def test_buckets_can_be_revoked_while_they_load(
    shard: Shard, log: EventLog, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    shard.push(push_of({0: (1, 2)}, ones(STORED)))
    shard.buckets.revoke(EVERY_BUCKET)
    load(shard)
    assert (shard.owned(), shard.buckets.pop_conflicted(), shard.buckets.progress.buckets) == ([], set(), 0)
    assert shard.store.memory().rows == {0: 0, 1: 0}
    assert pushes(next_owner(log, rows), initial, STORED) == dict.fromkeys(STORED, 1)


def test_a_stop_during_loading_ends_at_the_next_piece(
    log: EventLog, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    shard = shard_of(log, rows, "heir")
    pieces: list[int] = []
    begun = threading.Event()

    def wait_for_stop() -> None:
        pieces.append(1)
        begun.set()
        assert shard.buckets.to_load.wait(DEADLINE_S), "`stop` sets it before it joins the threads"

    rows.before_piece = wait_for_stop
    shard.buckets.claim(EVERY_BUCKET, Fence(11))
    shard.start()
    assert begun.wait(DEADLINE_S)
    shard.stop()
    assert len(pieces) == 1
    assert shard.failed is None
    end = {p: log.bounds(TopicPartition(TOPICS.samples, p)).end for p in range(PARSED.partitions)}
    assert end == {0: 0, 1: 0}


def test_a_push_changes_only_the_buckets_it_names(shard: Shard, initial: dict[Row, list[float]]) -> None:
    """The sender does not know yet of bucket 3: its gradients went to the former owner."""
    elsewhere = [row for row in STORED if row[1] >> 60 == 3]
    here = [row for row in STORED if row not in elsewhere]
    believed = np.ones(PARSED.buckets, np.bool_)
    believed[3] = False
    assert shard.push(replace(push_of({0: (1, 2)}, ones(here)), owned=believed))
    assert shard.store.applied_of(3) == {0: 1, 1: 0}
    assert shard.push(replace(push_of({0: (1, 2)}, ones(STORED)), owned=np.ones(PARSED.buckets, np.bool_)))
    assert pushes(shard, initial, STORED) == dict.fromkeys(STORED, 2)


def test_a_push_that_names_a_missing_bucket_is_refused(shard: Shard) -> None:
    shard.buckets.drop([Bucket(3)])
    with pytest.raises(Refused):
        shard.push(replace(push_of({0: (1, 2)}, {}), owned=np.ones(PARSED.buckets, np.bool_)))
    assert shard.applied() == {0: [1], 1: [0]}


def test_a_push_with_rows_of_unnamed_buckets_is_refused(shard: Shard) -> None:
    with pytest.raises(Refused):
        shard.push(replace(push_of({0: (1, 2)}, ones(STORED)), owned=np.zeros(PARSED.buckets, np.bool_)))
    assert shard.applied() == {0: [1], 1: [0]}


def test_a_claim_that_loses_the_log_owns_no_bucket(
    log: EventLog, rows: Watched, initial: dict[Row, list[float]]
) -> None:
    """A bucket owned in the `FlushBook` only would hold retention for ever."""
    faulty = Faulty(log)
    shard = shard_of(faulty, rows, "heir")
    starts = PARSED.partitions  # read before the ends of `rows`
    faulty.script("bounds", nth=starts + 1, error=Unavailable("the log is away"))
    with pytest.raises(Unavailable):
        shard.buckets.claim(EVERY_BUCKET, Fence(11))
    assert list(shard.owned()) == []
    assert shard.flusher.book.smallest_applied() == {}
    shard.buckets.claim(EVERY_BUCKET, Fence(12))
    assert list(shard.owned()) == EVERY_BUCKET


def test_a_new_owner_returns_the_pushes_its_rows_contain(
    shard: Shard, initial: dict[Row, list[float]]
) -> None:
    group, _ = keys_of(STORED)
    out = [np.empty((len(group.keys), 2), np.float32)]
    states = RowStates([np.empty((len(group.keys), 0), np.float32)])

    def known() -> list[list[int]]:
        shard.lookup([group], out, states=states)
        assert states.known is not None
        found: list[list[int]] = states.known.offsets.tolist()
        return found

    assert known() == [[1, 0]]
    shard.push(push_of({0: (1, 2)}, ones(STORED), fence=11))
    assert known() == [[2, 0]]
    shard.buckets.claim(EVERY_BUCKET, Fence(12))  # from the row store, so that push is replayed
    assert known() == [[1, 0]]


@pytest.fixture
def holds(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[TopicPartition, int]]:
    """{name: {partition: retention pin}}."""
    held: dict[str, dict[TopicPartition, int]] = {}
    monkeypatch.setattr(log, "hold", lambda name, offsets: held.update({name: dict(offsets)}))
    return held


SAMPLES = TopicPartition(TOPICS.samples, 0)
HEIR = f"shard-{PARSED.name}-heir"


def test_retention_is_held_for_a_conflicted_bucket(
    shard: Shard, rows: Watched, holds: dict[str, dict[TopicPartition, int]]
) -> None:
    """Other buckets advance; without the pin, retention would delete samples that this bucket needs."""
    shard.push(push_of({0: (1, 5)}, {}))
    write_by_old_owner(rows, 3)
    load(shard)
    assert shard.buckets.pop_conflicted() == {3}
    for _ in range(2):
        shard.flush()
        assert holds[HEIR][SAMPLES] == 1

    shard.buckets.claim([Bucket(3)], Fence(12), whole=True)
    assert holds[HEIR][SAMPLES] == 1
    shard.push(push_of({0: (1, 5)}, {}))
    shard.flush()
    assert holds[HEIR][SAMPLES] == 5


def test_retention_is_held_for_rows_lost_in_a_failover(
    shard: Shard, rows: Watched, holds: dict[str, dict[TopicPartition, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored meta of the conflicted bucket is older than at the claim."""
    metas = rows.metas

    def older(buckets: Sequence[Bucket]) -> Any:
        found = metas(buckets)
        return {b: replace(m, seq=m.seq - 1, applied={0: 0, 1: 0}) if b == 3 else m for b, m in found.items()}

    monkeypatch.setattr(rows, "metas", older)
    shard.push(push_of({0: (1, 5)}, {}))
    load(shard)
    assert shard.buckets.pop_conflicted() == {3}
    shard.flush()
    assert holds[HEIR][SAMPLES] == 0


def test_retention_is_held_for_a_fenced_bucket(
    shard: Shard, rows: Watched, holds: dict[str, dict[TopicPartition, int]]
) -> None:
    """Another shard has claimed bucket 3, and ended before it held retention."""
    load(shard)
    shard.flush()
    rows.claim([Bucket(3)], Fence(12))
    shard.push(push_of({0: (1, 5)}, {}))
    shard.flush()
    assert 3 not in shard.owned()
    assert holds[HEIR][SAMPLES] == 1
    shard.buckets.drop([Bucket(3)])
    shard.flush()
    assert holds[HEIR][SAMPLES] == 5


def test_a_claim_lost_while_all_is_read_is_made_again(
    log: EventLog, rows: Watched, initial: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover loses the fence of bucket 3: its owner must not take the former one's."""
    metas, claim, lost = rows.metas, rows.claim, set[int]()

    def of_replica(buckets: Sequence[Bucket]) -> Any:
        return {b: replace(m, fence=Fence(10)) if b in lost else m for b, m in metas(buckets).items()}

    def written(buckets: Sequence[Bucket], fence: Fence) -> Any:
        lost.difference_update(buckets)
        return claim(buckets, fence)

    monkeypatch.setattr(rows, "metas", of_replica)
    monkeypatch.setattr(rows, "claim", written)
    heir = shard_of(log, rows, "heir")
    scan = rows.scan

    def failing_over(buckets: Sequence[Bucket]) -> Any:
        monkeypatch.setattr(rows, "scan", scan)
        lost.add(3)
        return scan(buckets)

    monkeypatch.setattr(rows, "scan", failing_over)
    heir.buckets.claim(EVERY_BUCKET, Fence(12), whole=True)
    assert set(heir.flusher.book.fences.tolist()) == {12}
    assert not lost


def test_a_bucket_lost_during_loading_is_dropped(
    shard: Shard, rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be read for ever, and the buckets behind it never; a new claim says that it is lost."""
    metas = rows.metas

    def emptied(buckets: Sequence[Bucket]) -> Any:
        if 3 in buckets:
            raise LostMetas("bucket 3 has no meta", [Bucket(3)])
        return metas(buckets)

    monkeypatch.setattr(rows, "metas", emptied)
    for _ in range(2 * len(EVERY_BUCKET)):
        shard.buckets.load_next_part()
    assert shard.buckets.loading() == []
    assert shard.buckets.pop_conflicted() == {3}


def test_retention_is_held_for_revoked_buckets_until_served(
    shard: Shard, holds: dict[str, dict[TopicPartition, int]]
) -> None:
    load(shard)
    shard.buckets.revoke([Bucket(3)])
    shard.push(push_of({0: (1, 5)}, {}))
    shard.flush()
    assert holds[HEIR][SAMPLES] == 1
    shard.buckets.drop([Bucket(3)])
    shard.flush()
    assert holds[HEIR][SAMPLES] == 5


def test_retention_is_held_for_claimed_buckets_before_reads(
    log: EventLog,
    rows: Watched,
    initial: dict[Row, list[float]],
    holds: dict[str, dict[TopicPartition, int]],
) -> None:
    shard = shard_of(log, rows, "heir")
    found: list[int] = []
    rows.before_piece = lambda: found.append(holds[HEIR][SAMPLES])
    shard.buckets.claim(EVERY_BUCKET, Fence(11), whole=True)
    assert set(found) == {1}


def test_a_stop_ends_a_whole_load(log: EventLog, rows: Watched, initial: object) -> None:
    heir, stop, pieces = shard_of(log, rows, "heir", Fence(11)), threading.Event(), list[int]()

    def stop_at_the_second() -> None:
        pieces.append(1)
        if len(pieces) == 2:
            stop.set()

    rows.before_piece = stop_at_the_second
    with pytest.raises(Unavailable, match="the process stops while rows are read"):
        heir.load(stop)

    assert len(pieces) == 2
    assert heir.owned() == []


# Damage


def damage(tmp_path: Path, segment: int) -> bytes:
    """Empty a segment of the row store; returns its former body."""
    with contextlib.closing(sqlite3.connect(tmp_path / "rows.sqlite")) as db, db:
        ((body,),) = db.execute("SELECT body FROM segments WHERE id = ?", (segment,)).fetchall()
        db.execute("UPDATE segments SET body = x'' WHERE id = ?", (segment,))
    return bytes(body)


def test_damaged_buckets_are_dropped_and_others_loaded(shard: Shard, rows: Watched, tmp_path: Path) -> None:
    damage(tmp_path, 2)
    damaged = set(damaged_buckets(rows, shard.store, EVERY_BUCKET))
    assert 0 < len(damaged) < len(EVERY_BUCKET)

    load(shard)

    assert set(shard.owned()) == set(EVERY_BUCKET) - damaged
    assert shard.buckets.pop_conflicted() == damaged
    assert shard.failed is None


def test_a_lookup_of_damaged_rows_is_unavailable(shard: Shard, tmp_path: Path) -> None:
    damage(tmp_path, 2)

    with pytest.raises(Unavailable, match="rows cannot be read"):
        look_up(shard, STORED, create=True)
    assert shard.failed is None


def test_a_whole_load_refuses_damaged_rows_by_name(
    log: EventLog, rows: Watched, initial: object, tmp_path: Path
) -> None:
    damage(tmp_path, 2)
    taken = shard_of(log, rows, "heir")
    with pytest.raises(Corrupt, match="buckets of the row store are damaged, bucket"):
        taken.buckets.claim(EVERY_BUCKET, Fence(90), whole=True)
    assert not taken.owned()


def test_a_row_that_no_store_takes_costs_its_bucket_alone(
    log: EventLog, rows: Watched, initial: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "PARTS", len(EVERY_BUCKET) // 4)
    write_refused_row(rows, 6)  # the third of its part
    heir = shard_of(log, rows, "heir")
    heir.buckets.claim(EVERY_BUCKET, Fence(11))

    load(heir)

    assert heir.buckets.pop_conflicted() == {6}
    assert set(heir.owned()) == set(EVERY_BUCKET) - {6}
    with pytest.raises(Corrupt, match="1 buckets of the row store are damaged, bucket 6 first"):
        shard_of(log, rows, "other").buckets.claim(EVERY_BUCKET, Fence(12), whole=True)


def test_damage_that_is_gone_when_read_again_drops_nothing(shard: Shard, rows: Watched) -> None:
    def fail_once() -> None:
        rows.before_piece = lambda: None
        raise Corrupt("a bit was flipped on the way from the disk")

    rows.before_piece = fail_once
    with pytest.raises(Unavailable, match="each bucket alone could: a bit was flipped"):
        shard.buckets.load_next_part()

    load(shard)

    assert shard.buckets.pop_conflicted() == set()
    assert set(shard.owned()) == set(EVERY_BUCKET)
