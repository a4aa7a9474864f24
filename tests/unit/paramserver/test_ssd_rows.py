"""Rows of a shard on a local disk: flushes in parts, and settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.apps.row_memory import shard_rows_bound
from freshet.config.settings import load_settings
from freshet.config.spec.layout import layout_of
from freshet.errors import ConfigError, FreshetError, TooLarge, Unavailable
from freshet.log import EventLog
from freshet.log.topics import ModelContext
from freshet.paramserver import buckets as buckets_module
from freshet.paramserver.flusher import Flusher
from freshet.paramserver.shard import Shard
from freshet.rows.grpc.frames import key_group
from freshet.rows.service import Push
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rows.store import FlushOutcome
from freshet.tables import RowsBound, Store
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.rowservice import WIDTH, look_up, push_of
from freshet.types import U8, Bucket, Fence, Flush, OffsetRange, RowRuns, TimeMs
from tests.fixtures.shards import PARSED, loaded
from tests.fixtures.tables import disk_folder

ROWS = 4_000


def bound_of(memory_bytes: int) -> RowsBound:
    return RowsBound(memory_bytes, str(disk_folder()))


def filled(log: EventLog, rows: SqliteRowStore) -> Shard:
    """A shard with more rows than its memory takes, all stored."""
    shard = loaded(log, rows, 10, bound=bound_of(100_000))
    keys = [(0, key * 0x9E3779B97F4A7C15 % (1 << 64)) for key in range(1, ROWS + 1)]
    shard.push(push_of({0: (0, 1)}, dict.fromkeys(keys, [1.0] * WIDTH)))
    shard.flush()
    return shard


def test_changed_rows_on_disk_are_flushed_in_parts(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = loaded(log, rows, 10, bound=bound_of(100_000))
    keys = [(0, key * 0x9E3779B97F4A7C15 % (1 << 64)) for key in range(1, 4_001)]
    for at in range(20):
        part = keys[200 * at : 200 * (at + 1)]
        assert shard.push(push_of({0: (at, at + 1)}, dict.fromkeys(part, [1.0] * WIDTH)))
        shard.publish()
    wait_until("rows have left memory", lambda: shard.store.ssd_rows().rows > 1_000, within_s=60)
    flushes: list[int] = []
    write = rows.flush

    def counted(flush: Flush) -> U8:
        flushes.append(flush.runs.rows)
        return write(flush)

    monkeypatch.setattr(rows, "flush", counted)
    shard.flush()

    assert len(flushes) > 2
    assert max(flushes) < len(keys) / 2
    assert sum(flushes) == len(keys)
    assert shard.buckets.count_stored().sum() == len(keys)
    shard.stop(flush=False)
    again = loaded(log, rows, 11)
    read = np.array(list(look_up(again, keys, create=False).values()))
    assert read.shape == (len(keys), WIDTH)
    assert np.abs(read + 1.0).max() < 0.1
    rows.close()


def test_buckets_are_replaced_in_parts(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover that took a round's writes back: all at once would be all rows in memory."""
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = filled(log, rows)
    whole: list[int] = []
    write = rows.flush

    def replaced(flush: Flush) -> U8:
        if not flush.whole:
            return np.full(len(flush.buckets), FlushOutcome.REPLACE, np.uint8)
        whole.append(flush.runs.rows)
        return write(flush)

    monkeypatch.setattr(rows, "flush", replaced)
    shard.flush()
    assert max(whole) < ROWS / 2
    assert sum(whole) == ROWS
    assert shard.buckets.count_stored().sum() == ROWS
    rows.close()


def test_buckets_to_replace_are_not_forgotten(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush of later changes alone might be accepted once the store has lost more."""
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = filled(log, rows)
    outcomes: list[tuple[bool, int]] = []
    failed: list[bool] = []
    write = rows.flush

    def failing(flush: Flush) -> U8:
        outcomes.append((flush.whole, len(flush.buckets)))
        if len(outcomes) == 1:
            return np.full(len(flush.buckets), FlushOutcome.REPLACE, np.uint8)
        if len(outcomes) == 3 and not failed:
            failed.append(True)
            raise Unavailable("the master is away")
        return write(flush)

    monkeypatch.setattr(rows, "flush", failing)
    with pytest.raises(Unavailable):
        shard.flush()
    assert failed
    del outcomes[:]
    outcomes.append((True, 0))  # so that none is replaced again
    shard.flush()
    written = [n for whole, n in outcomes if whole]
    assert [whole for whole, _ in outcomes[: len(written)]] == [True] * len(written)
    assert sum(written) > len(shard.owned()) / 2
    assert shard.buckets.count_stored().sum() == ROWS
    rows.close()


def test_rows_that_load_take_a_part_of_the_memory(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, spec = SqliteRowStore(tmp_path / "rows.sqlite"), replace(PARSED, buckets=512)
    shard = loaded(log, rows, 10, spec=spec)
    keys = np.sort(np.arange(1, 4_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    group = key_group(0, keys, np.zeros(len(keys), np.uint8), spec.buckets)
    push = Push(
        (OffsetRange(0, 0, 1),), Fence(10), TimeMs(5), [group], [np.ones((len(keys), WIDTH), np.float32)]
    )
    assert shard.push(push)
    shard.flush()
    shard.stop(flush=False)
    made = Shard(ModelContext.open(spec, "hash", log), rows, fence=Fence(11), bound=bound_of(100_000))
    made.buckets.claim([Bucket(b) for b in range(spec.buckets)], Fence(11))
    read: list[int] = []
    scan = rows.scan

    def counted(buckets: Sequence[Bucket]) -> Iterator[RowRuns]:
        read.append(len(buckets))
        return scan(buckets)

    monkeypatch.setattr(rows, "scan", counted)
    while made.buckets.loading():
        made.buckets.load_next_part()
    assert sum(read) == spec.buckets
    assert max(read) < spec.buckets / 16
    assert made.store.rows()[0] == len(keys)
    rows.close()


def test_no_flush_follows_one_that_lost_its_copy(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store counts as flushed what was copied: another flush would write offsets without these rows."""
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = loaded(log, rows, 10)
    collect = shard.store.collect_flush

    def lost(*buckets: Sequence[Bucket]) -> None:
        collect(*buckets)
        raise MemoryError("the copy")

    shard.push(push_of({0: (0, 1)}, {(0, 7): [1.0] * WIDTH}))
    with monkeypatch.context() as patched:
        patched.setattr(shard.store, "collect_flush", lost)
        with pytest.raises(MemoryError):
            shard.flush()
    with pytest.raises(FreshetError, match="lost: this process must end"):
        shard.flush()
    assert shard.buckets.count_stored().sum() == 0
    rows.close()


def test_bucket_that_is_dropped_leaves_nothing_on_disk(log: EventLog, tmp_path: Path) -> None:
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = loaded(log, rows, 10, bound=bound_of(1))
    keys = [(0, key * 0x9E3779B97F4A7C15 % (1 << 64)) for key in range(1, 501)]
    shard.push(push_of({0: (0, 1)}, dict.fromkeys(keys, [1.0] * WIDTH)))
    shard.publish()
    wait_until("all rows have left memory", lambda: shard.store.ssd_rows().rows == len(keys), within_s=60)
    for bucket in shard.owned():
        shard.store.drop_bucket(bucket)
    left = shard.store.ssd_rows()
    assert (left.rows, left.bytes_in_use, shard.store.rows()[0]) == (0, 0, 0)
    rows.close()


@pytest.mark.parametrize("folder", ["/nowhere", "/proc"])
def test_folder_that_cannot_hold_rows_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="expected a folder on a local disk"):
        Store.of(PARSED, layout_of(PARSED), bound=RowsBound(1, folder))


def test_rows_that_are_published_rounded_are_refused() -> None:
    spec = replace(PARSED, train=replace(PARSED.train, publish_codec="int8"))
    with pytest.raises(ConfigError, match="expected fp32 where rows move to a local disk"):
        Store.of(spec, layout_of(spec), bound=bound_of(1))


def test_shard_needs_a_bound_beyond_which_rows_go_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_PARAMSERVER_SSD_FOLDER", str(disk_folder()))
    with pytest.raises(ConfigError, match="EVICT_BYTES = 0\n  expected bytes of memory"):
        shard_rows_bound(load_settings())
    monkeypatch.setenv("FRESHET_PARAMSERVER_EVICT_BYTES", "1000000")
    assert shard_rows_bound(load_settings()) == bound_of(1_000_000)


def test_fetch_brings_rows_of_a_later_batch(log: EventLog, tmp_path: Path) -> None:
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = loaded(log, rows, 10, bound=bound_of(1))
    push = push_of({0: (0, 1)}, {(0, 7): [1.0] * WIDTH})
    shard.push(push)
    shard.publish()
    wait_until("the row has left memory", lambda: shard.store.ssd_rows().rows == 1, within_s=60)
    before = shard.store.ssd_rows().fetched
    shard.store.fetch(push.groups)
    assert shard.store.ssd_rows().fetched > before
    assert look_up(shard, [(0, 7)], create=False)[(0, 7)] == pytest.approx([-1.0] * WIDTH, abs=0.1)
    rows.close()


def test_rows_that_readers_may_lack_are_published_in_parts(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a claim that a failover lost: put back all at once, all rows would be in memory."""
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    filled(log, rows).stop(flush=False)
    monkeypatch.setattr(buckets_module, "_hidden", lambda metas, former: set(metas))
    most: list[int] = []
    put_back = Store.put_back_published

    def counted(store: Store, parts: Any) -> None:
        put_back(store, parts)
        most.append(store.pending_publish())

    monkeypatch.setattr(Store, "put_back_published", counted)
    again = loaded(log, rows, 11, bound=bound_of(100_000))
    again.publish()

    assert max(most) < ROWS / 2
    assert again.counts.published_rows == ROWS
    rows.close()


def test_rows_that_cannot_be_published_undo_no_claim(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buckets are served by then; the thread that publishes meets the error again."""
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    filled(log, rows).stop(flush=False)
    monkeypatch.setattr(buckets_module, "_hidden", lambda metas, former: set(metas))

    def refuse(flusher: Flusher) -> int:
        raise TooLarge("a record of rows")

    with monkeypatch.context() as refusing:
        refusing.setattr(Flusher, "publish", refuse)
        again = loaded(log, rows, 11, bound=bound_of(100_000))
    again.publish()

    assert again.counts.published_rows == ROWS
    rows.close()
